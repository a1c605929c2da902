"""Examples in docstrings give what stands below them."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "atlas_fl"
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if ">>>" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_an_example_gives_what_stands_below_it(path: Path) -> None:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    failed, tried = doctest.testmod(import_module(name))
    assert tried > 0 and failed == 0
