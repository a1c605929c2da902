"""Build the wheel and the source archive, check what is in them, and run the wheel in an empty environment.

    .venv/bin/python -m tools.package                              what `make package-check` runs
    .venv/bin/python -m tools.package python3.12 python3.13        the same wheel under other interpreters

The environment gets the locked packages of `requirements/base.txt` and the wheel, and nothing of this folder is on its
path: it fetches what a run needs, as `atlas doctor` then confirms, runs the smoke preset and writes its page. In the
end pip resolves every extra of the wheel under `constraints.txt`, without installing any.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from packaging.metadata import InvalidMetadata, Metadata
from trove_classifiers import classifiers

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
PACKAGE = "atlas_fl"
COMMAND = "atlas = atlas_fl.cli.main:main"
FIRST = (
    "py.typed",
    "config/presets.toml",
    "config/conflicts.tsv",
    "methods/published.toml",
    "models/chat_templates.toml",
    "models/known.toml",
    "ranks/devices.toml",
    "report/html/page.html.jinja",
    "report/html/page.css",
    "report/html/page.js",
    "report/html/charts.yaml",
    "storage/assets.toml",
    "storage/dinov2/config.json",
    "storage/dinov2/preprocessor_config.json",
)
"""Files without which the package installs and does not work, or is not typed."""
LEFT_OUT = frozenset({".venv", "runs", "build", "dist", ".git"})
"""Folders here that no source archive may have."""


def main() -> None:
    """Build, check and run; ends the process with the problems, one a line, where there are any."""
    interpreters = [(name, shutil.which(name)) for name in sys.argv[1:] or [sys.executable]]
    if missing := [name for name, path in interpreters if path is None]:
        raise SystemExit(f"no interpreter is called {', '.join(missing)}; give the path of one")
    with tempfile.TemporaryDirectory() as folder:
        wheel, archive = build(Path(folder) / "dist")
        if problems := [*wheel_problems(wheel), *archive_problems(archive)]:
            raise SystemExit("\n".join(problems))
        print(f"{wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB) and {archive.name} hold what they should")
        for number, (name, path) in enumerate(interpreters):
            run_in_new_environment(wheel, Path(folder) / str(number), python=str(Path(path or name).absolute()))


def build(folder: Path) -> tuple[Path, Path]:
    """(wheel, source archive), made by the backend that is installed here; nothing is asked of an index."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "--directory", str(folder)], cwd=ROOT, check=True)
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, archive


def project() -> Mapping[str, Any]:
    """The table `[project]` of pyproject.toml."""
    table: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def wheel_problems(path: Path) -> Iterator[str]:
    """The faults of a wheel: files that are missing or too many, and metadata that is not ours or not valid."""
    with ZipFile(path) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = archive.read(f"{info}/METADATA").decode()
        entries = archive.read(f"{info}/entry_points.txt").decode()
    packed = {name for name in names if not name.startswith(info)}
    yield from (f"the wheel lacks {name}" for name in sorted(source_files() - packed))
    yield from (f"the wheel has {name}, which is no file of the package" for name in sorted(packed - source_files()))
    yield from (f"{name} is not in the sources" for name in FIRST if f"{PACKAGE}/{name}" not in source_files())
    if COMMAND not in entries:
        yield f"the wheel does not declare the command `{COMMAND}`"
    if f"{info}/licenses/LICENSE" not in names:
        yield "the wheel lacks the licence"
    yield from metadata_problems(metadata)


def source_files() -> set[str]:
    """The files of the package, by their path in a wheel."""
    files = (path for path in (SOURCES / PACKAGE).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(SOURCES).as_posix() for path in files}


def archive_problems(path: Path) -> Iterator[str]:
    """The faults of a source archive."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CITATION.cff",
        "PKG-INFO",
        *(f"src/{n}" for n in source_files()),
    }
    yield from (f"the source archive lacks {name}" for name in sorted(needed - names))
    yield from (f"the source archive has {name}" for name in sorted(names) if name.split("/")[0] in LEFT_OUT)


def metadata_problems(text: str) -> Iterator[str]:
    """The faults of the metadata: by its specification, and against pyproject.toml."""
    try:
        Metadata.from_email(text, validate=True)
    except ExceptionGroup as group:
        yield from (f"the metadata is not valid: {error}" for error in group.exceptions if _is_invalid(error))
    message, declared = Parser().parsestr(text), project()
    for field, value in {
        "Name": declared["name"],
        "Version": declared["version"],
        "Summary": declared["description"],
        "Requires-Python": declared["requires-python"],
        "License-Expression": declared["license"],
        "Author": ", ".join(author["name"] for author in declared["authors"]),
        "Keywords": ",".join(sorted(declared["keywords"])),
        "Description-Content-Type": "text/markdown",
    }.items():
        if message[field] != value:
            yield f"{field} is {message[field]!r} in the metadata and {value!r} in pyproject.toml"
    if extras := set(declared["optional-dependencies"]) ^ set(_all(message, "Provides-Extra")):
        yield f"extras that are not both declared and provided: {', '.join(sorted(extras))}"
    yield from (f"{name!r} is no classifier" for name in _all(message, "Classifier") if name not in classifiers)


def _is_invalid(error: Exception) -> bool:
    return isinstance(error, InvalidMetadata)


def _all(message: Message, field: str) -> list[str]:
    return [str(value) for value in message.get_all(field) or []]


def run_in_new_environment(wheel: Path, folder: Path, *, python: str) -> None:
    """Install the wheel and what it needs into an environment of this interpreter, and let it run there."""
    folder.mkdir()
    environment = folder / "environment"
    _step(f"environment of {python} made", [python, "-m", "venv", environment], cwd=folder)
    bin_dir = environment / "bin"
    _step("installed", [bin_dir / "python", "-m", "tools.install", wheel, "base"], cwd=ROOT)
    atlas = bin_dir / "atlas"
    _step("fetched", [atlas, "fetch", "embedded"], cwd=folder)
    _step("looked at", [atlas, "doctor"], cwd=folder)
    _step("run", [atlas, "run", "--preset", "smoke", "--name", "smoke"], cwd=folder)
    _step("reported", [atlas, "report", "smoke", "--page-only"], cwd=folder)
    extras = ",".join(project()["optional-dependencies"])
    resolve = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run", f"{wheel}[{extras}]"]
    _step("extras resolved", [bin_dir / "python", *resolve, "--constraint", ROOT / "constraints.txt"], cwd=folder)


def _step(name: str, command: Sequence[str | Path], *, cwd: Path) -> None:
    """Run a command outside of this project's sources, and say how long it took; ends the process where it fails."""
    start_time = time.perf_counter()
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    clean = {key: value for key, value in os.environ.items() if key not in left_out}
    # for pip this is the value of `compile`: what is imported need not all be compiled, and is so by the first command
    clean |= {"PIP_NO_COMPILE": "0"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout}{done.stderr}")
    print(f"{name} in {time.perf_counter() - start_time:.0f} s", flush=True)


if __name__ == "__main__":
    main()
