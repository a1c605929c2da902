"""How much each layer matters, measured from gradients, and how much of its budget a cluster may use.

Importance of a layer: the mean squared gradient of its parameters, as a share of the sum over all layers.
The alternative `rngwp` is HSplitLoRA's: the mean of |weight * gradient|, smoothed over passes (arXiv 2505.02795).
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Num

from atlas_fl.errors import DataError


def shares(values: Num[np.ndarray, " layers"]) -> Float[np.ndarray, " layers"]:
    """The values divided by their sum, float64.

    Raises `DataError` where a value is negative or not finite, or all are zero: no gradient is no measurement.
    """
    measured = np.asarray(values, dtype=np.float64)
    if not np.isfinite(measured).all() or (measured < 0).any() or not measured.any():
        raise DataError(
            f"layer importance cannot be measured from {measured.tolist()}; "
            "the gradients must be finite and not all zero"
        )
    scaled = measured / measured.max()  # the sum of the largest doubles would overflow
    return np.asarray(scaled / scaled.sum())


def layer_importance(
    square_sums: Num[np.ndarray, " layers"], num_params: Num[np.ndarray, " layers"]
) -> Float[np.ndarray, " layers"]:
    """Importance of every layer from the sums of its squared gradients over `num_params` parameters; sums to one.

    importance_l = (||g_l||^2 / n_l) / sum_m (||g_m||^2 / n_m). Raises `DataError` as `shares` does.
    """
    return shares(_per_parameter(square_sums, num_params))


def rngwp(
    previous: Float[np.ndarray, " layers"] | None,
    product_sums: Num[np.ndarray, " layers"],
    num_params: Num[np.ndarray, " layers"],
    *,
    decay: float = 0.9,
) -> Float[np.ndarray, " layers"]:
    """The smoothed mean |w * g| of every layer: `decay * previous + (1 - decay) * mean`, or the mean at first.

    `product_sums` are the sums of |w * g| over a layer's parameters. Not normalised, so that passes can be
    chained; `shares` makes an importance of it.
    """
    mean = _per_parameter(product_sums, num_params)
    return mean if previous is None else decay * previous + (1 - decay) * mean


def _per_parameter(
    sums: Num[np.ndarray, " layers"], num_params: Num[np.ndarray, " layers"]
) -> Float[np.ndarray, " layers"]:
    counts = np.asarray(num_params, dtype=np.float64)
    if not (counts > 0).all():
        raise DataError(f"parameters per layer are {counts.tolist()}; every layer must have some")
    return np.asarray(np.asarray(sums, dtype=np.float64) / counts)


def cluster_importance(
    importance: Float[np.ndarray, "clients layers"], labels: Sequence[int]
) -> Float[np.ndarray, "clients layers"]:
    """Every client's importance replaced by the mean over its cluster; a client without cluster (-1) keeps its own."""
    groups = np.asarray(labels)
    result = np.array(importance, dtype=np.float64)
    for label in set(groups.tolist()) - {-1}:
        result[groups == label] = importance[groups == label].mean(axis=0)
    return result


def complexity_factors(
    difficulty: Float[np.ndarray, " clients"], labels: Sequence[int], *, floor: float = 0.5
) -> Float[np.ndarray, " clients"]:
    """The share of its budget that each client may use: 1 in the hardest cluster, towards `floor` in easier ones.

    factor = floor + (1 - floor) * d_c / max d, with d_c the mean difficulty of the client's cluster (its own for a
    client without cluster). It multiplies the budget and never exceeds one, so what a device can hold stays the bound.
    Difficulties of different tasks compare only on one scale, such as the loss over the loss of guessing.
    Raises `DataError` for a difficulty that is negative or not finite.
    """
    values = np.asarray(difficulty, dtype=np.float64)
    if not np.isfinite(values).all() or (values < 0).any():
        raise DataError(f"difficulties {values.tolist()} are not allowed; give finite numbers of at least 0")
    means = cluster_importance(values[:, None], labels)[:, 0]
    largest = means.max(initial=0.0)
    return np.ones_like(means) if largest == 0 else np.asarray(floor + (1 - floor) * means / largest)


def scale_budget(budget_bytes: int, factor: float, *, least_bytes: int) -> int:
    """`factor` of the budget, but not below `least_bytes`, and never above the budget itself."""
    return min(budget_bytes, max(int(budget_bytes * factor), least_bytes))
