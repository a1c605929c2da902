"""Task, TextExamples and Images: examples, classes, metric and splits of a task."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from stat import S_ISDIR
from threading import RLock
from typing import Any, Literal, Self, TypeAlias, TypeVar, get_args

import numpy as np

from atlas_fl.errors import ConfigError
from atlas_fl.frozen import Frozen
from atlas_fl.params import Split, Truncation

Pixels: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""(n, height, width, channels) uint8; one channel is grey, three are red, green and blue."""


class Images(Frozen, eq=False):
    """Images of one size with a class each."""

    pixels: Pixels
    label: np.ndarray[Any, np.dtype[np.int64]]
    """(n,) classes from 0 on."""

    def __post_init__(self) -> None:
        assert self.pixels.dtype == np.uint8 and self.pixels.ndim == 4, "pixels are uint8 (n, height, width, channels)"
        assert self.pixels.shape[-1] in (1, 3), "an image is grey or has red, green and blue"
        assert self.label.dtype == np.int64 and self.label.shape == self.pixels.shape[:1], "one int64 class an image"

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def size(self) -> tuple[int, int, int]:
        """(height, width, channels)."""
        _, height, width, channels = self.pixels.shape
        return height, width, channels

    def take(self, index: Sequence[int] | np.ndarray[Any, np.dtype[Any]]) -> Self:
        """The images of these positions, in this order."""
        positions = np.asarray(index, dtype=np.int64)
        return replace(self, pixels=self.pixels[positions], label=self.label[positions])


Metric: TypeAlias = Literal["accuracy", "balanced_accuracy", "f1", "micro_f1", "macro_f1", "auroc", "mcc", "pearson"]
"""The score that a task is judged by; pearson makes it a regression, and micro_f1 is of multi-label tasks.

All of them are better when higher. A task that writes text is judged by its next-token accuracy for that reason, with
the perplexity beside it: the accuracy lies between 0 and 1 as the scores of other tasks do, so that the best round, the
worst client, rounds to 90%, means over a mixed federation and the adaptive graph mean the same for all.
"""

METRICS: tuple[Metric, ...] = get_args(Metric)
MULTILABEL_METRICS: tuple[Metric, ...] = ("micro_f1", "macro_f1", "accuracy", "auroc")
"""Metrics of a multi-label task, its default first."""

Labels: TypeAlias = np.ndarray[Any, np.dtype[Any]]
"""One label per row: int64 classes from 0 on, float32 values of a regression, or float32 words of a text to write; of
a multi-label task a row of float32 zeros and ones, (n, labels).

The number of words is no label that anybody learns; partitions deal texts out by it, as they do values.
"""


class Rows(Frozen, eq=False):
    """Labelled texts or pairs of texts, or texts to be written with or without a prompt."""

    text: tuple[str, ...]
    pair: tuple[str, ...] | None = None
    """The second text of every row, for tasks on two texts; what is to be written where `text` is its prompt."""
    label: Labels

    def __len__(self) -> int:
        return len(self.text)

    def take(self, index: Sequence[int] | Labels) -> Self:
        """The rows of these positions, in this order."""
        positions = np.asarray(index, dtype=np.int64)
        text = tuple(self.text[i] for i in positions)
        pair = None if self.pair is None else tuple(self.pair[i] for i in positions)
        return replace(self, text=text, pair=pair, label=self.label[positions])


def rows_to_write(written: Sequence[str], *, prompts: Sequence[str] | None = None) -> Rows:
    """Texts to be written, each after its prompt where there are prompts; the labels are their numbers of words."""
    words = np.asarray([len(text.split()) for text in written], dtype=np.float32)
    if prompts is None:
        return Rows(text=tuple(written), label=words)
    return Rows(text=tuple(prompts), pair=tuple(written), label=words)


Examples: TypeAlias = Rows | Images
"""Examples of a split."""

Kind = TypeVar("Kind", Rows, Examples)
"""Texts or images: a function of either returns the kind that it gets."""


class Splits(Frozen):
    """Examples in three splits."""

    train: Examples
    validation: Examples
    test: Examples
    left_out: int = 0
    """Rows that were given and are in no split: repeated, contradicting each other, or in two splits."""

    @property
    def splits(self) -> Mapping[Split, Examples]:
        """The examples by split."""
        return {"train": self.train, "validation": self.validation, "test": self.test}

    def with_splits(self, examples: Callable[[Split], Examples]) -> Self:
        """The same with other examples, by split."""
        return replace(self, train=examples("train"), validation=examples("validation"), test=examples("test"))


class TaskData(Splits):
    """The three splits of a task: clean, and without a text or an image in common."""

    clients: tuple["TaskData", ...] = ()
    """The splits of every client, where the data name their clients (`data.own_clients`); else they are dealt out."""
    words: tuple[str, ...] = ()
    """The words that the data have for these clients."""
    notes: tuple[str, ...] = ()
    """Remarks on the data: files that were left out, rows that were skipped, an encoding that was guessed."""


class Source(Frozen):
    """Folders that tasks are read from."""

    cache_dir: Path
    """The folder of the embedded data (`storage.assets.embedded_dir()`)."""
    data_dir: Path | None = None
    """The user's directory of data sets that would else come from the hub."""
    validation_share: float | None = None
    """Share of a data set's training images that becomes the validation split where it has none.

    None is a fifth, and never more than 2,000.
    """


class Task(Frozen):
    """A named task and the function that reads it."""

    name: str
    num_labels: int
    """Classes or labels; 1 is a regression, 0 writes text."""
    multilabel: bool = False
    """An example has any number of the labels, none included, in the place of one class."""
    metric: Metric = "accuracy"
    max_length: int = 128
    """Longest sequence in tokens."""
    truncate: Truncation | None = None
    """The part that a longer one loses; None is the tail, of a prompt the head."""
    chat: bool = False
    """True if its texts are conversations (`data.chat`)."""
    template: str | None = None
    """Name or Jinja source of the chat template; None is the tokenizer's own."""
    images: bool = False
    """True if its splits are `Images` and no `Rows`."""
    label_names: tuple[str, ...] = ()
    """One name per class; empty for a regression."""
    positive: int | None = None
    """The class that f1, precision and recall are of; by default class 1 of two, and of more the mean over classes."""
    note: str = ""
    """Note for readers: where the rows come from, how labels and splits were made."""
    clients: tuple[str, ...] = ()
    """The names of its clients, where the data name them; else they are numbered."""
    load: Callable[[Source], TaskData]
    """Reads it. Two that are equal read the same: `load_task` keeps what they return."""
    files: Callable[[Source], Sequence[Path]] | None = None
    """The files and folders that `load` reads or looks for; None where nothing is to be kept of what it returns."""

    @property
    def metric_name(self) -> str:
        """The metric as tables name it; of f1 with the class that it is of.

        >>> Task(name="sms", num_labels=2, metric="f1", label_names=("ham", "spam"), load=lambda _: ...).metric_name
        'f1 of spam'
        """
        if self.metric == "auroc":
            return "AUROC"
        positive = 1 if self.positive is None and self.num_labels == 2 else self.positive
        if self.metric != "f1":
            return self.metric.replace("_", " ")
        if positive is None:
            return "macro f1"
        return f"f1 of {self.label_names[positive] if self.label_names else f'class {positive}'}"

    @property
    def is_regression(self) -> bool:
        """Return whether the labels are values and no classes."""
        return self.num_labels == 1

    @property
    def writes(self) -> bool:
        """Return whether there are no labels at all, but text that is to be predicted token by token."""
        return self.num_labels == 0

    @property
    def has_classes(self) -> bool:
        """Return whether each example is of one class."""
        return self.num_labels > 1 and not self.multilabel


def as_texts(examples: Examples, *, task: str) -> Rows:
    """The same examples where they are texts; a `ConfigError` where they are images, which a text model cannot read."""
    if isinstance(examples, Images):
        raise ConfigError(
            f"task {task!r} is of images and the model reads text; choose a task of text or a vision model"
        )
    return examples


def concatenate(parts: Sequence[Examples]) -> Examples:
    """The examples of all parts in one, in their order.

    Raises:
        ConfigError: some are pairs of texts, or texts behind prompts, and some are not.
    """
    images = [part for part in parts if isinstance(part, Images)]
    label = np.concatenate([part.label for part in parts])
    if len(images) == len(parts):
        return Images(pixels=np.concatenate([part.pixels for part in images]), label=label)
    texts = [as_texts(part, task="sources") for part in parts]
    pairs = [part.pair for part in texts if part.pair is not None]
    if len(pairs) not in (0, len(texts)):
        raise ConfigError("--one-task takes tasks of one form, and some have pairs of texts, or prompts, and some none")
    return Rows(
        text=tuple(text for part in texts for text in part.text),
        pair=tuple(text for pair in pairs for text in pair) if pairs else None,
        label=label,
    )


MOST_KEPT = 32
"""Data sets that are kept in a process; the one that was used the longest ago goes first."""
_LOCK = RLock()
Signature: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
"""Path, and device, inode, size, time of the content and time of the inode; nothing of these for a missing file."""
Value = TypeVar("Value")


def load_task(task: Task, source: Source) -> TaskData:
    """The splits of a task; read once for as long as its files do not change, if the task names them."""
    return task.load(source) if task.files is None else read_once(task.load, source, files=task.files(source))


def read_once(read: Callable[..., Value], *args: Hashable, files: Iterable[Path]) -> Value:
    """Value that `read` returns, or returned for these while the files were as they are now; not to be altered."""
    with _LOCK:  # another thread that asks for the same waits for it
        value: Value = _read(read, args, file_signature(files))
        return value


@lru_cache(maxsize=MOST_KEPT)
def _read(read: Callable[..., Any], args: tuple[Hashable, ...], _: Signature) -> Any:
    return read(*args)


def file_signature(paths: Iterable[Path]) -> Signature:
    """Signature that tells files, and folders with all in them, from later versions, without opening any."""
    return tuple(entry for path in paths for entry in _entries(path, above=()))


def _entries(path: Path, *, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Entries of a path and of all below it, through links too; `above` are the folders that it lies in."""
    try:
        stat = path.stat()
        folder = (stat.st_dev, stat.st_ino)
        inner = sorted(path.iterdir()) if S_ISDIR(stat.st_mode) and folder not in above else []
    except OSError:
        yield str(path), ()
        return
    yield str(path), (*folder, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    for child in inner:
        yield from _entries(child, above=(*above, folder))


def forget() -> None:
    """Drop all that was read."""
    _read.cache_clear()
