import math

import pytest
import torch

from atlas_fl.errors import ProtocolError
from atlas_fl.runtime.protocol.answer_schema import SCHEMAS, SCORES, SECONDS, Range, TensorSchema
from atlas_fl.runtime.protocol.messages import OPTIONS


def test_every_action_has_a_schema() -> None:
    assert SCHEMAS.keys() == OPTIONS.keys()


@pytest.mark.parametrize("kind", SCORES)
def test_every_score_has_a_range_that_nothing_huge_is_in(kind: str) -> None:
    for name, own in SCORES[kind].items():
        assert own.holds(1.0)
        if name != "perplexity":  # that of a guess among many words is as large as they are many
            assert not own.holds(1e300), name
        assert own.holds(math.nan) is own.may_be_undefined
    assert not SCORES[kind]["primary"].may_be_undefined


def test_a_wide_range_has_no_room_at_its_narrow_end() -> None:
    wide = Range(most=1e78)
    assert [wide.holds(value) for value in (-1.0, -1e-9, 0.0, 1e78, 1.1e78)] == [False, True, True, True, False]
    assert not SECONDS.holds(-1.0)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(3), r"'t' is \(3,\) torch.float32; allowed: \(2,\) torch.float32"),
        (torch.ones(2).double(), "torch.float64; allowed"),
        (torch.tensor([0.5, math.nan]), "holds values from nan to nan; allowed: 0 to 1"),
        (torch.tensor([0.5, 2.0]), "holds values from 0.5 to 2; allowed: 0 to 1"),
    ],
)
def test_a_tensor_is_of_its_shape_dtype_and_range(tensor: torch.Tensor, message: str) -> None:
    schema = TensorSchema(shape=(2,), dtype=torch.float32, least=0.0, most=1.0)
    schema.check("t", torch.tensor([0.0, 1.0]))
    with pytest.raises(ProtocolError, match=message):
        schema.check("t", tensor)


def test_a_tensor_without_a_range_holds_any_finite_number() -> None:
    schema = TensorSchema(shape=(1,), dtype=torch.float64)
    schema.check("t", torch.tensor([1e300], dtype=torch.float64))
    with pytest.raises(ProtocolError, match="allowed: finite numbers"):
        schema.check("t", torch.tensor([math.inf], dtype=torch.float64))
