"""TIES and DARE as averages: the changes of the clients are merged as task vectors, and added to what was sent.

    tau_k = w'_k - w_k                       w_k as sent, w'_k as trained
    x     = sum_k p_k w_k + lambda merge(tau_1, ..., tau_n)            lambda: --merge-scale

    TIES   t_k   = tau_k, but zero where |tau_k| is not among the largest, of which --ties-density are kept
           gamma = sign(sum_k p_k t_k)
           merge = sum of p_k t_k / sum of p_k, over the k with sign(t_k) = gamma; 0 where gamma is
    DARE   merge = sum_k p_k (1 - m_k) tau_k / (1 - p),   m_k = 1 with probability p = --dare-drop, value by value

Yadav, Tam, Choshen, Raffel and Bansal, "TIES-Merging", NeurIPS 2023, arXiv:2306.01708, algorithm 1; Yu, Yu, Yu, Huang
and Li, "Language Models are Super Mario", ICML 2024, arXiv:2311.03099. They merge once, and all models count
alike; here it is every round, p_k are shares of the examples, and lambda = 1 of DARE is the average of what is left,
not its sum. TIES keeps the largest values of each tensor by itself, as PEFT does, where the paper takes those of the
whole model. In product space tau are dense updates s B A, and each client gets the best approximation of its rank of x.
"""

from collections.abc import Iterable
from math import ceil
from typing import Annotated, TypeAlias

import torch
from torch import Tensor

from atlas_fl.methods.knobs import Tried
from atlas_fl.methods.method import StepInputs
from atlas_fl.methods.server_optimizers import ByCohort, Cohort, NextValue, Values
from atlas_fl.ranges import Range
from atlas_fl.rng import torch_generator

Changes: TypeAlias = Iterable[tuple[str, float, Tensor]]
"""Each client with its share p_k and its change tau_k, float64."""


def trim(change: Tensor, density: float) -> Tensor:
    """The change, zero but for this share of its values, the largest; of equal ones at the limit all stay."""
    sizes = change.abs().flatten()
    count = max(ceil(density * len(sizes) - 1e-9), 1)
    return torch.where(change.abs() >= sizes.kthvalue(len(sizes) - count + 1).values, change, 0.0)


class Merging(ByCohort):
    """The average of what was sent, moved by the merged changes of each cohort."""

    merge_scale: Annotated[float, Range(above=0), Tried("ties", "dare", values=(1.0, 0.5, 1.5, 2.0))] = 1.0
    """Factor of the merged change that `ties` and `dare` add, their lambda."""

    def merge(self, changes: Changes, *, round: int, name: str) -> Tensor:
        """The merged change of the tensor or module of this name; by default the average."""
        del round, name
        return sum((share * change for _, share, change in changes), torch.zeros(()))

    def next_values(self, inputs: StepInputs) -> NextValue:
        """x of every value."""

        def next_value(cohort: Cohort, name: str, values: Values) -> Tensor:
            changes = (
                (inputs.federation.clients[k], share, values.trained({k: 1.0}) - values.sent({k: 1.0}))
                for k, share in cohort.weights.items()
            )
            return values.sent(cohort.weights) + self.merge_scale * self.merge(changes, round=inputs.round, name=name)

        return next_value


class Ties(Merging):
    """TIES: the largest changes, of these the sign of most, and the mean of who has it (`--ties-density`)."""

    ties_density: Annotated[float, Range(above=0, most=1), Tried("ties", values=(0.2, 0.5, 0.1, 1.0))] = 0.2
    """Share of a tensor's changes that `ties` keeps of each client, the largest."""

    name = "ties"
    differs = "merged every round and by examples; the largest values are of each tensor, there of the whole model"

    def merge(self, changes: Changes, *, round: int, name: str) -> Tensor:
        """The disjoint mean of the trimmed changes; summed by sign, so that those of one client are held at a time."""
        del round, name
        sums = shares = torch.zeros(())
        for _, share, change in changes:
            kept = trim(change, self.ties_density)
            signs = torch.stack([kept > 0, kept < 0])
            sums, shares = sums + share * kept * signs, shares + share * signs
        means, elected = sums / torch.where(shares > 0, shares, 1.0), sums.sum(0).sign()
        return torch.where(elected > 0, means[0], 0.0) + torch.where(elected < 0, means[1], 0.0)


class Dare(Merging):
    """DARE: the average of changes of which a drawn part is dropped and the rest scaled up (`--dare-drop`)."""

    dare_drop: Annotated[float, Range(least=0, below=1), Tried("dare", values=(0.5, 0.2, 0.8, 0.9))] = 0.5
    """Probability with which `dare` drops a value of a client's change."""

    name = "dare"
    differs = "merged every round, and averaged by examples"

    def merge(self, changes: Changes, *, round: int, name: str) -> Tensor:
        """The weighted sum of what is left, over the share that is."""
        total = torch.zeros(())
        for client, share, change in changes:
            draw = torch_generator(self.options.seed, "dare", round, client, name)
            is_kept = torch.rand(change.shape, generator=draw, dtype=torch.float64) >= self.dare_drop
            total = total + share / (1 - self.dare_drop) * change * is_kept.to(change.device)
        return total
