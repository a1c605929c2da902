"""Trained tensors in few bytes: all bits come back, a change of few values is short, and damage is refused."""

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atlas_fl.errors import ProtocolError
from atlas_fl.methods.update_filters import apply_filter
from atlas_fl.sparse.compression import compress, decompress

ANY = arrays.arrays(np.float32, (2, 7), elements=st.floats(width=32))
SMALL = arrays.arrays(np.float32, (2, 7), elements=st.floats(-4, 4, width=32))


def filtered(start: torch.Tensor, words: list[str]) -> torch.Tensor:
    change = {"w": torch.randn(start.shape, generator=torch.Generator().manual_seed(1)) * 0.01}
    for word in words:
        change = apply_filter(word, change, torch.Generator().manual_seed(2))
    return start + change["w"]


@given(ANY, SMALL)
def test_every_tensor_comes_back_with_all_its_bits(values: np.ndarray, begun: np.ndarray) -> None:
    params, start = {"w": torch.from_numpy(values)}, {"w": torch.from_numpy(begun)}
    (back,) = decompress(compress(params, start), start).values()
    assert back.view(torch.int32).equal(params["w"].view(torch.int32))
    assert back.shape == start["w"].shape


def test_bytes_worked_out_by_hand() -> None:
    start = {"w": torch.tensor([1.0, 2.0, -1.0, 0.5])}
    moved = {"w": torch.tensor([1.0 + 3 / 8, 2.0, -1.0 - 2 / 8, 0.5 + 100 / 8])}
    # 12.5 / 127.5 is between 2^-4 and 2^-3: steps of 1 / 8
    assert compress(moved, start)["w"].tolist() == [1, 256 - 3, 0, 3, 0, 256 - 2, 100]
    one = {"w": torch.tensor([1.0, 2.0, -1.0, 0.5 + 1 / 8])}
    # a bit for each value, from the left, and the largest number of steps that one byte has: 64 of 1 / 512
    assert compress(one, start)["w"].tolist() == [1, 256 - 9, 1, 0b00010000, 64]


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (["quantise=8"], 1.01),
        (["quantise=4"], 1.01),
        (["quantise=16"], 2.01),
        (["topk=0.1"], 0.1 * 4 + 1 / 8 + 0.01),
        (["topk=0.1", "quantise=8"], 0.1 + 1 / 8 + 0.01),
        (["clip=0.1"], 4.01),
    ],
)
def test_a_filtered_change_takes_so_many_bytes_a_value_at_most(words: list[str], most: float) -> None:
    start = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    params = {"w": filtered(start, words)}
    message = compress(params, {"w": start})["w"]
    assert message.dtype is torch.uint8
    assert message.numel() <= most * start.numel()
    assert decompress({"w": message}, {"w": start})["w"].equal(params["w"])


def test_what_has_no_start_or_is_of_another_type_goes_as_it_is() -> None:
    params = {"new": torch.ones(3), "half": torch.ones(3, dtype=torch.bfloat16), "private": torch.ones(3).byte()}
    start = {"half": torch.zeros(3, dtype=torch.bfloat16), "private": torch.zeros(3).byte()}
    assert all(one is params[key] for key, one in compress(params, start).items())
    assert all(one is params[key] for key, one in decompress(params, start).items())


@pytest.mark.parametrize(
    "message",
    [
        [],
        [1, 0],
        [1, 0, 0],
        [3, 0, 0, 1, 2, 3, 4],
        [1, 0, 0, 1, 2, 3],
        [1, 0, 0, 1, 2, 3, 4, 5],
        [2, 0, 0, 1, 2, 3, 4],
        [1, 0, 1],
        [1, 0, 1, 0b11000000, 5],
        [0, 0, 0],
    ],
)
def test_bytes_that_no_client_makes_are_refused(message: list[int]) -> None:
    sent = {"w": torch.tensor(message, dtype=torch.uint8)}
    with pytest.raises(ProtocolError, match="a compressed tensor is damaged, or of another model"):
        decompress(sent, {"w": torch.zeros(4)})


def test_a_hostile_exponent_gives_values_that_the_screening_refuses() -> None:
    sent = {"w": torch.tensor([1, 127, 0, 127, 127, 127, 127], dtype=torch.uint8)}
    assert not decompress(sent, {"w": torch.ones(4)})["w"].isfinite().any()
