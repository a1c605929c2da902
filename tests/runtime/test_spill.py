"""A round of whole models holds so many bytes of updates in memory, however many clients take part."""

import sys
from pathlib import Path

import pytest
import torch

from atlas_fl.client.job import Update
from atlas_fl.errors import DataError
from atlas_fl.runtime import local

MB = 2**20


def update(client: int, *, size: int = MB) -> Update:
    params = {"weight": torch.full((size // 4,), float(client)), "head.bias": torch.tensor([client, 0.5])}
    return Update(client=f"c-{client}", params=params, examples=client, metrics={})


def is_a_file(tensor: torch.Tensor) -> bool:
    """Return whether the values lie in the mapping of a file without a name."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *_, name = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in place.split("-"))
        if start <= tensor.data_ptr() < end:
            return name.endswith("(deleted)")
    raise AssertionError("no mapping holds the tensor")


def test_updates_up_to_the_bound_are_left_alone_and_one_beyond_it_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_BYTES_IN_MEMORY", 2 * MB + 16)
    held: list[Update] = []
    for client in range(4):
        held += local.spill_to_disk("train", [given := update(client)], held)
        assert (held[-1] is given) == (client < 2), "an update is 1 MB and 8 bytes"
        assert held[-1].examples == client
    for client, one in enumerate(held):
        assert one.params.keys() == {"weight", "head.bias"}
        assert all(torch.equal(tensor, update(client).params[key]) for key, tensor in one.params.items())


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells what lies where on Linux")
def test_memory_stays_at_the_bound_however_many_clients_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MAX_BYTES_IN_MEMORY", 2 * MB + 16)
    held = list[Update]()
    for client in range(12):
        held += local.spill_to_disk("train", [update(client)], held)
    assert [is_a_file(one.params["weight"]) for one in held] == [False] * 2 + [True] * 10


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(DataError, match=r"no room for a client's update of 1 MB in .*gone.*; free some, set TMPDIR"):
        local.memory_mapped(update(1).params)
