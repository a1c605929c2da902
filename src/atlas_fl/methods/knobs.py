"""Knobs: settings of single methods, declared as fields of their classes.

    tree_threshold: Annotated[float, Range(least=0, below=1), Tried("fedtreelora", values=(0.1, 0.0))] = 0.1
    \"""The silhouette above which `fedtreelora` cuts the clients of a layer at all.\"""

Flag, key in a file, help, range and tuning grid of a knob follow from these lines. They are read from the sources of
the methods, because importing those takes seconds.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal

from atlas_fl.ranges import Range

KNOB = "knob"
"""Mark of a knob that is no number."""


@dataclass(frozen=True)
class Tried:
    """Values of a setting that the tuning of these strategies tries, the default first."""

    strategies: tuple[str, ...]
    values: tuple[Any, ...]

    def __init__(self, *strategies: str, values: tuple[Any, ...]) -> None:
        object.__setattr__(self, "strategies", strategies)
        object.__setattr__(self, "values", values)


@cache
def knobs_class() -> type[Any]:
    """Frozen dataclass with the knobs of all methods as its fields."""
    about = "Knobs of single strategies: how a server optimizer steps, and what rows and clusters follow from updates."
    return make_dataclass("ServerConfig", list(_knobs()), namespace={"__doc__": about}, frozen=True, kw_only=True)


def _knobs() -> Iterator[tuple[str, Any, Any]]:
    """(name, annotation, field) of every knob."""
    names = {"Annotated": Annotated, "Literal": Literal, "Range": Range, "Tried": Tried, "KNOB": KNOB}
    files = sorted(resources.files(__package__).iterdir(), key=lambda file: file.name)
    texts = [file.read_text(encoding="utf-8") for file in files if file.name.endswith(".py")]
    modules = [ast.parse(text) for text in texts if "Annotated[" in text and "class Range" not in text]
    for node in (node for module in modules for node in module.body if isinstance(node, ast.ClassDef)):
        docs = documented_fields(node)
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and ast.unparse(line.annotation).startswith("Annotated["):
                assert isinstance(line.target, ast.Name) and line.value is not None
                kind = eval(compile(ast.Expression(line.annotation), node.name, "eval"), names)
                default = ast.literal_eval(line.value)
                yield line.target.id, kind, field(default=default, metadata={"help": docs[line.target.id]})


def documented_fields(node: ast.ClassDef) -> dict[str, str]:
    """Docstrings below the fields of a class, on one line each."""
    return {
        line.target.id: _docstring_text(below)
        for line, below in zip(node.body, node.body[1:])
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


def _docstring_text(node: ast.stmt) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""
