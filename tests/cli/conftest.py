"""The command line in this process: its exit code and what it printed."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from atlas_fl.cli.main import main


@dataclass(frozen=True)
class Said:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def atlas(capsys, monkeypatch) -> Callable[..., Said]:
    """Runs `atlas` with these words on a terminal of 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(*words: str) -> Said:
        capsys.readouterr()
        code = main(list(words))
        printed = capsys.readouterr()
        return Said(code, printed.out, printed.err)

    return call
