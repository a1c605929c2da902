"""Applying the matrix of a rule to the models: `w <- M w`, in factor space or in product space."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atlas_fl.errors import ConfigError, ProtocolError, unknown
from atlas_fl.mixing.factors import Moved, Reduce, Workspace, mix_factor, mix_plain
from atlas_fl.mixing.product import energy_share, fit, leading, leading_reduced, realigned, stack_factors
from atlas_fl.mixing.rows import Group, components_of, groups_of
from atlas_fl.tree import HEAD, LORA_A, LORA_B, PRIVATE, lora_modules
from atlas_fl.types import ByClient, Params

SHARES = ("A", "B", "head")
SPACES = ("factors", "product")
ALIGNMENTS = ("pad", "truncate")


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """Models after a server step."""

    by_client: dict[str, Params]
    """Every client's new parameters, in the old order of the keys. Who did not move has the same mapping as before,
    what did not move is the same tensor; clients with equal rows and ranks share one tensor, so read-only is meant."""
    discarded: dict[str, float]
    """Share of the squared norm of a client's update that its ranks could not hold; 0 for who did not move."""


def check_mixing(share: Sequence[str], space: str, align: str) -> None:
    """Raise ConfigError for an unknown word, for sharing nothing, and for product space with A or B alone."""
    for kind, names, known in (("share", share, SHARES), ("space", [space], SPACES), ("align", [align], ALIGNMENTS)):
        for name in names:
            if name not in known:
                raise unknown(kind, name, known)
    if not share:
        raise ConfigError(f"share is empty: a rule that communicates needs some of {', '.join(SHARES)}; or use 'local'")
    if space == "product" and ("A" in share) != ("B" in share):
        raise ConfigError(
            f"space 'product' mixes s B A and needs both A and B shared, not {', '.join(share)}; use space 'factors'"
        )


class _Rows:
    """Groups and components of each distinct matrix, found once."""

    def __init__(self, matrices: Callable[[str], np.ndarray]) -> None:
        self._matrices = matrices
        self.workspace: Workspace = {}
        self._found: dict[int, tuple[np.ndarray, tuple[Group, ...], tuple[int, ...]]] = {}

    def of(self, key: str) -> tuple[tuple[Group, ...], tuple[int, ...]]:
        matrix = self._matrices(key)
        if id(matrix) not in self._found:
            self._found[id(matrix)] = (matrix, groups_of(matrix), components_of(matrix))
        return self._found[id(matrix)][1:]


@dataclass(frozen=True, kw_only=True)
class _Held:
    """Everyone's models, by position."""

    params: tuple[Params, ...]
    clients: tuple[str, ...]

    def holders(self, group: Group, key: str) -> dict[int, Tensor]:
        """The key's tensor of every client in the group; empty if nobody there holds it."""
        found = {k: self.params[k][key] for k in group.everyone if key in self.params[k]}
        if found and len(found) < len(group.everyone):
            lacking = ", ".join(self.clients[k] for k in group.everyone if k not in found)
            raise ProtocolError(f"{lacking} has no {key}, but clients that it mixes with do")
        return found


def _all_keys(params: Iterable[Params]) -> Iterator[str]:
    return iter(dict.fromkeys(key for one in params for key in one))


def _is_shared(key: str, share: Sequence[str], space: str) -> bool:
    """Whether a tensor mixes by itself; biases and other whole tensors go with the adapters."""
    if key.startswith(HEAD):
        return "head" in share
    if key == PRIVATE:
        return False
    if key.endswith(LORA_A):
        return "A" in share and space == "factors"
    if key.endswith(LORA_B):
        return "B" in share and space == "factors"
    return "A" in share or "B" in share


def _leads(components: Sequence[int], ranks: Sequence[int | None]) -> dict[int, int]:
    """For each client with a rank the smallest among those that it is connected with."""
    smallest: dict[int, int] = {}
    for component, rank in zip(components, ranks):
        if rank is not None:
            smallest[component] = min(rank, smallest.get(component, rank))
    return {k: smallest[components[k]] for k, rank in enumerate(ranks) if rank is not None}


def _mix_key(
    held: _Held, rows: _Rows, key: str, *, align: str, scale: Callable[[int], float], reduce: Reduce | None
) -> Iterator[Moved]:
    groups, components = rows.of(key)
    is_b = key.endswith(LORA_B)
    is_factor = is_b or key.endswith(LORA_A)
    axis = 1 if is_b else 0
    lead: dict[int, int] | None = None
    if align == "truncate" and is_factor:
        lead = _leads(components, [one[key].shape[axis] if key in one else None for one in held.params])
    for group in groups:
        tensors = held.holders(group, key)
        shapes = {tensor.shape for tensor in tensors.values()}
        if len(shapes) == 1 and (lead is None or {lead[k] for k in tensors} == {next(iter(shapes))[axis]}):
            yield from mix_plain(tensors, group, rows.workspace, reduce)
        elif shapes and not is_factor:
            raise ProtocolError(
                f"{key} has the shapes {sorted(map(tuple, shapes))}; clients that mix it need equal ones: name their "
                "tasks apart or do not share the head"
            )
        elif is_b:
            scales = {k: scale(tensor.shape[1]) for k, tensor in tensors.items()}
            turned = {k: tensor.T for k, tensor in tensors.items()}
            mixed = mix_factor(turned, group, lead=lead, scales=scales, keep_own=False, reduce=reduce)
            yield from ((clients, tensor.T.contiguous()) for clients, tensor in mixed)
        elif shapes:
            yield from mix_factor(tensors, group, lead=lead, scales=None, keep_own=True, reduce=reduce)


def _mix_product(
    held: _Held, group: Group, module: str, *, scale: Callable[[int], float], reduce: Reduce | None
) -> Iterator[tuple[int, Tensor, Tensor, float, float]]:
    """(client, A, B, energy thrown away, energy of the whole) for every target of the group."""
    a, b = held.holders(group, module + LORA_A), held.holders(group, module + LORA_B)
    if not a:
        return
    sources = group.sources
    counts = [a[k].shape[0] for k in sources]
    factors = [a[k] for k in sources], [b[k] for k in sources], [scale(r) for r in counts]
    longest = [max(a[k].shape[0] for k in targets) for targets in group.targets]
    if reduce is None:
        stack_a, stack_b = stack_factors(*factors)
        weights = torch.from_numpy(np.repeat(group.rows, counts, axis=1)).to(stack_a.device)
        found = leading(stack_a, stack_b, weights, ranks=longest)
    else:
        found = leading_reduced(*factors, reduce=reduce, ranks=longest)
    for best, targets in zip(found, group.targets):
        done: dict[int, tuple[Tensor, Tensor, float]] = {}
        for k in targets:
            rank = a[k].shape[0]
            # equal rank, equal result, unless spare directions come from the client's own A
            if rank not in done or rank > len(best.energies):
                new_a, new_b, thrown = fit(best, a[k], rank=rank, scale=scale(rank))
                done[rank] = (new_a.to(a[k].dtype).contiguous(), new_b.to(b[k].dtype).contiguous(), thrown)
            yield k, *done[rank], best.total


def mix(
    by_client: ByClient,
    matrices: Callable[[str], np.ndarray] | Mapping[str, np.ndarray],
    *,
    clients: Sequence[str],
    share: Sequence[str],
    space: str,
    align: str,
    scale: Callable[[int], float],
    reduce: Reduce | None = None,
) -> Mixed:
    """Everyone's model after `w <- M w`, where `matrices(key)` is M (n, n) float64, row-stochastic, for that tensor.

    In `product` space the update `s B A` of each module is mixed with the matrix of its `lora_A`, then cut to each
    client's own rank. `scale` gives s of a rank. Who has the identity's row keeps the very same tensors. Raises
    ConfigError for words that contradict, ProtocolError where models that should mix hold different tensors.

    With `reduce` a row of M, whose weights are equal, only says who is aggregated, and this function how: value by
    value, in product space those of the dense updates.
    """
    check_mixing(share, space, align)
    rows = _Rows(matrices.__getitem__ if isinstance(matrices, Mapping) else matrices)
    held = _Held(params=tuple(by_client[client] for client in clients), clients=tuple(clients))
    new: dict[int, dict[str, Tensor]] = {}
    for key in _all_keys(held.params):
        if _is_shared(key, share, space):
            for targets, tensor in _mix_key(held, rows, key, align=align, scale=scale, reduce=reduce):
                for k in targets:
                    new.setdefault(k, dict(held.params[k]))[key] = tensor
    thrown, total = dict.fromkeys(clients, 0.0), dict.fromkeys(clients, 0.0)
    # Sorted, because the sums below follow the order, and a model that comes from a checkpoint has another one.
    modules = sorted(lora_modules(dict.fromkeys(_all_keys(held.params), torch.empty(0)))) if space == "product" else []
    for module in modules if "A" in share else []:
        for group in rows.of(module + LORA_A)[0]:
            for k, a, b, lost, whole in _mix_product(held, group, module, scale=scale, reduce=reduce):
                new.setdefault(k, dict(held.params[k])).update({module + LORA_A: a, module + LORA_B: b})
                thrown[clients[k]] += lost
                total[clients[k]] += whole
    moved = {client: new.get(k, held.params[k]) for k, client in enumerate(clients)}
    return Mixed(by_client=moved, discarded=energy_share(thrown, total))


def realign(params: Params, ranks: Mapping[str, int], scale: Callable[[int], float]) -> dict[str, Tensor]:
    """The same model with other ranks: `ranks` names the modules that change, `scale` gives s of a rank.

    Exact as long as the new rank holds the product, else the best approximation. New directions are orthogonal rows
    of A beside zero columns of B, so they can be trained. Raises ConfigError for an unknown module or rank below 1.
    """
    new = dict(params)
    for module, rank in ranks.items():
        if module + LORA_A not in params:
            raise unknown("adapted module", module, lora_modules(params))
        if rank < 1:
            raise ConfigError(f"rank {rank} of {module} must be at least 1")
        a, b = params[module + LORA_A], params[module + LORA_B]
        if rank != a.shape[0]:
            scales = {"old_scale": scale(a.shape[0]), "new_scale": scale(rank)}
            new[module + LORA_A], new[module + LORA_B] = realigned(a, b, rank=rank, **scales)
    return new
