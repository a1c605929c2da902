"""Write `requirements/*.txt`: what each set installs, with the SHA-256 of every file that may be installed for it.

    python -m tools.lock        what `make lock` runs: from `pyproject.toml`, `constraints.txt` and the index of pip

The versions are those of `constraints.txt`. pip resolves them without an installation and says what each package
needs; the files and their hashes are what the indexes and folders offer that pip is configured with, so no index is
named here. A hash that is listed stays as long as its version does: where the lock is made again it only gains files.
"""

import json
import logging
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
TOOLS = ("pip", "setuptools", "editables")
"""Packages that install and build, besides the backend that `pyproject.toml` names.

Setuptools builds rouge-score, which is published as a source archive alone, and hatchling may ask for editables.
"""
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = (("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64"), ("darwin", "Darwin", "arm64"))
"""Machines on which an installation must work; torch has no wheel for other machines that this project runs on."""
HEADER = """\
# Made by `make lock` from pyproject.toml and constraints.txt: every file that pip may install, by its SHA-256. What
# is published as a source archive alone is built by the tools of build.txt; all others come as wheels.
"""
TORCH = """\
# The builds of torch on different indexes are different files. Listed are those of the public index, and with the local
# label +cpu the one that was tested. Another build is refused until `make lock` has listed it from an index you trust.
"""

Metadata = Mapping[str, Any]
Hashes = dict[str, set[str]]


def main() -> None:
    """Write the lock files; a line says how many packages and files they name."""
    FOLDER.mkdir(exist_ok=True)
    roots = read_roots(ROOT / "pyproject.toml")
    pins = read_pins(ROOT / "constraints.txt")
    packages = resolve(requirement for requirements in roots.values() for requirement in requirements)
    roots["cuda"] = cuda_requirements(pins["torch"])
    packages |= resolve(roots["cuda"])
    versions = {name: data["version"].split("+")[0] for name, data in packages.items()}  # torch may have a label
    if wrong := [f"{name}=={version}" for name, version in versions.items() if pins.get(name) != version]:
        raise SystemExit(f"constraints.txt does not pin what pip would install; add {', '.join(sorted(wrong))}")
    with index_of_pip() as links:
        offered = {name: offered_files(name, pins[name], links(name)) for name in sorted(packages)}
    locked = {name: hashes for path in FOLDER.glob("*.txt") for name, hashes in read_lock(path, pins).items()}
    for group, names in sets(roots, packages).items():
        hashes = {name: set(offered[name].values()) | locked.get(name, set()) for name in names}
        (FOLDER / f"{group}.txt").write_text(lock_text(hashes, pins, offered), encoding="utf-8")
    print(f"{len(packages)} packages, {sum(map(len, offered.values()))} files")


def read_roots(path: Path) -> dict[str, list[str]]:
    """The requirements of each set: the base, the extras, and the tools that install and build."""
    project = tomllib.loads(path.read_text(encoding="utf-8"))
    build = [*TOOLS, *project["build-system"]["requires"]]
    return {"build": build, "base": project["project"]["dependencies"], **project["project"]["optional-dependencies"]}


def read_pins(path: Path) -> dict[str, str]:
    """The pinned version of every package of a file of constraints."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {str(canonicalize_name(name)): version for name, version in pairs}


def resolve(requirements: Iterable[str]) -> dict[str, Metadata]:
    """The metadata of all packages that pip would install for the requirements under the constraints, by name.

    With `fast-deps` pip reads the metadata out of a remote wheel without the rest of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"]
        command += ["--ignore-installed", "--use-feature", "fast-deps", "--report", str(report)]
        command += ["--constraint", str(ROOT / "constraints.txt"), *requirements]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"pip cannot resolve the requirements: {done.stderr.strip()}")
        install = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {str(canonicalize_name(entry["metadata"]["name"])): entry["metadata"] for entry in install}


def cuda_requirements(version: str) -> list[str]:
    """Packages that only the public build of torch needs on Linux: NVIDIA's libraries and Triton.

    `===` compares texts, so that a build with a local label is not taken.
    """
    torch = resolve([f"torch==={version}"])["torch"]
    linux = [text.split(";")[0].strip() for text in torch["requires_dist"] if 'platform_system == "Linux"' in text]
    if not linux:
        raise SystemExit("the index of pip has no build of torch with CUDA, and requirements/cuda.txt is of that build")
    return linux


def sets(roots: Mapping[str, list[str]], packages: Mapping[str, Metadata]) -> dict[str, list[str]]:
    """The packages that each set installs; an extra, and CUDA, only what the base lacks."""
    closures = {group: closure(requirements, packages) for group, requirements in roots.items()}
    base = closures["base"]
    return {group: sorted(names if group in ("base", "build") else names - base) for group, names in closures.items()}


def closure(requirements: Iterable[str], packages: Mapping[str, Metadata]) -> set[str]:
    """Everything that the requirements need on one of the machines and Pythons; one too many elsewhere does no harm."""
    environments = [_environment(*machine, python=python) for machine, python in product(MACHINES, PYTHONS)]
    needed = list(requirements)
    return set.union(*(_names_for(needed, packages, environment) for environment in environments))


def _environment(sys_platform: str, system: str, machine: str, *, python: str) -> dict[str, str]:
    return {
        "sys_platform": sys_platform,
        "platform_system": system,
        "platform_machine": machine,
        "python_version": python,
        "python_full_version": f"{python}.0",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }


def _names_for(
    requirements: Iterable[str], packages: Mapping[str, Metadata], environment: Mapping[str, str]
) -> set[str]:
    waiting = [(requirement, "") for requirement in map(Requirement, requirements)]
    done: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        name = str(canonicalize_name(requirement.name))
        if name not in packages:
            raise SystemExit(f"{requirement} is needed for {dict(environment)} and not here; pin it and list it")
        for new_extra in {"", *requirement.extras} - {extra for visited, extra in done if visited == name}:
            done.add((name, new_extra))
            waiting += [(Requirement(text), new_extra) for text in packages[name].get("requires_dist", [])]
    return {name for name, _ in done}


@contextmanager
def index_of_pip() -> Iterator[Callable[[str], Iterable[Any]]]:
    """A function that lists the files of a package at all indexes and in all folders that pip is configured with.

    pip has no public way to ask for more than what fits this machine, so its own reader of indexes is used, in the
    version that `requirements/build.txt` pins.
    """
    from pip._internal.commands import create_command
    from pip._internal.index.collector import parse_links

    logging.getLogger("pip").setLevel(logging.ERROR)
    command: Any = create_command("download")
    options, _ = command.parse_args(["all"])
    with command.main_context():
        collector = command._build_package_finder(options, command.get_default_session(options))._link_collector

        def page(link: Any) -> list[Any]:
            response = collector.fetch_response(link)
            return list(parse_links(response)) if response else []

        def links(name: str) -> Iterator[Any]:
            sources = collector.collect_sources(project_name=name, candidates_from_page=page)
            for source in filter(None, (*sources.find_links, *sources.index_urls)):
                yield from (*source.page_candidates(), *source.file_links())

        yield links


def offered_files(name: str, version: str, links: Iterable[Any]) -> dict[str, str]:
    """The SHA-256 of each of the files that is of this version and that a supported machine could install."""
    wheels, archives = {}, {}
    for link in links:
        try:
            if link.filename.endswith(".whl") and _is_installable(link.filename, name, version):
                wheels[link.filename] = _hash_of(link)
            elif _is_archive(link.filename, name, version):
                archives[link.filename] = _hash_of(link)
        except ValueError:
            continue  # indexes keep files of twenty years, under names that no pip of today reads
    if not wheels and not archives:
        raise SystemExit(f"the index of pip offers no file of {name}=={version}")
    return wheels or archives


def _is_archive(filename: str, name: str, version: str) -> bool:
    return filename.endswith((".tar.gz", ".zip")) and parse_sdist_filename(filename) == (name, Version(version))


def _is_installable(filename: str, name: str, version: str) -> bool:
    project, release, _, tags = parse_wheel_filename(filename)
    if project != name or version not in (str(release), release.public):
        return False
    return any(_fits(tag.interpreter, tag.abi, tag.platform) for tag in tags)


def _fits(interpreter: str, abi: str, platform: str) -> bool:
    if not platform.startswith(("any", "manylinux", "musllinux", "linux", "macosx")):
        return False
    minor = interpreter.removeprefix("cp3")
    return interpreter.startswith("py") or (minor.isdigit() and (abi == "abi3" or int(minor) >= 11))


def _hash_of(link: Any) -> str:
    if link.is_file and link.hash_name != "sha256":
        return sha256(Path(link.file_path).read_bytes()).hexdigest()
    if link.hash_name != "sha256":
        raise SystemExit(f"the index gives no SHA-256 of {link.filename}")
    return str(link.hash)


def read_lock(path: Path, pins: Mapping[str, str]) -> Hashes:
    """The hashes that a lock file lists for each package whose pin is still the same."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    hashes: Hashes = {}
    for line in text.splitlines():
        pinned, *options = line.split() or [""]
        name, _, version = pinned.partition("==")
        if version and pins.get(str(canonicalize_name(name))) == version:
            hashes[str(canonicalize_name(name))] = {option.removeprefix("--hash=sha256:") for option in options}
    return hashes


def lock_text(hashes: Hashes, pins: Mapping[str, str], offered: Mapping[str, Mapping[str, str]]) -> str:
    """The lines of a lock file, as `pip install --require-hashes` reads them."""
    built = [name for name in hashes if not any(file.endswith(".whl") for file in offered[name])]
    lines = ["--only-binary :all:", *(f"--no-binary {name}" for name in built)]
    for name, values in hashes.items():
        lines += [TORCH.rstrip()] if name == "torch" else []
        lines.append(
            " \\\n    ".join([f"{name}=={pins[name]}", *(f"--hash=sha256:{value}" for value in sorted(values))])
        )
    return HEADER + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
