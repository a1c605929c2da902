"""Cleaning of rows: duplicates, contradictions and leaks left out; seeded, stratified splits.

A text counts once in a task, whatever its case and spacing, and an image by its pixels.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import combinations
from typing import Any

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
    for position, key in enumerate(keys(rows)):
        seen = first.setdefault(key, position)
        if rows.label[seen] != rows.label[position]:
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


def why_fewer(given: Mapping[str, Examples]) -> tuple[str, str] | None:
    """Cause and remedy of rows that cleaning took of these splits, in words; None where it took repetitions at most."""
    causes, remedies = list[str](), list[str]()
    for split, rows in given.items():
        if positions := _contradictions(rows):
            of_split = "" if split == "all" else f"{split} "
            what = "images that have another label too" if isinstance(rows, Images) else "texts that have another label"
            causes.append(f"{len(positions)} of {len(rows)} {of_split}rows are {what}{_such_as(rows, positions[0])}")
            remedies.append("give equal rows one label, or remove them")
    for left, right, positions in _shared_rows(given):
        rows = given[left]
        causes.append(f"{len(positions)} of {len(rows)} {left} rows are in {right} too{_such_as(rows, positions[0])}")
        remedies.append("give each split rows of its own")
    return (", and ".join(causes), ", and ".join(dict.fromkeys(remedies))) if causes else None


def _contradictions(rows: Examples) -> list[int]:
    """Positions of the rows whose key has two labels."""
    labels: dict[str, set[float]] = {}
    for key, label in zip(row_keys := list(keys(rows)), rows.label.tolist(), strict=True):
        labels.setdefault(key, set()).add(label)
    return [position for position, key in enumerate(row_keys) if len(labels[key]) > 1]


def _shared_rows(given: Mapping[Any, Examples]) -> Iterator[tuple[Any, Any, list[int]]]:
    """(split, another split, positions of the rows of the first that are in the second too), where there are any."""
    row_keys = {split: list(keys(given[split])) for split in ("train", "validation", "test") if split in given}
    for left, right in combinations(row_keys, 2):
        others = set(row_keys[right])
        if positions := [position for position, key in enumerate(row_keys[left]) if key in others]:
            yield left, right, positions


def _such_as(rows: Examples, position: int) -> str:
    if isinstance(rows, Images):
        return f", such as number {position}"
    pair = "" if rows.pair is None else f" | {rows.pair[position]}"
    return f", such as {(rows.text[position] + pair)[:_SHOWN]!r}"


def check_no_leak(splits: Mapping[Split, Examples]) -> None:
    """A `DataError` with an example if two splits share a text or an image (`keys`)."""
    for left, right, positions in _shared_rows(splits):
        rows = splits[left]
        kind = "images" if isinstance(rows, Images) else "texts"
        raise DataError(
            f"{len(positions)} {kind} are in {left} and in {right}{_such_as(rows, positions[0])}; remove them from one"
            " of the two"
        )


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
    """The class of every label, (n,) int64; values of a regression fall into the bins between `edges`."""
    if np.issubdtype(labels.dtype, np.integer):
        return labels.astype(np.int64)
    return np.digitize(labels, bin_edges(labels) if edges is None else edges).astype(np.int64)


def bin_edges(labels: Labels) -> Labels:
    """Inner edges of the `NUM_BINS` equally filled ranges of these values; none of no values."""
    if not len(labels):
        return labels
    return np.unique(np.quantile(labels, np.linspace(0, 1, NUM_BINS + 1)[1:-1]))


def stratified_order(labels: Labels, rng: np.random.Generator) -> Labels:
    """A random order of the rows in which every stretch holds about the same share of each class, (n,) int64."""
    classes = strata(labels)
    rank = np.empty(len(classes))
    for value in np.unique(classes):
        members = rng.permutation(np.flatnonzero(classes == value))
        # Row i of m members lands in the i-th of m equal parts of [0, 1).
        rank[members] = (np.arange(len(members)) + rng.random(len(members))) / len(members)
    return np.argsort(rank, kind="stable")


def split_rows(
    rows: Examples,
    *,
    name: str,
    labelled: bool = True,
    label_names: Sequence[str] = (),
    validation_share: float | None = None,
) -> TaskData:
    """Disjoint splits in the proportions 200 : 100 : 130 of these rows without their duplicates.

    They depend on the rows and the name alone. `validation_share` is that of what is left when the test is taken. A
    `DataError` says when there are too few rows, or classes of labelled ones, or one of `label_names` without training
    rows.
    """
    given = {"all": rows}
    rows = deduplicate(rows)
    order = stratified_order(rows.label, generator(SEED, "split", name))
    total = TRAIN + VALIDATION + TEST
    num_validation, num_test = len(rows) * VALIDATION // total, len(rows) * TEST // total
    if validation_share is not None:
        num_validation = _share_of(len(rows) - num_test, validation_share, name=name)
    data = TaskData(
        train=rows.take(order[num_validation + num_test :]),
        validation=rows.take(order[num_test : num_validation + num_test]),
        test=rows.take(order[:num_test]),
    )
    return check_splits(data, name=name, labelled=labelled, label_names=label_names, given=given)


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
    """
    if "all" in splits:
        return split_rows(
            splits["all"],
            name=name,
            labelled=labelled,
            label_names=label_names,
            validation_share=validation_share,
        )
    train = deduplicate(splits["train"])
    given = [splits[split] for split in ("test", "validation") if split in splits and len(splits[split])]
    for part in range(2 - len(given)):
        num_rows = min(int(len(train) * CARVED_SHARE), MOST_CARVED)
        if len(given) == 1 and validation_share is not None:
            num_rows = _share_of(len(train), validation_share, name=name)
        carved, train = _carve(train, num_rows, name=f"{name}/{part}")
        given.append(carved)
    data = clean(TaskData(train=train, validation=given[1], test=given[0]))
    return check_splits(data, name=name, labelled=labelled, label_names=label_names, given=splits)


def check_splits(
    data: TaskData, *, name: str, labelled: bool, label_names: Sequence[str], given: Mapping[str, Examples]
) -> TaskData:
    """The same data with the number of rows that are left out; a `DataError` says what nobody could learn from.

    That is an empty split, labelled training rows of one class only, or one of `label_names` that is held out alone; it
    says what of `given` cleaning took, too.
    """
    sizes = {split: len(rows) for split, rows in data.splits.items()}
    if empty := [split for split, size in sizes.items() if size == 0]:
        what = f"task {name!r} has no {' and no '.join(empty)} rows ({sum(sizes.values())} distinct rows in all)"
        raise _mistake(what, given, remedy="give it more rows, five at the least")
    if labelled and len(np.unique(data.train.label)) < 2:
        what = f"all {sizes['train']} training rows of task {name!r} have one label"
        raise _mistake(what, given, remedy="give it rows of a second")
    for split, rows in (("validation", data.validation), ("test", data.test)):
        for label in np.setdiff1d(rows.label, data.train.label)[: len(label_names)].tolist():
            count = int((rows.label == label).sum())
            what = f"class {label_names[label]!r} of task {name!r} has {count} {split} rows and no training row"
            taken = "train" not in given or label in given["train"].label
            remedy = "add rows of it, three at the least, or remove them"
            if "train" in given:
                remedy = "give train rows of it, or remove it from the other splits"
            raise _mistake(what, given if taken else {}, remedy=remedy)
    return replace(data, left_out=sum(map(len, given.values())) - sum(sizes.values()))


def _mistake(what: str, given: Mapping[str, Examples], *, remedy: str) -> DataError:
    """The error with what cleaning took of these splits and how to mend that, where it took any."""
    why = why_fewer(given)
    return DataError(f"{what}; {remedy}" if why is None else f"{what}: {why[0]}; {why[1]}")


def _share_of(count: int, share: float, *, name: str) -> int:
    if (share_count := int(count * share)) == 0:
        raise DataError(
            f"--validation-share {share:g} of the {count} rows of task {name!r} is not one; give a larger share, or add"
            " rows"
        )
    return share_count


def _carve(rows: Kind, num_rows: int, *, name: str) -> tuple[Kind, Kind]:
    order = stratified_order(rows.label, generator(SEED, "carve", name))
    return rows.take(order[:num_rows]), rows.take(order[num_rows:])
