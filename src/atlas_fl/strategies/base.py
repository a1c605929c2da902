"""A strategy: a frozen pair of functions, and the one way in which every rule of this package is applied."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from atlas_fl.errors import ConfigError, ProtocolError, unknown
from atlas_fl.mixing.distances import squared_distances
from atlas_fl.mixing.factors import Reduce
from atlas_fl.mixing.matrices import LAPLACIANS, Federation
from atlas_fl.mixing.mix import Mixed, check_mixing, mix
from atlas_fl.mixing.shared import with_shared
from atlas_fl.strategies.rule import Distances, Matrices, Rule, for_newcomers, matrices_for
from atlas_fl.types import ByClient, Params

State: TypeAlias = ByClient
"""What a strategy remembers between rounds: the model that every client holds. `tree.prefixed` makes it one flat
mapping for a checkpoint, `tree.unprefixed` brings it back."""

Known: TypeAlias = ByClient | None
"""The models that everyone holds, where there are any yet."""

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

    state: State
    """What the rule remembers."""
    start: ByClient
    """What every client starts the next round with."""
    discarded: Mapping[str, float]
    """By client, the share of its mixed update's squared norm that its ranks could not hold (product space; else 0)."""


@runtime_checkable
class Aggregate(Protocol):
    """One server step: a pure function of the state, the updates of who took part, and the federation."""

    def __call__(self, state: State, updates: ByClient, federation: Federation, *, round: int) -> Aggregated:
        """The new state, and what every client starts the next round with."""


@runtime_checkable
class Welcome(Protocol):
    """What clients begin with that join a run: a pure function of the state and of their own fresh models."""

    def __call__(self, state: State, fresh: ByClient, federation: Federation) -> dict[str, Params]:
        """The newcomers' models, mixed from those that the others hold; `federation` is of all of them."""


@runtime_checkable
class MatricesOf(Protocol):
    """The matrices of one round."""

    def __call__(
        self, federation: Federation, present: Sequence[bool], *, round: int, models: Known = None
    ) -> Matrices:
        """The matrix for each parameter's name, when these clients took part.

        A rule that goes by the distances between models needs these; without them it says who may mix with whom.
        """


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A server rule; nothing in it changes."""

    name: str
    """Its name in the registry."""
    communicates: bool
    """Whether anything leaves the clients."""
    clustered: bool
    """Whether it needs clusters or a graph."""
    init: Callable[[ByClient], State]
    """The state before round one, from the models that the clients start with."""
    aggregate: Aggregate
    """The server step."""
    matrices: MatricesOf
    """The matrices that the step applies; of a rule that is none (`median`), who is aggregated with whom."""
    eta: Callable[[int], float]
    """The step of a round (the first is 1); 0 where the rule has none."""
    welcome: Welcome
    """What clients that join a run begin with."""


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


def init(start: ByClient) -> State:
    """Everyone holds what the run starts with."""
    return dict(start)


def held(state: State, updates: ByClient) -> dict[str, Params]:
    """What everyone holds after local training: the update of who took part, the old model of who did not."""
    strangers = sorted(updates.keys() - state.keys())
    if strangers:
        raise ProtocolError(f"update of an unknown client {strangers[0]!r}; this run has {', '.join(state)}")
    return {client: updates.get(client, params) for client, params in state.items()}


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
    by_distance: bool = False,
    reduce: Reduce | None = None,
) -> Strategy:
    """The strategy that applies the rule's matrix to what everyone holds.

    With `by_distance` the rule is told how far apart the models are. With `reduce` its rows only say who is aggregated
    with whom, and this is how.
    Who joins later begins with its row of `arrival`, in which it is not present and the others are: by default of the
    rule itself, which for an average is the average of the others.
    """
    check_options(options)
    weighting, eta = (options.layer_weighting, _steps(options)) if has_eta else ("none", _no_step)
    newcomers = for_newcomers(arrival or rule)

    def matrices(federation: Federation, present: Sequence[bool], *, round: int, models: Known = None) -> Matrices:
        return matrices_for(
            rule,
            # what is reduced is the same for all of a group, and so for those who share a set
            federation if reduce is None else replace(federation, cuts=()),
            present,
            eta=eta(round),
            layer_weighting=weighting,
            max_share=options.max_share,
            distances=_distances(federation, models, options) if by_distance and models is not None else None,
        )

    def aggregate(state: State, updates: ByClient, federation: Federation, *, round: int) -> Aggregated:
        models = with_shared(held(state, updates), federation, list(updates))
        present = [client in updates for client in federation.clients]
        mixed = _mixed(models, matrices(federation, present, round=round, models=models), federation, options, reduce)
        return Aggregated(state=mixed.by_client, start=mixed.by_client, discarded=mixed.discarded)

    def welcome(state: State, fresh: ByClient, federation: Federation) -> dict[str, Params]:
        there = [client not in fresh for client in federation.clients]
        models = {**state, **fresh}
        apart = _distances(federation, models, options) if by_distance else None
        found = matrices_for(newcomers, federation, there, eta=1.0, layer_weighting="none", distances=apart)
        by_client = _mixed(models, found, federation, options, reduce).by_client
        return {client: by_client[client] for client in fresh}

    return Strategy(
        name=name,
        communicates=communicates,
        clustered=clustered,
        init=init,
        aggregate=aggregate,
        matrices=matrices,
        eta=eta,
        welcome=welcome,
    )


def _distances(federation: Federation, models: ByClient, options: StrategyOptions) -> Distances:
    def apart(clients: Sequence[int], *, head: bool) -> np.ndarray:
        names = [federation.clients[k] for k in clients]
        return np.asarray(squared_distances(models, names, head=head, share=options.share, scale=options.scale))

    return apart


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
