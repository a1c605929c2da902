"""A rule: from one round to the mixing matrix of a group of parameters, and the matrix of each tensor by its name."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Float64, Int64

from atlas_fl.errors import ConfigError
from atlas_fl.mixing.matrices import Federation, cluster_labels, group_ids, layer_factors
from atlas_fl.mixing.shared import pooled
from atlas_fl.tree import HEAD, LORA_A, LORA_B
from atlas_fl.types import ByClient, ServerState

Matrices: TypeAlias = Callable[[str], np.ndarray]
"""The matrix M (n, n) that a parameter of this name is mixed with."""

GRANULARITIES = ("all", "layer", "kind", "layer_and_kind")
"""Which parameters of a model share a mixing matrix, besides heads, which mix inside a task."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """The parameters that one mixing matrix is for."""

    is_head: bool
    """Whether they are heads."""
    layer: int | None = None
    """Their layer; None where the layers share a matrix, and for heads."""
    kind: str | None = None
    """`A`, `B`, `product` (A and B together), `weights` or `head`; None where the kinds share a matrix."""


def parameter_kind(key: str, space: str) -> str:
    """What kind of parameter this is: `head`, `A`, `B`, `weights`, or in product space `product` for A and B."""
    if key.startswith(HEAD):
        return "head"
    if key.endswith((LORA_A, LORA_B)):
        return "product" if space == "product" else key[-1]
    return "weights"


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundModels:
    """What a rule sees of one round besides the federation."""

    before: ByClient
    """The models of the last aggregation, as the server has them."""
    after: ByClient
    """The same with the updates of the clients that took part."""
    server_state: ServerState
    """What the strategy remembers."""


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
    parameters: ParameterGroup
    """What the matrix is for."""
    models: RoundModels | None = None
    """The models of the round; None before there are updates."""


Rule: TypeAlias = Callable[[Step], np.ndarray]
"""M (n, n), row-stochastic, of one step."""


def within_clusters(step: Step) -> Int64[np.ndarray, " n"]:
    """The step's groups, cut at the borders of clusters; who is undecided is a group of its own."""
    labels = zip(cluster_labels(step.federation.clusters), step.groups.tolist())
    return group_ids(list(labels))


def layer_of(federation: Federation, key: str) -> int:
    """The layer of an adapted module's tensor; raises ConfigError where the plan names none."""
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
    granularity: str = "all",
    space: str = "product",
    models: RoundModels | None = None,
) -> Matrices:
    """The matrix for each name: heads stay inside their task, layers may scale eta; equal matrices are one object.

    A rule is called once for each group of parameters that `granularity` tells apart.
    What clients share above their cuts has one row for all of them (`mixing.shared`).
    """
    there = np.asarray(present, bool)
    anyone, by_task = np.zeros(len(there), np.int64), group_ids(federation.head_groups)
    factors = layer_factors(federation) if layer_weighting == "importance" else None
    is_pooled = any(cut is not None for cut in federation.cuts)
    by_layer, by_kind = granularity in ("layer", "layer_and_kind"), granularity in ("kind", "layer_and_kind")
    made: dict[Hashable, Float64[np.ndarray, "n n"]] = {}

    def matrix(key: str) -> Float64[np.ndarray, "n n"]:
        is_head = key.startswith(HEAD)
        layer = None if is_head or not (by_layer or is_pooled or factors is not None) else layer_of(federation, key)
        group = ParameterGroup(
            is_head=is_head, layer=layer if by_layer else None, kind=parameter_kind(key, space) if by_kind else None
        )
        size = eta if factors is None or layer is None else eta * float(factors[layer])
        if (group, size) not in made:
            groups = by_task if is_head else anyone
            made[group, size] = rule(
                Step(federation=federation, groups=groups, present=there, eta=size, parameters=group, models=models)
            )
        if layer is None or not is_pooled:
            return made[group, size]
        if (group, size, layer) not in made:
            row = pooled(made[group, size], federation, layer, present=there, max_share=max_share)
            made[group, size, layer] = row
        return made[group, size, layer]

    return matrix


def for_newcomers(rule: Rule) -> Rule:
    """The rule for those alone who are not present; everyone else keeps its model."""
    return lambda step: np.where(step.present[:, None], np.eye(len(step.present)), rule(step))
