"""FedMomentum: the leading directions of the averaged product are everyone's adapter, and the rest is held frozen.

    U S V^T = sum_k w_k s B_k A_k        s B A = U[:, :r] S[:r] V^T[:r]        W <- W + U[:, r:] S[r:] V^T[r:]

A and B share each singular value evenly, and go on; nothing is drawn anew. Yan, Hua, Wang, Zhang, Wu, Song and Guan,
"FedMomentum: Preserving LoRA Training Momentum in Federated Fine-Tuning", 2026, arXiv:2603.08014. Their singular value
decomposition is randomised; here it is exact, and all of the rest is kept. An optimizer's momentum is no part of it.
"""

from typing import ClassVar

import torch
from torch import Tensor

from atlas_fl.aggregation.lora_product import Factors, stack_factors, truncated_svd
from atlas_fl.methods.frozen_part import WithFrozenPart


class FedAvgWithRest(WithFrozenPart):
    """The average of products cut to the rank that all have, and what it lacks joins the frozen part."""

    name = "fedavg_with_rest"
    equal_ranks = True
    in_factors = False
    fixed: ClassVar = {"space": "product", "within": "all"}

    def new_factors(self, a: list[Tensor], b: list[Tensor], weights: list[float]) -> Factors:
        """The singular directions beyond the rank."""
        rank = len(a[0])
        wide, tall = stack_factors(a, b, [self.options.scale(rank)] * len(a))
        shares = torch.tensor(weights, dtype=torch.float64, device=wide.device).repeat_interleave(rank)[None]
        (best,) = truncated_svd(wide, tall, shares, ranks=[len(wide)])
        return Factors(a=best.right[rank:], b=best.left[:, rank:])
