"""A rule: a function from the federation to a mixing matrix, and the matrix that it comes to for each tensor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
from jaxtyping import Bool, Float64, Int64

from atlas_fl.errors import ConfigError
from atlas_fl.mixing.matrices import Federation, cluster_labels, group_ids, layer_factors
from atlas_fl.mixing.shared import pooled
from atlas_fl.tree import HEAD, LORA_A, LORA_B

Matrices: TypeAlias = Callable[[str], np.ndarray]
"""The matrix M (n, n) that a parameter of this name is mixed with."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """What a rule makes a matrix from."""

    federation: Federation
    """The clients."""
    groups: Int64[np.ndarray, " n"]
    """Clients of different groups must not mix."""
    present: Bool[np.ndarray, " n"]
    """Who took part."""
    eta: float
    """Size of the step."""
    distances: Callable[[Sequence[int]], Float64[np.ndarray, "n n"]] | None = None
    """The squared distances between what these clients, by their places, hold; None before there are updates."""


class Distances(Protocol):
    """The squared distances between clients' models in one round."""

    def __call__(self, clients: Sequence[int], *, head: bool) -> Float64[np.ndarray, "n n"]:
        """Those of the clients at these places: of their heads, or of all the rest."""


Rule: TypeAlias = Callable[[Step], np.ndarray]
"""M (n, n), row-stochastic, of one step."""


def within_clusters(step: Step) -> Int64[np.ndarray, " n"]:
    """The step's groups, cut at the borders of clusters; who is undecided is a group of its own."""
    labels = zip(cluster_labels(step.federation.clusters), step.groups.tolist())
    return group_ids(list(labels))


def _layer(federation: Federation, key: str) -> int:
    module = key.removesuffix(LORA_A).removesuffix(LORA_B)
    if module not in federation.layer_of:
        raise ConfigError(f"no layer is known for {module}; layer_weighting 'importance' needs one, or use 'none'")
    return federation.layer_of[module]


def matrices_for(
    rule: Rule,
    federation: Federation,
    present: Sequence[bool],
    *,
    eta: float,
    layer_weighting: str,
    max_share: float = 1.0,
    distances: Distances | None = None,
) -> Matrices:
    """The matrix for each name: heads stay inside their task, layers may scale eta; equal matrices are one object.

    What clients share above their cuts has one row for all of them (`mixing.shared`).
    """
    there = np.asarray(present, bool)
    anyone, by_task = np.zeros(len(there), np.int64), group_ids(federation.head_groups)
    factors = layer_factors(federation) if layer_weighting == "importance" else None
    by_layer = factors is not None or any(cut is not None for cut in federation.cuts)
    made: dict[int | None, Float64[np.ndarray, "n n"]] = {}

    def matrix(key: str) -> Float64[np.ndarray, "n n"]:
        is_head = key.startswith(HEAD)
        layer = None if is_head or not by_layer else _layer(federation, key)
        place = -1 if is_head else layer
        if place not in made:
            size = eta if factors is None or layer is None else eta * float(factors[layer])
            groups = by_task if is_head else anyone
            apart = None if distances is None else partial(distances, head=is_head)
            own = rule(Step(federation=federation, groups=groups, present=there, eta=size, distances=apart))
            if layer is not None:
                own = pooled(own, federation, layer, present=there, max_share=max_share)
            made[place] = own
        return made[place]

    return matrix


def for_newcomers(rule: Rule) -> Rule:
    """The rule for those alone who are not present; everyone else keeps its model."""
    return lambda step: np.where(step.present[:, None], np.eye(len(step.present)), rule(step))
