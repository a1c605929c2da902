import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from atlas_fl.models.backbone import ALIGNMENT, buffer_entries, tensor_views, write_weights
from atlas_fl.models.loading import load_backbone
from atlas_fl.split.model import load_client_part


def shared(weights: dict[str, torch.Tensor]) -> tuple[mmap.mmap, list[dict[str, Any]]]:
    places, size = buffer_entries(weights)
    memory = mmap.mmap(-1, size)
    write_weights(weights, memory, places)
    return memory, places


def test_tensors_lie_one_after_another_at_multiples_of_64() -> None:
    weights = {"a": torch.zeros(3), "b": torch.zeros(2, 17), "c": torch.zeros((), dtype=torch.bfloat16)}
    places, size = buffer_entries(weights)
    # 12 bytes take 64, 136 take 192, 2 take 64
    assert [place["offset"] for place in places] == [0, 64, 256]
    assert size == 320
    assert size % ALIGNMENT == 0


def test_a_model_made_of_shared_weights_is_the_loaded_one_and_owns_none(tiny: Any) -> None:
    memory, places = shared(tiny.backbone.frozen)
    first, second = (load_backbone(str(tiny.path), weights=tensor_views(memory, places)) for _ in range(2))
    loaded = tiny.backbone
    assert first.frozen.keys() == loaded.frozen.keys()
    for name, tensor in loaded.frozen.items():
        assert torch.equal(first.frozen[name], tensor), name
        assert first.frozen[name].data_ptr() % ALIGNMENT == 0
    for (name, own), (_, other) in zip(first.model.named_buffers(), loaded.model.named_buffers(), strict=True):
        assert torch.equal(own, other), name
    with torch.no_grad():
        for tensor in first.frozen.values():
            tensor.fill_(2.0)
    assert all(bool((tensor == 2).all()) for tensor in second.frozen.values())


@pytest.mark.parametrize("architecture", ["gpt2", "qwen2", "llama"])
def test_so_is_one_that_writes_with_its_output_embedding(writer_of: Callable[[str], Any], architecture: str) -> None:
    loaded = writer_of(architecture).backbone
    memory, places = shared(loaded.frozen)
    made = load_backbone(str(writer_of(architecture).path), writes=True, weights=tensor_views(memory, places))
    assert made.frozen.keys() == loaded.frozen.keys()
    assert torch.equal(made.vocabulary, loaded.vocabulary)
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    for tensor in made.frozen.values():
        assert start <= tensor.data_ptr() < start + len(memory)


@pytest.mark.parametrize("architecture", ["gpt2", "qwen2", "llama"])
def test_the_output_embedding_of_a_clients_part_is_aligned_too(
    writer_of: Callable[[str], Any], architecture: str
) -> None:
    part = load_client_part(str(writer_of(architecture).path), blocks=1, writes=True)
    assert torch.equal(part.vocabulary, writer_of(architecture).backbone.vocabulary)
    assert part.vocabulary.data_ptr() % ALIGNMENT == 0
