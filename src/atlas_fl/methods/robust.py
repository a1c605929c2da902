"""Robust aggregation against hostile clients: median, trimmed mean, Krum, multi-Krum, geometric median.

    median             of every value, over the clients
    trimmed_mean       the mean of every value without the ceil(trim n) lowest and highest
    krum               the model with the least sum of squared distances to its n - f - 2 nearest
    multi_krum         the mean of the n - f models with the least such sums
    geometric_median   the point with the least sum of distances to all, by Weiszfeld's steps c_k = 1 / max(nu, d_k)

Median and trimmed mean: Yin, Chen, Ramchandran and Bartlett, 2018. Krum: Blanchard, El Mhamdi, Guerraoui and Stainer,
2017. Geometric median: RFA, Pillutla, Kakade and Harchaoui, 2022. Every client counts alike: a claim of examples has no
effect.

The first two are no mixing matrix. The rows of the others follow from the distances between the models
(`aggregation.distances`). All are applied inside the groups that may mix: everyone, or each cluster; heads inside
their task. An update's norm is bounded before any rule (`aggregation.norm_bound`).
"""

from collections.abc import Sequence
from math import ceil
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from atlas_fl.aggregation.distances import squared_distances
from atlas_fl.aggregation.matrices import Federation, Square, Vector, average
from atlas_fl.aggregation.rules import MixingContext, StrategyOptions, groups_within
from atlas_fl.methods.method import Method, StepInputs
from atlas_fl.methods.server_optimizers import ByCohort, NextValue, cohorts
from atlas_fl.params import ByClient, Params, ServerState
from atlas_fl.ranges import Range

TIE = 1e-9
"""Relative difference of scores below which they are equal; equal ones are averaged, so that no order decides."""
SMOOTHING = 1e-6
"""nu: distances below it count as this."""
STEPS, SETTLED = 1000, 1e-12
"""Most steps of Weiszfeld's algorithm, and the change of a weight below which it has ended."""


def num_trimmed(n: int, trim: float) -> int:
    """Number of n values that are left out at each end: the share, rounded up, and never all but one or two."""
    return min(ceil(trim * n - 1e-9), (n - 1) // 2)


def krum_scores(squares: Square, byzantine: int) -> Vector:
    """The sum of squared distances to the n - f - 2 nearest others, at least one, where there are others."""
    n = len(squares)
    nearest = min(max(n - byzantine - 2, 1), n - 1)
    others = np.array([np.delete(row, k) for k, row in enumerate(squares)]).reshape(n, n - 1)
    return np.asarray(np.sort(others, axis=1)[:, :nearest].sum(axis=1))


def krum_weights(squares: Square, *, byzantine: int, selected: int) -> Vector:
    """Equal weights of so many models with the least scores, and of those that tie with the last of them."""
    scores = krum_scores(squares, byzantine)
    chosen = scores <= np.sort(scores)[selected - 1] * (1 + TIE)
    return np.asarray(chosen / chosen.sum())


def weiszfeld_weights(squares: Square) -> Vector:
    """The weights c of the geometric median `sum_k c_k w_k`, from the mean on.

    The distance of a point to a model follows from those between models: d_k^2 = sum_l c_l d_kl^2 - half of c^T D c.
    """
    weights = np.full(len(squares), 1 / len(squares))
    for _ in range(STEPS):
        pull = squares @ weights
        inverse = 1 / np.sqrt(np.maximum(pull - weights @ pull / 2, SMOOTHING**2))
        new = inverse / inverse.sum()
        moved, weights = float(np.abs(new - weights).max()), new
        if moved < SETTLED:
            break
    return np.asarray(weights)


def model_distances(step: MixingContext, clients: Sequence[int], options: StrategyOptions) -> Square:
    """The squared distances between the models of these clients, by index: of their heads, or of all the rest."""
    assert step.models is not None, "distances are of models"
    names = [step.federation.clients[k] for k in clients]
    return squared_distances(step.models.after, names, options, head=step.parameters.is_head)


class Robust(Method):
    """An aggregate of the present of each group that few hostile clients do not move far.

    Its rows are the plain mean of each group, which says who is aggregated with whom.
    """

    byzantine: Annotated[int, Range(least=0)] = 1
    """Hostile clients that `krum` and `multi_krum` expect among those that are aggregated; other robust rules warn
    where they withstand fewer."""

    differs = "whole models; what is aggregated are models of a round, there single gradients"
    reads_within = True

    def withstands(self, n: int) -> int:
        """Number of hostile clients of n that it withstands."""
        return (n - 1) // 2

    def rule(self, step: MixingContext) -> np.ndarray:
        """The plain mean of the present of each group."""
        return np.asarray(average(np.ones(len(step.present)), groups_within(step, self.options.within), step.present))

    def warnings(self, federation: Federation) -> tuple[str, ...]:
        """The cohorts in which it withstands fewer than `--byzantine`."""
        everyone = cohorts(federation, [True] * len(federation.clients), self.options)
        sizes = {cohort.name: len(cohort.members) for cohort in everyone}
        return tuple(
            f"{self.name}: {name}: {n} clients withstand {self.withstands(n)} hostile ones, and --byzantine is"
            f" {self.byzantine}"
            for name, n in sizes.items()
            if self.withstands(n) < self.byzantine
        )


class Median(Robust, ByCohort):
    """The median of every value over the clients: less than half of them may be hostile."""

    name = "median"

    def middle(self, stack: Tensor) -> Tensor:
        """The median over the first axis; of an even number the mean of the two in the middle."""
        ordered, n = stack.sort(0).values, len(stack)
        return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2

    def next_values(self, _inputs: StepInputs) -> NextValue:
        """The middle of what was trained, value by value."""
        return lambda cohort, _, values: self.middle(torch.stack([values.trained({k: 1.0}) for k in cohort.weights]))

    def initial_models(
        self, server_state: ServerState, client_models: ByClient, fresh: ByClient, federation: Federation
    ) -> dict[str, Params]:
        """The newcomers' models: the middle of those that the others hold."""
        everyone = {**client_models, **fresh}
        updates = {client: everyone[client] for client in everyone if client not in fresh}
        inputs = StepInputs(
            server_state=server_state, client_models=everyone, updates=updates, federation=federation, round=1
        )
        models = self.aggregate(inputs).client_models
        return {client: models[client] for client in fresh}


class TrimmedMean(Median):
    """The mean of every value without its lowest and highest (`--trim`)."""

    trim: Annotated[float, Range(least=0, below=0.5)] = 0.2
    """Share of the clients whose values `trimmed_mean` leaves out at each end, rounded up."""

    name = "trimmed_mean"

    def middle(self, stack: Tensor) -> Tensor:
        """The mean over the first axis without the lowest and highest values."""
        count = num_trimmed(len(stack), self.trim)
        return stack.sort(0).values[count : len(stack) - count].mean(0)

    def withstands(self, n: int) -> int:
        """As many as are left out at each end."""
        return num_trimmed(n, self.trim)


class ByDistance(Robust):
    """Weights of each group's present, as the distances between their models give them."""

    def weigh(self, squares: Square) -> Vector:
        """The weights of a group from the squared distances between its models; by default the plain mean."""
        return np.full(len(squares), 1 / len(squares))

    def rule(self, step: MixingContext) -> np.ndarray:
        """The weights of each group's present; before there are updates, the plain mean."""
        groups = groups_within(step, self.options.within)
        matrix = super().rule(step)
        if step.models is None:
            return matrix
        for label in set(groups.tolist()):
            inside = np.flatnonzero((groups == label) & step.present).tolist()
            if len(inside) > 1:
                row = np.zeros(len(matrix))
                row[inside] = self.weigh(model_distances(step, inside, self.options))
                matrix[groups == label] = row
        return matrix


class Krum(ByDistance):
    """The one model that is nearest to its neighbours, for everyone (`--byzantine`)."""

    name = "krum"

    def withstands(self, n: int) -> int:
        """Fewer than half of n - 2."""
        return max((n - 3) // 2, 0)

    def weigh(self, squares: Square) -> Vector:
        """All weight on the model with the least score."""
        return krum_weights(squares, byzantine=self.byzantine, selected=1)


class MultiKrum(Krum):
    """The mean of the models that are near to their neighbours: all but `--byzantine`."""

    name = "multi_krum"

    def weigh(self, squares: Square) -> Vector:
        """Equal weights of the models with the least scores."""
        n, f = len(squares), self.byzantine
        # all but f, and more than half
        return krum_weights(squares, byzantine=f, selected=n - min(f, (n - 1) // 2))


class GeometricMedian(ByDistance):
    """The point with the least sum of distances to all models: less than half of them may be hostile."""

    name = "geometric_median"
    differs = "whole models; every client counts alike, there by examples"

    def weigh(self, squares: Square) -> Vector:
        """Weiszfeld's weights."""
        return weiszfeld_weights(squares)
