"""The range of every number among the settings: a table, so that what is allowed can be read at a glance."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from atlas_fl.config.fields import settings, value_of
from atlas_fl.config.groups import Config
from atlas_fl.config.kinds import LARGEST, mistake


@dataclass(frozen=True)
class Range:
    """Which numbers are allowed."""

    words: str
    """For the message."""
    holds: Callable[[float], bool]
    """Whether a number is one of them; false for NaN."""


ZERO_OR_MORE = Range("at least 0", lambda value: value >= 0)
ONE_OR_MORE = Range("at least 1", lambda value: value >= 1)
TWO_OR_MORE = Range("at least 2", lambda value: value >= 2)
POSITIVE = Range("above 0", lambda value: value > 0)
SHARE = Range("above 0, at most 1", lambda value: 0 < value <= 1)
BETWEEN_ONES = Range("above -1, below 1", lambda value: -1 < value < 1)
INSIDE = Range("above 0, below 1", lambda value: 0 < value < 1)
BELOW_ONE = Range("at least 0, below 1", lambda value: 0 <= value < 1)

RANGES: Mapping[str, Range] = {
    "clients_per_task": Range("1 to 1000000", lambda value: 1 <= value <= 10**6),
    "samples": TWO_OR_MORE,  # a fingerprint is made from each half
    "validation_samples": ONE_OR_MORE,
    "test_samples": ONE_OR_MORE,
    "dirichlet_alpha": Range("above 0, at most 1e+06", lambda value: 0 < value <= 1e6),
    "max_length": Range("at least 4", lambda value: value >= 4),  # two special tokens take half of that
    "rouge_examples": ZERO_OR_MORE,
    "new_tokens": ONE_OR_MORE,
    "lora_alpha": POSITIVE,
    "dropout": BELOW_ONE,
    "rounds": ONE_OR_MORE,
    "local_epochs": ONE_OR_MORE,
    "batch_size": ONE_OR_MORE,
    "lr": POSITIVE,
    "warmup": BELOW_ONE,
    "weight_decay": ZERO_OR_MORE,
    "clip": ZERO_OR_MORE,
    "participation": SHARE,
    "eval_every": ONE_OR_MORE,
    "patience": ZERO_OR_MORE,
    "min_delta": ZERO_OR_MORE,
    "pack_tokens": ONE_OR_MORE,
    "pack_memory_gb": Range("above 0, at most 1e+06", lambda value: 0 < value <= 1e6),
    "fingerprint_batches": TWO_OR_MORE,
    "fingerprint_blocks": ONE_OR_MORE,
    "fingerprint_samples": TWO_OR_MORE,
    "fingerprint_steps": ONE_OR_MORE,
    "sketch_dim": Range("2 to 1000000", lambda value: 2 <= value <= 10**6),
    "pca_components": ONE_OR_MORE,
    "k_range": TWO_OR_MORE,
    "min_cluster_size": ONE_OR_MORE,
    "similarity_threshold": BETWEEN_ONES,
    "min_reliability": BETWEEN_ONES,
    "recluster_every": ZERO_OR_MORE,
    "stability": BELOW_ONE,
    "candidates": ONE_OR_MORE,
    "adapter_bytes": ONE_OR_MORE,
    "alpha_base": BELOW_ONE,
    "alpha_act": BELOW_ONE,
    "alpha_opt": BELOW_ONE,
    "wire_noise": ZERO_OR_MORE,
    # a Laplacian scaled to a largest eigenvalue of 1 is stable below 2
    "eta": Range("at least 0, below 2", lambda value: 0 <= value < 2),
    "eta_decay": SHARE,
    "alpha": POSITIVE,
    "neighbours": ZERO_OR_MORE,
    "singleton_neighbours": ZERO_OR_MORE,
    "graph_ema": BELOW_ONE,
    "aggregate_every": ONE_OR_MORE,
    "max_norm_ratio": Range("above 1", lambda value: value > 1),
    "max_share": SHARE,
    "trim": Range("at least 0, below 0.5", lambda value: 0 <= value < 0.5),
    "byzantine": ZERO_OR_MORE,
    "attack_scale": POSITIVE,
    "validation_share": INSIDE,
    "image_size": Range("at least 8", lambda value: value >= 8),
    "frozen_blocks": ZERO_OR_MORE,
    "ridge": POSITIVE,
    "local_steps": ONE_OR_MORE,
    "momentum": BELOW_ONE,
    "label_smoothing": BELOW_ONE,
    "crop": ZERO_OR_MORE,
    "sparsity": INSIDE,
    "calibration_rounds": ONE_OR_MORE,
    "calibration_clients": ONE_OR_MORE,
    "calibration_examples": ONE_OR_MORE,
    "seed": ZERO_OR_MORE,
    "max_rounds": ONE_OR_MORE,
    "checkpoint_every": ONE_OR_MORE,
    "keep_checkpoints": ONE_OR_MORE,
    "keep_best": ZERO_OR_MORE,
    "workers": ONE_OR_MORE,
}


def check_ranges(config: Config) -> None:
    """Nothing where every number is finite and in its range.

    Raises:
        ConfigError: one is not.
    """
    for name, allowed in RANGES.items():
        value = value_of(config, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not (_is_usable(number) and allowed.holds(number)):
                # only where that is what is wrong: nobody reads 10^15 in every line
                bound = f", at most {LARGEST:.0e}" if allowed.holds(number) else ""
                raise mistake(settings()[name].flag, value, allowed.words + bound)


def _is_usable(number: Any) -> bool:
    # Beyond 10^15 a float no longer holds every whole number, and no setting means anything there.
    # NaN and infinity fail the comparison too, and unlike `math.isfinite` it takes whole numbers of any size.
    return bool(abs(number) <= LARGEST)
