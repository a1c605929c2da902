"""A strategy: a frozen pair of functions, and the one way in which every rule of this package is applied."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from atlas_fl.errors import ConfigError, ProtocolError, unknown
from atlas_fl.mixing.factors import Reduce
from atlas_fl.mixing.matrices import LAPLACIANS, Federation
from atlas_fl.mixing.mix import Mixed, check_mixing, mix
from atlas_fl.mixing.shared import with_shared
from atlas_fl.strategies.rule import Matrices, RoundModels, Rule, for_newcomers, matrices_for
from atlas_fl.types import ByClient, Params, ServerState

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
    """Where robust rules are applied: over `all` clients, or inside `clusters`."""
    trim: float = 0.2
    """Share of the clients whose values `trimmed_mean` leaves out at each end."""
    byzantine: int = 1
    """Hostile clients that `krum` and `multi_krum` expect."""


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
class Welcome(Protocol):
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
    init: Callable[[ByClient], ServerState] = no_state
    """The server state before round one, from the models that the clients start with."""
    aggregate: Aggregate
    """The server step."""
    matrices: MatricesOf
    """The matrices that the step applies; of a rule that is none (`median`), who is aggregated with whom."""
    eta: Callable[[int], float]
    """The step of a round (the first is 1); 0 where the rule has none."""
    welcome: Welcome
    """What clients that join a run begin with."""
    extend_state: Callable[[ServerState, ByClient], ServerState] = same_state
    """The server state with an entry for each of these newcomers, from the models that they begin with."""


def check_options(options: StrategyOptions) -> None:
    """Raise ConfigError for a number out of range, an unknown word or words that contradict each other."""
    for name, value in (("eta", options.eta), ("eta_decay", options.eta_decay)):
        if not (np.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} is {value}; it must be finite and 0 or more")
    if options.laplacian not in LAPLACIANS:
        raise unknown("Laplacian", options.laplacian, LAPLACIANS)
    if options.layer_weighting not in LAYER_WEIGHTINGS:
        raise unknown("layer weighting", options.layer_weighting, LAYER_WEIGHTINGS)
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

    `granularity` tells which parameters have a matrix of their own (`rule.GRANULARITIES`). With `reduce` the rows only
    say who is aggregated with whom, and this is how.
    Who joins later begins with its row of `arrival`, in which it is not present and the others are: by default of the
    rule itself, which for an average is the average of the others.
    """
    check_options(options)
    weighting, eta = (options.layer_weighting, _steps(options)) if has_eta else ("none", _no_step)

    def matrices(
        federation: Federation, present: Sequence[bool], *, round: int, models: RoundModels | None = None
    ) -> Matrices:
        return matrices_for(
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
        welcome=_mixing_welcome(for_newcomers(arrival or rule), options, reduce),
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
        after = with_shared(with_updates(client_models, updates), federation, list(updates))
        present = [client in updates for client in federation.clients]
        models = RoundModels(before=client_models, after=after, server_state=server_state)
        mixed = _mixed(after, matrices(federation, present, round=round, models=models), federation, options, reduce)
        return Aggregated(server_state=server_state, client_models=mixed.by_client, discarded=mixed.discarded)

    return aggregate


def _mixing_welcome(rule: Rule, options: StrategyOptions, reduce: Reduce | None) -> Welcome:
    """The models of newcomers by their rows of this rule."""

    def welcome(
        server_state: ServerState, client_models: ByClient, fresh: ByClient, federation: Federation
    ) -> dict[str, Params]:
        present = [client not in fresh for client in federation.clients]
        everyone = {**client_models, **fresh}
        models = RoundModels(before=everyone, after=everyone, server_state=server_state)
        rows = matrices_for(rule, federation, present, eta=1.0, layer_weighting="none", models=models)
        by_client = _mixed(everyone, rows, federation, options, reduce).by_client
        return {client: by_client[client] for client in fresh}

    return welcome


def _mixed(
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
