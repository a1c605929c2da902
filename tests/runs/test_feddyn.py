"""Runs whose clients are held and corrected by their own changes: FedDyn."""

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file

from atlas_fl.config import Config
from tests.runs.finished import FinishedRuns
from tests.runs.reading import passing_audit, rows

pytestmark = pytest.mark.core

MakeConfig = Callable[..., Config]
FEDDYN = {"strategy": "feddyn", "ranks": "4", "proximal_mu": 0.1}


def test_a_run_passes_its_audit_and_what_is_sent_is_in_the_ledger(config: MakeConfig, finished: FinishedRuns) -> None:
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


def test_round_one_trains_as_fedprox_does(config: MakeConfig, finished: FinishedRuns) -> None:
    plain = {**FEDDYN, "strategy": "fedprox", "space": "factors", "name": "fedprox"}
    folders = [finished(config(**one)).folder for one in (FEDDYN, plain)]
    for round, is_same in ((1, True), (2, False)):
        first, second = (load_file(folder / f"audit/round-000{round}/trained.safetensors") for folder in folders)
        assert all((first[key] == second[key]).all() for key in first) == is_same
