"""Distances between models, and inner products of their changes, in product space of s B A.

    d_kl^2 = sum over modules || s_k B_k A_k - s_l B_l A_l ||_F^2 + sum over other tensors || w_k - w_l ||^2

Pairs of factors come from Gram matrices of the small products, so no dense update is formed.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from atlas_fl.aggregation.graph import gram_distances, update_gram
from atlas_fl.errors import ProtocolError
from atlas_fl.params import HEAD, LORA_A, LORA_B, ByClient, shared_params

AT_ONCE = 2**20
"""Values of each client that are looked at together."""


def squared_distances(
    models: ByClient, clients: Sequence[str], *, head: bool, share: Sequence[str], scale: Callable[[int], float]
) -> Float64[np.ndarray, "n n"]:
    """d_kl^2 of what these clients share: of their heads, or of all the rest.

    Without both factors in `share` the one that is there is compared by itself, padded with zeros to the longest rank.
    Raises ProtocolError where the clients hold different tensors.
    """
    parts = [shared_params(models[client], share) for client in clients]
    keys = [key for key in (parts[0] if parts else {}) if key.startswith(HEAD) == head]
    total = np.zeros((len(clients), len(clients)))
    as_products = not head and {"A", "B"} <= set(share)
    if as_products:
        total += gram_distances(update_gram(models, clients, scale))
    for key in keys:
        if not (as_products and key.endswith((LORA_A, LORA_B))):
            lacking = [client for client, part in zip(clients, parts, strict=True) if key not in part]
            if lacking:
                raise ProtocolError(f"{lacking[0]} has no {key}, but clients that it is compared with do")
            total += _plain(_pad_factors([part[key] for part in parts], key))
    return total


def change_gram(
    after: ByClient,
    before: ByClient,
    clients: Sequence[str],
    key: str,
    *,
    as_products: bool,
    scale: Callable[[int], float],
) -> Float64[np.ndarray, "n n"]:
    """<w_k - w_k^before, w_l - w_l^before> of every pair for one tensor; with `as_products`, at an A, of s B A.

    Factors of lower ranks are padded with zeros. Raises ProtocolError where clients hold tensors of other shapes.
    """
    both = [models[client] for models in (after, before) for client in clients]
    n = len(clients)
    if as_products and key.endswith(LORA_A):
        module = key.removesuffix(LORA_A)
        pairs = [{name: params[name] for name in (key, module + LORA_B)} for params in both]
        by_name = {str(index): pair for index, pair in enumerate(pairs)}
        gram = update_gram(by_name, list(by_name), scale)
        return np.asarray(gram[:n, :n] - gram[:n, n:] - gram[n:, :n] + gram[n:, n:])
    rows, total = _pad_factors([params[key] for params in both], key), np.zeros((n, n))
    for first in range(0, len(rows[0]), AT_ONCE):
        stack = torch.stack([row[first : first + AT_ONCE].double() for row in rows])
        changes = stack[:n] - stack[n:]
        total += (changes @ changes.T).cpu().numpy()
    return total


def _pad_factors(tensors: Sequence[Tensor], key: str) -> list[Tensor]:
    """The tensors as vectors of one length; factors of lower ranks get zeros, which other shapes may not."""
    rows = [tensor.T if key.endswith(LORA_B) else tensor for tensor in tensors]
    longest = max(row.shape[0] if row.ndim else 1 for row in rows)
    if key.endswith((LORA_A, LORA_B)):
        rows = [torch.nn.functional.pad(row, (0, 0, 0, longest - row.shape[0])) for row in rows]
    if len({row.shape for row in rows}) > 1:
        raise ProtocolError(f"{key} has several shapes; clients that are compared need equal ones")
    return [row.reshape(-1) for row in rows]


def _plain(rows: Sequence[Tensor]) -> np.ndarray:
    """|| w_k - w_l ||^2 of vectors; their differences from the first one lose fewer digits than they do themselves."""
    total = np.zeros((len(rows), len(rows)))
    for first in range(0, len(rows[0]), AT_ONCE):
        stack = torch.stack([row[first : first + AT_ONCE].double() for row in rows])
        stack -= stack[:1].clone()
        total += gram_distances((stack @ stack.T).cpu().numpy())
    return total
