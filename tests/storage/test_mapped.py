"""Tensors that are moved to the disk have the same values, no name, and a life of their own."""

import gc
from pathlib import Path

import pytest
import torch

from atlas_fl.storage import mapped
from atlas_fl.storage.folder_access import draft_name
from atlas_fl.storage.mapped import MappedTensors
from atlas_fl.storage.run_folder import MAPPED, held_run


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MappedTensors:
    """A store that moves everything, into files of 4 kB."""
    monkeypatch.setattr(mapped, "LARGEST_IN_MEMORY", 0)
    monkeypatch.setattr(mapped, "FILE_BYTES", 4096)
    return MappedTensors(folder=tmp_path)


def open_maps(folder: Path) -> int:
    """Number of files of this folder that are mapped into this process."""
    return len({line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line})


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


def test_values_stay_and_no_file_is_left(store: MappedTensors, tmp_path: Path) -> None:
    tensors = [torch.arange(12).reshape(3, 4).to(dtype) for dtype in DTYPES]
    tensors += [torch.zeros(0, 3), torch.tensor(2.5), torch.randn(40, 50).T]
    moved = store.move(iter(tensors))
    assert moved.keys() == {id(tensor) for tensor in tensors}
    for tensor in tensors:
        found = moved[id(tensor)]
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_is_moved_once(store: MappedTensors) -> None:
    first, second = torch.randn(5), torch.randn(6)
    (moved,) = store.move([first, first]).values()
    assert store.move([moved]) == {}
    assert list(store.move([moved, second])) == [id(second)]


def test_a_file_is_given_back_when_its_last_tensor_is_gone(store: MappedTensors) -> None:
    tensors = [torch.randn(512) for _ in range(6)]  # 2 kB each: three files
    moved = store.move(tensors)
    gc.collect()
    assert open_maps(store.folder) == 3
    kept = moved[id(tensors[0])]
    del moved
    gc.collect()
    assert open_maps(store.folder) == 1
    assert torch.equal(kept, tensors[0])
    assert len(store.mapped) == 1


def test_what_takes_little_memory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "LARGEST_IN_MEMORY", 400)
    store = MappedTensors(folder=tmp_path)
    small, large = torch.zeros(100), torch.zeros(101)
    assert store.move([small, small]) == {}
    assert store.move([small, torch.zeros(1)]) != {}
    assert store.move([large]) != {}


def test_files_of_a_killed_process_are_removed_and_no_others(tmp_path: Path) -> None:
    left = draft_name(MAPPED)
    for name in (left, draft_name(left), "mapped.safetensors", ".mapped.safetensors"):
        (tmp_path / name).touch()
    with held_run(tmp_path):
        left_over = {path.name for path in tmp_path.iterdir() if "mapped" in path.name}
    assert left_over == {".mapped.safetensors", "mapped.safetensors"}
