"""The sources of the package as syntax trees, for tests of what stands in them."""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TypeVar

import atlas_fl

ROOT = Path(atlas_fl.__file__).parent
MODULES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
"""The file of every module, by its path inside the package."""

Node = TypeVar("Node", bound=ast.AST)


@cache
def _all_nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def nodes(path: Path, kind: type[Node]) -> list[Node]:
    """Every node of this kind in a file."""
    return [node for node in _all_nodes(path) if isinstance(node, kind)]


def called(call: ast.Call) -> str:
    """The last name of what is called, whatever it is called on."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def listed(offenders: Iterable[str], remedy: str) -> str:
    """The message of a check: what to do, then every offender on a line of its own."""
    return "\n".join([remedy, *(f"  {offender}" for offender in offenders)])
