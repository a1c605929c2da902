"""The page of `X as X` in the package's `__init__`, held against what is really there."""

import inspect
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import atlas_fl

NAMES = dir(atlas_fl)
SOURCE = Path(atlas_fl.__file__)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(atlas_fl, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        text = inspect.getdoc(value) or ""
        assert text.split("\n\n")[0].rstrip().endswith((".", ":")), f"{name} begins with no whole sentence"
        assert not text.startswith(f"{name}("), f"{name} has only the docstring that a dataclass makes itself"
    public = [method for method in vars(value).values() if inspect.isfunction(method)] if inspect.isclass(value) else []
    for method in public:
        assert method.__name__.startswith("_") or inspect.getdoc(method), f"{name}.{method.__name__}"


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("Config") or name == "RunResult"])
def test_every_public_dataclass_is_frozen_plain_data(name: str) -> None:
    value: Any = getattr(atlas_fl, name)
    assert is_dataclass(value)
    assert value.__dataclass_params__.frozen
    assert all(field.kw_only for field in fields(value))


def test_no_public_name_is_that_of_a_module() -> None:
    modules = {path.stem for path in SOURCE.parent.glob("*.py")} | {path.name for path in SOURCE.parent.glob("*/")}
    assert not modules & set(NAMES)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'atlas_fl' has no attribute 'nothing'"):
        _ = atlas_fl.nothing  # type: ignore[attr-defined]


def test_the_import_costs_nothing() -> None:
    code = "import sys, atlas_fl; print(len([name for name in sys.modules if name.startswith('atlas_fl')]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
