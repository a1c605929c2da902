import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atlas_fl.client.batching import collate_packed
from atlas_fl.errors import ModelError
from atlas_fl.models.attention import make_layout
from atlas_fl.models.backbone import backbone_features, block_index, model_shape
from atlas_fl.ranks.cost_model import TrainingStep, device_memory
from atlas_fl.ranks.devices import DEVICES
from atlas_fl.split import model as parts
from atlas_fl.split.model import client_forward, load_client_part, select_client_side, server_forward


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that were really read from files."""
    names: list[str] = []

    @contextmanager
    def spied(path: Path, framework: str) -> Iterator[SimpleNamespace]:
        with real(path, framework=framework) as file:

            def get_tensor(name: str) -> torch.Tensor:
                names.append(name)
                return file.get_tensor(name)

            # of a slice the shape alone is asked for
            yield SimpleNamespace(keys=file.keys, get_slice=file.get_slice, get_tensor=get_tensor)

    real = parts.safe_open
    monkeypatch.setattr(parts, "safe_open", spied)
    return names


def two_clients(tiny, site_of, spec_of) -> Any:
    specs = (spec_of(name="a-0", examples=5), spec_of(name="b-0", examples=4, pairs=True))
    site = site_of(tiny, *specs)
    return collate_packed([site.data[spec.name].splits["train"] for spec in specs], device=site.backbone.device)


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_the_two_parts_together_are_the_model_to_the_last_bit(tiny, site_of, spec_of, blocks: int) -> None:
    row, backbone = two_clients(tiny, site_of, spec_of), tiny.backbone
    crossing = client_forward(backbone, row.ids, row.types, row.layout, blocks=blocks)
    assert crossing.shape == (len(row.ids), backbone.hidden)
    found = server_forward(backbone, crossing, row.layout, blocks=blocks)
    assert torch.equal(found, backbone_features(backbone, row.ids, row.types, row.layout))


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_client_reads_its_own_tensors_and_no_other(tiny, read: list[str], blocks: int) -> None:
    part = load_client_part(str(tiny.path), blocks=blocks)
    whole = dict(tiny.backbone.model.named_parameters())
    inside = tiny.backbone.family.blocks + "."
    below = {name for name in whole if name.startswith(inside) and block_index(tiny.backbone, name) < blocks}
    stem = {name for name in whole if name.startswith(tuple(f"{own}." for own in tiny.backbone.family.stem))}
    held = dict(part.model.named_parameters())
    assert set(held) == below | stem
    assert len(read) == len(held)
    assert {name.removeprefix(tiny.backbone.family.prefix + ".") for name in read} == set(held)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in held.items())
    assert part.num_parameters < tiny.backbone.num_parameters


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_part_of_its_own_computes_what_the_whole_model_does_there(tiny, site_of, spec_of, blocks: int) -> None:
    row, part = two_clients(tiny, site_of, spec_of), load_client_part(str(tiny.path), blocks=blocks)
    given = row.ids, row.types, row.layout
    found, expected = (client_forward(own, *given, blocks=blocks) for own in (part, tiny.backbone))
    assert torch.equal(found, expected)


def test_the_server_takes_many_clients_rows_at_once(tiny, site_of, spec_of) -> None:
    """Rows of two clients one after another are computed as each alone."""
    specs = (spec_of(name="a-0", examples=5), spec_of(name="b-0", examples=4))
    site, backbone = site_of(tiny, *specs), tiny.backbone
    rows = [collate_packed([site.data[spec.name].splits["train"]], device=backbone.device) for spec in specs]
    sent = [client_forward(backbone, row.ids, row.types, row.layout, blocks=1) for row in rows]
    alone = [server_forward(backbone, own, row.layout, blocks=1) for own, row in zip(sent, rows, strict=True)]
    lengths = [n for spec in specs for n in site.data[spec.name].splits["train"].lengths.tolist()]
    together = server_forward(backbone, torch.cat(sent), make_layout(lengths), blocks=1)
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_shards_are_read_only_where_the_client_has_something(copy_of, read: list[str]) -> None:
    folder = copy_of("bert")
    tensors = load_file(folder / "model.safetensors")
    shards = {name: f"model-{'top' if '.2.' in name or 'pooler' in name else 'low'}.safetensors" for name in tensors}
    low = {name: tensor for name, tensor in tensors.items() if "low" in shards[name]}
    save_file(low, folder / "model-low.safetensors")  # the upper shard is not even there
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    part = load_client_part(str(folder), blocks=2)
    assert len(read) == len(part.model.state_dict())
    (folder / "model-low.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-low\.safetensors, which its index names"):
        load_client_part(str(folder), blocks=2)


@pytest.mark.parametrize("blocks", [-1, 3, 7])
def test_a_cut_beyond_the_model_is_refused(tiny_of, blocks: int) -> None:
    with pytest.raises(ModelError, match=rf"has 3 blocks and cannot be cut at {blocks}; choose 0 to 2"):
        load_client_part(str(tiny_of("bert").path), blocks=blocks)


def test_files_that_lack_a_tensor_are_refused(copy_of) -> None:
    folder = copy_of("gpt2")
    save_file({"wte.weight": torch.zeros(41, 32)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks wpe\.weight; give complete files"):
        load_client_part(str(folder), blocks=1)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"there is no model\.safetensors or pytorch_model"):
        load_client_part(str(folder), blocks=1)


def test_what_trains_on_the_client(tiny_of, spec_of) -> None:
    tiny = tiny_of("gpt2")
    names = tiny.params(spec_of(name="a-0"))
    held = select_client_side(tiny.backbone, names, blocks=2, head=False)
    assert held == {f"h.{block}.attn.c_attn.lora_{factor}" for block in (0, 1) for factor in "AB"}
    assert select_client_side(tiny.backbone, names, blocks=2, head=True) == held | {"head.score.weight"}
    assert select_client_side(tiny.backbone, names, blocks=0, head=False) == frozenset()


def test_a_part_can_carry_adapters_under_the_stock_names(tiny, site_of, spec_of) -> None:
    part = load_client_part(str(tiny.path), blocks=1)
    site = site_of(tiny, spec_of(name="a-0"))
    cut = dataclasses.replace(site, backbone=part)
    assert list(cut.modules) == [name for name in site.modules if block_index(tiny.backbone, name) < 1]


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_the_memory_model_counts_the_weights_that_a_client_loads(tiny, site_of, spec_of, blocks: int) -> None:
    shape = model_shape(tiny.backbone, site_of(tiny, spec_of(name="a-0")).modules)
    part = load_client_part(str(tiny.path), blocks=blocks)
    found, whole = (
        device_memory(shape, DEVICES["cpu_2gb"], ranks=[2] * 3, step=step).parts["frozen weights"]
        for step in (TrainingStep(tokens=1, blocks=blocks), TrainingStep(tokens=1))
    )
    assert found == 4 * part.num_parameters
    assert whole == 4 * tiny.backbone.num_parameters
