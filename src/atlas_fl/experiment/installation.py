"""State of the installation: packages, memory, disk, embedded models and data.

Every problem has a remedy. It is needed where a run of the embedded presets cannot do without it; others are advice.
Of the packages PyTorch alone is loaded.
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeAlias

from atlas_fl.storage.assets import Asset, assets, embedded_dir
from atlas_fl.storage.downloads import find_damaged_file
from atlas_fl.storage.extras import PROJECT, accepts, extra_requirements
from atlas_fl.storage.folder_access import free_bytes

RUN_MEMORY_BYTES = 2_500_000_000
"""Most memory of a run of the quick preset, as README says."""

AssetState: TypeAlias = Literal["whole", "missing", "damaged"]


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that ATLAS is declared to need."""

    name: str
    needed: str
    """The requirement, such as `torch>=2.6`."""
    installed: str | None
    """The version that is here."""

    @property
    def fits(self) -> bool:
        """Return true where the installed version meets the requirement."""
        return self.installed is not None and accepts(self.needed, self.installed)


@dataclass(frozen=True, kw_only=True)
class AssetCheck:
    """State of an embedded model or data set: its files compared with those of this version by SHA-256."""

    name: str
    group: str
    """Its name for `atlas fetch`."""
    folder: Path
    state: AssetState
    file: str | None
    """The first file that is not right."""


@dataclass(frozen=True)
class Problem:
    """A fault of the installation, and its remedy."""

    text: str
    remedy: str
    is_needed: bool
    """True where a run of the embedded presets cannot do without it."""


@dataclass(frozen=True, kw_only=True)
class Installation:
    """The whole state."""

    version: str | None
    """Version of ATLAS; None where it is on the path and not installed."""
    packages: tuple[Package, ...]
    torch: ModuleType | None
    """PyTorch, where it can be loaded."""
    load_error: str | None
    """Reason why PyTorch, which is installed, cannot be loaded."""
    free_memory_bytes: int | None
    """Unknown, None, on some systems."""
    folders: Mapping[str, tuple[Path, int]]
    """By purpose a folder that files are written to, and the bytes that are free on its disk."""
    assets: tuple[AssetCheck, ...]


def inspect_installation(*, runs_dir: Path) -> Installation:
    """The state of this machine; runs would lie in `runs_dir`."""
    packages = tuple(
        Package(name=name, needed=needed, installed=_version(name)) for name, needed in extra_requirements("").items()
    )
    torch, load_error = _load_torch(packages)
    return Installation(
        version=_version(PROJECT),
        packages=packages,
        torch=torch,
        load_error=load_error,
        free_memory_bytes=free_bytes(),
        folders={"runs": _disk_of(runs_dir), "cache": _disk_of(embedded_dir())},
        assets=tuple(check_asset(asset, embedded_dir()) for asset in assets().values()),
    )


def problems_of(found: Installation) -> Iterator[Problem]:
    """All problems: packages first, then files and memory."""
    if found.version is None:
        text = f"{PROJECT} is on Python's path and not installed, so that what it needs is not known"
        yield Problem(text, "run `pip install .` in its sources, or `make setup`", is_needed=True)
    for package in found.packages:
        if not package.fits:
            here = f"{package.name} {package.installed} is here" if package.installed else f"{package.name} is missing"
            text = f"{here} and {package.needed} is needed"
            yield Problem(text, f"run `pip install '{package.needed}'`", is_needed=True)
    if found.load_error is not None:
        text = f"torch is installed and cannot be loaded: {found.load_error}"
        yield Problem(text, "run `pip install --force-reinstall torch`", is_needed=True)
    for asset in found.assets:
        if asset.state == "damaged" or (asset.state == "missing" and asset.group == "embedded"):
            here = f"is damaged: {asset.folder / str(asset.file)}" if asset.state == "damaged" else "was not fetched"
            remedy = f"run `atlas fetch {asset.group}`"
            yield Problem(f"{asset.name} {here}", remedy, is_needed=asset.group == "embedded")
    free = found.free_memory_bytes
    if free is not None and free < RUN_MEMORY_BYTES:
        text = f"{free / 1e9:.1f} GB of memory are free and the quick preset takes {RUN_MEMORY_BYTES / 1e9:.1f} GB"
        yield Problem(text, "end other programs, or take --preset smoke", is_needed=False)


def check_asset(asset: Asset, cache_dir: Path) -> AssetCheck:
    """The state of this part in the cache, or where the machine has it already."""
    folders = asset.folders(cache_dir)
    damaged = {folder: find_damaged_file(folder, asset) for folder in folders}
    whole = next((folder for folder, file in damaged.items() if file is None), None)
    state: AssetState = "missing" if not folders[0].is_dir() else "damaged"
    return AssetCheck(
        name=asset.name,
        group=asset.group,
        folder=whole or folders[0],
        state=state if whole is None else "whole",
        file=damaged[folders[0]] if whole is None else None,
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _load_torch(packages: tuple[Package, ...]) -> tuple[ModuleType | None, str | None]:
    """(the module or None, why it cannot be loaded though it is installed)."""
    if not any(package.name == "torch" and package.installed for package in packages):
        return None, None
    try:
        return import_module("torch"), None
    except (ImportError, OSError) as error:  # of a library that it loads, such as one of CUDA
        return None, " ".join(str(error).split())


def _disk_of(path: Path) -> tuple[Path, int]:
    path = path.absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return path, shutil.disk_usage(existing).free
