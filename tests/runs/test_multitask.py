"""Runs of one adapter for all tasks in one place: the reference `multitask`."""

import pytest
import torch
from safetensors.torch import load_file

from atlas_fl.audit.check import audit_run
from atlas_fl.experiment.run import run_config
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import alter_tensors, passing_audit, rows, same_tensors

pytestmark = pytest.mark.core

MULTITASK = {"strategy": "multitask", "ranks": "4", "dropout": 0.1}


def test_tasks_have_one_adapter_and_heads_of_their_own_and_nothing_is_sent(config, finished) -> None:
    folder = finished(config(**MULTITASK)).folder
    report = passing_audit(folder)
    assert {row.check for row in report.rows} >= {"common", "mixed"}
    exported = [load_file(folder / f"adapters/{task}-all/adapter_model.safetensors") for task in ("movie", "trec")]
    factors = [{key: value for key, value in tensors.items() if "lora_" in key} for tensors in exported]
    assert factors[0] and same_tensors(*factors)
    trained = load_file(folder / "audit/round-0002/trained.safetensors")
    assert [len(trained[f"{task}-all/head.classifier.bias"]) for task in ("movie", "trec")] == [2, 6]
    assert {row["client"] for row in rows(folder) if row.get("split") == "test"} == {"movie-all", "trec-all"}
    ledger = rows(folder, "ledger")
    assert [row for row in ledger if row["kind"] in ("adapter", "head")] == []


def test_of_one_task_it_is_the_central_model_to_the_last_bit(config: Make) -> None:
    central = {**MULTITASK, "strategy": "centralized"}
    folders = [run_config(config(**one, tasks="movie", name=one["strategy"])).folder for one in (MULTITASK, central)]
    path = "adapters/movie-all/adapter_model.safetensors"
    assert (folders[0] / path).read_bytes() == (folders[1] / path).read_bytes()
    assert rows(folders[0]) == rows(folders[1])


def test_an_audit_finds_a_task_with_another_adapter(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(**MULTITASK)).folder
    path = folder / "audit/round-0002/start.safetensors"
    key = next(key for key in load_file(path) if key.startswith("trec-all/") and key.endswith("lora_B"))
    alter_tensors(path, lambda tensors: tensors[key].nextafter_(torch.tensor(1.0)))
    assert "common" in {row.check for row in audit_run(folder).failures}
