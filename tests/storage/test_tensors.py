from hashlib import sha256

import pytest
import torch
from safetensors.torch import save

from atlas_fl.errors import CheckpointError
from atlas_fl.storage.tensors import DTYPES, encode_tensors, encoded_size, read_tensors, write_tensors


def params(rank: int = 8) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "layer.0.query.lora_A": torch.randn(rank, 12, generator=draw),
        "layer.0.query.lora_B": torch.randn(12, rank, generator=draw),
        "head.weight": torch.randn(3, 12, generator=draw),
        "head.bias": torch.zeros(3),
    }


def every_dtype() -> dict[str, torch.Tensor]:
    values = torch.arange(7)
    return {f"{99 - index}.{name}": values.to(dtype) for index, (dtype, name) in enumerate(DTYPES.items())}


@pytest.mark.parametrize(
    "tensors",
    [params(), every_dtype(), {"scalar": torch.tensor(3.5)}, {"empty": torch.empty(0, 4), "ü": torch.ones(1)}, {}],
    ids=["lora", "dtypes", "scalar", "empty tensor", "nothing"],
)
def test_encoding_equals_the_library_of_safetensors_byte_for_byte(tensors: dict[str, torch.Tensor]) -> None:
    assert encode_tensors(tensors) == save(tensors)
    assert encoded_size(tensors) == len(save(tensors))


def test_a_note_is_the_metadata_of_the_library(tmp_path) -> None:
    write_tensors(tmp_path / "x.safetensors", params(), metadata=("same", '{"a": ["ü"]}'))
    assert (tmp_path / "x.safetensors").read_bytes() == save(params(), {"same": '{"a": ["ü"]}'})


def test_one_payload_by_hand() -> None:
    # 8 bytes of length, a header padded to a multiple of 8, and two float32 numbers
    header = '{"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    assert len(header) == 54
    payload = encode_tensors({"b": torch.tensor([1.0, 2.0])})
    assert payload[:8] == (56).to_bytes(8, "little")
    assert payload[8:64] == (header + "  ").encode()
    assert payload[64:] == bytes.fromhex("0000803f00000040")
    assert encoded_size({"b": torch.tensor([1.0, 2.0])}) == 72


def test_views_transposes_and_shared_memory_encode_as_their_values() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    shared = {"a": base, "b": base, "c": base.T, "d": base[1:], "e": base[:, ::2].requires_grad_()}
    apart = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in shared.items()}
    assert encode_tensors(shared) == save(apart)


def test_the_order_of_the_names_changes_nothing() -> None:
    assert encode_tensors(dict(reversed(params().items()))) == encode_tensors(params())


def test_a_file_holds_the_payload_and_its_digest(tmp_path) -> None:
    digest = write_tensors(tmp_path / "x.safetensors", params())
    content = (tmp_path / "x.safetensors").read_bytes()
    assert content == encode_tensors(params())
    assert digest == sha256(content).hexdigest()
    back = read_tensors(tmp_path / "x.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in params().items())


def test_a_refused_tensor_leaves_the_old_file(tmp_path) -> None:
    write_tensors(tmp_path / "x.safetensors", params())
    with pytest.raises(KeyError, match="complex64"):
        write_tensors(tmp_path / "x.safetensors", {"x": torch.zeros(2, dtype=torch.complex64)})
    assert read_tensors(tmp_path / "x.safetensors").keys() == params().keys()


def test_a_missing_or_damaged_file_is_named(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"no file .*none.safetensors; the run did not write it"):
        read_tensors(tmp_path / "none.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(encode_tensors(params())[:-3])
    with pytest.raises(CheckpointError, match=r"damaged file .*cut.safetensors: .*; restore it or repeat the run"):
        read_tensors(tmp_path / "cut.safetensors")
