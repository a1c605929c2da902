"""Runs of kriging: averages until it has measured, then rows of its own; audited, and in the ledger."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from atlas_fl.audit.check import audit_run
from atlas_fl.experiment.run import run_config
from atlas_fl.report.figures import draw_all
from atlas_fl.storage.tensors import encoded_size
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import failed_checks, passing_audit, rows, same_tensors

pytestmark = pytest.mark.core

KRIGING = {"strategy": "kriging", "measure_round": 2}


def test_until_it_measures_it_is_fedavg_to_the_bit_and_then_models_differ(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(**KRIGING)).folder
    average = finished(config(strategy="fedavg", name="average")).folder
    for round, is_same in ((1, True), (2, False)):
        ours, theirs = (load_file(path / f"audit/round-000{round}/start.safetensors") for path in (folder, average))
        assert same_tensors(ours, theirs) == is_same
    mixed = load_file(folder / "audit/round-0002/start.safetensors")
    keys = {key.partition("/")[2] for key in mixed if not key.partition("/")[2].startswith("head.")}
    assert any(not torch.equal(mixed[f"movie-0/{key}"], mixed[f"movie-1/{key}"]) for key in keys)
    passing_audit(folder, "server", "mixed")


def test_every_layer_may_have_a_matrix_of_its_own(config: Make) -> None:
    whole, folder = (run_config(config(**KRIGING, gram_by=by, name=by)).folder for by in ("all", "layer"))
    ours, theirs = (load_file(path / "audit/round-0002/start.safetensors") for path in (folder, whole))
    is_equal = {key.partition("/")[2]: torch.equal(ours[key], theirs[key]) for key in ours}
    assert all(equal for key, equal in is_equal.items() if key.startswith("head."))
    assert not any(equal for key, equal in is_equal.items() if key.endswith("lora_B"))
    passing_audit(folder)
    config_file = folder / "config.toml"
    config_file.write_text(config_file.read_text().replace('gram_by = "layer"', 'gram_by = "all"'))
    assert "mixed" in {row.check for row in audit_run(folder).failures}


@pytest.mark.slow
def test_a_run_tells_how_personal_its_models_are_and_why(config: Make) -> None:
    result = run_config(config(**KRIGING, gram_by="layer"))
    told = [row for row in rows(result.folder) if row.get("event") == "sharing measured"]
    groups = {"layer 0", "layer 1", "layer 2", "head"}
    assert {(row["round"], row["client"], row["parameters"]) for row in told} == {
        (2, name, group) for name in ("movie-0", "movie-1", "trec-0", "trec-1") for group in groups
    }
    first = next(row for row in told if row["client"] == "movie-0" and row["parameters"] == "head")
    assert result.summary["sharing"]["movie-0"]["head"] == {
        name: first[name]
        for name in ("own_share", "effective_clients", "variance_over_noise", "round")
        if name in first
    }
    figures = {path.stem for path in draw_all(result.folder)}
    assert "sharing" in figures


def test_halves_are_sent_once_and_are_in_the_ledger(config: Make) -> None:
    folder = run_config(config(**KRIGING, rounds=3, participation=0.75, seed=1)).folder
    participants = {
        round: set(json.loads((folder / f"audit/round-000{round}/record.json").read_text())["participants"])
        for round in (2, 3)
    }
    sent = [row for row in rows(folder, "ledger") if row["kind"] == "halves"]
    late = participants[3] - participants[2]
    assert late, "someone is measured a round later"
    assert sorted((row["round"], row["client"]) for row in sent) == sorted(
        [(2, name) for name in participants[2]] + [(3, name) for name in late]
    )
    reports = load_file(folder / "audit/round-0003/server.safetensors")
    for row in sent:
        prefix = f"halves/{row['client']}/"
        own = {key.removeprefix(prefix): tensor for key, tensor in reports.items() if key.startswith(prefix)}
        assert row["direction"] == "up" and row["bytes"] == encoded_size(own)
    passing_audit(folder)


def test_who_joins_later_is_measured_in_its_first_round(config: Make) -> None:
    folder = run_config(config(**KRIGING, rounds=3, arrive=("movie-1=3",), name="late")).folder
    passing_audit(folder)
    sent = {(row["round"], row["client"]) for row in rows(folder, "ledger") if row["kind"] == "halves"}
    assert (3, "movie-1") in sent and len(sent) == 4


def test_an_audit_finds_halves_and_models_that_were_altered(config: Make) -> None:
    folder = run_config(config(**KRIGING, tasks="movie")).folder
    start, server = (folder / f"audit/round-0002/{name}.safetensors" for name in ("start", "server"))
    failed = partial(failed_checks, folder)
    half = next(key for key in load_file(server) if key.startswith("halves/movie-0/first/") and key.endswith("lora_B"))

    def report_of_the_other(tensors: dict[str, torch.Tensor]) -> None:
        own = [key for key in tensors if key.startswith("halves/movie-0/")]
        tensors.update({key: tensors[key.replace("movie-0", "movie-1")].clone() for key in own})

    assert "mixed" in failed(server, report_of_the_other)
    assert "server" in failed(server, lambda tensors: tensors.pop(half))
    assert "server" in failed(server, lambda tensors: tensors.update({"halves/movie-9/first/a": torch.ones(2)}))
    assert "server" in failed(server, lambda tensors: tensors.update({"other": torch.ones(2)}))
    head = next(key for key in load_file(start) if key.startswith("movie-0/head."))
    assert "mixed" in failed(start, lambda tensors: tensors[head].add_(0.01))
    passing_audit(folder)
