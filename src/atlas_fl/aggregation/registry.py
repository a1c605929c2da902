"""STRATEGIES: the server's rules by name, and their aliases."""

from collections.abc import Callable

from atlas_fl.aggregation.cfl import cfl
from atlas_fl.aggregation.exact_average import fedavg_stacked, fedavg_with_residual
from atlas_fl.aggregation.fedalt import fedavg_of_others
from atlas_fl.aggregation.fedamp import fedavg_by_distance
from atlas_fl.aggregation.feddyn import fedavg_dynamic
from atlas_fl.aggregation.fedpac import classifier_collaboration
from atlas_fl.aggregation.fedtreelora import fedtreelora
from atlas_fl.aggregation.hetlora import fedavg_by_norm
from atlas_fl.aggregation.ifca import ifca
from atlas_fl.aggregation.kriging import atlas, kriging
from atlas_fl.aggregation.pfedgraph import pfedgraph
from atlas_fl.aggregation.robust import geometric_median, krum, median, multi_krum, trimmed_mean
from atlas_fl.aggregation.server_optimizers import fedadagrad, fedadam, fedavgm, fedyogi
from atlas_fl.aggregation.strategies import Strategy as Strategy
from atlas_fl.aggregation.strategies import StrategyOptions as StrategyOptions
from atlas_fl.aggregation.strategies import atlas_laplacian, atlas_no_laplacian, fedavg, fedavg_cluster, local
from atlas_fl.aggregation.strategies import check_update as check_update
from atlas_fl.errors import unknown_name

STRATEGIES: dict[str, Callable[[StrategyOptions], Strategy]] = {
    "local": local,
    "fedavg": fedavg,
    "fedavg_by_norm": fedavg_by_norm,
    "fedavg_cluster": fedavg_cluster,
    "atlas": atlas,
    "atlas_laplacian": atlas_laplacian,
    "atlas_no_laplacian": atlas_no_laplacian,
    "median": median,
    "trimmed_mean": trimmed_mean,
    "krum": krum,
    "multi_krum": multi_krum,
    "geometric_median": geometric_median,
    "fedavgm": fedavgm,
    "fedadagrad": fedadagrad,
    "fedyogi": fedyogi,
    "fedadam": fedadam,
    "pfedgraph": pfedgraph,
    "fedavg_by_distance": fedavg_by_distance,
    "fedavg_of_others": fedavg_of_others,
    "fedavg_dynamic": fedavg_dynamic,
    "fedavg_stacked": fedavg_stacked,
    "fedavg_with_residual": fedavg_with_residual,
    "cfl": cfl,
    "ifca": ifca,
    "fedtreelora": fedtreelora,
    "classifier_collaboration": classifier_collaboration,
    "kriging": kriging,
}

MATRICES: dict[str, str] = {
    "local": "identity",
    "fedavg": "shares of the examples",
    "fedavg_by_norm": "shares of the updates' norms",
    "fedavg_cluster": "shares of the examples inside clusters",
    "atlas": "averages that fit, others by covariances of split halves",
    "atlas_laplacian": "I - eta L of the graph",
    "atlas_no_laplacian": "shares of the examples inside clusters",
    "median": "none, the median of each value",
    "trimmed_mean": "none, the trimmed mean of each value",
    "krum": "one model for all, by distances",
    "multi_krum": "equal shares of the nearest models",
    "geometric_median": "shares by distances",
    "fedavgm": "shares of the examples, then a server step",
    "fedadagrad": "shares of the examples, then a server step",
    "fedyogi": "shares of the examples, then a server step",
    "fedadam": "shares of the examples, then a server step",
    "pfedgraph": "by cosines of the changes",
    "fedavg_by_distance": "by distances of the models",
    "fedavg_of_others": "shares of the others' examples",
    "fedavg_dynamic": "shares of the examples, moved by all changes",
    "fedavg_stacked": "shares of the examples, exact products",
    "fedavg_with_residual": "shares of the examples, exact products",
    "cfl": "shares inside clusters of updates",
    "ifca": "shares inside clusters of least loss",
    "fedtreelora": "shares inside nested clusters by layer",
    "classifier_collaboration": "shares of the examples; heads by class features",
    "kriging": "by covariances of split halves",
}
"""The mixing matrix of each rule, in words."""

IN_FACTORS: frozenset[str] = frozenset({"fedavg_dynamic", "fedavg_stacked", "fedavg_with_residual"})
"""Rules of factor space alone; the others mix in either."""

NEEDS: dict[str, str] = {
    "atlas_laplacian": "validation data with --graph adaptive",
    **dict.fromkeys(("fedavg_dynamic", "fedavg_with_residual", "ifca"), "equal ranks"),
    **dict.fromkeys(("fedavgm", "fedadagrad", "fedyogi", "fedadam"), "equal ranks with --space factors"),
}
"""What rules need of a federation; nothing where they are not named."""

RELATIVE_BYTES: dict[str, str] = {
    "local": "0",
    "ifca": "(1+k)/2",
    "fedavg_dynamic": "1.5",
    **dict.fromkeys(("fedavg_stacked", "fedavg_with_residual"), "(1+n)/2"),
    "classifier_collaboration": "1+",
}
"""Bytes of a round relative to FedAvg, of the rules where they are not 1; 1+ with class features on top, n clients."""

EXTRA_PASSES: dict[str, str] = {
    "ifca": "passes over the training examples: k more",
    "classifier_collaboration": "passes over the training examples: one more",
    **dict.fromkeys(
        ("atlas", "kriging"), "in one round each half of the examples, trained apart, and sent beside the model"
    ),
}
"""What clients compute beside training, in every round if nothing else is said, of the rules that ask for it."""

ALIASES: dict[str, str] = {"local_only": "local", "standard_fl": "fedavg"}
"""Names that earlier descriptions of these rules used."""


def find_strategy(name: str, options: StrategyOptions) -> Strategy:
    """The strategy of this name or alias; raises ConfigError for an unknown name or options that contradict."""
    canonical = ALIASES.get(name, name)
    if canonical not in STRATEGIES:
        raise unknown_name("strategy", name, [*STRATEGIES, *ALIASES])
    return STRATEGIES[canonical](options)
