"""Importance is measured and sent where something follows it, and nowhere else."""

import numpy as np
import pytest

from atlas_fl.experiment.run import run_config
from atlas_fl.storage.jsonl import read_json
from tests.runs.finished import Make
from tests.runs.reading import rows


@pytest.mark.parametrize(
    ("settings", "is_measured"),
    [
        ({"ranks": "4"}, False),
        ({"ranks": "uniform"}, False),
        ({"ranks": "budget"}, True),
        ({"ranks": "matched"}, True),
        ({"ranks": "greedy"}, True),
        ({"ranks": "4", "layer_weighting": "importance", "strategy": "atlas_laplacian"}, True),
        ({"ranks": "4", "split": "auto"}, True),
    ],
)
def test_clients_measure_importance_where_something_follows_it(
    config: Make, settings: dict[str, str], is_measured: bool
) -> None:
    given = {"strategy": "fedavg", "alone": "none", "rounds": 1}
    folder = run_config(config(name="asked", **{**given, **settings})).folder
    importance = np.array(read_json(folder / "plan.json")["importance"])
    assert bool(np.ptp(importance)) == is_measured
    assert any(row["kind"] == "importance" for row in rows(folder, "ledger")) == is_measured
