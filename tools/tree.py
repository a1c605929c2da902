"""The tree of the package with the first line of every docstring, as README shows it.

    python -m tools.tree            # writes it into README.md, between the two marks

What a module is for is said once, in its docstring; `tests/test_docs.py` holds README to it.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "atlas_fl"
ORDER = (
    *("config", "data", "models", "sparse", "split", "client", "methods", "aggregation", "clustering"),
    *("ranks", "setup", "planning", "runtime", "experiment", "deployment", "privacy_attacks", "flower", "audit"),
    "report",
    *("cli", "storage"),
)
"""Packages in the order in which the story is told: settings, data, model, client, server, plan, run, results."""
BEGIN, END = "<!-- tree: written by `python -m tools.tree` -->\n```\n", "```\n<!-- end of tree -->"
MARKED = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
WIDTH = 120


def tree() -> str:
    """One line for each package and module; modules of the root first."""
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == set(ORDER), packages ^ set(ORDER)
    lines = ["src/atlas_fl/"]
    lines += [_line(path, depth=1) for path in sorted(PACKAGE.glob("[a-z]*.py"))]
    for name in ORDER:
        lines += _package(PACKAGE / name, depth=1)
    return "\n".join(lines) + "\n"


def with_tree(text: str) -> str:
    """README's text with the tree of today between the marks."""
    return MARKED.sub(lambda _: BEGIN + tree() + END, text)


def _package(folder: Path, depth: int) -> list[str]:
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    packages = sorted(path.parent for path in folder.glob("*/__init__.py"))
    inside = [line for package in packages for line in _package(package, depth + 1)]
    return [_line(folder / "__init__.py", depth), *(_line(path, depth + 1) for path in modules), *inside]


def _line(path: Path, depth: int) -> str:
    package = path.name == "__init__.py"
    name = "  " * depth + (f"{path.parent.name}/" if package else path.name)
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return f"{name:<30} {docstring.splitlines()[0]}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_tree(readme.read_text(encoding="utf-8")), encoding="utf-8")
