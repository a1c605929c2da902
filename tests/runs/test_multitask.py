"""Runs of one adapter for all tasks in one place: the reference `multitask`."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from atlas_fl.audit.check import audit_run
from atlas_fl.config import Config, to_toml
from atlas_fl.experiment.run import resume_run, run_config
from tests.runs.conftest import QUICK
from tests.runs.finished import FinishedRuns
from tests.runs.processes import Programs
from tests.runs.reading import rows, same_tensors, state

pytestmark = [pytest.mark.core, QUICK]

MakeConfig = Callable[..., Config]
MULTITASK = {"strategy": "multitask", "ranks": "4", "dropout": 0.1}


def test_tasks_have_one_adapter_and_heads_of_their_own_and_nothing_is_sent(
    config: MakeConfig, finished: FinishedRuns
) -> None:
    folder = finished(config(**MULTITASK)).folder
    report = audit_run(folder)
    assert report.ok, report.failures[:3]
    assert {row.check for row in report.rows} >= {"common", "mixed"}
    exported = [load_file(folder / f"adapters/{task}-all/adapter_model.safetensors") for task in ("movie", "trec")]
    factors = [{key: value for key, value in tensors.items() if "lora_" in key} for tensors in exported]
    assert factors[0] and same_tensors(*factors)
    trained = load_file(folder / "audit/round-0003/trained.safetensors")
    assert [len(trained[f"{task}-all/head.classifier.bias"]) for task in ("movie", "trec")] == [2, 6]
    assert {row["client"] for row in rows(folder) if row.get("split") == "test"} == {"movie-all", "trec-all"}
    ledger = rows(folder, "ledger")
    assert [row for row in ledger if row["kind"] in ("adapter", "head")] == []


def test_of_one_task_it_is_the_central_model_to_the_last_bit(config: MakeConfig) -> None:
    central = {**MULTITASK, "strategy": "centralized"}
    folders = [run_config(config(**one, tasks="movie", name=one["strategy"])).folder for one in (MULTITASK, central)]
    path = "adapters/movie-all/adapter_model.safetensors"
    assert (folders[0] / path).read_bytes() == (folders[1] / path).read_bytes()
    assert rows(folders[0]) == rows(folders[1])


@pytest.mark.parametrize("values", [{}, {"participation": 0.5, "fingerprint": "delta"}])
def test_a_run_that_is_killed_goes_on_to_the_same_bits(
    config: MakeConfig, programs: Programs, tmp_path: Path, values: dict[str, object]
) -> None:
    whole = run_config(config(**MULTITASK, **values)).folder
    assert audit_run(whole).ok
    (tmp_path / "config.toml").write_text(to_toml(config(**MULTITASK, **values, name="killed")))
    fault = "dies before the checkpoint of round two"
    programs.start("run", "--config", "config.toml", folder=tmp_path, fault=fault).end(-signal.SIGKILL)
    killed = tmp_path / "runs/killed"
    assert resume_run(killed).complete
    assert same_tensors(state(whole), state(killed))
    assert rows(whole) == rows(killed) and rows(whole, "ledger") == rows(killed, "ledger")


def test_an_audit_finds_a_task_with_another_adapter(config: MakeConfig, finished: FinishedRuns) -> None:
    folder = finished(config(**MULTITASK)).folder
    path = folder / "audit/round-0003/start.safetensors"
    with safe_open(path, "pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(path)
    key = next(key for key in tensors if key.startswith("trec-all/") and key.endswith("lora_B"))
    tensors[key] = torch.nextafter(tensors[key], torch.tensor(1.0))
    save_file(tensors, path, metadata)
    assert "common" in {row.check for row in audit_run(folder).failures}
