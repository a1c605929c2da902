"""Every field of a comparison is in every file; the terminal has tables of eighty columns."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from atlas_fl.report.comparison_tables import method_tables, pair_tables, statistics_files, task_table
from atlas_fl.report.federation_results import FederationResults
from atlas_fl.report.finished_runs import RunScores
from atlas_fl.report.html.comparison_page import federations_page
from atlas_fl.report.html.elements import markdown
from atlas_fl.report.method_comparison import MethodComparison, MethodRow, compare_scores
from atlas_fl.report.statistics import PairedComparison

CLIENTS = ("a-0", "a-1", "b-0", "b-1")


def run_of(name: str, seed: int) -> RunScores:
    draw = np.random.default_rng([seed, *name.encode()])
    return RunScores(
        seed=seed,
        tasks={client: client[0] for client in CLIENTS},
        scores={client: float(score) for client, score in zip(CLIENTS, draw.uniform(0.4, 0.8, 4), strict=True)},
        loss=0.5 + seed / 100,
        calibration_error=seed / 50,
        memory_bytes=seed * 1e8,
        gain_over_majority=0.125,
        num_bytes=5_000_000,
        bytes_below_whole=0.5,
        client_steps=480,
    )


def compared_runs(names: Sequence[str]) -> MethodComparison:
    """The comparison of such runs of these methods with the last one."""
    return compare_scores({name: [run_of(name, seed) for seed in (1, 2, 3, 4)] for name in names}, control=names[-1])


@pytest.fixture(scope="module")
def comparison() -> MethodComparison:
    return compared_runs(("local", "fedavg", "fedavg_cluster", "fedper"))


def page(comparison: MethodComparison) -> str:
    result = FederationResults(
        title="null", words="", changed={}, own_settings={}, tuned={}, comparison=comparison, seeds={}, in_one_place={}
    )
    return markdown(federations_page([result]), folded=True)


def read_csv(comparison: MethodComparison, kind: str) -> str:
    return statistics_files({"null, dial 2": comparison})[f"{kind}.csv"]


FORMATS: dict[str, Callable[[MethodComparison], str]] = {
    "CSV": lambda comparison: "".join(read_csv(comparison, kind) for kind in ("methods", "pairs")),
    "LaTeX": lambda comparison: statistics_files({"null": comparison})["statistics.tex"],
    "page": page,
}


def leaves(record: type[Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every number of such a record."""
    nested = {"statistics": "MethodStatistics", "bayesian": "BayesianComparison"}
    for field in fields(record):
        assert (field.name in nested) == is_dataclass(field.type), f"{field.name}: say here that it is a record"
        if is_dataclass(field.type):
            assert isinstance(field.type, type)
            yield from leaves(field.type, (*path, field.name))
        else:
            yield (*path, field.name)


def changed(record: Any, path: tuple[str, ...]) -> Any:
    """The record with another value there."""
    name, *rest = path
    value = getattr(record, name)
    if isinstance(value, dict):
        return replace(record, **{name: {key: score + 0.375 for key, score in value.items()}})
    if rest:
        return replace(record, **{name: changed(value, tuple(rest))})
    assert value is not None, f"{name} is not known here, and nothing is tested"
    if isinstance(value, tuple):
        return replace(record, **{name: (*value[:-1], value[-1] + 0.375)})
    return replace(record, **{name: value * 2 + 1 if isinstance(value, int) or value > 1 else value + 0.375})


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("path", list(leaves(MethodRow)), ids=".".join)
def test_every_field_of_a_method_is_in_every_file(comparison, form: str, path: tuple[str, ...]) -> None:
    row = changed(comparison.rows["fedavg_cluster"], path)
    other = replace(comparison, rows={**comparison.rows, "fedavg_cluster": row})
    elsewhere = {("tasks",), ("statistics", "seeds"), ("statistics", "clients"), ("statistics", "std")}
    is_left_out = form == "page" and path in elsewhere
    assert (FORMATS[form](other) == FORMATS[form](comparison)) is is_left_out


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("path", list(leaves(PairedComparison)), ids=".".join)
def test_every_field_of_a_pair_is_in_every_file(comparison, form: str, path: tuple[str, ...]) -> None:
    pair = replace(comparison.pairs["fedavg"], adjusted_p=0.5)
    base = replace(comparison, pairs={**comparison.pairs, "fedavg": pair})
    other = replace(comparison, pairs={**comparison.pairs, "fedavg": changed(pair, path)})
    is_left_out = (form != "CSV" and path == ("differences",)) or (form == "page" and path == ("effect_size",))
    assert (FORMATS[form](other) == FORMATS[form](base)) is is_left_out


def test_the_files_are_flat_and_in_full_precision(comparison) -> None:
    *_, last = csv.DictReader(read_csv(comparison, "methods").splitlines())
    local, *_ = csv.DictReader(read_csv(comparison, "pairs").splitlines())
    row, pair = comparison.rows["fedper"], comparison.pairs["local"]
    assert (last["federation"], last["method"], float(last["mean"])) == ("null, dial 2", "fedper", row.statistics.mean)
    assert tuple(map(float, last["interval"].split())) == row.statistics.interval
    assert (last["hurt_by_control"], last["client_steps"]) == ("", "480.0")
    assert (local["method"], local["control"], float(local["bayesian_rope"])) == ("local", "fedper", pair.bayesian.rope)
    assert [float(word) for word in local["differences"].split()] == list(pair.differences)
    assert read_csv(comparison, "methods").splitlines()[-1].startswith('"null, dial 2",fedper,4,4,')
    assert float(last["tasks_a"]) == row.tasks["a"]


def test_the_terminal_has_eighty_columns_and_all_of_it_but_the_differences_by_seed(comparison) -> None:
    rows = {"fedavg_cluster_prior" if name == "fedper" else name: row for name, row in comparison.rows.items()}
    runs = {name: [run_of(name, seed) for seed in (1, 2, 3, 4)] for name in rows}
    file = io.StringIO()
    wide = compare_scores(runs, control="fedavg")
    for table in [*method_tables(wide.rows), task_table(wide.rows), *pair_tables(wide)]:
        Console(width=80, file=file, color_system=None).print(table)
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("\n fedavg_cluster_prior ") == 7, "a table that does not fit would fold the name"
    for heading in (
        "calibration",
        "FedAvg",
        "steps",
        "gain",
        "coxon",
        "worse",
        "equal",
        "better",
    ):
        assert heading in text
    assert "…" not in text


def test_what_is_written_says_the_same(comparison) -> None:
    mean = f"{comparison.rows['local'].statistics.mean:.3f}"
    assert f"| `local` | {mean} ±" in page(comparison)
    mean = f"{comparison.rows['fedavg_cluster'].statistics.mean:.3f}"
    written = statistics_files({"null": comparison})["statistics.tex"]
    assert rf"fedavg\_cluster & {mean} $\pm$ " in written
    assert f"local & ${comparison.pairs['local'].mean:+.3f}$ $\\pm$ " in written
    assert "\\\\" not in written.replace(r" \\" + "\n", "")
    assert written.count(r"\begin{tabular}") == 7
