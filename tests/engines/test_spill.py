"""A round of whole models holds so many bytes of updates in memory, however many clients take part."""

import sys
from pathlib import Path

import pytest
import torch

from atlas_fl.clients.base import Update
from atlas_fl.engines import spill
from atlas_fl.errors import DataError

MB = 2**20


def update(client: int, *, size: int = MB) -> Update:
    params = {"weight": torch.full((size // 4,), float(client)), "head.bias": torch.tensor([client, 0.5])}
    return Update(client=f"c-{client}", params=params, examples=client, metrics={})


def held_mb() -> float:
    """Memory of this process that is no file's."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def test_updates_up_to_the_bound_are_left_alone_and_one_beyond_it_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "HELD_BYTES", 2 * MB + 16)
    held: list[Update] = []
    for client in range(4):
        held.append(spill.bounded(given := update(client), held))
        assert (held[-1] is given) == (client < 2), "an update is 1 MB and 8 bytes"
        assert held[-1].examples == client
    for client, one in enumerate(held):
        assert one.params.keys() == {"weight", "head.bias"}
        assert all(torch.equal(tensor, update(client).params[key]) for key, tensor in one.params.items())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells whose pages these are on Linux")
def test_memory_stays_at_the_bound_however_many_clients_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "HELD_BYTES", 80 * MB + 16)
    held, before = list[Update](), held_mb()
    for client in range(12):
        held.append(spill.bounded(update(client, size=40 * MB), held))
    total = sum(int(one.params["weight"].numel() * one.params["weight"].mean()) for one in held)
    assert total == sum(range(12)) * 10 * MB
    assert 60 < held_mb() - before < 160, "two of twelve, and the one that is written"


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(DataError, match=r"no room for a client's update of 1 MB in .*gone.*; free some, set TMPDIR"):
        spill.on_disk(update(1).params)
