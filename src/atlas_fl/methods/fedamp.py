"""FedAMP's weights: the nearer another's model, the more it counts.

    m_kl = alpha / (n - 1) exp(-x_kl / sigma)   l != k          m_kk = 1 - sum_{l != k} m_kl
    x_kl = d_kl^2 / (mean of d^2 over all pairs)                d_kl: distance of the models (`aggregation.distances`)

Huang, Chu, Zhou, Wang, Liu, Pei and Zhang, "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021,
arXiv:2007.03797. In their algorithm every client has a model of its own, and what this rule makes is the anchor that
`--proximal-mu` pulls it to. Their sigma has the unit of a squared distance; here it counts mean squared distances of
the round, so that it means the same for every model. Heads have distances of their own, inside a task.
"""

from typing import Annotated

import numpy as np

from atlas_fl.aggregation.matrices import Square
from atlas_fl.aggregation.rules import MixingContext, present_by_group
from atlas_fl.methods.averages import Averaging
from atlas_fl.methods.robust import model_distances
from atlas_fl.ranges import Range


def attention(squares: Square, *, alpha: float, sigma: float) -> Square:
    """The rows m_k of clients with these squared distances."""
    n = len(squares)
    if n < 2:
        return np.eye(n)
    mean = squares.sum() / (n * (n - 1))
    rows = alpha / (n - 1) * np.exp(-squares / (mean * sigma if mean > 0 else 1.0))
    np.fill_diagonal(rows, 0.0)
    return np.asarray(rows + np.diag(1.0 - rows.sum(axis=1)))


class FedAvgByDistance(Averaging):
    """FedAMP's mixture: the nearer a model the more it counts (`--attention-alpha`, `--attention-sigma`)."""

    attention_alpha: Annotated[float, Range(above=0, most=1)] = 1.0
    """The most that all others together weigh in what a client of `fedamp` is pulled to."""
    attention_sigma: Annotated[float, Range(above=0)] = 1.0
    """Squared distance between models, in mean ones of the round, at which another counts for 1/e in `fedamp`."""

    name = "fedavg_by_distance"

    def rule(self, step: MixingContext) -> np.ndarray:
        """The rows m_k of those who are present."""
        matrix = np.eye(len(step.present))
        for inside in present_by_group(step.groups, step.present):
            squares = np.zeros((len(inside),) * 2)
            if step.models is not None:
                squares = model_distances(step, inside, self.options)
            rows = attention(squares, alpha=self.attention_alpha, sigma=self.attention_sigma)
            matrix[np.ix_(inside, inside)] = rows
        return matrix
