"""Tasks of the hub by name, and its data sets: from a directory, the cache of `datasets`, or the hub itself.

The rows of the tasks stand in `hub_tasks.toml`: GLUE, IMDB, AG News, Yelp, SQuAD, E2E, XSum, CIFAR.

A. Wang et al., GLUE, ICLR 2019; IMDB: Maas et al., ACL 2011; AG News and Yelp: Zhang, Zhao and LeCun, NIPS 2015; SQuAD:
Rajpurkar et al., EMNLP 2016; E2E: Novikova et al., SIGDIAL 2017; XSum: Narayan et al., EMNLP 2018. The labels of most
test splits of GLUE are hidden; `cleaning.arrange` says what is used in their place: the published validation split is
the test, and validation is cut from train.
"""

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from atlas_fl.data.cleaning import arrange
from atlas_fl.data.image_sets import decode_image
from atlas_fl.data.tables import SPLITS, Table, column, from_datasets, read_folder, texts
from atlas_fl.data.task import Examples, Images, Labels, Metric, Rows, Source, Task, TaskData, rows_to_write
from atlas_fl.errors import DataError
from atlas_fl.frozen import Frozen
from atlas_fl.packaged import packaged_tables
from atlas_fl.storage.assets import embedded_dir
from atlas_fl.storage.files import atomic_folder
from atlas_fl.storage.hub import hub_fault

FILES = "{train,validation,test}.parquet (or .csv, .jsonl, or a save_to_disk folder)"
"""Files that a data set's folder in a directory of the user's may hold."""


GLUE_REPOSITORY = "nyu-mll/glue"


class Published(Frozen):
    """A data set as the hub knows it."""

    name: str
    """Its name here, and that of its folder in a directory of the user's."""
    repository: str = GLUE_REPOSITORY
    config: str
    """Name of the data set within the repository; empty where it has one alone."""

    @property
    def title(self) -> str:
        """Name in messages."""
        return f"GLUE {self.name}" if self.repository == GLUE_REPOSITORY else self.name

    def folder_in(self, source: Source) -> Path | None:
        """The folder in which a directory of the user's would hold it; None where no directory was given."""
        return None if source.data_dir is None else source.data_dir / self.name


def find_tables(published: Published, source: Source) -> dict[str, Table]:
    """The tables of a data set by split; a `DataError` names what is missing and the three ways to supply it."""
    folder = published.folder_in(source)
    if folder is not None and folder.is_dir():
        tables = read_folder(folder)[0]
    else:
        looked = f"there is no folder {folder}" if folder is not None else "no --data-dir was given"
        remedy = f"or give --data-dir DIR with DIR{os.sep}{published.name}{os.sep}{FILES}"
        tables = from_datasets(_load(published, looked=f"{looked}, ", remedy=f", {remedy}"))
    if "train" not in tables:
        raise DataError(f"{published.title} has no train split; it has {', '.join(tables) or 'nothing'}")
    return tables


def _load(published: Published, *, looked: str = "", remedy: str = "") -> Any:
    """The splits of a data set by name, from the cache of `datasets` or the hub itself; `DataError` where neither."""
    import datasets  # two seconds that other commands need not pay

    cached = _read_cache(published)
    if cached is not None:
        return cached
    reason = hub_fault()
    if reason is None:
        try:
            return datasets.load_dataset(published.repository, published.config or None, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
    names = ", ".join(repr(name) for name in (published.repository, published.config) if name)
    raise DataError(
        f"{published.title} is not here: {looked}the cache {datasets.config.HF_DATASETS_CACHE} does not hold it and the"
        f" hub does not give it ({reason}); either connect to the hub, or fill that cache with"
        f" datasets.load_dataset({names}) where there is a network and copy it{remedy}"
    )


def hub_folder(name: str) -> Path:
    """The folder with a data set of the hub, `owner/name[@config][#split]`, which is saved into the cache once.

    Raises:
        DataError: it is nowhere, or has no such split.
    """
    place, _, split = name.partition("#")
    repository, _, config = place.partition("@")
    folder = embedded_dir().parent / "hub" / re.sub(r"[^\w.@#-]", "___", name)
    if not folder.is_dir():
        data = _load(Published(name=f"hub:{name}", repository=repository, config=config))
        if split and split not in data:
            raise DataError(f"hub:{place} has no split {split!r}; it has {', '.join(data)}; name one behind '#'")
        with atomic_folder(folder) as draft:
            (data[split] if split else data).save_to_disk(str(draft))
    return folder


def source_files(published: Published, source: Source) -> tuple[Path, ...]:
    """The folders that `find_tables` would read, whether or not they are there yet."""
    folder = published.folder_in(source)
    if folder is not None and folder.is_dir():
        return (folder,)
    import datasets  # two seconds that other commands need not pay

    cached = Path(datasets.config.HF_DATASETS_CACHE, published.repository.replace("/", "___"), published.config)
    return (cached,) if folder is None else (folder, cached)


def _read_cache(published: Published) -> Any:
    """The splits of a data set in the cache of `datasets`; None where it is not there."""
    from datasets.packaged_modules.cache.cache import Cache

    # Asked before the hub: load_dataset would retry for half a minute before it looks here.
    repository = published.repository
    name, config = repository.partition("/")[2], published.config or None
    try:
        builder = Cache(repo_id=repository, dataset_name=name, config_name=config, version="auto", hash="auto")
        return builder.as_dataset()
    except (ValueError, OSError):
        return None


HIDDEN = -1


class Format(Published):
    """Place of a data set on the hub, and its columns."""

    text: str
    """Column of the text or image, or of the prompt after which is written."""
    images: bool = False
    """True if the column holds images."""
    pair: str | None = None
    """Column of the second text."""
    label: str = "label"
    """Column of the classes or numbers."""
    label_names: Sequence[str] = ()
    """Empty for a regression, and for what is written."""
    target: str | None = None
    """Column of what is to be written; None where there are labels."""
    context: str | None = None
    """Column that stands before `text` in the prompt."""
    metric: Metric = "accuracy"
    max_length: int = 128
    note: str = "GLUE; tested on its validation split"


def load_hub_task(source: Source, *, form: Format) -> TaskData:
    """The splits of a task; a `DataError` names what is missing and the three ways to supply it."""
    rows = {
        split: _rows(table, form, origin=f"{split} of {form.title}")
        for split, table in find_tables(form, source).items()
        # some copies leave the hidden labels out, others write -1
        if split in SPLITS and (split != "test" or (form.target or form.label) in table)
    }
    share = source.validation_share if form.images else None
    return arrange(rows, name=form.name, labelled=form.target is None, validation_share=share)


def _rows(table: Table, form: Format, *, origin: str) -> Examples:
    if form.target is not None:
        return _rows_to_write(table, form, form.target, origin=origin)
    label = _labels(column(table, form.label, origin=origin), form, origin=origin)
    known = np.flatnonzero(label != HIDDEN)
    if form.images:
        if form.text not in table:
            raise DataError(f"{origin} has no column {form.text!r}; it has {', '.join(map(repr, table))}")
        pixels = np.stack([decode_image(value, origin=origin) for value in table[form.text]])
        return Images(pixels=pixels, label=label).take(known)
    pair = None if form.pair is None else texts(table, form.pair, origin=origin)
    return Rows(text=texts(table, form.text, origin=origin), pair=pair, label=label).take(known)


def _rows_to_write(table: Table, form: Format, target: str, *, origin: str) -> Rows:
    """Prompts and what is written after them; a question comes last, since a long prompt loses its beginning."""
    # of SQuAD's answers, `{"text": [..], ..}`, the first, or "" where there is none
    answers = [next(iter(it.get("text", ())), "") if isinstance(it, Mapping) else it for it in table.get(target, ())]
    kept = [index for index, text in enumerate(answers) if text != ""]
    columns = {**table, target: answers} if target in table else table
    table = {name: [values[index] for index in kept] for name, values in columns.items()}
    prompts, written = texts(table, form.text, origin=origin), texts(table, target, origin=origin)
    if form.context is not None:
        contexts = texts(table, form.context, origin=origin)
        prompts = tuple(f"{context}\n{prompt}" for context, prompt in zip(contexts, prompts, strict=True))
    return rows_to_write(written, prompts=prompts)


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


def _task(form: Format) -> Task:
    return Task(
        name=form.name,
        num_labels=0 if form.target is not None else len(form.label_names) or 1,
        images=form.images,
        metric=form.metric,
        max_length=form.max_length,
        label_names=tuple(form.label_names),
        note=form.note,
        load=partial(load_hub_task, form=form),
        files=partial(source_files, form),
    )


HUB_TASKS: tuple[Task, ...] = tuple(
    _task(Format(**{"name": name, "config": name, **row}))
    for name, row in packaged_tables(__package__, "hub_tasks.toml").items()
)
