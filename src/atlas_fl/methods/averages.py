"""FedAvg over all clients or inside clusters, and local training.

McMahan et al. 2017, arXiv:1602.05629. Published methods that are settings of these are rows of `published.toml`: what
is shared (`share`), where it is mixed (`space`, `align`) and what a client trains (`trained_parts`, `proximal_mu`).
"""

from typing import ClassVar

from atlas_fl.aggregation.matrices import Rows, Square, identity
from atlas_fl.aggregation.rules import CLUSTERS, MixingContext, weighted_average
from atlas_fl.methods.method import Method


class Local(Method):
    """Everyone keeps what it trained; nothing is sent."""

    name = "local"
    communicates = False
    not_a_sum = "sends nothing"

    def rule(self, step: MixingContext) -> Square | Rows:
        """The identity."""
        return identity(len(step.present))


class Averaging(Method):
    """A method that begins with one average over all clients, weighted by examples; heads only inside their task."""

    def rule(self, step: MixingContext) -> Square | Rows:
        """The shares of the examples in each row."""
        return weighted_average(self.options, step)

    def arrival(self, step: MixingContext) -> Square | Rows:
        """The same, whatever rule follows."""
        return weighted_average(self.options, step)


class AveragingFactors(Averaging):
    """The same of A and B apart, of clients of one rank."""

    equal_ranks = True
    in_factors = True
    fixed: ClassVar = {"space": "factors", "within": "all"}


class FedAvg(Averaging):
    """One average over all clients, weighted by examples; heads only inside their task."""

    name = "fedavg"
    differs = "whole models"
    is_average = True
    not_a_sum = ""


class FedAvgCluster(Method):
    """The weighted average inside each cluster; who is undecided stays alone.

    With one rank everywhere and `space="factors"` this is the baseline of the papers.
    """

    name = "fedavg_cluster"
    clustered = True
    not_a_sum = ""

    def rule(self, step: MixingContext) -> Square | Rows:
        """The shares of the examples inside clusters."""
        return weighted_average(self.options, step, within=CLUSTERS)
