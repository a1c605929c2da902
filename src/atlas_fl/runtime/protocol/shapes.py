"""Shapes of the JSON that comes from the network, checked before it is used.

A shape is a function `(value, location) -> fault`, empty where the value fits. Names that it does not know are allowed.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from atlas_fl.errors import short_repr
from atlas_fl.ranks.devices import Bounds

Shape: TypeAlias = Callable[[Any, str], str]

LARGEST = 10**18
"""No count comes near it, and its square is a number still."""


def scalar(kind: str, test: Callable[[Any], bool]) -> Shape:
    """A value that passes this test; `kind` names such values in a message."""

    def shape(value: Any, location: str) -> str:
        return "" if test(value) else f"{_place(location)} is {short_repr(value)} and no {kind}"

    return shape


def _place(location: str) -> str:
    return location.lstrip(".") or "it"


def number_in(bounds: Bounds) -> Shape:
    """One of the numbers in these bounds."""
    return scalar(str(bounds), bounds.__contains__)


text = scalar("text", lambda value: isinstance(value, str))
flag = scalar("true or false", lambda value: type(value) is bool)
mapping = scalar("mapping", lambda value: isinstance(value, dict))
integer = scalar("whole number", lambda value: type(value) is int and abs(value) <= LARGEST)
count = scalar("whole number from 0", lambda value: type(value) is int and 0 <= value <= LARGEST)


def optional(shape: Shape) -> Shape:
    """Null, or this."""
    return lambda value, location: "" if value is None else shape(value, location)


def list_of(shape: Shape) -> Shape:
    """A list of these."""
    lists = scalar("list", lambda value: isinstance(value, list))

    def entries(value: Any, location: str) -> str:
        return lists(value, location) or first_fault(
            shape(entry, f"{location}[{index}]") for index, entry in enumerate(value)
        )

    return entries


def fields(required: Mapping[str, Shape], /, **optional: Shape) -> Shape:
    """A mapping that has all the required names, and others of these perhaps."""
    shapes = {**optional, **required}

    def entries(value: Any, location: str) -> str:
        if fault := mapping(value, location):
            return fault
        missing = next((f"{_place(location)} lacks {name!r}" for name in required if name not in value), "")
        known = [name for name in value if name in shapes]
        return missing or first_fault(shapes[name](value[name], f"{location}.{name}") for name in known)

    return entries


def first_fault(faults: Iterable[str]) -> str:
    """The first of these that is one."""
    return next((fault for fault in faults if fault), "")
