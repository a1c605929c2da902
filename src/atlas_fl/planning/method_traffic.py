"""Predicted bytes of a round that a method sends beside the model (corrections, other clusters' models) or leaves out.

In bytes of encoded tensors, as the ledger will have them; each method says its own (`methods.method.Part.extra_bytes`).
Two tables say the same for readers, relative to FedAvg: `methods.method.PublishedMethod.relative_bytes` of published
methods and `methods.method.Method.relative_bytes` of rules; what changes here changes there (`atlas list strategies`).
"""

from atlas_fl.client.options import TrainOptions
from atlas_fl.config import Config
from atlas_fl.methods.method import message_size
from atlas_fl.params import Params, shared_params
from atlas_fl.partial_sharing import is_fully_shared
from atlas_fl.setup.options import parts_of_config, strategy_of


def method_bytes(
    config: Config, options: TrainOptions, model: Params, *, participants: int, labels: int
) -> tuple[int, int]:
    """(bytes up, bytes down) that a round of this client has beyond its shared model once each way; below 0 for less.

    Where rounds differ, as RoLoRA's, it is the mean of two that follow each other.

    Args:
        model: all that the client trains, whole.
        participants: clients that take part in a round.
        labels: classes of the client's task.
    """
    shared = shared_params(model, config.mixing.share)
    extra = [part.extra_bytes(shared, participants=participants, classes=labels) for part in parts_of_config(config)]
    unsent = 0
    if _leaves_out_untrained(config):
        sizes = [
            message_size({key: one for key, one in shared.items() if not options.trains(key, round=number)})
            for number in (1, 2)
        ]
        unsent = sum(sizes) // 2
    return sum(up for up, _ in extra) - unsent, sum(down for _, down in extra) - unsent


def report_bytes_once(config: Config, model: Params) -> int:
    """Bytes of a report that this client sends once in the run; 0 where there is none."""
    method = strategy_of(config)
    return method.report_bytes(shared_params(model, config.mixing.share), classes=0) if method.asks_once else 0


def _leaves_out_untrained(config: Config) -> bool:
    """Return whether parameters that do not train in a round are not sent (`experiment.untrained`)."""
    mixing = config.mixing
    is_mean = strategy_of(config).is_average and mixing.space == "factors" and not mixing.personal_models
    return is_mean and mixing.aggregate_every == 1 and is_fully_shared(mixing.share)
