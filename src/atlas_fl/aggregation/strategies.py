"""Strategies: FedAvg, clustered FedAvg, `atlas_laplacian`, local training; checks of updates; the Strategy protocol.

A strategy is a frozen pair of functions, `init` and `aggregate`. A rule goes from one round (`MixingContext`) to the
mixing matrix of a group of parameters. An update is checked before it may meet the models of others. The weight of a
claimed number of examples is bounded (`aggregation.matrices.bounded_weights`).

FedAvg: McMahan et al., 2017. Laplacian personalisation on the graph of clients: MIRA, Elbakary et al., 2024.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64

from atlas_fl.aggregation.matrices import (
    LAPLACIANS,
    Federation,
    average,
    cluster_labels,
    drop_edges,
    group_ids,
    laplacian_step,
    layer_factors,
)
from atlas_fl.aggregation.mixing import Mixed, Reduce, check_mixing, mix, sync_shared, tie_rows
from atlas_fl.errors import ConfigError, ProtocolError, unknown_name
from atlas_fl.params import HEAD, LORA_A, LORA_B, ByClient, Params, ServerState, is_last_layer

LARGEST = 1e18
"""Size of a weight above which it is refused: the square of a little more is no float32 any longer."""


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_update(start: Params, update: Params) -> None:
    """Raise ProtocolError unless the update has the keys, shapes and dtypes of `start`, no value beyond `LARGEST`."""
    missing, extra = start.keys() - update.keys(), update.keys() - start.keys()
    if missing or extra:
        parts = [f"lacks {_some(missing)}"] if missing else []
        parts += [f"has unknown {_some(extra)}"] if extra else []
        raise ProtocolError(f"the update {' and '.join(parts)}; it must hold the {len(start)} tensors that were sent")
    for key, sent in start.items():
        got = update[key]
        if got.shape != sent.shape or got.dtype != sent.dtype:
            raise ProtocolError(
                f"{key} is {tuple(got.shape)} {got.dtype}, sent was {tuple(sent.shape)} {sent.dtype}; return it as sent"
            )
    check_finite(update)


def check_finite(update: Params) -> None:
    """Raise ProtocolError where a value is NaN, infinite or beyond `LARGEST`."""
    for key, bad in unusable_values(update):
        kind = f"beyond {LARGEST:g}" if bool(update[key].isfinite().all()) else "NaN or infinite"
        raise ProtocolError(f"{key} holds {bad} values that are {kind}; lower the learning rate or clip")


def unusable_values(params: Params) -> Iterator[tuple[str, int]]:
    """(name, how many) of every tensor with values that are NaN, infinite or beyond `LARGEST` in size."""
    floats = {key: tensor for key, tensor in params.items() if tensor.is_floating_point() and tensor.numel()}
    # one call for all: no value is larger than the norm, and NaN and infinity survive it
    norms = torch._foreach_norm(list(floats.values())) if floats else []
    for key, norm in zip(floats, torch.stack(tuple(norms)).tolist() if floats else []):
        bad = 0 if norm <= LARGEST else int((~(floats[key].abs() <= LARGEST)).sum())
        if bad:
            yield key, bad


def unusable_models(models: ByClient) -> tuple[str, ...]:
    """The clients whose models hold such values; tensors that several share are read once."""
    tensors = {id(tensor): tensor for params in models.values() for tensor in params.values()}
    bad = {int(key) for key, _ in unusable_values({str(index): tensor for index, tensor in tensors.items()})}
    return tuple(name for name, params in models.items() if bad & {id(tensor) for tensor in params.values()})


Matrices: TypeAlias = Callable[[str], np.ndarray]
"""The matrix M (n, n) that a parameter of this name is mixed with."""

CLUSTERS = "clusters"
"""Of `StrategyOptions.within`: each cluster by itself."""

GRANULARITIES = ("all", "layer", "kind", "layer_and_kind")
"""Which parameters of a model share a mixing matrix, besides heads, which mix inside a task."""

LAST_LAYER = "last layer"
"""The granularity and the kind of rules that mix the last layer of a head otherwise than what stands below it."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """The parameters that one mixing matrix is for."""

    is_head: bool
    """Whether they are heads."""
    layer: int | None = None
    """Their layer; None where the layers share a matrix, and for heads."""
    kind: str | None = None
    """`A`, `B`, `product` (A and B together), `weights`, `head` or `last layer`; None where the kinds share a
    matrix."""

    @property
    def words(self) -> str:
        """`head`, `adapters`, or the layer and the kind."""
        layer = None if self.layer is None else f"layer {self.layer}"
        return "head" if self.is_head else ", ".join(filter(None, (layer, self.kind))) or "adapters"


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
class MixingContext:
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


Rule: TypeAlias = Callable[[MixingContext], np.ndarray]
"""M (n, n), row-stochastic, of one step."""


def within_clusters(step: MixingContext) -> Int64[np.ndarray, " n"]:
    """The step's groups, cut at the borders of clusters; who is undecided is a group of its own."""
    labels = zip(cluster_labels(step.federation.clusters), step.groups.tolist())
    return group_ids(list(labels))


def groups_within(step: MixingContext, within: str) -> Int64[np.ndarray, " n"]:
    """The step's groups, with `within` as `clusters` cut at the borders of clusters."""
    return within_clusters(step) if within == CLUSTERS else step.groups


def layer_of(federation: Federation, key: str) -> int:
    """The layer of an adapted module's tensor; raises ConfigError where the plan names none."""
    module = key.removesuffix(LORA_A).removesuffix(LORA_B)
    if module not in federation.layer_of:
        raise ConfigError(f"no layer is known for {module}; layer_weighting 'importance' needs one, or use 'none'")
    return federation.layer_of[module]


def parameter_group(key: str, federation: Federation, *, granularity: str, space: str) -> ParameterGroup:
    """The parameters that this one shares a matrix with."""
    is_head = key.startswith(HEAD)
    if granularity == LAST_LAYER:
        return ParameterGroup(is_head=is_head, kind=LAST_LAYER if is_last_layer(key) else None)
    by_layer, by_kind = granularity in ("layer", "layer_and_kind"), granularity in ("kind", "layer_and_kind")
    return ParameterGroup(
        is_head=is_head,
        layer=layer_of(federation, key) if by_layer and not is_head else None,
        kind=parameter_kind(key, space) if by_kind else None,
    )


def mixing_matrices(
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
    What clients share above their cuts has one row for all of them (`aggregation.mixing`).
    """
    there = np.asarray(present, bool)
    anyone, by_task = np.zeros(len(there), np.int64), group_ids(federation.head_groups)
    factors = layer_factors(federation) if layer_weighting == "importance" else None
    is_pooled = any(cut is not None for cut in federation.cuts)
    made: dict[Hashable, Float64[np.ndarray, "n n"]] = {}

    def matrix(key: str) -> Float64[np.ndarray, "n n"]:
        is_head = key.startswith(HEAD)
        layer = None if is_head or not (is_pooled or factors is not None) else layer_of(federation, key)
        group = parameter_group(key, federation, granularity=granularity, space=space)
        size = eta if factors is None or layer is None else eta * float(factors[layer])
        if (group, size) not in made:
            groups = by_task if is_head else anyone
            made[group, size] = rule(
                MixingContext(
                    federation=federation, groups=groups, present=there, eta=size, parameters=group, models=models
                )
            )
        if layer is None or not is_pooled:
            return made[group, size]
        if (group, size, layer) not in made:
            row = tie_rows(made[group, size], federation, layer, present=there, max_share=max_share)
            made[group, size, layer] = row
        return made[group, size, layer]

    return matrix


def for_newcomers(rule: Rule) -> Rule:
    """The rule for those alone who are not present; everyone else keeps its model."""
    return lambda step: np.where(step.present[:, None], np.eye(len(step.present)), rule(step))


LAYER_WEIGHTINGS = ("none", "importance")


def twice_the_rank(_rank: int) -> float:
    """The scale alpha / r with alpha = 2 r: always 2."""
    return 2.0


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The numbers and words that rules are made from."""

    eta: float = 0.1
    """Step of the Laplacian in round one."""
    eta_decay: float = 1.0
    """Factor on eta after each round."""
    laplacian: str = "random_walk"
    """Which Laplacian."""
    space: str = "product"
    """Where the adapters are mixed: `product` or `factors`."""
    share: tuple[str, ...] = ("A", "B", "head")
    """What leaves the client."""
    align: str = "pad"
    """How factors of different ranks meet."""
    layer_weighting: str = "none"
    """`importance` scales eta by each layer's importance."""
    scale: Callable[[int], float] = twice_the_rank
    """LoRA scale s of a rank."""
    max_share: float = 1.0
    """Largest share of a weighted average that one client's examples may give it (`matrices.bounded_weights`)."""
    within: str = "all"
    """Where robust rules, server optimizers and `pfedgraph` are applied, over `all` clients or inside `clusters`, with
    which `kriging` averages where clients differ by less than their noise."""
    trim: float = 0.2
    """Share of the clients whose values `trimmed_mean` leaves out at each end."""
    byzantine: int = 1
    """Hostile clients that `krum` and `multi_krum` expect."""
    server_lr: float | None = None
    """Learning rate eta of a server optimizer; its own default where None."""
    server_beta1: float | None = None
    """Share of a server optimizer's first moment that stays; its own default where None."""
    server_beta2: float = 0.99
    """Share of the second moment of `fedadam` and `fedyogi` that stays."""
    server_tau: float = 1e-3
    """What is added to the root of the second moment; its square is the second moment to begin with."""
    gram_by: str = "all"
    """Which parameters of `pfedgraph` and `kriging` have a mixing matrix of their own (`GRANULARITIES`)."""
    gram_alpha: float = 0.8
    """How much the rows of `pfedgraph` stay with the shares of the examples."""
    attention_alpha: float = 1.0
    """The most that all others together weigh in a row of `fedavg_by_distance`."""
    attention_sigma: float = 1.0
    """Squared distance, in mean ones of the round, at which a model counts for 1/e there."""
    bipartition_ratio: float = 0.4
    """`cfl` cuts a cluster whose average update is shorter than this share of its longest."""
    tree_step: int = 1
    """By how many clusters a layer of `fedtreelora` may have more than the one below."""
    tree_threshold: float = 0.1
    """The silhouette that cuts of `fedtreelora` must exceed where the layer below has one cluster."""


@dataclass(frozen=True, kw_only=True)
class Aggregated:
    """What one server step gives."""

    server_state: ServerState
    """What the strategy remembers."""
    client_models: ByClient
    """The model of every client: what it starts the next round with."""
    discarded: Mapping[str, float]
    """By client, the share of its mixed update's squared norm that its ranks could not hold (product space; else 0)."""


@runtime_checkable
class Aggregate(Protocol):
    """One server step: a pure function of state, models, the updates of who took part, and the federation."""

    def __call__(
        self,
        server_state: ServerState,
        client_models: ByClient,
        updates: ByClient,
        federation: Federation,
        *,
        round: int,
    ) -> Aggregated:
        """The new state, and what every client starts the next round with.

        `client_models` are those of the last aggregation, of every client.
        """


@runtime_checkable
class InitialModels(Protocol):
    """The models of clients that join a run, from those of the others and their own fresh ones; a pure function."""

    def __call__(
        self, server_state: ServerState, client_models: ByClient, fresh: ByClient, federation: Federation
    ) -> dict[str, Params]:
        """The newcomers' models, mixed from those that the others hold; `federation` is of all of them."""


@runtime_checkable
class MatricesOf(Protocol):
    """The matrices of one round."""

    def __call__(
        self, federation: Federation, present: Sequence[bool], *, round: int, models: RoundModels | None = None
    ) -> Matrices:
        """The matrix for each parameter's name, when these clients took part.

        A rule that depends on the updates needs `models`; without them it says who may mix with whom.
        """


def no_state(_client_models: ByClient) -> ServerState:
    """The state of a strategy that remembers nothing but the models."""
    return {}


def any_models(_client_models: ByClient, _federation: Federation) -> None:
    """Nothing: a strategy that takes models of any ranks and layers."""


def no_reports(server_state: ServerState, _reports: ByClient) -> ServerState:
    """The state of a strategy that asks for no reports."""
    return server_state


def same_state(server_state: ServerState, _newcomers: ByClient) -> ServerState:
    """The state of a strategy that remembers nothing of single clients."""
    return server_state


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A server rule; nothing in it changes."""

    name: str
    """Its name in the registry."""
    communicates: bool
    """Whether anything leaves the clients."""
    clustered: bool
    """Whether it needs clusters or a graph."""
    state_by_cluster: bool = False
    """Whether its server state is of clusters, which then have to stay what they are."""
    takes_newcomers: bool = True
    """Whether clients may join late; not where updates that they missed say who belongs together."""
    init: Callable[[ByClient], ServerState] = no_state
    """The server state before round one, from the models that the clients start with."""
    aggregate: Aggregate
    """The server step."""
    matrices: MatricesOf
    """The matrices that the step applies; of a rule that is none (`median`), who is aggregated with whom."""
    eta: Callable[[int], float]
    """The step of a round (the first is 1); 0 where the rule has none."""
    initial_models: InitialModels
    """What clients that join a run begin with."""
    check: Callable[[ByClient, Federation], None] = any_models
    """Raises ConfigError where it cannot aggregate models of these ranks and layers."""
    extend_state: Callable[[ServerState, ByClient], ServerState] = same_state
    """The server state with an entry for each of these newcomers, from the models that they begin with."""
    report: str = "none"
    """What it asks clients for beside their updates: `class_features`, or `halves` once (`experiment.reports`)."""
    record_reports: Callable[[ServerState, ByClient], ServerState] = no_reports
    """The server state with what these clients have reported."""


def check_options(options: StrategyOptions) -> None:
    """Raise ConfigError for a number out of range, an unknown word or words that contradict each other."""
    for name, value in (("eta", options.eta), ("eta_decay", options.eta_decay)):
        if not (np.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} is {value}; it must be finite and 0 or more")
    if options.laplacian not in LAPLACIANS:
        raise unknown_name("Laplacian", options.laplacian, LAPLACIANS)
    if options.layer_weighting not in LAYER_WEIGHTINGS:
        raise unknown_name("layer weighting", options.layer_weighting, LAYER_WEIGHTINGS)
    if options.gram_by not in GRANULARITIES:
        raise unknown_name("granularity", options.gram_by, GRANULARITIES)
    check_mixing(options.share, options.space, options.align)


def with_updates(client_models: ByClient, updates: ByClient) -> dict[str, Params]:
    """The model of every client after local training: its update, or its old model where it took no part."""
    strangers = sorted(updates.keys() - client_models.keys())
    if strangers:
        raise ProtocolError(f"update of an unknown client {strangers[0]!r}; this run has {', '.join(client_models)}")
    return {client: updates.get(client, params) for client, params in client_models.items()}


def _steps(options: StrategyOptions) -> Callable[[int], float]:
    """The size of the rule's step by round."""
    return lambda round: options.eta * options.eta_decay ** (round - 1)


def _no_step(_round: int) -> float:
    return 0.0


def mixing_strategy(
    name: str,
    rule: Rule,
    options: StrategyOptions,
    *,
    arrival: Rule | None = None,
    communicates: bool = True,
    clustered: bool = False,
    has_eta: bool = False,
    granularity: str = "all",
    reduce: Reduce | None = None,
) -> Strategy:
    """The strategy that applies the rule's matrices to the models of all clients.

    `granularity` tells which parameters have a matrix of their own (`GRANULARITIES`). With `reduce` the rows only
    say who is aggregated with whom, and this is how.
    Who joins later begins with its row of `arrival`, in which it is not present and the others are: by default of the
    rule itself, which for an average is the average of the others.
    """
    check_options(options)
    weighting, eta = (options.layer_weighting, _steps(options)) if has_eta else ("none", _no_step)

    def matrices(
        federation: Federation, present: Sequence[bool], *, round: int, models: RoundModels | None = None
    ) -> Matrices:
        return mixing_matrices(
            rule,
            # what is reduced is the same for all of a group, and so for those who share a set
            federation if reduce is None else replace(federation, cuts=()),
            present,
            eta=eta(round),
            layer_weighting=weighting,
            max_share=options.max_share,
            granularity=granularity,
            space=options.space,
            models=models,
        )

    return Strategy(
        name=name,
        communicates=communicates,
        clustered=clustered,
        aggregate=_mixing_aggregate(matrices, options, reduce),
        matrices=matrices,
        eta=eta,
        initial_models=_mixing_initial_models(for_newcomers(arrival or rule), options, reduce),
    )


def _mixing_aggregate(matrices: MatricesOf, options: StrategyOptions, reduce: Reduce | None) -> Aggregate:
    """The server step that applies these matrices and leaves the server state as it is."""

    def aggregate(
        server_state: ServerState,
        client_models: ByClient,
        updates: ByClient,
        federation: Federation,
        *,
        round: int,
    ) -> Aggregated:
        after = sync_shared(with_updates(client_models, updates), federation, list(updates))
        present = [client in updates for client in federation.clients]
        models = RoundModels(before=client_models, after=after, server_state=server_state)
        mixed = _mix_by_space(
            after, matrices(federation, present, round=round, models=models), federation, options, reduce
        )
        return Aggregated(server_state=server_state, client_models=mixed.by_client, discarded=mixed.discarded)

    return aggregate


def _mixing_initial_models(rule: Rule, options: StrategyOptions, reduce: Reduce | None) -> InitialModels:
    """The models of newcomers by their rows of this rule."""

    def initial_models(
        server_state: ServerState, client_models: ByClient, fresh: ByClient, federation: Federation
    ) -> dict[str, Params]:
        present = [client not in fresh for client in federation.clients]
        everyone = {**client_models, **fresh}
        models = RoundModels(before=everyone, after=everyone, server_state=server_state)
        rows = mixing_matrices(rule, federation, present, eta=1.0, layer_weighting="none", models=models)
        by_client = _mix_by_space(everyone, rows, federation, options, reduce).by_client
        return {client: by_client[client] for client in fresh}

    return initial_models


def _mix_by_space(
    models: ByClient, matrices: Matrices, federation: Federation, options: StrategyOptions, reduce: Reduce | None
) -> Mixed:
    return mix(
        models,
        matrices,
        clients=federation.clients,
        share=options.share,
        space=options.space,
        align=options.align,
        scale=options.scale,
        reduce=reduce,
    )


def _identity(step: MixingContext) -> np.ndarray:
    return np.eye(len(step.present))


def weighted_average(options: StrategyOptions) -> Rule:
    """The rows of one average over each group, weighted by examples, over those who are present."""

    def rule(step: MixingContext) -> np.ndarray:
        weights = step.federation.weights
        return np.asarray(average(weights, step.groups, step.present, max_share=options.max_share))

    return rule


def _clusters(options: StrategyOptions) -> Rule:
    def rule(step: MixingContext) -> np.ndarray:
        weights = step.federation.weights
        return np.asarray(average(weights, within_clusters(step), step.present, max_share=options.max_share))

    return rule


def local(_: StrategyOptions) -> Strategy:
    """Everyone keeps what it trained; nothing is sent, and no option says anything."""
    return mixing_strategy("local", _identity, StrategyOptions(), communicates=False)


def fedavg(options: StrategyOptions) -> Strategy:
    """One average over all clients, weighted by examples; heads only inside their task."""
    return mixing_strategy("fedavg", weighted_average(options), options)


def fedavg_cluster(options: StrategyOptions) -> Strategy:
    """The weighted average inside each cluster; who is undecided stays alone.

    With one rank everywhere and `space="factors"` this is the baseline of the papers.
    """
    return mixing_strategy("fedavg_cluster", _clusters(options), options, clustered=True)


def atlas_no_laplacian(options: StrategyOptions) -> Strategy:
    """ATLAS without phase 4: its clusters, its ranks and its space, but the in-cluster average for the Laplacian.

    The matrix is that of `fedavg_cluster`; the two differ in what a run puts around them (ranks and space).
    """
    return mixing_strategy("atlas_no_laplacian", _clusters(options), options, clustered=True)


def atlas_laplacian(options: StrategyOptions) -> Strategy:
    """`w_k <- w_k - eta sum_l L_kl w_l` on the models as trained: everyone keeps a model of its own.

    It replaces an average inside clusters; after one the step would be zero. Heads follow the graph without the
    edges between tasks. Who took no part keeps its model and still counts as a neighbour. Who joins later begins with
    the mean of its neighbours by the weights of its edges, `w_k = sum_l a_kl w_l / sum_l a_kl`: the whole step of the
    random walk, of a client that has no model yet.
    """

    def rule(step: MixingContext) -> np.ndarray:
        graph = drop_edges(step.federation.adjacency, step.groups)
        return np.asarray(laplacian_step(graph, kind=options.laplacian, eta=step.eta, present=step.present))

    def neighbours(step: MixingContext) -> np.ndarray:
        edges = drop_edges(step.federation.adjacency, step.groups) * step.present[None, :]
        degree = edges.sum(axis=1, keepdims=True)
        return np.where(degree > 0, edges / np.where(degree > 0, degree, 1.0), np.eye(len(edges)))

    return mixing_strategy("atlas_laplacian", rule, options, arrival=neighbours, clustered=True, has_eta=True)
