import pytest
import torch

from atlas_fl.errors import ModelError
from atlas_fl.sparse.masks import bottom_k, select_params


def taken(mask):
    return {name: own.int().tolist() for name, own in mask.items()}


def choose(values, count, within=None):
    return bottom_k(lambda name: values[name], values, count=count, within=within)


def test_ties_are_broken_by_name_and_position_by_hand() -> None:
    """Five twos and a one: with four to keep, the one and the first three twos, a's before b's."""
    values = {"b": torch.tensor([2.0, 1.0, 2.0]), "a": torch.tensor([[2.0, 2.0], [3.0, 2.0]])}
    assert taken(choose(values, 4)) == {"b": [0, 1, 0], "a": [[1, 1], [0, 1]]}
    assert list(choose(values, 4)) == ["b", "a"], "the mask is in the order of the parameters"
    assert taken(choose(values, 5)) == {"b": [1, 1, 0], "a": [[1, 1], [0, 1]]}


def test_only_what_is_within_is_kept_by_hand() -> None:
    values = {"a": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    within = {"a": torch.tensor([False, True, True, True])}
    assert taken(choose(values, 2, within)) == {"a": [0, 1, 1, 0]}
    assert taken(choose(values, 3, within)) == {"a": [0, 1, 1, 1]}
    with pytest.raises(AssertionError):
        choose(values, 4, within)


@pytest.mark.slow
def test_more_than_two_to_the_24_values_with_ties() -> None:
    """float32 cannot count this far, and `torch.quantile` refuses so many values."""
    size = 2**24 + 3
    values = {"a": torch.zeros(size), "b": torch.ones(1)}
    values["a"][-1] = -1
    found = choose(values, size - 1)
    assert int(found["a"].sum(dtype=torch.int64)) == size - 1
    assert not found["a"][-2]
    assert found["a"][-1]
    assert not found["b"]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_cannot_be_ranked_is_refused_and_named(bad: float) -> None:
    with pytest.raises(ModelError, match="weights of 'b' hold NaN or infinity"):
        choose({"a": torch.ones(2), "b": torch.tensor([1.0, bad])}, 1)


def test_float64_is_ranked_as_such_and_bfloat16_exactly() -> None:
    near = torch.tensor([1.0 + 2**-40, 1.0], dtype=torch.float64)
    assert taken(choose({"a": near}, 1)) == {"a": [0, 1]}
    assert taken(choose({"a": torch.tensor([2.0, 1.0], dtype=torch.bfloat16)}, 1)) == {"a": [0, 1]}


def test_an_unknown_parameter_is_named() -> None:
    assert list(select_params({"a": torch.ones(1), "b": torch.ones(1)}, ["b"])) == ["b"]
    with pytest.raises(ModelError, match="no parameter 'c'; it has 1, such as 'a'"):
        select_params({"a": torch.ones(1)}, ["c"])
