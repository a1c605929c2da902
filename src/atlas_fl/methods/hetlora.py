"""HetLoRA's aggregation: averages in which a client weighs as much as its update is large.

    p_k = || W_k ||_F / sum_l || W_l ||_F,    || W_k ||_F^2 = sum over modules of || s_k B_k A_k ||_F^2

Clients of small ranks hold less of an update, and weigh less for it. Cho, Liu, Xu, Fahrezi and Joshi, "Heterogeneous
LoRA for Federated Fine-tuning of On-Device Foundation Models", EMNLP 2024, arXiv:2401.06432 (sparsity-weighted
aggregation). Heads are averaged by examples, and so is all else where nobody has an update. Its pruning of a client's
own ranks during training is left out.
"""

import numpy as np

from atlas_fl.aggregation.matrices import average
from atlas_fl.aggregation.rules import MixingContext, StrategyOptions
from atlas_fl.methods.method import Method
from atlas_fl.params import LORA_A, LORA_B, Params, lora_modules
from atlas_fl.partial_sharing import is_placeholder


def update_norm(params: Params, options: StrategyOptions) -> float:
    """The Frobenius norm of all s B A of a model together, in float64; 0 where a factor is at the client alone.

    `|| B A ||^2 = sum of (B^T B) * (A A^T)`, so nothing of the size of a module is computed.
    """
    total = 0.0
    for module in lora_modules(params):
        a, b = params[module + LORA_A], params[module + LORA_B]
        if not is_placeholder(a) and not is_placeholder(b):
            a, b = a.double(), b.double()
            total += options.scale(len(a)) ** 2 * float(((b.T @ b) * (a @ a.T)).sum())
    return float(np.sqrt(max(total, 0.0)))


class FedAvgByNorm(Method):
    """One average over all clients, weighted by the Frobenius norms of their updates; heads by examples."""

    name = "fedavg_by_norm"

    def rule(self, step: MixingContext) -> np.ndarray:
        """The shares of the norms."""
        weights = step.federation.weights
        if step.models is not None and not step.parameters.is_head:
            norms = np.array([update_norm(step.models.after[name], self.options) for name in step.federation.clients])
            weights = norms if (norms * step.present).any() else weights
        return np.asarray(average(weights, step.groups, step.present, max_share=self.options.max_share))
