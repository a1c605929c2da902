import pytest
import torch

from atlas_fl.errors import ModelError, ProtocolError
from atlas_fl.sparse.codec import decode_mask, decode_values, encode_mask, encode_values, mask_size, values_size
from atlas_fl.sparse.masks import calibrate_mask
from atlas_fl.storage.tensors import decode_tensors, encode_tensors, encoded_size

PARAMS = {"w": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), "b": torch.tensor([7.0, 8.0])}
MASK = {"w": torch.tensor([[True, False, True], [False, False, False]]), "b": torch.tensor([False, True])}


def test_the_bytes_of_values_by_hand() -> None:
    """Three of eight: b before w, row by row, behind 8 bytes of length and a header padded to eights."""
    message = encode_values(PARAMS, MASK)
    assert decode_tensors(message)["values.F32"].tolist() == [8.0, 1.0, 3.0]
    assert len('{"values.F32":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}') == 64
    assert len(message) == 8 + 64 + 12 == values_size(3)
    found = decode_values(message, MASK, PARAMS)
    assert found["w"].tolist() == [[1, 0, 3], [0, 0, 0]]
    assert found["b"].tolist() == [0, 8]
    start = {"w": torch.full((2, 3), 9.0), "b": torch.full((2,), 9.0)}
    assert decode_values(message, MASK, PARAMS, into=start)["w"].tolist() == [[1, 9, 3], [9, 9, 9]]
    assert start["w"].tolist() == [[9, 9, 9], [9, 9, 9]]


def test_the_bits_of_a_mask_by_hand() -> None:
    """b then w is 01 101000."""
    assert decode_tensors(encode_mask(MASK))["bitmap"].tolist() == [0b01101000]
    params = {"a": torch.zeros(100, 70), "b": torch.zeros(33)}
    mask = calibrate_mask(dict, params, names=params, strategy="random", sparsity=0.9, seed=1)
    assert mask_size(mask) == len(encode_mask(mask))


def test_at_nine_tenths_a_message_takes_a_tenth_of_the_dense_bytes_and_little_more() -> None:
    """Kept values from the second message on, 10.5% at most; the first has the mask beside them, 1/32 more."""
    params = {f"block.{i}.weight": torch.randn(128, 128) for i in range(8)}
    mask = calibrate_mask(dict, params, names=params, strategy="highest_magnitude", sparsity=0.9, seed=1)
    dense, values = encoded_size(params), len(encode_values(params, mask))
    assert values <= 0.105 * dense
    assert values + len(encode_mask(mask)) <= (0.105 + 1 / 32) * dense


def test_values_keep_their_bits() -> None:
    params = {"b": torch.tensor([torch.nan, 1e-40, -0.0]), "c": torch.zeros(0)}
    mask = {name: torch.ones_like(value, dtype=torch.bool) for name, value in params.items()}
    found = decode_values(encode_values(params, mask), mask, params)
    assert torch.equal(found["b"].view(torch.int32), params["b"].view(torch.int32))


@pytest.mark.parametrize("kept", [0, 1, 999])
def test_sizes_without_data(kept: int) -> None:
    params = {"w": torch.zeros(1000)}
    assert values_size(kept) == len(encode_values(params, {"w": torch.arange(1000) < kept}))


def test_what_is_damaged_or_of_another_model_is_refused() -> None:
    message, values = encode_mask(MASK), encode_values(PARAMS, MASK)
    with pytest.raises(ProtocolError, match="model of other parameters"):
        decode_mask(message, {"w": torch.zeros(3, 2), "b": torch.zeros(2)})
    with pytest.raises(ProtocolError, match="damaged"):
        decode_mask(message[:-1], PARAMS)
    with pytest.raises(ProtocolError, match="damaged"):
        decode_values(values[:20], MASK, PARAMS)
    more = {"w": ~MASK["w"], "b": MASK["b"]}
    with pytest.raises(ProtocolError, match=r"has 3 values of torch\.float32 and its mask keeps 5"):
        decode_values(values, more, PARAMS)
    fewer = {"w": MASK["w"], "b": torch.zeros(2, dtype=torch.bool)}
    with pytest.raises(ProtocolError, match="and its mask keeps 2"):
        decode_values(values, fewer, PARAMS)
    with pytest.raises(ProtocolError, match=r"its mask keeps 3 of torch\.float64"):
        decode_values(values, MASK, {name: value.double() for name, value in PARAMS.items()})
    with pytest.raises(ProtocolError, match="no bitmap of the right length"):
        decode_mask(encode_tensors({"layout": decode_tensors(message)["layout"]}), PARAMS)
    with pytest.raises(ModelError, match="the mask has none for 'b'"):
        encode_values(PARAMS, {"w": MASK["w"]})
