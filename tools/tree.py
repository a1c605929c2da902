"""The tree of the package with the first line of every docstring.

    python -m tools.tree            prints it; the documentation site has it as a page

What a module is for is said once, in its docstring.
"""

import ast
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


def tree() -> str:
    """One line for each package and module; modules of the root first."""
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages == set(ORDER), packages ^ set(ORDER)
    lines = ["src/atlas_fl/"]
    lines += [_line(path, depth=1) for path in sorted(PACKAGE.glob("[a-z]*.py"))]
    for name in ORDER:
        lines += _package(PACKAGE / name, depth=1)
    return "\n".join(lines) + "\n"


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
    print(tree(), end="")
