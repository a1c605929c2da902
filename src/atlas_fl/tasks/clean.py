"""Duplicates and leaks: a text counts once in a task, whatever its case and spacing."""

from collections.abc import Iterator

from atlas_fl.errors import DataError
from atlas_fl.tasks.spec import Rows, TaskData

_SEPARATOR = "\x1f"


def keys(rows: Rows) -> Iterator[str]:
    """Of every row, its text and pair with case and spacing normalised: two rows with one key are the same example."""
    if rows.pair is None:
        yield from (_normal(text) for text in rows.text)
    else:
        yield from (_normal(text) + _SEPARATOR + _normal(pair) for text, pair in zip(rows.text, rows.pair))


def deduplicate(rows: Rows) -> Rows:
    """The first row of every key; keys whose labels contradict each other are left out altogether."""
    first: dict[str, int] = {}
    contradicted: set[str] = set()
    for position, key in enumerate(keys(rows)):
        seen = first.setdefault(key, position)
        if rows.label[seen] != rows.label[position]:
            contradicted.add(key)
    return rows.take([position for key, position in first.items() if key not in contradicted])


def without(rows: Rows, *others: Rows) -> Rows:
    """The rows whose key is in none of the others."""
    taken = {key for other in others for key in keys(other)}
    return rows.take([position for position, key in enumerate(keys(rows)) if key not in taken])


def clean(data: TaskData) -> TaskData:
    """The splits without duplicates; a text in two splits stays in the one that is more expensive to lose.

    That is test before validation before train.
    """
    test = deduplicate(data.test)
    validation = without(deduplicate(data.validation), test)
    return TaskData(train=without(deduplicate(data.train), validation, test), validation=validation, test=test)


def check_no_leak(train: Rows, validation: Rows, test: Rows) -> None:
    """A `DataError` with an example if two splits share a text, by case and space normalised text and pair."""
    splits = {name: set(keys(rows)) for name, rows in (("train", train), ("validation", validation), ("test", test))}
    for left, right in (("train", "validation"), ("train", "test"), ("validation", "test")):
        shared = splits[left] & splits[right]
        if shared:
            example = min(shared).replace(_SEPARATOR, " | ")[:120]
            raise DataError(
                f"{len(shared)} texts are in {left} and in {right}, such as {example!r}; "
                "remove them from one of the two (tasks.clean does)"
            )


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())
