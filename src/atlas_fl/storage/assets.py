"""The embedded models and data: their packages, versions and digests, and their folders once fetched."""

import os
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Literal

import platformdirs

from atlas_fl.errors import DataError
from atlas_fl.frozen import Frozen
from atlas_fl.packaged import packaged_tables


class Asset(Frozen):
    """One package and the files that are taken from it."""

    name: str
    """Folder in the cache."""
    requirement: str
    """Requirement that pip or apt gets."""
    size_mb: int
    """Size of the download."""
    prefix: str
    """Folder inside the package that the files lie in."""
    files: Mapping[str, str]
    """SHA-256 of every file by its path in the cache, below `prefix` where nothing is converted."""
    installer: Literal["pip", "apt"]
    """Installer of the package: pip for a wheel, apt for a Debian package."""
    group: Literal["embedded", "vision", "llm"]
    """Name of its group in `atlas fetch`, and of the extra that a conversion needs."""
    packed: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the files inside the package where `files` are made from them (`storage.downloads.CONVERTERS`)."""
    conversion_package: str | None = None
    """The package that the conversion needs."""
    system_dir: str | None = None
    """Folder in which the machine may have the files already."""
    note: str = ""
    """Origin, as far as it is known."""

    def folders(self, cache_dir: Path) -> list[Path]:
        """Folders that may hold the files: that in the cache first."""
        return [cache_dir / self.name, *([Path(self.system_dir)] if self.system_dir else [])]

    @property
    def package_files(self) -> Mapping[str, str]:
        """SHA-256 of what is taken out of the package, by its path below `prefix`."""
        return self.packed or self.files


@cache
def assets() -> Mapping[str, Asset]:
    """The packages by name, out of `assets.toml`."""
    return {name: Asset(name=name, **entry) for name, entry in packaged_tables(__package__, "assets.toml").items()}


def embedded_dir() -> Path:
    """The folder that holds the embedded model and data: `ATLAS_CACHE`, or the user's cache directory."""
    override = os.environ.get("ATLAS_CACHE")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("atlas-fl")) / "embedded"


def asset_dir(cache_dir: Path, name: str) -> Path:
    """The folder of an embedded model or of embedded data; a `DataError` if it was not fetched."""
    folder, asset = cache_dir / name, assets()[name]
    missing = next((name for name in asset.files if not (folder / name).is_file()), None)
    if missing:
        raise DataError(f"{folder / missing} is missing; run `atlas fetch {asset.group}` to get {asset.requirement}")
    return folder
