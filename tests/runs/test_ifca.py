"""Runs in which clients choose the cluster whose model has the least loss: IFCA."""

import pytest
from safetensors.torch import load_file, save_file

from atlas_fl.audit.check import audit_run
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import alter_tensors, passing_audit, rows

pytestmark = pytest.mark.core

IFCA = {"strategy": "ifca", "ranks": "4", "ifca_clusters": 2}


def test_a_run_passes_its_audit_and_models_of_other_clusters_are_counted(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(**IFCA)).folder
    passing_audit(folder, "chosen", "server", "mixed")
    kept = load_file(folder / "audit/round-0002/server.safetensors")
    clusters = {int(value) for key, value in kept.items() if key.startswith("clusters/")}
    assert any(key.startswith("losses/") for key in kept) and clusters <= {0, 1}
    plain = finished(config(strategy="fedavg", ranks="4", name="fedavg")).folder
    sizes = [
        sum(int(str(row["bytes"])) for row in rows(one, "ledger") if row["direction"] == "down")
        for one in (folder, plain)
    ]
    assert sizes[0] > sizes[1]


@pytest.mark.parametrize(("file", "part", "check"), [("begun", "lora_A", "chosen"), ("server", "clusters/", "server")])
def test_an_audit_finds_what_was_altered(config, finished, file: str, part: str, check: str) -> None:
    folder = finished(config(**IFCA)).folder
    alter_tensors(
        folder / f"audit/round-0002/{file}.safetensors",
        lambda tensors: [tensor.add_(1) for key, tensor in tensors.items() if part in key],
    )
    assert check in {row.check for row in audit_run(folder).failures}


def test_an_audit_finds_a_round_in_which_nobody_measured(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(**IFCA)).folder
    path, before = (folder / f"audit/round-000{round}/server.safetensors" for round in (2, 1))
    old = {key: value for key, value in load_file(before).items() if key.startswith("clusters/")}
    save_file(old, path)
    assert {(2, "", "chosen")} <= {(row.round, row.client, row.check) for row in audit_run(folder).failures}
    (folder / "audit/round-0002/begun.safetensors").unlink()
    assert "begun.safetensors is missing" in " ".join(row.detail for row in audit_run(folder).failures)
