"""Distances between models, similarity of their changes, and their diversity, in product space of s B A.

    d_kl^2 = sum over modules || s_k B_k A_k - s_l B_l A_l ||_F^2 + sum over other tensors || w_k - w_l ||^2

Pairs of factors come from Gram matrices of the small products (`<s_k B_k A_k, s_l B_l A_l>`), so a rotation of the
factors changes nothing and no dense update is formed.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from atlas_fl.aggregation.matrices import Square
from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.errors import ProtocolError
from atlas_fl.frozen import Frozen
from atlas_fl.params import HEAD, LORA_A, LORA_B, ByClient, lora_modules, shared_params

AT_ONCE = 2**20
"""Values of each client that are looked at together."""


def update_gram(by_client: ByClient, clients: Sequence[str], scale: Callable[[int], float]) -> Square:
    """<Delta_k, Delta_l> of every pair, summed over the adapted modules; a client without a module has zero there."""
    n = len(clients)
    total = np.zeros((n, n))
    # Sorted, because the last bits follow the order, and a model that comes from a checkpoint has another one.
    for module in sorted({module for client in clients for module in lora_modules(by_client[client])}):
        holders = [k for k, client in enumerate(clients) if module + LORA_A in by_client[client]]
        a = [by_client[clients[k]][module + LORA_A].double() for k in holders]
        b = [by_client[clients[k]][module + LORA_B].double() * scale(len(rows)) for k, rows in zip(holders, a)]
        stack_a, stack_b = torch.cat(a), torch.cat(b, 1)
        inner = ((stack_a @ stack_a.T) * (stack_b.T @ stack_b)).cpu().numpy()
        owner = np.zeros((len(inner), n))
        owner[np.arange(len(inner)), np.repeat(holders, [len(rows) for rows in a])] = 1.0
        total += owner.T @ inner @ owner
    return total


def gram_distances(gram: Square) -> Square:
    """||Delta_k - Delta_l||^2 of every pair; rounding below 1e-13 of the norms counts as zero."""
    squares = np.diag(gram)
    sums = squares[:, None] + squares[None, :]
    distances = sums - gram - gram.T
    return np.where(distances > 1e-13 * sums, distances, 0.0)


def squared_distances(models: ByClient, clients: Sequence[str], options: StrategyOptions, *, head: bool) -> Square:
    """d_kl^2 of what these clients share: of their heads, or of all the rest.

    Without both factors in `share` the one that is there is compared by itself, padded with zeros to the longest rank.
    Raises ProtocolError where the clients hold different tensors.
    """
    parts = [shared_params(models[client], options.share) for client in clients]
    keys = [key for key in (parts[0] if parts else {}) if key.startswith(HEAD) == head]
    total = np.zeros((len(clients), len(clients)))
    as_products = not head and {"A", "B"} <= set(options.share)
    if as_products:
        total += gram_distances(update_gram(models, clients, options.scale))
    for key in keys:
        if not (as_products and key.endswith((LORA_A, LORA_B))):
            lacking = [client for client, part in zip(clients, parts, strict=True) if key not in part]
            if lacking:
                raise ProtocolError(f"{lacking[0]} has no {key}, but clients that it is compared with do")
            total += _plain(_pad_factors([part[key] for part in parts], key))
    return total


def change_gram(
    after: ByClient, before: ByClient, clients: Sequence[str], key: str, *, options: StrategyOptions
) -> Square:
    """<w_k - w_k^before, w_l - w_l^before> of every pair for one tensor; in product space, at an A, of s B A.

    Factors of lower ranks are padded with zeros. Raises ProtocolError where clients hold tensors of other shapes.
    """
    both = [models[client] for models in (after, before) for client in clients]
    n = len(clients)
    if options.space == "product" and key.endswith(LORA_A):
        module = key.removesuffix(LORA_A)
        pairs = [{name: params[name] for name in (key, module + LORA_B)} for params in both]
        by_name = {str(index): pair for index, pair in enumerate(pairs)}
        gram = update_gram(by_name, list(by_name), options.scale)
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


def cosines(gram: Square) -> Square:
    """Cosines from inner products: 1 on the diagonal, 0 beside a vector of length zero."""
    lengths = np.sqrt(np.maximum(np.diag(gram), 0.0))
    sizes = np.outer(lengths, lengths)
    values = np.clip(np.where(sizes > 0, gram / np.where(sizes > 0, sizes, 1.0), 0.0), -1.0, 1.0)
    np.fill_diagonal(values, 1.0)
    return np.asarray(values)


def gram_of_changes(
    before: ByClient,
    after: ByClient,
    tasks: Mapping[str, str],
    options: StrategyOptions,
    *,
    selects: Callable[[str], bool] | None = None,
) -> Square:
    """<w_k - w_k^before, w_l - w_l^before> of the clients of these tasks, over the shared parameters that `selects`
    names, by default all.

    A parameter that one of two clients lacks, and a head of another task, adds nothing.
    """
    shared = {name: shared_params(after[name], options.share) for name in tasks}
    names, total = list(tasks), np.zeros((len(tasks),) * 2)
    # sorted, because sums follow the order, and a model that comes from a checkpoint has another one
    for key in sorted({key for params in shared.values() for key in params if params[key].numel()}):
        if (selects is not None and not selects(key)) or (options.space == "product" and key.endswith(LORA_B)):
            continue
        for task in dict.fromkeys(tasks.values()) if key.startswith(HEAD) else (None,):
            places = [k for k, name in enumerate(names) if task in (None, tasks[name]) and key in shared[name]]
            if places:  # a task that writes text has no head
                members = [names[k] for k in places]
                total[np.ix_(places, places)] += change_gram(shared, before, members, key, options=options)
    return total


class Diversity(Frozen):
    """Effect of one server step on the adapters; all norms are Frobenius norms over all modules."""

    spread_before: float
    """Root mean square distance of the updates from their mean over their root mean square norm: 0 if all agree."""
    spread_after: float
    """The same of what the clients start the next round with."""
    norms: dict[str, float]
    """||Delta_k|| as trained."""

    def is_finite(self) -> bool:
        """Return whether every figure is a number: the squares of updates that are far too large are not."""
        return bool(np.isfinite([self.spread_before, self.spread_after, *self.norms.values()]).all())


def spread(squares: np.ndarray, mean_square: float) -> float:
    """Root mean square distance from the plain mean, over the root mean square norm: 0 (all equal) to 1 (mean zero).

    From ||Delta_k||^2, (n,), and ||mean Delta||^2; rounding below 1e-13 of the norms counts as zero.
    """
    size = float(np.mean(squares))
    distance = size - mean_square
    return float(np.sqrt(distance / size)) if distance > 1e-13 * size else 0.0


CLIENTS_AT_ONCE = 1000
"""Most clients whose factors are in memory in float64 where their mean is formed."""


def squared_norms(
    by_client: ByClient, clients: Sequence[str], scale: Callable[[int], float]
) -> tuple[np.ndarray, float]:
    """(||Delta_k||^2 of each client (n,), ||mean Delta||^2), summed over the adapted modules; linear in the clients.

    The mean of a module is formed where its factors have more ranks than it, and else left as a product of factors.
    """
    squares, of_sum = np.zeros(len(clients)), 0.0
    for module in sorted({module for client in clients for module in lora_modules(by_client[client])}):
        holders = [k for k, client in enumerate(clients) if module + LORA_A in by_client[client]]
        pairs = [(by_client[clients[k]][module + LORA_A], by_client[clients[k]][module + LORA_B]) for k in holders]
        is_formed = sum(len(a) for a, _ in pairs) > min(pairs[0][0].shape[1], len(pairs[0][1]))
        total = torch.zeros((), dtype=torch.float64)
        at_once = CLIENTS_AT_ONCE if is_formed else len(pairs)
        for first in range(0, len(pairs), at_once):
            block = pairs[first : first + at_once]
            a, b = zip(*((a.double(), b.double() * scale(len(a))) for a, b in block), strict=True)
            places = holders[first : first + len(block)]
            squares[places] += [float(((x @ x.T) * (y.T @ y)).sum()) for x, y in zip(a, b, strict=True)]
            stack_a, stack_b = torch.cat(a), torch.cat(b, 1)
            total = total + stack_b @ stack_a if is_formed else (stack_a @ stack_a.T) * (stack_b.T @ stack_b)
        of_sum += float((total.square() if is_formed else total).sum())
    return squares, of_sum / len(clients) ** 2


def diversity(before: ByClient, after: ByClient, *, clients: Sequence[str], scale: Callable[[int], float]) -> Diversity:
    """Spread and norms of one server step; `before` are the models as trained, `after` as delivered."""
    first, second = (squared_norms(models, clients, scale) for models in (before, after))
    norms = dict(zip(clients, np.sqrt(first[0]).tolist(), strict=True))
    return Diversity(spread_before=spread(*first), spread_after=spread(*second), norms=norms)
