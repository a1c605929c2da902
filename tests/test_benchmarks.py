"""Benchmarks, which nothing else runs: whether each starts, and has the flags that are written behind its name.

Whether the rest of them fits the package is for the type checker to find.
"""

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.*")]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")


@pytest.mark.slow
@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_starts(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.syspath_prepend(path.parent)  # as for a script that is run
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(path), run_name="__main__")
    assert f"usage: {path.name}" in capsys.readouterr().out


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_has_the_flags_that_documents_give_it(path: Path) -> None:
    behind = re.compile(rf"python\s+benchmarks/{path.name}([^`#\n]*)")
    lines = [line for document in DOCUMENTS for line in behind.findall(document.read_text(encoding="utf-8"))]
    assert lines, "no document says how it is run"
    known = set(re.findall(r'"(--[a-z-]+)"', path.read_text(encoding="utf-8")))
    assert {flag for line in lines for flag in FLAG.findall(line)} <= known
