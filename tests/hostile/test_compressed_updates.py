"""Sites whose updates are compressed: the bits and the bytes of a simulation, and answers that no site makes."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from atlas_fl.audit.check import audit_run
from atlas_fl.config import Config
from atlas_fl.experiment.run import run_config
from tests.hostile.federation import SITES, federate
from tests.hostile.servers import record
from tests.runs.reading import rows, state

SMALL = {"ranks": "4", "alone": "none", "update_filter": ("topk=0.1", "quantise=8")}


def ledger(folder: Path) -> Counter[tuple[str, ...]]:
    return Counter(
        tuple(str(row[key]) for key in ("client", "direction", "kind", "bytes")) for row in rows(folder, "ledger")
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedavg", "fedper"])
def test_sites_end_in_the_values_and_the_bytes_of_a_simulation(
    shared_config: Callable[..., Config], tmp_path: Path, strategy: str
) -> None:
    given = {**SMALL, "strategy": strategy, "space": "factors", "tasks": "movie", "clients_per_task": 3, "rounds": 2}
    allow = ("partial-training",) if strategy == "fedper" else ()
    found = record(shared_config(name=f"served-{strategy}", **given), tmp_path, SITES, allow=allow).found
    assert not found.faults, "".join(found.faults)
    assert (found.error, found.faults, found.refused) == (None, [], {})
    simulated = run_config(shared_config(name=f"simulated-{strategy}", secrets=str(tmp_path), **given)).folder
    whole, travelled = state(simulated), state(found.folder)
    same = [name for name, one in travelled.items() if one.numel() and "/private" not in name]
    assert any("lora_A" in name for name in same)
    assert all(whole[name].equal(travelled[name]) for name in same)
    assert ledger(found.folder) == ledger(simulated)
    assert audit_run(found.folder).ok


@pytest.mark.slow
def test_a_damaged_change_is_refused_from_its_site_alone(config: Callable[..., Config]) -> None:
    def short(head: dict[str, Any], tensors: dict[str, Any], _: str) -> Any:
        return head, {key: one[:-1] if one.dtype is torch.uint8 else one for key, one in tensors.items()}

    found = federate(config(name="served", strategy="fedavg", **SMALL), {"movie-2": short}, least=2)
    assert found.error is None and not found.faults
    assert found.noted("movie-2") and any("a compressed tensor is damaged" in note for note in found.notes)


@pytest.mark.slow
def test_bytes_in_the_place_of_values_are_refused_where_nothing_is_compressed(config: Callable[..., Config]) -> None:
    def coded(head: dict[str, Any], tensors: dict[str, Any], action: str) -> Any:
        if action != "train":
            return head, tensors
        zeros = {key: torch.zeros(3 + one.numel(), dtype=torch.uint8) for key, one in tensors.items() if "lora" in key}
        return head, {**tensors, **zeros}

    found = federate(config(name="served", strategy="fedavg", ranks="4", alone="none"), {"movie-2": coded}, least=2)
    assert found.error is None and not found.faults
    assert found.noted("the update of movie-2 was refused")
