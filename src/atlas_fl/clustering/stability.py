"""Labels that keep their meaning when clients are clustered again."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from atlas_fl.errors import ConfigError

UNDECIDED = -1
"""Label of a client that is in no cluster and trains alone."""


def stable_labels(previous: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """The new labels renamed so that as many clients as possible keep their label (Hungarian matching, Kuhn 1955).

    Both are of the same clients in the same order. A new cluster with no counterpart gets the smallest label that
    neither clustering's matched clusters nor `previous` use; undecided clients (-1) stay so and match nothing.
    """
    if len(previous) != len(new):
        raise ConfigError(f"previous labels of {len(previous)} clients cannot name {len(new)}; cluster afresh")
    before, after = np.asarray(previous), np.asarray(new)
    old_names, new_names = decided_names(previous), decided_names(new)
    overlap = np.array([[np.sum((before == old) & (after == name)) for name in new_names] for old in old_names])
    renamed = {UNDECIDED: UNDECIDED}
    if overlap.size:
        for row, column in zip(*linear_sum_assignment(overlap, maximize=True), strict=True):
            if overlap[row, column] > 0:
                renamed[new_names[column]] = old_names[row]
    fresh = iter(label for label in range(len(old_names) + len(new_names) + 1) if label not in set(old_names))
    return tuple(renamed[label] if label in renamed else renamed.setdefault(label, next(fresh)) for label in new)


def decided_names(labels: Sequence[int]) -> list[int]:
    """The labels in use, ascending, without that of undecided clients."""
    return sorted({int(label) for label in labels} - {UNDECIDED})


def by_first_appearance(labels: np.ndarray) -> tuple[int, ...]:
    """The same partition with clusters numbered 0, 1, ... in the order of their first client; -1 stays."""
    names: dict[int, int] = {UNDECIDED: UNDECIDED}
    return tuple(names.setdefault(int(label), len(names) - 1) for label in labels)
