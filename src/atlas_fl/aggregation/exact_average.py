"""Products of LoRA factors as factors again: the exact average of products, and what averaged factors lack of it.

    sum_k w_k s_k B_k A_k              = [w_k s_k B_k ...] [A_k ...]                     rank n r
    sum_k w_k s B_k A_k - s Bbar Abar  = [w_k s (B_k - B_n) ...] [A_k - Abar ...]        rank (n - 1) r, k < n

with Bbar = sum_k w_k B_k and Abar = sum_k w_k A_k. The second form follows from sum_k w_k (A_k - Abar) = 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atlas_fl.aggregation.lora_product import stack_factors
from atlas_fl.params import LORA_A, LORA_B, Params


@dataclass(frozen=True, kw_only=True, eq=False)
class Factors:
    """An update `b @ a` of one module, its scale in b, float64."""

    a: Tensor
    """(rank, d_in); rank 0 where nothing is to be added."""
    b: Tensor
    """(d_out, rank)."""


def stack_products(
    a: Sequence[Tensor], b: Sequence[Tensor], scales: Sequence[float], weights: Sequence[float]
) -> Factors:
    """FLoRA's server step of one module: the weighted sum of all s B A; a_k is (r_k, d_in) and b_k (d_out, r_k)."""
    wide, tall = stack_factors(a, b, [weight * scale for weight, scale in zip(weights, scales, strict=True)])
    return shorten(Factors(a=wide, b=tall))


def residual(a: Sequence[Tensor], b: Sequence[Tensor], scale: float, weights: Sequence[float]) -> Factors:
    """Addition of FedEx-LoRA to a module's averaged adapter: a_k is (r, d_in), b_k (d_out, r), weights sum to 1."""
    wide = [factor.double() for factor in a]
    mean = sum((weight * factor for weight, factor in zip(weights, wide, strict=True)), torch.zeros_like(wide[0]))
    last = b[-1].double()
    others = [scale * weight * (factor.double() - last) for weight, factor in zip(weights[:-1], b[:-1])]
    rows = [wide[0][:0], *(factor - mean for factor in wide[:-1])]
    return shorten(Factors(a=torch.cat(rows), b=torch.cat([last[:, :0], *others], dim=1)))


def add_factors(frozen: Factors, new: Factors) -> Factors:
    """Frozen part after another round: the sum of both updates."""
    return shorten(Factors(a=torch.cat([frozen.a, new.a]), b=torch.cat([frozen.b, new.b], dim=1)))


def shorten(factors: Factors) -> Factors:
    """The same update with a rank of at most min(d_in, d_out): above it one factor is the identity."""
    (rank, d_in), d_out = factors.a.shape, len(factors.b)
    if rank <= min(d_in, d_out):
        return factors
    dense, identity = factors.b @ factors.a, torch.eye(min(d_in, d_out), dtype=torch.float64, device=factors.a.device)
    return Factors(a=dense, b=identity) if d_out <= d_in else Factors(a=identity, b=dense)


def to_adapter(module: str, factors: Factors, scale: Callable[[int], float]) -> dict[str, Tensor]:
    """float32 A and B with `scale(rank) B A` as the update; nothing of rank 0."""
    rank = len(factors.a)
    return (
        {module + LORA_A: factors.a.float(), module + LORA_B: (factors.b / scale(rank)).float().contiguous()}
        if rank
        else {}
    )


def from_adapter(module: str, adapter: Params, scale: Callable[[int], float], *, like: Factors) -> Factors:
    """The update of one module of this adapter; of rank 0, of the shape of `like`, where it has none."""
    if module + LORA_A not in adapter:
        return Factors(a=like.a[:0], b=like.b[:, :0])
    a, b = (adapter[module + end].to(like.a) for end in (LORA_A, LORA_B))
    return Factors(a=a, b=scale(len(a)) * b)
