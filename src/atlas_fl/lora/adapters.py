"""New adapters and heads: one shared start for all clients, whatever their ranks."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from atlas_fl.rng import torch_generator
from atlas_fl.tree import HEAD, LORA_A, LORA_B, PRIVATE
from atlas_fl.types import Params


def init_adapters(dims: Mapping[str, tuple[int, int]], ranks: Mapping[str, int], *, seed: int) -> dict[str, Tensor]:
    """Fresh factors of every module: A uniform as in PEFT, B zero.

    `dims` are (d_in, d_out) by module. The rows of A are drawn one after another from one stream per module,
    so that a client of rank 4 starts from the first four rows of a client of rank 16.
    """
    params: dict[str, Tensor] = {}
    for module, rank in ranks.items():
        d_in, d_out = dims[module]
        bound = 1 / math.sqrt(d_in)  # Kaiming's uniform bound with a = sqrt(5), PEFT's choice
        draw = torch.empty(rank, d_in).uniform_(-bound, bound, generator=torch_generator(seed, "lora_A", module))
        params[module + LORA_A] = draw
        params[module + LORA_B] = torch.zeros(d_out, rank)
    return params


def init_head(shapes: Mapping[str, tuple[int, ...]], *, seed: int, group: str) -> dict[str, Tensor]:
    """A fresh head, the same for all clients of one group: weights normal(0, 0.02), biases zero."""
    return {
        name: torch.empty(shape).normal_(0, 0.02, generator=torch_generator(seed, "head", group, name))
        if len(shape) > 1
        else torch.zeros(shape)
        for name, shape in shapes.items()
    }


def grown(fresh: Params, warm: Params, scale: Callable[[int], float]) -> dict[str, Tensor]:
    """The warm-up's function at higher ranks: the shared A has more rows, and the new columns of B are zero.

    Exact, because the rows of A are drawn one after another: a larger A begins with the smaller one. What `warm` does
    not have is fresh.
    """
    new = {**fresh, **{key: warm[key] for key in warm if key.startswith(HEAD) or key == PRIVATE}}
    for key in (key for key in warm if key.endswith(LORA_B)):
        low, high = warm[key].shape[1], fresh[key].shape[1]
        assert high >= low, "the warm-up's rank is the smallest"
        new[key] = torch.nn.functional.pad(warm[key] * (scale(low) / scale(high)), (0, high - low))
    return new


def lora_scale(rank: int, *, alpha: float | None, rslora: bool) -> float:
    """The factor s of `s B A`: alpha / rank, or alpha / sqrt(rank); alpha is twice the rank when not given.

    >>> lora_scale(8, alpha=None, rslora=False), lora_scale(8, alpha=16, rslora=False)
    (2.0, 2.0)
    """
    alpha = 2.0 * rank if alpha is None else alpha
    return alpha / math.sqrt(rank) if rslora else alpha / rank
