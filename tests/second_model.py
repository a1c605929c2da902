"""A second model and the shared one together, by kind."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.methods.registry import SECOND_MODELS
from atlas_fl.models.registry import Family
from atlas_fl.params import HEAD, Params, lora_modules, stock_key


def combine(
    own: Params,
    shared: Params,
    kind: str,
    *,
    weight: float,
    scale: Callable[[int], float],
    gate: Params = MappingProxyType({}),
) -> Params:
    """What a client computes with."""
    options = StrategyOptions(scale=scale)
    return SECOND_MODELS[kind](options, second_weight=weight).combine(own, shared, gate)


def add_gated(model: nn.Module, params: Params, *, family: Family, scale: Callable[[int], float]) -> nn.Module:
    """The stock model with its head and, by hooks, stacked adapters and their gate, from the formula of FedALT.

    y = W x + s (w_1 B_1 A_1 x + w_2 B_2 A_2 x),  (w_1, w_2) = softmax(G x + c)

    With 2 n - 1 outputs in the order of FedLEASE's program: softmax, the n largest, divided by their sum.
    """
    head = {stock_key(key): value for key, value in params.items() if key.startswith(HEAD)}
    assert not model.load_state_dict(head, strict=False).unexpected_keys
    for module in lora_modules(params):
        parts = {name: params[f"{module}.lora_{name}"] for name in ("A", "B", "gate")}
        hook = _gated_hook(parts, scale=scale(len(parts["A"])))
        model.get_submodule(family.stock_name(module)).register_forward_hook(hook)
    return model


def _gated_hook(parts: Mapping[str, Tensor], *, scale: float) -> Callable[..., Tensor]:
    outputs = len(parts["gate"])
    count = 2 if outputs == 2 else (outputs + 1) // 2
    a, b = parts["A"].chunk(count), parts["B"].chunk(count, dim=1)
    leads_to = [0] * (outputs - count) + list(range(count))

    def add(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        x = inputs[0]
        weights = torch.softmax(x @ parts["gate"][:, :-1].T + parts["gate"][:, -1], dim=-1)
        largest, places = weights.topk(count)
        shares = largest / largest.sum(dim=-1, keepdim=True)
        for row, expert in enumerate(leads_to):
            share = (shares * (places == row)).sum(dim=-1, keepdim=True)
            output = output + scale * share * (x @ a[expert].T @ b[expert].T)
        return output

    return add
