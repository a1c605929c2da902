"""Runs whose gradients are corrected by those of the others, SCAFFOLD, or by the own changes, FedDyn."""

import pytest
import torch
from safetensors.torch import load_file

from atlas_fl.audit.check import audit_run
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import passing_audit, rows

pytestmark = pytest.mark.core

SCAFFOLD = {"strategy": "scaffold", "ranks": "4"}


def test_a_run_passes_its_audit_and_what_is_sent_is_in_the_ledger(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(**SCAFFOLD)).folder
    passing_audit(folder, "corrected")
    sent = [row for row in rows(folder, "ledger") if row["kind"] == "correction"]
    # nobody is corrected in round one, and everyone tells its control in every round
    assert {row["round"] for row in sent if row["direction"] == "down"} == {2}
    assert {row["round"] for row in sent if row["direction"] == "up"} == {1, 2}
    own = next(row for row in sent if row["direction"] == "up")
    models = [row for row in rows(folder, "ledger") if row["kind"] in ("adapter", "head") and row["direction"] == "up"]
    same = [row for row in models if (row["client"], row["round"]) == (own["client"], own["round"])]
    assert sum(int(str(row["bytes"])) for row in same) == pytest.approx(int(str(own["bytes"])), rel=0.1)


def test_in_personal_rounds_nobody_is_corrected_or_tells_its_control(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(**SCAFFOLD, rounds=3, personal_rounds=1)).folder
    passing_audit(folder)
    assert {row["round"] for row in rows(folder, "ledger") if row["kind"] == "correction"} == {1, 2}
    assert not (folder / "audit/round-0003/correction.safetensors").exists()


def test_an_audit_finds_a_correction_in_a_personal_round(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(**SCAFFOLD, rounds=3, personal_rounds=1)).folder
    name = "correction.safetensors"
    (folder / "audit/round-0003" / name).write_bytes((folder / "audit/round-0002" / name).read_bytes())
    failures = [row for row in audit_run(folder).failures if row.check == "corrected"]
    assert {row.round for row in failures} == {3}
    assert "in a personal round" in failures[0].detail


FEDDYN = {"strategy": "feddyn", "ranks": "4", "proximal_mu": 0.1}


def test_feddyn_passes_its_audit_and_what_is_sent_is_in_the_ledger(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(**FEDDYN)).folder
    passing_audit(folder, "corrected", "server", "mixed")
    sent = [row for row in rows(folder, "ledger") if row["kind"] == "correction"]
    assert {(row["round"], row["direction"]) for row in sent} == {(2, "down")}
    first = load_file(folder / "audit/round-0000/start.safetensors")
    trained = load_file(folder / "audit/round-0001/trained.safetensors")
    correction = load_file(folder / "audit/round-0002/correction.safetensors")
    changed = {key: trained[key] - first[key] for key in trained if key in first and key in correction}
    assert changed and any(bool(change.any()) for change in changed.values())
    for key, change in changed.items():
        torch.testing.assert_close(correction[key], 0.1 * change, atol=1e-8, rtol=1e-4)


@pytest.mark.parametrize("strategy", ["scaffold", "feddyn"])
def test_theorems_about_sgd_are_compared_under_sgd(config: Make, finished: FinishedRuns, strategy: str) -> None:
    """Beside FedAvg with the same steps: other models, of finite values, and an audit that passes."""
    words = {"ranks": "4", "optimizer": "sgd", "clip": 0.0, "lr": 0.05, "space": "factors"}
    folder, plain = (finished(config(strategy=name, name=name, **words)).folder for name in (strategy, "fedavg"))
    passing_audit(folder, "corrected")
    models = [load_file(one / "audit" / "round-0002" / "start.safetensors") for one in (folder, plain)]
    assert all(bool(tensor.isfinite().all()) for model in models for tensor in model.values())
    assert any(not torch.equal(models[0][key], models[1][key]) for key in models[0])
    steps = [[row["steps"] for row in rows(one) if row.get("split") == "train"] for one in (folder, plain)]
    assert steps[0] == steps[1]
