import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from atlas_fl.audit.run_files import read_audited
from atlas_fl.errors import CheckpointError
from atlas_fl.params import ByClient
from atlas_fl.storage.tensors import write_models


def model(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "blocks.0.weight": torch.randn(64, 64, generator=draw),
        "norm.weight": torch.ones(64),
        "head.weight": torch.randn(5, 64, generator=draw),
    }


def same(found: dict[str, torch.Tensor], models: ByClient) -> bool:
    wanted = {f"{client}/{key}": tensor for client, params in models.items() for key, tensor in params.items()}
    return found.keys() == wanted.keys() and all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def written(path: Path, models: ByClient) -> int:
    write_models(path, models)
    assert same(read_audited(path), models)
    return path.stat().st_size


def test_two_clients_with_one_model_take_the_bytes_of_one_and_a_little(tmp_path) -> None:
    one = written(tmp_path / "one.safetensors", {"a": model(0)})
    two = written(tmp_path / "two.safetensors", {"a": (shared := model(0)), "b": shared})
    copies = written(tmp_path / "copies.safetensors", {"a": model(0), "b": model(0)})
    apart = written(tmp_path / "apart.safetensors", {"a": model(0), "b": model(1)})
    # by hand: a name such as "a/blocks.0.weight": ["b"] for each of the three tensors
    assert one < two <= one + 3 * 40
    assert copies == two
    assert apart > 2 * one - 64 * 4 - 200, "the norm alone is the same"


def test_every_different_tensor_stands_once_under_its_first_holder(tmp_path) -> None:
    body = model(0)
    heads = {client: {**body, "head.weight": torch.full((5, 64), float(at))} for at, client in enumerate("abc")}
    models = {**heads, "d": heads["b"], "e": {**body, "norm.weight": torch.ones(64, dtype=torch.float64)}}
    written(tmp_path / "x.safetensors", models)
    assert sorted(load_file(tmp_path / "x.safetensors")) == [
        *("a/blocks.0.weight", "a/head.weight", "a/norm.weight"),
        *("b/head.weight", "c/head.weight", "e/head.weight", "e/norm.weight"),
    ]
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert json.loads(file.metadata()["same"]) == {
            "a/blocks.0.weight": ["b", "c", "d", "e"],
            "a/norm.weight": ["b", "c", "d"],
            "b/head.weight": ["d"],
        }


def test_what_is_read_shares_memory_as_what_was_written(tmp_path) -> None:
    written(tmp_path / "x.safetensors", {"a": model(0), "b": model(0)})
    found = read_audited(tmp_path / "x.safetensors")
    assert found["a/blocks.0.weight"] is found["b/blocks.0.weight"]


def test_the_bytes_do_not_tell_which_objects_were_shared(tmp_path) -> None:
    shared = model(0)
    write_models(tmp_path / "shared.safetensors", {"a": shared, "b": shared, "c": model(1)})
    turned = dict(sorted(model(0).items(), reverse=True))  # as after a resume: in another order
    write_models(tmp_path / "copies.safetensors", {"a": turned, "b": model(0), "c": model(1)})
    assert (tmp_path / "shared.safetensors").read_bytes() == (tmp_path / "copies.safetensors").read_bytes()


def test_adapters_stand_under_every_name_for_any_reader_of_the_format(tmp_path) -> None:
    lora = {"q.lora_A": torch.ones(2, 8), "q.lora_B": torch.zeros(8, 2), "head.weight": torch.ones(3, 8)}
    models = {"a": lora, "b": lora}
    written(tmp_path / "x.safetensors", models)
    assert same(load_file(tmp_path / "x.safetensors"), models)


@pytest.mark.parametrize("note", ["{", "[]", '{"a/w": 3}', '{"b/w": ["c"]}', '{"a/w": ["a"]}'])
def test_metadata_that_cannot_be_are_one_line(tmp_path, note: str) -> None:
    save_file({"a/w": torch.ones(3)}, tmp_path / "x.safetensors", {"same": note})
    with pytest.raises(CheckpointError, match=r"x.safetensors is damaged: ") as caught:
        read_audited(tmp_path / "x.safetensors")
    assert "\n" not in str(caught.value)
