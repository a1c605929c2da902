"""Cleaning of rows: duplicates, contradictions and leaks left out; seeded, stratified splits.

A text counts once in a task, whatever its case and spacing, and an image by its pixels.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import combinations

import numpy as np

from atlas_fl.data.task import Examples, Images, Kind, Labels, TaskData
from atlas_fl.errors import DataError
from atlas_fl.params import Split
from atlas_fl.rng import generator

_SEPARATOR = "\x1f"
_SHOWN = 120
"""Characters of a text in a message."""


def keys(rows: Examples) -> Iterator[str]:
    """Key of every row; two rows with one key are the same example.

    That is the text and pair with case and spacing normalised, or a hash of the pixels.
    """
    if isinstance(rows, Images):
        size = str(rows.size).encode()
        yield from (blake2b(image.tobytes() + size, digest_size=16).hexdigest() for image in rows.pixels)
        return
    if rows.pair is None:
        yield from (_normal(text) for text in rows.text)
    else:
        yield from (_normal(text) + _SEPARATOR + _normal(pair) for text, pair in zip(rows.text, rows.pair))


def deduplicate(rows: Kind) -> Kind:
    """The first row of every key; keys whose labels contradict each other are left out altogether."""
    first: dict[str, int] = {}
    contradicted: set[str] = set()
    labels = rows.label.tolist()
    for position, key in enumerate(keys(rows)):
        seen = first.setdefault(key, position)
        if labels[seen] != labels[position]:
            contradicted.add(key)
    return rows.take([position for key, position in first.items() if key not in contradicted])


def without(rows: Kind, *others: Kind) -> Kind:
    """The rows whose key is in none of the others."""
    taken = {key for other in others for key in keys(other)}
    return rows.take([position for position, key in enumerate(keys(rows)) if key not in taken])


def clean(data: TaskData) -> TaskData:
    """The splits without duplicates; what is in two splits stays in the one that is more expensive to lose.

    That is test before validation before train.
    """
    test = deduplicate(data.test)
    validation = without(deduplicate(data.validation), test)
    return TaskData(train=without(deduplicate(data.train), validation, test), validation=validation, test=test)


def check_no_leak(splits: Mapping[Split, Examples]) -> None:
    """A `DataError` with an example if two splits share a text or an image (`keys`)."""
    row_keys = {split: list(keys(rows)) for split, rows in splits.items()}
    for left, right in combinations(row_keys, 2):
        others = set(row_keys[right])
        if positions := [position for position, key in enumerate(row_keys[left]) if key in others]:
            rows = splits[left]
            kind = "images" if isinstance(rows, Images) else "texts"
            raise DataError(
                f"{len(positions)} {kind} are in {left} and in {right}, such as {_shown(rows, positions[0])}; remove"
                " them from one of the two"
            )


def _shown(rows: Examples, position: int) -> str:
    if isinstance(rows, Images):
        return f"number {position}"
    pair = "" if rows.pair is None else f" | {rows.pair[position]}"
    return repr((rows.text[position] + pair)[:_SHOWN])


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())


# The proportions of a client's default sizes, so that no split runs out before the others do.
TRAIN, VALIDATION, TEST = 200, 100, 130
SEED = 0
"""Splits belong to the data and not to the run, so that two runs with different seeds are tested on the same texts."""
NUM_BINS = 5
"""Strata of a regression: equally filled ranges of the label."""
CARVED_SHARE, MOST_CARVED = 0.2, 2000
"""Part of the training rows that a missing split takes: a fifth, and never more than this many."""


def strata(labels: Labels, *, edges: Labels | None = None) -> Labels:
    """The class of every label, (n,) int64; values of a regression fall into the bins between `edges`.

    Of rows of several labels it is the set of them, or with `edges` the bin of their number.
    """
    if np.issubdtype(labels.dtype, np.integer):
        return labels.astype(np.int64)
    if labels.ndim == 2 and edges is None:
        return np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return np.digitize(_values(labels), bin_edges(labels) if edges is None else edges).astype(np.int64)


def bin_edges(labels: Labels) -> Labels:
    """Inner edges of the `NUM_BINS` equally filled ranges of these values; none of no values."""
    if not len(labels):
        return labels
    return np.unique(np.quantile(_values(labels), np.linspace(0, 1, NUM_BINS + 1)[1:-1]))


def _values(labels: Labels) -> Labels:
    """The values of a regression; of rows of several labels how many there are, (n,)."""
    return labels.sum(axis=1) if labels.ndim == 2 else labels


def stratified_order(labels: Labels, rng: np.random.Generator) -> Labels:
    """A random order of the rows in which every stretch holds about the same share of each class, (n,) int64."""
    classes = strata(labels)
    rank = np.empty(len(classes))
    for value in np.unique(classes):
        members = rng.permutation(np.flatnonzero(classes == value))
        # Row i of m members lands in the i-th of m equal parts of [0, 1).
        rank[members] = (np.arange(len(members)) + rng.random(len(members))) / len(members)
    return np.argsort(rank, kind="stable")


def arrange(
    splits: Mapping[str, Examples],
    *,
    name: str,
    labelled: bool = True,
    label_names: Sequence[str] = (),
    validation_share: float | None = None,
) -> TaskData:
    """The splits that a data set comes with, cleaned, and those it lacks.

    With labelled train, validation and test: these. Without test: its validation is the test, as published results
    on GLUE are, and validation is a fifth of train (at most 2,000 rows), or `validation_share` of it. With train alone:
    both are taken from it. Rows of no split (`all`) are cut by `split_rows`.

    A `DataError` says what nobody could learn from: an empty split, labelled training rows of one class only, or one of
    `label_names` that is held out alone; it says how many rows cleaning took, too.
    """
    if "all" in splits:
        data = split_rows(splits["all"], name=name, validation_share=validation_share)
    else:
        train = deduplicate(splits["train"])
        given = [splits[split] for split in ("test", "validation") if split in splits and len(splits[split])]
        for part in range(2 - len(given)):
            num_rows = min(int(len(train) * CARVED_SHARE), MOST_CARVED)
            if len(given) == 1 and validation_share is not None:
                num_rows = _share_of(len(train), validation_share, name=name)
            order = stratified_order(train.label, generator(SEED, "carve", f"{name}/{part}"))
            given.append(train.take(order[:num_rows]))
            train = train.take(order[num_rows:])
        data = clean(TaskData(train=train, validation=given[1], test=given[0]))
    sizes = {split: len(rows) for split, rows in data.splits.items()}
    left_out = sum(map(len, splits.values())) - sum(sizes.values())
    lost = f"; rows left out: {left_out:,}, which repeat or contradict others, or lie in two splits"
    lost = lost if left_out else ""
    if empty := [split for split, size in sizes.items() if size == 0]:
        what = f"task {name!r} has no {' and no '.join(empty)} rows ({sum(sizes.values())} distinct rows in all)"
        raise DataError(f"{what}{lost}; give it more rows, five at the least")
    if labelled and len(np.unique(data.train.label, axis=0)) < 2:
        what = f"all {sizes['train']} training rows of task {name!r} have one label"
        raise DataError(f"{what}{lost}; give it rows of a second")
    held_out = {"validation": data.validation, "test": data.test}
    for split, rows in held_out.items() if label_names else ():
        for label in np.setdiff1d(rows.label, data.train.label).tolist():
            count = int((rows.label == label).sum())
            what = f"class {label_names[label]!r} of task {name!r} has {count} {split} rows and no training row"
            raise DataError(f"{what}{lost}; give it train rows, three at the least, or remove it everywhere")
    return replace(data, left_out=left_out)


def split_rows(rows: Examples, *, name: str, validation_share: float | None = None) -> TaskData:
    """Disjoint splits in the proportions 200 : 100 : 130 of these rows without their duplicates.

    They depend on the rows and the name alone. `validation_share` is that of what is left when the test is taken.
    """
    rows = deduplicate(rows)
    order = stratified_order(rows.label, generator(SEED, "split", name))
    total = TRAIN + VALIDATION + TEST
    num_validation, num_test = len(rows) * VALIDATION // total, len(rows) * TEST // total
    if validation_share is not None:
        num_validation = _share_of(len(rows) - num_test, validation_share, name=name)
    return TaskData(
        train=rows.take(order[num_validation + num_test :]),
        validation=rows.take(order[num_test : num_validation + num_test]),
        test=rows.take(order[:num_test]),
    )


def _share_of(count: int, share: float, *, name: str) -> int:
    if (share_count := int(count * share)) == 0:
        raise DataError(
            f"--validation-share {share:g} of the {count} rows of task {name!r} is not one; give a larger share, or add"
            " rows"
        )
    return share_count
