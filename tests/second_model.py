"""A second model and the shared one together, by kind."""

from collections.abc import Callable
from types import MappingProxyType

from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.methods.registry import SECOND_MODELS
from atlas_fl.params import Params


def combine(
    own: Params,
    shared: Params,
    kind: str,
    *,
    weight: float,
    scale: Callable[[int], float],
    gate: Params = MappingProxyType({}),
) -> Params:
    """What a client computes with."""
    options = StrategyOptions(scale=scale)
    return SECOND_MODELS[kind](options, second_weight=weight).combine(own, shared, gate)
