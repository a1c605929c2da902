"""Predicted bytes of a round that a method sends beside the model (corrections, other clusters' models) or leaves out.

In bytes of encoded tensors, as the ledger will have them: corrections, models of other clusters, class features, halves
(once), a frozen part, factors in turn. Two tables say the same for readers, relative to FedAvg:
`config.methods.PublishedMethod.relative_bytes` by method and `aggregation.registry.RELATIVE_BYTES` by rule; what
changes here changes there (`atlas list strategies`).
"""

import numpy as np
import torch

from atlas_fl.client.class_features import feature_width, summarize
from atlas_fl.client.options import TrainOptions
from atlas_fl.client.split_halves import join_halves
from atlas_fl.config import Config
from atlas_fl.config.methods import has_frozen_part, measures_halves, reads_features, rule_of
from atlas_fl.params import LORA_A, LORA_B, Params, head_keys, select, shared_params
from atlas_fl.partial_sharing import is_fully_shared
from atlas_fl.storage.tensors import encoded_size


def method_bytes(
    config: Config, options: TrainOptions, model: Params, *, participants: int, labels: int
) -> tuple[int, int]:
    """(bytes up, bytes down) that a round of this client has beyond its shared model once each way; below 0 for less.

    Where rounds differ, as RoLoRA's, it is the mean of two that follow each other. A frozen part is that of clients
    with this client's ranks.

    Args:
        model: all that the client trains, whole.
        participants: clients that take part in a round.
        labels: classes of the client's task.
    """
    shared = shared_params(model, config.mixing.share)
    size, rule = _size(shared), rule_of(config)
    if config.training.control_variates:
        return size, size
    if rule == "fedavg_dynamic":
        return 0, size
    if rule == "ifca":
        return 0, (config.server.ifca_clusters - 1) * size
    if has_frozen_part(config):
        adapters = {key: tensor for key, tensor in shared.items() if key.endswith((LORA_A, LORA_B))}
        if rule == "fedavg_stacked":  # in the place of adapters
            return 0, _size(_stack_factors(adapters, participants)) - _size(adapters)
        return 0, _size(_stack_factors(adapters, participants - 1))
    if reads_features(config):
        nothing = summarize(torch.zeros(0, feature_width(model)), np.zeros(0, np.int64), num_labels=labels)
        centroids = {"means": nothing["means"], "seen": nothing["counts"] > 0}
        return encoded_size(nothing), encoded_size(centroids) if config.training.feature_alignment else 0
    unsent = [_size({key: one for key, one in shared.items() if not options.trains(key, round=n)}) for n in (1, 2)]
    return (-sum(unsent) // 2, -sum(unsent) // 2) if _leaves_out_untrained(config) else (0, 0)


def halves_bytes(config: Config, model: Params) -> int:
    """Bytes that this client sends once, of both halves under `atlas` and `kriging`; 0 under other rules."""
    shared = shared_params(model, config.mixing.share)
    return encoded_size(join_halves(shared, shared)) if measures_halves(config) else 0


def _size(params: Params) -> int:
    """Encoded size of the adapters plus that of the head."""
    head = head_keys(params)
    parts = (select(params, head), {key: tensor for key, tensor in params.items() if key not in head})
    return sum(encoded_size(part) for part in parts if part)


def _stack_factors(adapters: Params, count: int) -> Params:
    """Factors of so many clients as one."""
    return {
        key: torch.cat([tensor] * count, dim=0 if key.endswith(LORA_A) else 1)
        for key, tensor in adapters.items()
        if count
    }


def _leaves_out_untrained(config: Config) -> bool:
    """Return whether parameters that do not train in a round are not sent (`experiment.untrained`)."""
    mixing = config.mixing
    is_mean = rule_of(config) == "fedavg" and mixing.space == "factors" and not mixing.personal_models
    return is_mean and mixing.aggregate_every == 1 and is_fully_shared(mixing.share)
