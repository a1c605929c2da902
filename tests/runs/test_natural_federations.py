"""Federations whose data name their clients: one short run each, with the real model and data."""

from pathlib import Path

import pytest

from atlas_fl.config import with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.data.registry import TASKS
from atlas_fl.experiment.run import run_config

QUICK = {"strategy": "fedavg", "rounds": 1, "samples": 8, "validation_samples": 2, "test_samples": 4, "alone": "none"}
QUICK |= {"fingerprint_steps": 1, "fingerprint_batches": 2, "batch_size": 4}
PRESETS = ("raters", "senses", "countries-in-and-out", "editorials", "reviews")
LONGER = ("senses-all-blocks", "countries", "editorials-100")


@pytest.mark.slow
@pytest.mark.parametrize("preset", (*PRESETS, *(pytest.param(name, marks=pytest.mark.product) for name in LONGER)))
def test_a_federation_runs_and_every_client_of_the_data_is_scored(preset: str, tmp_path: Path) -> None:
    config = with_values(find_preset(preset), {**QUICK, "runs_dir": str(tmp_path)})
    clients = run_config(config).summary["clients"]
    names = [client for task in config.data.tasks for client in TASKS[task].clients]
    if preset == "raters":  # the same groups in three tasks
        names = [f"{task}-{client}" for task in config.data.tasks for client in TASKS[task].clients]
    assert sorted(clients) == sorted(names)
    assert all(0 <= entry["final"]["test"]["primary"] <= 1 for entry in clients.values())
