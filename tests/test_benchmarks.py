"""Benchmarks, which nothing else runs: whether each starts, and has the flags that are written behind its name.

Whether the rest of them fits the package is for the type checker to find.
"""

import csv
import re
import runpy
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from atlas_fl.aggregation.matrices import laplacian_step
from atlas_fl.cli.arguments import base_config, split
from atlas_fl.cli.main import main
from atlas_fl.config import validate
from atlas_fl.methods.registry import METHODS, RULES

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


PLAN = tomllib.loads((ROOT / "benchmarks/equal_terms.toml").read_text(encoding="utf-8"))
FEDERATIONS = {name: flags for part in ({}, *PLAN.values()) for name, flags in part.get("federations", {}).items()}
FEDERATIONS |= PLAN["federations"]


def declared(*federations: str, rows: Path | None = None) -> list[str]:
    """The units of these federations, all or those that a file of rows lacks."""
    module = runpy.run_path(str(ROOT / "benchmarks/equal_terms.py"))
    plan, known = ROOT / "benchmarks/equal_terms.toml", rows or Path("no.csv")
    units = module["missing_units"](plan, known, list(federations), [], together=3)
    return [f"{unit.federation} {method}" for unit in units for method in unit.methods]


@pytest.mark.parametrize("flags", FEDERATIONS.values(), ids=FEDERATIONS)
def test_a_declared_federation_is_a_preset_of_its_own_that_can_be_run(flags: str) -> None:
    """Rows are told apart by preset and dial alone, so no two federations may have the same."""
    words = [word for word in flags.split() if not word.startswith("build/")]
    config = validate(base_config(split(words[: 2 * (len(words) // 2)])))
    same = [other for other in FEDERATIONS.values() if f"{other} ".startswith(f"--preset {config.run.preset} ")]
    assert same == [flags]


CONTROLS = tomllib.loads((ROOT / "benchmarks/controls.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("flags", "method"),
    [
        (flags, method)
        for part in CONTROLS.values()
        for flags in part["federations"].values()
        for method in part["methods"]
    ],
)
def test_a_declared_control_can_be_run(flags: str, method: str) -> None:
    validate(base_config(split([*flags.split(), "--strategy", method])))


def test_one_share_for_all_is_one_share_for_all() -> None:
    """On a uniform graph of three: 1 - eta of one's own model, and half of eta of each other's."""
    step = laplacian_step(np.ones((3, 3)) - np.eye(3), eta=0.4, present=np.ones(3, bool))
    assert step == pytest.approx(np.full((3, 3), 0.2) + 0.4 * np.eye(3))


def test_declared_units_are_known_methods_each_once_in_every_federation_of_its_part() -> None:
    units = declared()
    assert len(set(units)) == len(units)
    assert {unit.split()[1] for unit in units} <= METHODS.keys() | RULES.keys()
    for part in ("new", "new_and_large", "new_images"):
        expected = [f"{name} {method}" for name in PLAN[part]["federations"] for method in PLAN[part]["methods"]]
        assert declared(*PLAN[part]["federations"]) == expected


def test_every_declared_unit_can_be_run() -> None:
    for unit in declared():
        federation, method = unit.split()
        validate(base_config(split([*FEDERATIONS[federation].split(), "--strategy", method])))


def test_a_unit_is_done_once_each_seed_has_a_tuned_row(tmp_path: Path) -> None:
    rows, line = tmp_path / "rows.csv", "{0},,{1},{2},{3}\n"
    tuned = [line.format("clothes", "fedavg", seed, "yes") for seed in range(5)]
    other = [line.format("clothes", "ditto", seed, "") for seed in range(5)]
    rows.write_text("preset,dial,strategy,seed,tuning\n" + "".join(tuned + other))
    missing = declared("clothes", rows=rows)
    assert "clothes fedavg" not in missing and "clothes ditto" in missing and len(missing) == 6
    rows.write_text(rows.read_text().replace("clothes,,fedavg,4,yes\n", ""))
    assert declared("clothes", rows=rows)[1] == "clothes fedavg"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "page"),
    [
        ("equal_terms.csv", "results.md"),
        ("new_federations.csv", "results-new-data.md"),
        ("other_methods.csv", "results-other-methods.md"),
    ],
)
def test_the_page_of_results_is_what_its_command_writes(rows: str, page: str, tmp_path: Path) -> None:
    folded = ["--all"] if page == "results.md" else []
    words = ["results", str(ROOT / "benchmarks" / rows), "--control", "fedavg", *folded, "--to", str(tmp_path / page)]
    assert main(words) == 0
    assert (tmp_path / page).read_text() == (ROOT / "docs" / page).read_text()


def test_differences_over_clients_by_hand(tmp_path: Path) -> None:
    """Three clients gain .1, .2 and .3 in the mean over two seeds: .2, with t = .2 / (.1 / sqrt 3) and p .074."""
    scores = {
        "fedavg": ("a b c,0.5 0.5 0.5", "b c a,0.5 0.5 0.5"),
        "ditto": ("a b c,0.5 0.7 0.8", "c a b,0.8 0.7 0.7"),  # a row has the clients in an order of its own
        "local": ("a b c,0.5 0.5 0.5",),
    }
    lines = [f"p,,{name},{score}\n" for name, seeds in scores.items() for score in seeds]
    (rows := tmp_path / "rows.csv").write_text("preset,dial,strategy,clients,scores\n" + "".join(lines))
    table = list(runpy.run_path(str(ROOT / "benchmarks/clients_as_units.py"))["lines"](rows, "fedavg"))
    assert table[2:] == [
        "| `ditto` | +0.200 | -0.048 to +0.448 | 0.074 | 3 of 3 |",
        "| `local` | the same scores | | | |",
    ]


def test_the_rows_that_other_methods_are_compared_with_are_those_of_the_first_five_seeds() -> None:
    """`fedavg`, `local`, `kriging` and `atlas` were run once, with the main methods."""
    main_rows, others = (
        {(row["preset"], row["strategy"], row["seed"]): row for row in csv.DictReader(path.read_text().splitlines())}
        for path in (ROOT / "benchmarks/equal_terms.csv", ROOT / "benchmarks/other_methods.csv")
    )
    shared = [key for key in others if key[1] in ("fedavg", "local", "kriging", "atlas")]
    assert len(shared) == 4 * 6 * 5
    assert all(others[key] == main_rows[key] for key in shared)
    assert not {key for key in others if key not in shared} & main_rows.keys()
