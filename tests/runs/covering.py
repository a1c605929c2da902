"""Methods that among them have every rule and every setting of a method: what `make test` runs of them."""

from collections.abc import Iterable

import pytest

from atlas_fl.methods.registry import METHODS

PRODUCT = (pytest.mark.slow, pytest.mark.product)


def covering_methods() -> frozenset[str]:
    """The first method in the order of the table with a rule or a setting that none before it has."""
    seen = set[str]()
    found = set[str]()
    for method, row in METHODS.items():
        words = {f"rule {row.rule}", *row.settings, *row.suggested}
        if not words <= seen:
            found.add(method)
        seen |= words
    return frozenset(found)


def first_of_each_rule() -> frozenset[str]:
    """The first method in the order of the table that mixes by its rule."""
    first = dict[str, str]()
    for method, row in METHODS.items():
        first.setdefault(row.rule, method)
    return frozenset(first.values())


def with_marks(methods: Iterable[str], quick: Iterable[str]) -> list[object]:
    """Parameters of a test: those that are not quick are left to `make test-all`."""
    chosen = set(quick)
    return [pytest.param(method, marks=() if method in chosen else PRODUCT) for method in methods]
