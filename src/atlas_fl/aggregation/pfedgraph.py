"""pFedGraph: mixing rows from the directions of the clients' changes, for all parameters or by layer and kind.

    d_kl = -cos(w_k - w_k^0, w_l - w_l^0)                        w^0: what the client began the run with
    m_k  = argmin over the simplex of sum_l m_l d_kl + alpha || m - p ||^2 = Proj_simplex(p - d_k / (2 alpha))

p are the shares of the examples among those that took part; who did not keeps its model. Ye, Ni, Xu, Wang, Chen and
Wang, "Personalized Federated Learning with Inferred Collaboration Graphs", ICML 2023. Their term of local training, and
the step of their program that counts a cosine above .9 as 1, are left out.

The cosines come from the Gram matrix of the changes, in product space of s B A: over all that is shared, or for each
layer, kind of parameter or both a matrix of its own (`--gram-by`). Heads of different tasks have nothing in common.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from atlas_fl.aggregation.change_similarity import cosines, gram_of_changes
from atlas_fl.aggregation.matrices import Federation, average
from atlas_fl.aggregation.strategies import (
    CLUSTERS,
    MixingContext,
    Strategy,
    StrategyOptions,
    groups_within,
    mixing_strategy,
    parameter_group,
)
from atlas_fl.errors import ConfigError
from atlas_fl.params import HEAD, LORA_A, LORA_B, ByClient, Params, ServerState, shared_params

INITIAL = "initial"
"""The entry of the server state: the models that the clients began with, as far as they are shared."""


def project_onto_simplex(point: Float64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """The nearest point whose entries are 0 or more and sum to 1. Duchi et al., 2008."""
    falling = np.sort(point)[::-1]
    excess = (np.cumsum(falling) - 1.0) / np.arange(1, len(point) + 1)
    inside = np.maximum(point - excess[np.flatnonzero(falling > excess)[-1]], 0.0)
    return np.asarray(inside / inside.sum())


def _initial(state: ServerState) -> Mapping[str, Params]:
    models = state[INITIAL]
    assert not isinstance(models, Tensor), "the initial models are by client"
    return {client: _params(params) for client, params in models.items()}


def _params(value: Tensor | ServerState) -> Params:
    assert not isinstance(value, Tensor), "a model is by parameter"
    return {key: tensor for key, tensor in value.items() if isinstance(tensor, Tensor)}


def _similarities(step: MixingContext, clients: Sequence[int], options: StrategyOptions) -> Float64[np.ndarray, "n n"]:
    """The cosines between the changes of these clients, by index."""
    assert step.models is not None, "changes are of models"
    initial, after = _initial(step.models.server_state), step.models.after
    federation, granularity = step.federation, options.gram_by

    def is_in_group(key: str) -> bool:
        return parameter_group(key, federation, granularity=granularity, space=options.space) == step.parameters

    selects = None if granularity == "all" else is_in_group  # else heads and the rest are compared apart
    return cosines(gram_of_changes(initial, after, clients, federation, options, selects=selects))


def pfedgraph(options: StrategyOptions) -> Strategy:
    """Everyone gets more of those whose changes point into its own direction (`--gram-by`, `--gram-alpha`)."""

    def share(step: MixingContext) -> np.ndarray:
        groups = groups_within(step, options.within)
        return np.asarray(average(step.federation.weights, groups, step.present, max_share=options.max_share))

    def rule(step: MixingContext) -> np.ndarray:
        matrix, groups = share(step), groups_within(step, options.within)
        if step.models is None:
            return matrix
        for label in set(groups.tolist()):
            inside = np.flatnonzero((groups == label) & step.present).tolist()
            if len(inside) > 1:
                pull = matrix[inside[0], inside] + _similarities(step, inside, options) / (2 * options.gram_alpha)
                matrix[np.ix_(inside, inside)] = [project_onto_simplex(row) for row in pull]
        return np.asarray(np.where(step.present[:, None], matrix, np.eye(len(matrix))))

    strategy = mixing_strategy(
        "pfedgraph", rule, options, arrival=share, clustered=options.within == CLUSTERS, granularity=options.gram_by
    )
    return replace(strategy, init=_init(options), extend_state=_extend(options), check=check_layers(options))


def _init(options: StrategyOptions) -> Callable[[ByClient], ServerState]:
    def init(client_models: ByClient) -> ServerState:
        models = {client: shared_params(params, options.share) for client, params in client_models.items()}
        return {INITIAL: models}

    return init


def _extend(options: StrategyOptions) -> Callable[[ServerState, ByClient], ServerState]:
    def extend(server_state: ServerState, newcomers: ByClient) -> ServerState:
        models = {client: shared_params(params, options.share) for client, params in newcomers.items()}
        return {INITIAL: {**_initial(server_state), **models}}

    return extend


def check_layers(options: StrategyOptions) -> Callable[[ByClient, Federation], None]:
    """Raises ConfigError where matrices are by layer and a parameter is in none."""

    def check(models: ByClient, federation: Federation) -> None:
        if options.gram_by not in ("layer", "layer_and_kind"):
            return
        for key in (key for params in models.values() for key in shared_params(params, options.share)):
            if not key.startswith(HEAD) and key.removesuffix(LORA_A).removesuffix(LORA_B) not in federation.layer_of:
                raise ConfigError(
                    f"--gram-by {options.gram_by} needs a layer of every parameter, and {key} is in none; take"
                    " --gram-by all or kind"
                )

    return check
