import pytest
import torch

from atlas_fl.aggregation.update_checks import LARGEST, check_update, unusable_models
from atlas_fl.errors import ProtocolError

SENT = {"q.lora_A": torch.ones(2, 3), "q.lora_B": torch.zeros(4, 2), "head.bias": torch.ones(2)}


def test_a_good_update_passes():
    check_update(SENT, {key: tensor * 5 for key, tensor in SENT.items()})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_are_refused(value):
    bad = torch.ones(2, 3)
    bad[1, 2] = value
    with pytest.raises(ProtocolError, match=r"q\.lora_A holds 1 values that are NaN or infinite; lower the learning"):
        check_update(SENT, {**SENT, "q.lora_A": bad})


def test_values_whose_squares_are_no_numbers_are_refused_and_smaller_ones_pass():
    check_update(SENT, {**SENT, "q.lora_A": torch.full((2, 3), 0.99 * LARGEST)})
    with pytest.raises(ProtocolError, match=r"q\.lora_A holds 6 values that are beyond 1e\+18; lower"):
        check_update(SENT, {**SENT, "q.lora_A": torch.full((2, 3), 3e38)})


def test_a_model_with_such_a_value_is_named_and_a_tensor_of_several_counts_for_each():
    bad = {"x": torch.tensor([1.0, float("nan")])}
    models = {"a": {"x": torch.ones(2)}, "b": bad, "c": {**bad, "y": torch.ones(1)}}
    assert unusable_models(models) == ("b", "c")


def test_a_missing_and_an_extra_tensor_are_named():
    renamed = {key.replace("q.", "query."): tensor for key, tensor in SENT.items()}
    message = r"the update lacks q\.lora_A, q\.lora_B and has unknown query\.lora_A, query\.lora_B; it must hold the 3"
    with pytest.raises(ProtocolError, match=message):
        check_update(SENT, renamed)
    with pytest.raises(ProtocolError, match=r"the update lacks head\.bias, q\.lora_A, q\.lora_B; it"):
        check_update(SENT, {})
    many = {f"{k}": torch.ones(1) for k in range(9)}
    with pytest.raises(ProtocolError, match="has unknown 0, 1, 2, 3, 4, 5, 6, 7 and 1 more; it must"):
        check_update(SENT, {**SENT, **many})


def test_a_wrong_shape_or_dtype_is_named():
    with pytest.raises(ProtocolError, match=r"q\.lora_B is \(4, 3\) torch.float32, sent was \(4, 2\) torch.float32"):
        check_update(SENT, {**SENT, "q.lora_B": torch.zeros(4, 3)})
    with pytest.raises(ProtocolError, match=r"head\.bias is \(2,\) torch.float16, sent was \(2,\) torch.float32"):
        check_update(SENT, {**SENT, "head.bias": torch.ones(2).half()})


def test_whole_numbers_and_empty_tensors_are_no_trouble():
    sent = {**SENT, "head.steps": torch.tensor(3), "head.none": torch.ones(0, 2)}
    check_update(sent, dict(sent))
