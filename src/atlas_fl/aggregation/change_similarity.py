"""Similarity of the clients' changes: inner products and cosines, over all that two clients have in common.

In product space a change is that of s B A. Heads are compared inside their task.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float64

from atlas_fl.aggregation.distances import change_gram
from atlas_fl.aggregation.matrices import Federation
from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.params import HEAD, LORA_B, ByClient, shared_params


def cosines(gram: Float64[np.ndarray, "n n"]) -> Float64[np.ndarray, "n n"]:
    """Cosines from inner products: 1 on the diagonal, 0 beside a vector of length zero."""
    lengths = np.sqrt(np.maximum(np.diag(gram), 0.0))
    sizes = np.outer(lengths, lengths)
    values = np.clip(np.where(sizes > 0, gram / np.where(sizes > 0, sizes, 1.0), 0.0), -1.0, 1.0)
    np.fill_diagonal(values, 1.0)
    return np.asarray(values)


def gram_of_changes(
    before: ByClient,
    after: ByClient,
    clients: Sequence[int],
    federation: Federation,
    options: StrategyOptions,
    *,
    selects: Callable[[str], bool] | None = None,
) -> Float64[np.ndarray, "n n"]:
    """<w_k - w_k^before, w_l - w_l^before> of these clients, by index, over the shared parameters that `selects`
    names, by default all.

    A parameter that one of two clients lacks, and a head of another task, adds nothing.
    """
    names = [federation.clients[k] for k in clients]
    tasks = [federation.head_groups[k] for k in clients]
    shared, total = {name: shared_params(after[name], options.share) for name in names}, np.zeros((len(names),) * 2)
    # sorted, because sums follow the order, and a model that comes from a checkpoint has another one
    for key in sorted({key for params in shared.values() for key in params if params[key].numel()}):
        if (selects is not None and not selects(key)) or (options.space == "product" and key.endswith(LORA_B)):
            continue
        for task in dict.fromkeys(tasks) if key.startswith(HEAD) else (None,):
            members = [k for k, own in enumerate(tasks) if task in (None, own) and key in shared[names[k]]]
            chosen = [names[k] for k in members]
            if not members:  # a task that writes text has no head
                continue
            total[np.ix_(members, members)] += change_gram(
                shared, before, chosen, key, as_products=options.space == "product", scale=options.scale
            )
    return total
