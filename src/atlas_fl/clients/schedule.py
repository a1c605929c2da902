"""Learning rates over the steps of a whole run: linear warm-up, then a schedule from the peak down."""

import math
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

Schedule: TypeAlias = Literal["constant", "linear", "cosine", "step"]

SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "step": lambda done: 0.1 ** ((done >= 0.5) + (done >= 0.75)),
}
"""Share of the peak by the share of the steps after the warm-up that are done, 0 to 1."""


def rate_factor(schedule: Schedule, *, warmup: float, step: int, steps: int) -> float:
    """The share of the peak rate at a step (from 0) of `steps`; `warmup` is a share of the steps.

    >>> [round(rate_factor("linear", warmup=0.2, step=s, steps=10), 3) for s in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.125]
    """
    warm = round(warmup * steps)
    if step < warm:
        return (step + 1) / warm
    return SCHEDULES[schedule]((step - warm) / max(1, steps - warm))
