"""Clients that join a run that has begun."""

from collections.abc import Callable

import pytest

from atlas_fl.config import Config
from atlas_fl.io.folder import RunFolder
from atlas_fl.io.results import read_json, read_rows
from atlas_fl.run import run

Make = Callable[..., Config]


@pytest.mark.parametrize("strategy", ["atlas", "fedavg", "fedavg_cluster", "local"])
def test_it_runs(config: Make, strategy: str) -> None:
    result = run(config(strategy=strategy, arrive=("movie-1=2",)))
    folder = RunFolder(result.folder)
    print([r for r in read_rows(folder.metrics) if r.get("event") or r.get("client") == "movie-1"])
    print([r for r in read_rows(folder.ledger) if r.get("client") == "movie-1"])
    plan = read_json(folder.path / "plan-0002.json")
    print(plan["notes"], plan["adjacency"], plan["clustering"]["labels"])
    assert 0
