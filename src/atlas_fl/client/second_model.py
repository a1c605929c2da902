"""The second model of a client, its own, beside the shared one: Ditto, APFL, FedDPA; what it computes with.

    proximal       v                                   trained with lambda / 2 || v - w ||^2      Ditto
    interpolated   a v + (1 - a) w                     a trained, too, kept in [0, 1]             APFL
    stacked        W0 x + a s B A x + (1 - a) s B_w A_w x    with (A, B) = v             FedDPA, FedALT
    frozen         W0 x + s B A x + s_w B_w A_w x            with (A, B) = v             FLoRA, FedEx-LoRA

w is the shared model that the server sent, and stays as it is while v trains. What is stacked is one adapter of the
ranks of both, A on A_w and a B beside (1 - a) B_w, so that nothing else of the product knows of two; its head is v's.

FedALT's gate gives every layer and token x an a of its own, trained with v from G = 0 (`models.lora`):

    (a(x), 1 - a(x)) = softmax(G x + (log a, log (1 - a)))

With a = 1/2 that is the paper's; with a = 1 the gate is closed to w and nothing moves it.
Ditto: Li, Hu, Beirami and Smith 2021, arXiv:2012.04221. APFL: Deng, Kamani and Mahdavi 2020, arXiv:2003.13461. FedDPA:
Yang, Long, Shen, Jiang and Blumenstein 2024, arXiv:2403.19211, with a fixed weight at inference. FedALT: Bian, Wang,
Zhang and Xu 2025, arXiv:2503.11880.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from atlas_fl.params import HEAD, LORA_A, LORA_B, LORA_GATE, Params, lora_modules

SecondModel: TypeAlias = Literal["none", "proximal", "interpolated", "stacked", "frozen"]
"""What a client's second model is to the shared one; `frozen`: its only adapter, beside what all hold frozen."""

WEIGHT = "second.weight"
"""The name under which an interpolated model holds its a, a number of float32."""


def initial_second(start: Params, kind: SecondModel, weight: float) -> Params:
    """The second model before its first round: the one that everyone starts with, and its a where that is trained."""
    return {**start, WEIGHT: torch.tensor(weight)} if kind == "interpolated" else start


def initial_gate(model: Params) -> dict[str, Tensor]:
    """The gate before its first round: G = 0, (2, d_in) of every adapted module, so that its weight is a everywhere."""
    return {
        module + LORA_GATE: torch.zeros(2, model[module + LORA_A].shape[1], dtype=torch.float32)
        for module in lora_modules(model)
    }


def combine(
    own: Params,
    shared: Params,
    kind: SecondModel,
    *,
    weight: float,
    scale: Callable[[int], float],
    gate: Params = MappingProxyType({}),
) -> Params:
    """What a client computes with: its second model and the shared one together; gradients reach the second.

    With a `gate` (`initial_gate`) what is stacked is weighed by the input, and the gate is among the tensors.
    """
    if kind == "interpolated":
        share = own[WEIGHT]
        return {key: value + (1 - share) * (shared[key] - value) for key, value in own.items() if key != WEIGHT}
    if kind == "frozen":
        return _stack(own, shared, weights=(1.0, 1.0), scale=scale)
    if kind != "stacked":
        return own
    if not gate:
        return _stack(own, shared, weights=(weight, 1 - weight), scale=scale)
    return {**_stack(own, shared, weights=(1.0, 1.0), scale=scale), **_with_offset(gate, weight)}


def _with_offset(gate: Params, weight: float) -> dict[str, Tensor]:
    """The gate as a model holds it, (2, d_in + 1): the logarithms of both weights are its last column."""
    offset = torch.tensor([[weight], [1 - weight]]).log()
    return {key: torch.cat([value, offset.to(value)], dim=1) for key, value in gate.items()}


def _stack(own: Params, shared: Params, *, weights: tuple[float, float], scale: Callable[[int], float]) -> Params:
    stacked: dict[str, Tensor] = {key: value for key, value in own.items() if key.startswith(HEAD)}
    for module in lora_modules(own):
        if module + LORA_A not in shared:  # nothing is frozen there
            stacked |= {module + end: own[module + end] for end in (LORA_A, LORA_B)}
            continue
        (a, b), (other_a, other_b) = ((params[module + LORA_A], params[module + LORA_B]) for params in (own, shared))
        both, own_scale = scale(len(a) + len(other_a)), scale(len(a)) if len(a) else 0.0
        stacked[module + LORA_A] = torch.cat([a, other_a.to(a)])
        parts = [weights[0] * own_scale / both * b, weights[1] * scale(len(other_a)) / both * other_b.to(b)]
        stacked[module + LORA_B] = torch.cat(parts, dim=1)
    return stacked


def keep_in_range(leaves: Mapping[str, Tensor]) -> None:
    """Put a trained a back between 0 and 1, in place."""
    if WEIGHT in leaves:
        leaves[WEIGHT].detach().clamp_(0.0, 1.0)
