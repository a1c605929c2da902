"""Mixing rules: from one round (`MixingContext`) to the mixing matrix of a group of parameters, and their application.

A rule is called once for each group of parameters that its granularity tells apart. The weight of a claimed number of
examples is bounded (`aggregation.matrices.bounded_weights`).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TypeAlias

import numpy as np
from torch import Tensor

from atlas_fl.aggregation.lora_product import energy_share
from atlas_fl.aggregation.matrices import (
    Chosen,
    Federation,
    Groups,
    Rows,
    Square,
    average,
    cluster_labels,
    group_ids,
    layer_factors,
)
from atlas_fl.aggregation.mixing import Mixed, Mixture
from atlas_fl.errors import ConfigError
from atlas_fl.frozen import Frozen
from atlas_fl.params import HEAD, LORA_A, LORA_B, ByClient, ServerState, TreesByClient, is_last_layer, shared_params

Matrices: TypeAlias = Callable[[str], np.ndarray | Rows]
"""The matrix M (n, n) that a parameter of this name is mixed with."""

CLUSTERS = "clusters"
"""Value of `StrategyOptions.within` for each cluster by itself."""

LAST_LAYER = "last layer"
"""The granularity of rules that mix the last layer of a head otherwise than what stands below it."""


class ParameterGroup(Frozen):
    """The parameters that one mixing matrix is for."""

    is_head: bool
    """True if they are heads."""
    layer: int | None = None
    """Their layer; None where the layers share a matrix, and for heads."""
    is_last_layer: bool = False
    """True if a rule mixes the last layer of a head otherwise than what stands below it, and they are of that layer."""

    @property
    def words(self) -> str:
        """`head`, `adapters`, or the layer."""
        if self.is_head:
            return "head"
        return "adapters" if self.layer is None else f"layer {self.layer}"


class Answers(Frozen, eq=False):
    """Figures and tensors that clients have sent beside their updates, by client."""

    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Training metrics of this round: `loss`, the mean over its steps, `steps` and `seconds`."""
    validation: Mapping[str, float] = field(default_factory=dict)
    """The newest validation score of every client that has one: the primary metric of its task."""
    reports: TreesByClient = field(default_factory=dict)
    """Reports that the method asked for, by kind and client."""


class RoundModels(Frozen, eq=False):
    """Models, state and answers of one round, as a rule sees them."""

    before: ByClient
    """The models of the last aggregation, as the server has them."""
    after: ByClient
    """The same with the updates of the clients that took part."""
    server_state: ServerState
    """State of the method."""
    answers: Answers = field(default_factory=Answers)
    """Metrics, scores and reports of the clients."""


class MixingContext(Frozen, eq=False):
    """Input of a rule."""

    federation: Federation
    """The clients."""
    groups: Groups
    """Clients of different groups must not mix."""
    present: Chosen
    """Clients that took part."""
    eta: float
    """Size of the step."""
    parameters: ParameterGroup
    """Parameters that the matrix is for."""
    models: RoundModels | None = None
    """The models of the round; None before there are updates."""

    @property
    def server_state(self) -> ServerState:
        """State of the method; empty before there are updates."""
        return {} if self.models is None else self.models.server_state

    def of(self, places: np.ndarray) -> "MixingContext":
        """The input of the rule for the clients at these places alone."""
        whole = self.federation
        clients, tasks = (tuple(np.array(names)[places].tolist()) for names in (whole.clients, whole.head_groups))
        weights, clusters, edges = whole.weights[places], whole.clusters[places], whole.adjacency[places][:, places]
        federation = replace(whole, clients=clients, weights=weights, clusters=clusters, adjacency=edges)
        federation = replace(federation, head_groups=tasks)
        return replace(self, federation=federation, groups=self.groups[places], present=self.present[places])


Rule: TypeAlias = Callable[[MixingContext], np.ndarray | Rows]
"""M (n, n), row-stochastic, of one step."""


def groups_within(step: MixingContext, within: str) -> Groups:
    """The step's groups, with `within` as `clusters` cut at the borders of clusters.

    Who is undecided is then a group of its own.
    """
    if within != CLUSTERS:
        return step.groups
    return group_ids(list(zip(cluster_labels(step.federation.clusters), step.groups.tolist())))


def present_by_group(groups: Groups, present: Chosen) -> Iterator[list[int]]:
    """The clients of each group that took part, by their places."""
    for label in sorted(set(groups.tolist())):
        yield np.flatnonzero((groups == label) & present).tolist()


def layer_of(federation: Federation, key: str) -> int:
    """The layer of an adapted module's tensor; raises ConfigError where the plan names none."""
    module = key.removesuffix(LORA_A).removesuffix(LORA_B)
    if module not in federation.layer_of:
        raise ConfigError(
            f"{module} is in no layer, and what is mixed by layer needs one; take another --strategy, --gram-by all,"
            " --layer-weighting none or --trainable lora"
        )
    return federation.layer_of[module]


def parameter_group(key: str, federation: Federation, *, granularity: str) -> ParameterGroup:
    """The parameters that this one shares a matrix with."""
    is_head = key.startswith(HEAD)
    return ParameterGroup(
        is_head=is_head,
        layer=layer_of(federation, key) if granularity == "layer" and not is_head else None,
        is_last_layer=granularity == LAST_LAYER and is_last_layer(key),
    )


def mixing_matrices(
    rule: Rule,
    federation: Federation,
    present: Sequence[bool],
    *,
    eta: float = 0.0,
    layer_weighting: str = "none",
    granularity: str = "all",
    models: RoundModels | None = None,
) -> Matrices:
    """The matrix for each name: heads stay inside their task, layers may scale eta; equal matrices are one object.

    A rule is called once for each group of parameters that `granularity` tells apart.
    """
    there = np.asarray(present, bool)
    anyone, by_task = np.zeros(len(there), np.int64), group_ids(federation.head_groups)
    factors = layer_factors(federation) if layer_weighting == "importance" else None
    made: dict[Hashable, np.ndarray | Rows] = {}

    def matrix(key: str) -> np.ndarray | Rows:
        is_head = key.startswith(HEAD)
        layer = None if is_head or factors is None else layer_of(federation, key)
        group = parameter_group(key, federation, granularity=granularity)
        size = eta if factors is None or layer is None else eta * float(factors[layer])
        if (group, size) not in made:
            groups = by_task if is_head else anyone
            made[group, size] = rule(
                MixingContext(
                    federation=federation, groups=groups, present=there, eta=size, parameters=group, models=models
                )
            )
        return made[group, size]

    return matrix


def twice_the_rank(_rank: int) -> float:
    """The scale alpha / r with alpha = 2 r: always 2."""
    return 2.0


class StrategyOptions(Frozen):
    """Settings that all methods see, by the names under which `config.schema` explains them; by default switched off.

    Settings of single methods are fields of their classes (`methods.knobs`).
    """

    space: str = "product"
    share: tuple[str, ...] = ("A", "B", "head")
    align: str = "pad"
    max_share: float = 1.0
    within: str = "all"
    eta: float = 0.1
    eta_decay: float = 1.0
    layer_weighting: str = "none"
    proximal_mu: float = 0.0
    second_model: str = "none"
    personal_models: bool = False
    control_variates: bool = False
    seed: int = 0
    rounds: int = 1
    personal_rounds: int = 0
    scale: Callable[[int], float] = twice_the_rank
    """LoRA scale s of a rank."""
    lr: float = 1e-3
    """Peak learning rate of the clients' adapters."""

    @property
    def last_aggregation(self) -> int:
        """The round that the last aggregation ends."""
        return self.rounds - self.personal_rounds


def mix(models: ByClient, matrices: Matrices, clients: Sequence[str], options: StrategyOptions) -> Mixed:
    """Everyone's model after `w <- M w`, where `matrices(key)` is M (n, n) float64, row-stochastic, for that tensor.

    In `product` space the update `s B A` of each module is mixed with the matrix of its `lora_A`, then cut to each
    client's own rank. Who has the identity's row keeps the very same tensors. Raises ProtocolError where models that
    should mix hold different tensors.
    """
    params = tuple(models[client] for client in clients)
    mixture = Mixture(
        params=params, clients=tuple(clients), matrices=matrices, align=options.align, scale=options.scale
    )
    shared = dict.fromkeys(key for one in params for key in shared_params(one, options.share))
    in_factors = options.space == "factors"
    # Sorted, because the sums below follow the order, and a model that comes from a checkpoint has another one.
    modules = [] if in_factors else sorted(key.removesuffix(LORA_A) for key in shared if key.endswith(LORA_A))
    new: dict[int, dict[str, Tensor]] = {}
    for key in (key for key in shared if in_factors or not key.endswith((LORA_A, LORA_B))):
        for targets, tensor in mixture.mix_tensor(key):
            for k in targets:
                new.setdefault(k, dict(params[k]))[key] = tensor
    thrown, total = dict.fromkeys(clients, 0.0), dict.fromkeys(clients, 0.0)
    for module in modules:
        for group in mixture.groups(module + LORA_A):
            for k, a, b, lost, whole in mixture.mix_product(group, module):
                new.setdefault(k, dict(params[k])).update({module + LORA_A: a, module + LORA_B: b})
                thrown[clients[k]] += lost
                total[clients[k]] += whole
    moved = {client: new.get(k, params[k]) for k, client in enumerate(clients)}
    return Mixed(by_client=moved, discarded=energy_share(thrown, total))


def weighted_average(options: StrategyOptions, step: MixingContext, *, within: str = "all") -> Square | Rows:
    """The rows of one average over each group, or inside each cluster, weighted by examples, over who is present."""
    return average(step.federation.weights, groups_within(step, within), step.present, max_share=options.max_share)
