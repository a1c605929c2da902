"""Parts that nobody trains in a round, such as one factor of RoLoRA: the average keeps them, and nobody sends them."""

from collections.abc import Mapping

import torch

from atlas_fl.client.job import Job
from atlas_fl.client.options import TrainOptions
from atlas_fl.config import Config
from atlas_fl.params import PRIVATE, ByClient, Params
from atlas_fl.partial_sharing import is_fully_shared
from atlas_fl.setup.options import strategy_of
from atlas_fl.split.channel import Cut


def keep_untrained(
    config: Config, options: TrainOptions, before: ByClient, mixed: ByClient, *, round: int
) -> dict[str, Params]:
    """The mixed models, in which what did not train in this round and was equal at all clients is what it was.

    The average of equal values may differ from them in the last bit, and would have to be sent. Only under FedAvg in
    the space of factors; a server optimizer, for one, goes on moving what does not train.
    """
    if not strategy_of(config).is_average or config.mixing.space != "factors" or config.mixing.personal_models:
        return dict(mixed)
    names = {key for key in _untrained_keys(options, before, round=round) if _is_common(before, key)}
    return {
        client: {key: before[client][key] if key in names else tensor for key, tensor in params.items()}
        if names & params.keys() and params is not before[client]
        else params
        for client, params in mixed.items()
    }


def unsent_names(
    config: Config, job: Job, before: ByClient, after: ByClient, *, cuts: Mapping[str, Cut]
) -> frozenset[str]:
    """The names of what neither trained in the round of this job nor changed at any client: it is not sent.

    Empty where clients keep parts or models to themselves or have cuts, whose messages are made of other parts, and
    where several rounds are sent at once.
    """
    mixing = config.mixing
    if cuts or mixing.personal_models or mixing.aggregate_every > 1 or not is_fully_shared(mixing.share):
        return frozenset()
    return frozenset(
        key
        for key in _untrained_keys(job.options, before, round=job.round)
        if all(_is_same(params.get(key), after[client].get(key)) for client, params in before.items())
    )


def _untrained_keys(options: TrainOptions, models: ByClient, *, round: int) -> set[str]:
    keys = {key for params in models.values() for key in params if key != PRIVATE}
    return {key for key in keys if not options.trains(key, round=round)}


def _is_common(models: ByClient, key: str) -> bool:
    tensors = [params[key] for params in models.values() if key in params]
    return all(_is_same(tensors[0], tensor) for tensor in tensors)


def _is_same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left is right or torch.equal(left, right)
