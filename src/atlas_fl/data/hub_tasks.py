"""Tasks of the hub by name: GLUE, IMDB, AG News, Yelp, SQuAD, E2E, XSum; each from a directory, a cache, or the hub.

A. Wang et al., GLUE, ICLR 2019; IMDB: Maas et al., ACL 2011; AG News and Yelp: Zhang, Zhao and LeCun, NIPS 2015; SQuAD:
Rajpurkar et al., EMNLP 2016; E2E: Novikova et al., SIGDIAL 2017; XSum: Narayan et al., EMNLP 2018. The labels of most
test splits of GLUE are hidden; `cleaning.arrange` says what is used in their place: the published validation split is
the test, and validation is cut from train.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from atlas_fl.data.cleaning import arrange
from atlas_fl.data.hub import Published, find_tables, source_files
from atlas_fl.data.tables import SPLITS, Table, column, texts
from atlas_fl.data.task import Labels, Metric, Rows, Source, Task, TaskData, rows_to_write
from atlas_fl.errors import DataError

GLUE_REPOSITORY = "nyu-mll/glue"
HIDDEN = -1


@dataclass(frozen=True, kw_only=True)
class Format:
    """Place of a data set on the hub, and its columns."""

    name: str
    text: str
    """Column of the text, or of the prompt after which is written."""
    pair: str | None = None
    """Column of the second text."""
    label_names: tuple[str, ...] = ()
    """Empty for a regression, and for what is written."""
    target: str | None = None
    """Column of what is to be written; None where there are labels."""
    context: str | None = None
    """Column that stands before `text` in the prompt."""
    repository: str = GLUE_REPOSITORY
    config: str | None = None
    """Name of the data set within the repository; the task's name by default."""
    metric: Metric = "accuracy"
    max_length: int = 128
    note: str = "GLUE; tested on its validation split"

    @property
    def published(self) -> Published:
        """The data set as the hub knows it."""
        return Published(
            title=f"GLUE {self.name}" if self.repository == GLUE_REPOSITORY else self.name,
            repository=self.repository,
            config=self.config or self.name,
            folder=self.name,
        )


def load_hub_task(source: Source, *, form: Format) -> TaskData:
    """The splits of a task; a `DataError` names what is missing and the three ways to supply it."""
    tables = find_tables(form.published, source)
    rows = {
        split: _rows(table, form, origin=f"{split} of {form.published.title}")
        for split, table in tables.items()
        # some copies leave the hidden labels out, others write -1
        if split in SPLITS and (split != "test" or (form.target or "label") in table)
    }
    return arrange(rows, name=form.name, labelled=form.target is None)


def _rows(table: Table, form: Format, *, origin: str) -> Rows:
    if form.target is not None:
        return _rows_to_write(table, form, form.target, origin=origin)
    label = _labels(column(table, "label", origin=origin), form, origin=origin)
    pair = None if form.pair is None else texts(table, form.pair, origin=origin)
    rows = Rows(text=texts(table, form.text, origin=origin), pair=pair, label=label)
    return rows.take(np.flatnonzero(label != HIDDEN))


def _rows_to_write(table: Table, form: Format, target: str, *, origin: str) -> Rows:
    """Prompts and what is written after them; a question comes last, since a long prompt loses its beginning."""
    answers = [_first_answer(value) for value in table.get(target, ())]
    kept = [index for index, text in enumerate(answers) if text != ""]
    columns = {**table, target: answers} if target in table else table
    table = {name: [values[index] for index in kept] for name, values in columns.items()}
    prompts, written = texts(table, form.text, origin=origin), texts(table, target, origin=origin)
    if form.context is not None:
        contexts = texts(table, form.context, origin=origin)
        prompts = tuple(f"{context}\n{prompt}" for context, prompt in zip(contexts, prompts, strict=True))
    return rows_to_write(written, prompts=prompts)


def _first_answer(value: Any) -> Any:
    """First of SQuAD's answers, `{"text": [..], ..}`, or "" where there is none; anything else as it is."""
    return next(iter(value.get("text", ())), "") if isinstance(value, Mapping) else value


def _labels(values: Sequence[Any], form: Format, *, origin: str) -> Labels:
    names = {name: index for index, name in enumerate(form.label_names)}
    try:
        if not names:
            return np.asarray([float(value) for value in values], dtype=np.float32)
        label = np.asarray([names[value] if value in names else int(value) for value in values], dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise DataError(f"a label of {origin} is wrong: {error}; have {', '.join(names) or 'numbers'}") from error
    wrong = label[(label < HIDDEN) | (label >= len(names))]
    if len(wrong):
        raise DataError(f"label {wrong[0]} in {origin} is out of range; it has {len(names)} classes from 0 on")
    return label


_SENTIMENT = ("negative", "positive")
_EQUIVALENT = ("not_equivalent", "equivalent")
_ENTAILED = ("entailment", "not_entailment")
_NLI = ("entailment", "neutral", "contradiction")
_ASKED_BEFORE = ("not_duplicate", "duplicate")

_GLUE = (
    Format(name="sst2", text="sentence", label_names=_SENTIMENT),
    Format(name="mrpc", text="sentence1", pair="sentence2", label_names=_EQUIVALENT, metric="f1"),
    Format(name="cola", text="sentence", label_names=("unacceptable", "acceptable"), metric="mcc"),
    Format(name="qnli", text="question", pair="sentence", label_names=_ENTAILED, max_length=256),
    Format(name="qqp", text="question1", pair="question2", label_names=_ASKED_BEFORE, metric="f1"),
    Format(name="mnli", text="premise", pair="hypothesis", label_names=_NLI),
    Format(name="rte", text="sentence1", pair="sentence2", label_names=_ENTAILED),
    Format(name="wnli", text="sentence1", pair="sentence2", label_names=("not_entailment", "entailment")),
    Format(name="stsb", text="sentence1", pair="sentence2", metric="pearson"),
)
_OTHERS = (
    Format(
        name="imdb",
        text="text",
        label_names=_SENTIMENT,
        repository="stanfordnlp/imdb",
        config="plain_text",
        max_length=256,
        note="film reviews of the hub",
    ),
    Format(
        name="ag_news",
        text="text",
        label_names=("world", "sports", "business", "technology"),
        repository="fancyzhx/ag_news",
        config="default",
        note="news by topic, of the hub",
    ),
    Format(
        name="yelp",
        text="text",
        label_names=_SENTIMENT,
        repository="fancyzhx/yelp_polarity",
        config="plain_text",
        max_length=256,
        note="reviews of places, of the hub",
    ),
    Format(
        name="squad",
        text="question",
        context="context",
        target="answers",
        repository="rajpurkar/squad",
        config="plain_text",
        max_length=384,
        note="writes the answer after passage and question; of the hub",
    ),
    Format(
        name="e2e",
        text="meaning_representation",
        target="human_reference",
        repository="tuetschek/e2e_nlg",
        config="default",
        note="writes a sentence about a restaurant from its attributes; of the hub",
    ),
    Format(
        name="xsum",
        text="document",
        target="summary",
        repository="EdinburghNLP/xsum",
        config="default",
        max_length=512,
        note="writes a sentence that sums up an article; of the hub",
    ),
)


def _task(form: Format) -> Task:
    return Task(
        name=form.name,
        num_labels=0 if form.target is not None else len(form.label_names) or 1,
        metric=form.metric,
        max_length=form.max_length,
        label_names=form.label_names,
        note=form.note,
        load=partial(load_hub_task, form=form),
        files=partial(source_files, form.published),
    )


GLUE: tuple[Task, ...] = tuple(_task(form) for form in _GLUE)
HUB_TASKS: tuple[Task, ...] = (*GLUE, *(_task(form) for form in _OTHERS))
