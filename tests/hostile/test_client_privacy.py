"""Client-level differential privacy across sites: noise from the operating system, every sum paid before it is made."""

from collections.abc import Callable
from pathlib import Path

import pytest

from atlas_fl.config import Config
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.run import run_config
from atlas_fl.runtime.remote import RemoteEngine
from atlas_fl.storage.jsonl import read_sealed
from tests.hostile.servers import record
from tests.runs.reading import passing_audit, rows, same_tensors, state

pytest.importorskip("dp_accounting", reason="the extra dp is not installed")

THREE = tuple(f"movie-{k}" for k in range(3))
GIVEN = {
    **{"strategy": "fedit", "ranks": "4", "clients_per_task": 3, "rounds": 2, "tasks": "movie", "pack_tokens": 1},
    **{"dp": "client", "epsilon": 5.0, "update_filter": ("clip=0.5",), "alone": "none"},
}


@pytest.mark.slow
def test_a_server_draws_noise_that_no_seed_gives_and_pays_for_every_sum(
    shared_config: Callable[..., Config], tmp_path: Path
) -> None:
    found = record(shared_config(name="served", **GIVEN), tmp_path, THREE)
    assert (found.found.error, found.found.faults, found.found.refused) == (None, [], {})
    passing_audit(found.found.folder, "epsilon")
    assert read_sealed(found.found.folder / "releases.json", "rounds")["rounds"] == [1, 2]
    spent = {row["round"]: row["epsilon"] for row in rows(found.found.folder) if row.get("split") == "train"}
    assert spent[1] < spent[2] and 4.9 < spent[2] <= 5.0
    simulated = run_config(shared_config(name="simulated", secrets=str(found.folder), **GIVEN))
    assert not same_tensors(state(simulated.folder), state(found.found.folder))


@pytest.mark.slow
def test_a_server_that_has_given_out_all_sums_gives_out_no_more(
    shared_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a server that was killed in round 1 and did it again
    monkeypatch.setattr(RemoteEngine, "release", lambda _, round: [1, *range(1, round + 1)])
    found = record(shared_config(name="spent", **GIVEN), tmp_path, THREE)
    assert isinstance(found.found.error, ConfigError)
    assert "with this round; allowed: 5: a killed server did rounds again" in str(found.found.error)
    passing_audit(found.found.folder)
