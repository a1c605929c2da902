"""Mixing tensors apart from each other: heads, biases, and LoRA factors in factor space.

Factors of different ranks meet by `pad` (zeros up to the longest rank, as HetLoRA) or `truncate` (the leading rows
that all of a connected group have; the rest stays the client's own). The average of factors is not the factors of
the average: product space is exact, this is what most papers do.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from atlas_fl.mixing.rows import Group

Moved: TypeAlias = tuple[tuple[int, ...], Tensor]
"""Clients, by position, and the new tensor that they all get."""

Reduce: TypeAlias = Callable[[Tensor], Tensor]
"""From (clients, ...) to (...), value by value: what a rule that is no mixing matrix does in the place of a sum."""

Workspace: TypeAlias = dict[tuple[int, int, torch.dtype, torch.device], Tensor]
"""Stacks that are used again: megabytes fresh from the system cost more time than the sums over them."""


def _weights(rows: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(rows).to(device=like.device, dtype=like.dtype)


def _flat(stack: Tensor) -> Tensor:
    """(clients, values) in at least float32."""
    return stack.flatten(1) if stack.dtype in (torch.float32, torch.float64) else stack.flatten(1).float()


def _aggregated(rows: np.ndarray, flat: Tensor, reduce: Reduce | None) -> Tensor:
    """(rows, values): the weighted sums of the stack, or what `reduce` makes of it.

    Then all sources count alike, and a row over their equal weight is what each of them is scaled by.
    """
    if reduce is None:
        return _weights(rows, flat) @ flat
    scales = rows * rows.shape[1]
    alike = np.allclose(scales, 1, rtol=1e-12)
    found = [
        reduce(flat if alike else flat * _weights(row, flat)[:, None]) for row in (scales[:1] if alike else scales)
    ]
    return torch.stack(found * (len(rows) // len(found)))


def mix_plain(
    tensors: Mapping[int, Tensor], group: Group, workspace: Workspace, reduce: Reduce | None = None
) -> Iterator[Moved]:
    """`sum_l m_kl w_l` for every target of the group, whose tensors have one shape; equal rows give one tensor.

    The stack of all sources lies in `workspace`, which the next call may overwrite.
    """
    first = tensors[group.sources[0]]
    place = (len(group.sources), first.numel(), first.dtype, first.device)
    if place not in workspace:
        workspace[place] = torch.empty(*place[:2], dtype=first.dtype, device=first.device)
    stack = _flat(torch.stack([tensors[k].reshape(-1) for k in group.sources], out=workspace[place]))
    mixed = _aggregated(group.rows, stack, reduce).to(first.dtype).view(-1, *first.shape)
    # every row owns its memory: a client that stays away must not keep the stack of all alive
    rows = [mixed[0]] if len(mixed) == 1 else [row.clone() for row in mixed]
    return zip(group.targets, rows)


def _scaled(group: Group, scales: Mapping[int, float]) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
    """Rows with `m_kl s_l / s_k`, split where targets of one row have different scales."""
    rows, targets = [], []
    for row, clients in zip(group.rows, group.targets):
        for scale in dict.fromkeys(scales[k] for k in clients):
            rows.append(row * np.array([scales[source] for source in group.sources]) / scale)
            targets.append(tuple(k for k in clients if scales[k] == scale))
    return np.array(rows), tuple(targets)


def mix_factor(
    factors: Mapping[int, Tensor],
    group: Group,
    *,
    lead: Mapping[int, int] | None,
    scales: Mapping[int, float] | None,
    keep_own: bool,
    reduce: Reduce | None = None,
) -> Iterator[Moved]:
    """The mixed factor of every target, each with its own rank; the rank is the first axis (pass B transposed).

    `lead` gives the number of leading rows that mix (truncate), None pads with zeros to the longest rank. `scales`
    are those of B: the update is s B A, so s B is what is averaged. Rows that no source supplies are the client's
    own (`keep_own`, for A, so that the direction can be trained) or zero (for B, so that the function is the mean's).
    """
    rows, targets = (group.rows, group.targets) if scales is None else _scaled(group, scales)
    first = factors[group.sources[0]]
    longest = max(factors[k].shape[0] for k in group.sources)
    stack = torch.zeros(len(group.sources), longest, first.shape[1], dtype=first.dtype, device=first.device)
    for place, k in enumerate(group.sources):
        stack[place, : factors[k].shape[0]] = factors[k]
    flat = _flat(stack)
    mixed = _aggregated(rows, flat, reduce).to(first.dtype).view(-1, longest, first.shape[1])
    for row, clients in zip(mixed, targets):
        for k in clients:
            own = factors[k]
            length = min(longest, own.shape[0]) if lead is None else lead[k]
            new = own.clone() if keep_own or lead is not None else torch.zeros_like(own)
            new[:length] = row[:length]
            yield (k,), new
