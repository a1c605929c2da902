"""Runs of FedRouter: parts of clients with adapters of their own, averaged in clusters, and their clients' scores."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atlas_fl.data.clients import whole_of
from atlas_fl.errors import AtlasError
from atlas_fl.experiment.run import run_config
from atlas_fl.report.finished_runs import find_finished_runs, read_finished_run, read_summary, to_csv
from atlas_fl.setup.assembly import assemble, recorded_config
from atlas_fl.storage.jsonl import read_json
from atlas_fl.storage.run_folder import RunFolder
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import passing_audit, rows

ROUTED: Mapping[str, Any] = {
    "strategy": "fedrouter",
    "samples": 24,
    "validation_samples": 12,
    "test_samples": 12,
    "min_reliability": -0.9,
}


def test_each_part_trains_an_adapter_of_its_own_on_its_texts(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(**ROUTED)).folder
    passing_audit(folder, "mixed", "loaded")
    planned = {entry["name"]: entry for entry in rows_of_plan(folder)}
    whole = assemble(config(**{**ROUTED, "client_parts": 1, "strategy": "fedavg_cluster"}))
    for client in whole.clients:
        parts = [name for name in planned if whole_of(name) == client.name]
        assert sum(planned[name]["examples"] for name in parts) == len(client.train)
    cut = [name for name in planned if ".part" in name]
    assert cut and len({entry["device"] for name, entry in planned.items() if whole_of(name) == whole_of(cut[0])}) == 1
    assembly = assemble(recorded_config(RunFolder(folder)))
    assert [client.name for client in assembly.clients] == list(planned)
    texts = [set(client.train.text) for client in assembly.clients if whole_of(client.name) == whole_of(cut[0])]
    assert len(texts) == 2 and not texts[0] & texts[1]


def rows_of_plan(folder: Path) -> list[Mapping[str, Any]]:
    return list(read_json(folder / "plan.json")["clients"])


def test_a_client_in_parts_counts_once_in_comparisons_by_the_mean_over_its_examples(
    config: Make, finished: FinishedRuns, tmp_path: Path
) -> None:
    folder = finished(config(**ROUTED)).folder
    run, summary = read_finished_run(folder), read_summary(folder)
    usual = finished(config(**{**ROUTED, "strategy": "fedavg", "client_parts": 1, "name": "usual"})).folder
    assert run.scores.scores.keys() == read_finished_run(usual).scores.scores.keys()
    assert run.scores.tasks == read_finished_run(usual).scores.tasks
    tests = {name: entry["final"]["test"] for name, entry in summary["clients"].items()}
    client = next(whole_of(name) for name in tests if ".part" in name)
    parts = [test for name, test in tests.items() if whole_of(name) == client]
    right = sum(test["primary"] * test["examples"] for test in parts)
    assert run.scores.scores[client] == pytest.approx(right / sum(test["examples"] for test in parts))
    losses = [
        np.average([t["loss"] for t in own], weights=[t["examples"] for t in own])
        for own in ([test for name, test in tests.items() if whole_of(name) == client] for client in run.scores.scores)
    ]
    assert run.scores.loss == pytest.approx(np.mean(losses)) and run.scores.gain_over_majority is None
    rows_file = tmp_path / "rows.csv"
    rows_file.write_text(to_csv([run]))
    (again,) = find_finished_runs([rows_file])
    assert again.scores.scores == pytest.approx(run.scores.scores)


def test_parts_and_their_clusters_have_an_effect(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(**ROUTED)).folder
    other = finished(config(**{**ROUTED, "strategy": "fedavg_cluster", "client_parts": 1, "name": "other"})).folder
    losses = [
        [row["loss"] for row in rows(one) if row.get("split") == "test" and row.get("round") == 2]
        for one in (folder, other)
    ]
    assert len(losses[0]) > len(losses[1]) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"arrive": "movie-1=2"}, "^--client-parts 2 cuts the clients who are there from the start"),
        ({"attack": "noise", "attackers": ("movie-1",)}, "^--client-parts 2 cuts clients, and --attack noise is of"),
        ({"split": "2"}, "^--fingerprint embedding reads what the whole model makes of texts, and --split 2 parts it"),
    ],
)
def test_settings_of_whole_clients_are_refused(config: Make, values: Mapping[str, Any], message: str) -> None:
    with pytest.raises(AtlasError, match=message):
        run_config(config(**{**ROUTED, **values}))
