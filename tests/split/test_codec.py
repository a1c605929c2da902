import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atlas_fl.errors import ProtocolError
from atlas_fl.split.codec import SMALLEST, WIRES, decode_rows, encode_rows, message_size, read_message
from atlas_fl.storage.tensors import encode_tensors
from tests.examples import examples

LARGEST = torch.finfo(torch.float32).max
FLOAT = 1e-6
"""float32's own rounding, a few times."""


def bound(rows: torch.Tensor, wire: str) -> torch.Tensor:
    """The error that the module states, for every value."""
    most = rows.abs().amax(-1, keepdim=True)
    stated = {"fp32": torch.zeros_like(rows), "bf16": rows.abs() / 256, "int8": (most / 254).expand_as(rows)}[wire]
    own = torch.zeros_like(rows) if wire == "fp32" else most * FLOAT + SMALLEST
    return stated + own


def through(rows: torch.Tensor, wire: str) -> torch.Tensor:
    return decode_rows(encode_rows(rows, wire=wire))[0]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("size", [1e-38, 1e-25, 1e-3, 1.0, 1e6, 1e30, LARGEST])
def test_every_value_is_within_the_stated_error(wire: str, size: float) -> None:
    rows = torch.empty(40, 48).uniform_(-1, 1, generator=torch.Generator().manual_seed(1)) * size
    rows[3] = 0
    rows[4, 1:] = 0
    rows[5] = size
    rows[6, 0] = size
    found = through(rows, wire)
    assert found.isfinite().all()
    assert ((found.double() - rows.double()).abs() <= bound(rows.double(), wire)).all()


@examples(200)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_no_finite_row_becomes_anything_else(values: list[float]) -> None:
    rows = torch.tensor([values, [0.0] * len(values)], dtype=torch.float32)
    for wire in WIRES:
        found = through(rows, wire)
        assert found.isfinite().all()
        assert ((found.double() - rows.double()).abs() <= bound(rows.double(), wire)).all()


def test_int8_is_near_its_bound_and_not_far_below() -> None:
    """Guards the law above: with a scale that was too fine the largest values would be cut off."""
    rows = torch.linspace(-1, 1, 4001)[None]
    error = (through(rows, "int8") - rows).abs().max()
    assert 1 / 260 < float(error) <= 1 / 254 + FLOAT


def test_a_row_does_not_spoil_its_neighbours() -> None:
    rows = torch.randn(2, 16, generator=torch.Generator().manual_seed(2))
    rows[1] *= 1e6
    assert torch.equal(through(rows, "int8")[0], through(rows[:1], "int8")[0])


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_none_and_stays_in_its_row(wire: str, bad: float) -> None:
    rows = torch.ones(3, 4)
    rows[1, 2] = bad
    found = through(rows, wire)
    assert not found[1].isfinite().all()
    assert torch.equal(found[[0, 2]], torch.ones(2, 4))


def test_bytes_by_hand() -> None:
    """Three tokens of width four: the safetensors header, padded to eights, and then the numbers."""
    # 60 characters padded to 64, behind 8 bytes for that number
    assert len('{"rows":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]}}') == 60
    rows = torch.arange(12.0).view(3, 4)
    assert len(encode_rows(rows, wire="fp32")) == 8 + 64 + 48
    # {"rows":{"dtype":"BF16","shape":[3,4],"data_offsets":[0,24]}} has 61
    assert len(encode_rows(rows, wire="bf16")) == 8 + 64 + 24
    scales = '{"scales":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"rows":{"dtype":"I8","shape":[3,4],'
    assert len(scales + '"data_offsets":[12,24]}}') == 119
    assert len(encode_rows(rows, wire="int8")) == 8 + 120 + 3 * 4 + 12
    # the scale of 0 1 2 3 is 3 / 127: 42.3 and 84.7 steps become 42 and 85
    assert through(rows, "int8")[0].tolist() == pytest.approx([0.0, 42 * 3 / 127, 85 * 3 / 127, 3.0])


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("count", [0, 1, 12, 300])
def test_the_size_is_known_without_the_rows(wire: str, count: int) -> None:
    for extra in ({"lengths": torch.ones(5, dtype=torch.int32)}, {}):
        message = encode_rows(torch.randn(count, 32), wire=wire, extra=extra)
        assert message_size(count, 32, wire=wire, extra=extra) == len(message)


def test_bfloat16_rows_come_back_in_float32() -> None:
    rows = torch.ones(2, 3, dtype=torch.bfloat16)
    assert through(rows, "fp32").dtype is torch.float32


@pytest.mark.parametrize("wire", WIRES)
def test_a_message_of_another_machine_is_read_as_it_was_written(wire: str) -> None:
    rows, lengths = torch.linspace(-1, 1, 12).reshape(3, 4), torch.tensor([2, 1], dtype=torch.int32)
    message = encode_rows(rows, wire=wire, extra={"lengths": lengths})
    expected, beside = decode_rows(message)
    assert expected.shape == (3, 4) and list(beside) == ["lengths"]
    read = read_message(message)
    assert sorted(read) == ["lengths", "rows"] and torch.equal(read["rows"], expected)
    assert torch.equal(read["lengths"], lengths) and torch.equal(beside["lengths"], lengths)


@pytest.mark.parametrize(
    "rows",
    [torch.ones(3, 4, dtype=torch.int8), torch.ones(3, 4, dtype=torch.float64), torch.ones(3)],
    ids=["int8 without scales", "float64", "one row"],
)
def test_a_message_in_another_form_is_refused(rows: torch.Tensor) -> None:
    with pytest.raises(ProtocolError, match="rows came through the cut in another form than fp32, bf16, int8"):
        read_message(encode_tensors({"rows": rows}))
