"""Every command that a message of ATLAS offers is in a table here, and works where it is offered."""

import ast
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from atlas_fl.cli.main import COMMANDS, main
from atlas_fl.config.presets import presets
from atlas_fl.storage.extras import install_command
from tests.runs.conftest import save_bert

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/atlas_fl"
TINY = "--preset smoke --samples 8 --validation-samples 4 --test-samples 4 --batch-size 4 --fingerprint-steps 1"
TINY += " --model tiny"
"""A short run on the model of the folder `tiny`."""
HOLE = "{}"
"""What a message fills in."""


def texts() -> Iterator[str]:
    """Every text of the sources that is no docstring, with holes for what is filled in, and the rows of the tables."""
    for path in SOURCES.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        # a docstring is a statement of its own
        parts |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in parts:
                continue
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    for path in (*SOURCES.rglob("*.tsv"), SOURCES / "models/known.toml"):
        yield from path.read_text(encoding="utf-8").splitlines()


QUOTED = re.compile(r"`((?:atlas|pip|make|python) [^`]*)`")
BARE = re.compile(rf"(?<![`\w])atlas (?:{'|'.join(COMMANDS)}) (?:--[a-z]|\{{).*?(?= {{4}}|[;`\n]|: about|$)")
"""A command with a flag or a hole that stands in no backquotes, as lists of what to do next have them."""


def offered() -> set[str]:
    """The commands that these texts offer."""
    return {found for text in texts() for form in (QUOTED, BARE) for found in form.findall(text)}


REPEATED = "atlas run --config runs/stopped/config.toml --name again --max-rounds 1"
RUNS: Mapping[str, str] = {
    "atlas certs make FOLDER --server {}": "atlas certs make more --server localhost --client c",
    "atlas certs renew {} --to {}": "atlas certs renew a --to certs",
    "atlas certs revoke {} --to {}": "atlas certs revoke b --to certs",
    "atlas fetch embedded": "atlas fetch embedded",
    "atlas fetch {}": "atlas fetch embedded",
    "atlas list presets": "atlas list presets",
    "atlas list strategies": "atlas list strategies",
    "atlas list strategies NAME": "atlas list strategies fedavg",
    "atlas list strategies {}": "atlas list strategies median",
    "atlas list tasks": "atlas list tasks",
    "atlas plan": f"atlas plan {TINY}",
    "atlas resume RUN": "atlas resume runs/stopped",
    "atlas resume {}": "atlas resume runs/stopped",
    "atlas run": f"atlas run {TINY} --name again --max-rounds 1",
    **dict.fromkeys(("atlas run --config THIS_FILE --name again", "atlas run --config {} --name again"), REPEATED),
    "atlas compare --preset {} --strategies local fedavg_cluster atlas --seeds 3": (
        f"atlas compare {TINY} --strategies local fedavg_cluster atlas --seeds 3 --rounds 1"
    ),
    "atlas report {}": "atlas report runs/stopped --page-only",
    **dict.fromkeys(
        ("atlas export", "atlas export {} --client NAME --to FOLDER"),
        "atlas export runs/stopped --client movie-0 --to exported",
    ),
}
"""By command, the words with which it must succeed in a folder with a run that was stopped, and certificates."""
EXPLAINED = {
    *("atlas certs make", "atlas certs request", "atlas certs sign", "atlas certs {}", "atlas certs --help"),
    *(
        "atlas compare",
        "atlas results",
        "atlas join",
        "atlas serve",
        "atlas serve --again {}",
        "atlas sweep --lambda-sweep",
    ),
    *(
        "atlas fetch vision",
        "atlas fetch llm",
        "atlas evaluate",
        "atlas generate",
        "atlas run --preset {}",
        "atlas run --preset quick",
        "atlas COMMAND --help",
    ),
    *(f"atlas {name} --help" for name in ("list", "run", "sweep")),
}
"""Commands that are named, or take minutes or other machines: the command and each of its flags stand on its page."""
ELSEWHERE = {
    *("make setup", "pip install .", "pip install '{}'", "pip install --force-reinstall torch", "pip cache purge"),
    "python -m ensurepip",
}
"""Commands of other programs."""


@pytest.mark.core
def test_every_command_that_a_message_offers_is_in_a_table() -> None:
    known = {*RUNS, *EXPLAINED, *ELSEWHERE}
    assert offered() - known == set(), "give it a scene in this file"
    assert known - offered() == set(), "no message offers it any more"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, a run on it that was stopped after a round, and certificates of two sites."""
    made = tmp_path_factory.mktemp("stopped")
    save_bert(made / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        assert main(["certs", "make", "certs", "--server", "localhost", "--client", "a", "--client", "b"]) == 0
        assert main(["run", *TINY.split(), "--name", "stopped", "--max-rounds", "1"]) == 0
    return made


@pytest.fixture
def folder(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, as the one to work in."""
    folder = Path(shutil.copytree(stopped, tmp_path / "copy"))
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS)
def test_an_offered_command_works(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    program, *words = shlex.split(RUNS[command])
    assert (program, main(words)) == ("atlas", 0), capsys.readouterr().err
    assert folder.exists()


@pytest.mark.parametrize("command", sorted(EXPLAINED))
def test_a_named_command_and_its_flags_are_on_its_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, name, *words = command.replace("COMMAND", "run").split()
    assert name in COMMANDS
    assert main([name, "--help", "all"]) == 0
    page = capsys.readouterr().out
    for word in words:
        if word.startswith("-") and word != "--lambda-sweep":  # which is of the earlier ATLAS, and is told so
            assert word in page
        elif word.isalpha() and name == "certs":
            assert re.search(rf"\b{word}\b", page)
        elif word == "quick":
            assert word in presets()


def test_what_is_offered_of_other_programs_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert re.search(r"^setup:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for extra, needed in project["optional-dependencies"].items():
        words = shlex.split(install_command(extra))
        assert words[:2] == ["pip", "install"]
        assert {Requirement(word).name for word in words[2:]} <= {Requirement(one).name for one in needed}
        assert words[2:], "an extra of nothing installs nothing"


@pytest.mark.slow
def test_who_may_not_be_placed_is_told_what_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that the run has are refused with the client that has them; the task that a message offers works."""
    monkeypatch.chdir(tmp_path)
    for name, wards, first in (("all.csv", "NS", 0), ("old.csv", "S", 0), ("new.csv", "W", 40)):
        rows = [f"{ward} note {n} on {n % 7},{'ab'[n % 2]},{ward}" for ward in wards for n in range(first, first + 30)]
        Path(name).write_text("\n".join(["body,urgency,ward", *rows]))
    save_bert(tmp_path / "tiny")
    whole = "--samples none --validation-samples none --test-samples none --fingerprint-steps 1 --clusters auto"
    task = "triage=all.csv,text=body,label=urgency,client=ward"
    assert main(f"run --preset smoke --model tiny {whole} --rounds 1 --name run --task {task}".split()) == 0
    capsys.readouterr()
    assert main(["place", "runs/run", "--task", "triage=old.csv,text=body,label=urgency"]) == 2
    told = capsys.readouterr().err
    assert "in the run already, most of them with S, so nobody new is there to place; give rows that no client" in told
    assert main(["place", "runs/run", "--task", "triage"]) == 2
    told = capsys.readouterr().err
    assert "a newcomer is one client, and task 'triage' names 2 (N, S); give a file of its rows alone: --task" in told
    assert main(["place", "runs/run", *told.split("alone: ")[1].split()]) == 0
