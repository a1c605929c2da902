"""Text tasks whose data name their clients: words by who rated them, given names by country, sentences by document.

Words: A. B. Warriner, V. Kuperman and M. Brysbaert, Norms of valence, arousal, and dominance for 13,915 English lemmas,
Behavior Research Methods 2013; D. A. Medler, A. Arnoldussen, J. R. Binder and M. S. Seidenberg, The Wisconsin
Perceptual Attribute Ratings Database, 2005. Names: J. Michael, nam_dict.txt, 2008. Sentences: `data.embedded`.
The rows of the tasks stand in `federations.toml`.
"""

import csv
import gzip
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from atlas_fl.data.embedded import asset_task, read_lines, read_ratings
from atlas_fl.data.own_clients import Dealing, arrange_clients, cut_groups
from atlas_fl.data.task import Rows, Task, TaskData, as_texts, concatenate
from atlas_fl.packaged import packaged_tables

_FIRST_COUNTRY = 30
"""Place in a line of the list of names where the frequencies of the first country stand, one character each."""


def read_words(path: Path, *, clients: Mapping[str, str], text: str, reference: str | None = None) -> dict[str, Rows]:
    """Words by client; label 1 if the value in its column is above the median of the reference, or of its column."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    words = tuple(row[text] for row in table)
    rows: dict[str, Rows] = {}
    for client, own in clients.items():
        value, other = (np.asarray([float(row[name] or "nan") for row in table]) for name in (own, reference or own))
        label = (value > np.nanmedian(other)).astype(np.int64)
        rows[client] = Rows(text=words, label=label).take(np.flatnonzero(~np.isnan(value)))
    return rows


def read_names(path: Path, *, clients: Mapping[str, int]) -> dict[str, Rows]:
    """Given names by country, those that have one sex where they are used; label 1 is female.

    Left out are names with several spellings ("+" inside), and lines that repeat a name in another order ("+" before
    the countries).
    """
    names: dict[str, list[tuple[str, int]]] = {client: [] for client in clients}
    for line in read_lines(path):
        sex, name = line[:2].strip(), line[3 : _FIRST_COUNTRY - 1].strip()
        if sex not in ("M", "F") or line[_FIRST_COUNTRY - 1 : _FIRST_COUNTRY] == "+" or "+" in name:
            continue
        for client, place in clients.items():
            if line[_FIRST_COUNTRY + place] != " ":
                names[client].append((name, int(sex == "F")))
    return {
        client: Rows(text=tuple(name for name, _ in own), label=np.asarray([sex for _, sex in own], dtype=np.int64))
        for client, own in names.items()
    }


def read_documents(path: Path, *, clients: Iterable[str], least: float) -> dict[str, Rows]:
    """Rated sentences by document, the number before "_" of a sentence's own, as in `review-7`; label 1 is positive."""
    rows = read_ratings(path, least=None)
    numbers = np.asarray([line.partition("_")[0] for line in read_lines(path)[1:]])
    rated = np.abs(rows.label) >= least
    judged = Rows(text=rows.text, label=(rows.label > 0).astype(np.int64))
    documents = [client.partition("-")[2] for client in clients]
    return {number: judged.take(np.flatnonzero((numbers == number) & rated)) for number in documents}


def split_texts(by_client: Mapping[str, Rows], *, name: str) -> dict[str, dict[str, Rows]]:
    """The rows of every client by split; a text that several clients have is in the same split of all of them."""
    rows = as_texts(concatenate(list(by_client.values())), task=name)
    ends = np.cumsum([len(own) for own in by_client.values()])
    cuts = cut_groups([text.casefold() for text in rows.text], None, name=name)
    owners = {split: np.searchsorted(ends, positions, side="right") for split, positions in cuts.items()}
    return {
        client: {split: rows.take(positions[owners[split] == index]) for split, positions in cuts.items()}
        for index, client in enumerate(by_client)
    }


READERS: Mapping[str, Callable[..., dict[str, Rows]]] = {
    "words": read_words,
    "names": read_names,
    "documents": read_documents,
}
"""Reader of the clients' rows from a task's file, by the name that the task has for it."""


def _task(
    name: str,
    *,
    read: str,
    clients: Iterable[str],
    options: Mapping[str, Any] = MappingProxyType({}),
    shares_texts: bool = True,
    **fields: Any,
) -> Task:
    """A task of these clients, whose rows a reader finds."""

    def make(path: Path) -> TaskData:
        by_client = READERS[read](path, clients=clients, **options)
        whole = {client: {"all": rows} for client, rows in by_client.items()}
        return arrange_clients(split_texts(by_client, name=name) if shares_texts else whole, Dealing(), name=name)

    return asset_task(name, make, clients=tuple(clients), **fields)


_TABLES = packaged_tables(__package__, "federations.toml")
FEDERATIONS: tuple[Task, ...] = tuple(_task(name, **row) for name, row in _TABLES["tasks"].items())
