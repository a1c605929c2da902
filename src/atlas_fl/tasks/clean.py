"""Duplicates and leaks: a text counts once in a task, whatever its case and spacing, and an image by its pixels."""

from collections.abc import Iterator, Mapping
from hashlib import blake2b

from atlas_fl.errors import DataError
from atlas_fl.tasks.images import Images
from atlas_fl.tasks.spec import Examples, Kind, Labelled, Rows, TaskData

_SEPARATOR = "\x1f"
_SHOWN = 120
"""Characters of a text in a message."""


def keys(rows: Labelled) -> Iterator[str]:
    """Of every row a key; two rows with one key are the same example.

    That is the text and pair with case and spacing normalised, or a hash of the pixels.
    """
    if isinstance(rows, Images):
        size = str(rows.size).encode()
        yield from (blake2b(image.tobytes() + size, digest_size=16).hexdigest() for image in rows.pixels)
        return
    assert isinstance(rows, Rows)
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
    """What cleaning took of these splits and how to mend it, in words; None where it took repetitions at most."""
    whats, remedies = list[str](), list[str]()
    for split, rows in given.items():
        if found := _contradictions(rows):
            told = "" if split == "all" else f"{split} "
            what = "images that have another label too" if isinstance(rows, Images) else "texts that have another label"
            whats.append(f"{len(found)} of {len(rows)} {told}rows are {what}{_such_as(rows, found[0])}")
            remedies.append("give equal rows one label, or remove them")
    for left, right in (("train", "validation"), ("train", "test"), ("validation", "test")):
        if left in given and right in given and (found := _shared(given[left], given[right])):
            rows = given[left]
            whats.append(f"{len(found)} of {len(rows)} {left} rows are in {right} too{_such_as(rows, found[0])}")
            remedies.append("give each split rows of its own")
    return (", and ".join(whats), ", and ".join(dict.fromkeys(remedies))) if whats else None


def _contradictions(rows: Examples) -> list[int]:
    """Positions of the rows whose key has two labels."""
    labels: dict[str, set[float]] = {}
    for key, label in zip(found := list(keys(rows)), rows.label.tolist(), strict=True):
        labels.setdefault(key, set()).add(label)
    return [position for position, key in enumerate(found) if len(labels[key]) > 1]


def _shared(rows: Examples, others: Examples) -> list[int]:
    taken = set(keys(others))
    return [position for position, key in enumerate(keys(rows)) if key in taken]


def _such_as(rows: Examples, position: int) -> str:
    if isinstance(rows, Images):
        return f", such as number {position}"
    pair = "" if rows.pair is None else f" | {rows.pair[position]}"
    return f", such as {(rows.text[position] + pair)[:_SHOWN]!r}"


def check_no_leak(train: Examples, validation: Examples, test: Examples) -> None:
    """A `DataError` with an example if two splits share a text or an image (`keys`)."""
    places = {
        name: {key: place for place, key in enumerate(keys(rows))}
        for name, rows in (("train", train), ("validation", validation), ("test", test))
    }
    for left, right in (("train", "validation"), ("train", "test"), ("validation", "test")):
        shared = places[left].keys() & places[right].keys()
        if shared:
            example = min(shared)
            if isinstance(train, Images):
                what = f"images are in {left} and in {right}, such as number {places[left][example]} of {left}"
            else:
                shown = example.replace(_SEPARATOR, " | ")[:_SHOWN]
                what = f"texts are in {left} and in {right}, such as {shown!r}"
            raise DataError(f"{len(shared)} {what}; remove them from one of the two (tasks.clean does)")


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())
