"""Trees of tensors and their flat form."""

import torch

from atlas_fl.params import flatten_state, unflatten_state


def test_a_server_state_is_flat_by_paths_and_comes_back_as_it_was() -> None:
    one, two, three = (torch.tensor([value]) for value in (1.0, 2.0, 3.0))
    state = {"step": one, "moments": {"all": {"q.lora_A": two, "head.weight": three}, "none": {}}}
    flat = flatten_state(state)
    assert flat == {"step": one, "moments/all/q.lora_A": two, "moments/all/head.weight": three}
    assert unflatten_state(flat) == {"step": one, "moments": {"all": {"q.lora_A": two, "head.weight": three}}}
    assert unflatten_state({}) == {} == flatten_state({})
