"""Files that lie in a package beside its modules: tables and texts."""

import tomllib
from importlib import resources
from typing import Any


def packaged_text(package: str, name: str) -> str:
    """The text of this file of the package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def packaged_tables(package: str, name: str) -> dict[str, Any]:
    """The content of this TOML file of the package."""
    return tomllib.loads(packaged_text(package, name))
