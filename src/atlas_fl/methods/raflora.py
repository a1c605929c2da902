"""raFLoRA: averages of products in which each partition of the ranks is averaged over the clients that have it.

    r_1 < ... < r_m     the ranks of a module at the clients of a cohort that took part, r_0 = 0
    W = sum over h of sum over k with rank r_h or more of (n_k / N_h) s_k B_k[:, r_{h-1}:r_h] A_k[r_{h-1}:r_h]

N_h are the examples of these clients, and each client gets the best approximation of its rank of W. In FlexLoRA's
average n_k / N_1 weighs every partition, so that what few clients have decays round by round: "rank collapse". Wu, Hu,
Min and Wang, "Preventing Rank Collapse in Federated Low-Rank Adaptation with Client Heterogeneity", 2026,
arXiv:2602.13486. How a product is split into A and B is that of product space, evenly. With one rank it is
FlexLoRA.
"""

from typing import ClassVar

import torch
from torch import Tensor

from atlas_fl.aggregation.lora_product import stack_factors
from atlas_fl.methods.method import StepInputs
from atlas_fl.methods.server_optimizers import ByCohort, Cohort, NextValue, Values
from atlas_fl.params import LORA_A, LORA_B


class FedAvgByRank(ByCohort):
    """The weighted average, of each rank's part of the products over the clients that have it; heads by task."""

    name = "fedavg_by_rank"
    needs = ""
    fixed: ClassVar = {"space": "product"}

    def next_values(self, inputs: StepInputs) -> NextValue:
        """W of every module, and the average of all else."""

        def next_value(cohort: Cohort, name: str, values: Values) -> Tensor:
            models = [inputs.updates[inputs.federation.clients[k]] for k in cohort.weights]
            if name + LORA_A not in models[0]:
                return values.trained(cohort.weights)
            a, b = ([params[name + end] for params in models] for end in (LORA_A, LORA_B))
            # every row of a partition has the same clients, so that it can be weighed by itself
            shares = list(cohort.weights.values())
            counts = [len(factor) for factor in a]
            totals = [sum(share for share, count in zip(shares, counts) if count > row) for row in range(max(counts))]
            weights = []
            for factor, share, count in zip(a, shares, counts):
                total = torch.tensor(totals[:count], dtype=torch.float64, device=factor.device)
                weights.append(self.options.scale(count) * share / total)
            stack_a, stack_b = stack_factors(a, b, weights)
            return stack_b @ stack_a

        return next_value
