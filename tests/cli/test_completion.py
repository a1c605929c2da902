import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atlas_fl.cli.arguments import known_flags
from atlas_fl.cli.main import COMMANDS

Atlas = Callable[..., Any]
BASH = shutil.which("bash")


@pytest.fixture
def script(atlas: Atlas, tmp_path: Path) -> Path:
    """The script for bash in a file."""
    said = atlas("completion", "bash")
    assert (said.code, said.err) == (0, "")
    path = tmp_path / "atlas.bash"
    path.write_text(said.out, encoding="utf-8")
    return path


def completions(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    assert BASH is not None
    code = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _atlas; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run([BASH, "-c", code, "bash", str(script), "atlas", *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.skipif(BASH is None, reason="no bash here")
def test_bash_completes_commands_flags_and_choices(script: Path) -> None:
    assert {"run", "resume", "report", "results"} <= set(completions(script, "r"))
    assert completions(script, "run", "--aud") == ["--audit"]
    assert completions(script, "run", "--space", "") == ["factors", "product"]
    assert completions(script, "run", "--no-such") == []


@pytest.mark.skipif(BASH is None, reason="no bash here")
def test_every_command_and_every_flag_is_completed(script: Path) -> None:
    assert set(completions(script, "")) == {*COMMANDS, "-h", "--help"}
    for name in ("run", "compare", "join", "doctor", "certs"):
        assert set(completions(script, name, "")) == set(known_flags(COMMANDS[name].options))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script_with_all_commands(shell: str, atlas: Atlas) -> None:
    said = atlas("completion", shell)
    assert said.code == 0
    for name, command in COMMANDS.items():
        assert name in said.out
        summary = command.summary.replace("'", "\N{RIGHT SINGLE QUOTATION MARK}")
        assert shell == "bash" or f"'{summary}'" in said.out


def test_another_shell_is_refused_with_the_ones_that_there_are(atlas: Atlas) -> None:
    said = atlas("completion", "cmd")
    assert said.code == 2
    assert "bash" in said.err and "fish" in said.err
    assert atlas("completion").err.startswith("atlas: missing: SHELL")
