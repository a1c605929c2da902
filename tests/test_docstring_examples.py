"""Examples in docstrings give what stands below them."""

import doctest
from importlib import import_module

import pytest

from tests.sources import MODULES


@pytest.mark.parametrize("module", [name for name, path in MODULES.items() if ">>>" in path.read_text("utf-8")])
def test_an_example_gives_what_stands_below_it(module: str) -> None:
    name = f"atlas_fl/{module}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    failed, tried = doctest.testmod(import_module(name))
    assert tried > 0 and failed == 0
