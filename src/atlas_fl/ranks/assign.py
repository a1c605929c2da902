"""From a device and the importance of its layers to ranks: budget, allocation and memory check in one call."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from atlas_fl.errors import BudgetError
from atlas_fl.models.shape import ModelShape
from atlas_fl.ranks.allocate import ALLOCATORS, find_allocator, usable_candidates
from atlas_fl.ranks.devices import Device
from atlas_fl.ranks.importance import scale_budget
from atlas_fl.ranks.memory import (
    TRAINING_COPIES,
    Fractions,
    Memory,
    Step,
    adapter_bytes,
    check_memory,
    cost_table,
    device_memory,
    device_rank,
    layer_cost,
    rank_budget,
)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The ranks of a client and what they were chosen from."""

    ranks: tuple[int, ...]
    """Rank of every layer; 0 where nothing is adapted."""
    budget_bytes: int
    """Training bytes (four copies of every parameter) that the ranks may take."""
    used_bytes: int
    """Training bytes that they take."""
    upload_bytes: int
    """Bytes of the adapters' parameters: a quarter of `used_bytes`."""
    largest_rank: int
    """Estimate: the largest rank that every layer could have within the budget."""
    memory: Memory
    notes: tuple[str, ...] = ()
    """What the user should know of how the budget came about."""


def assign_ranks(
    shape: ModelShape,
    device: Device,
    *,
    importance: Float[np.ndarray, " layers"],
    rule: str,
    candidates: Sequence[int],
    step: Step,
    own_bytes: int | None = None,
    fractions: Fractions | None = None,
    factor: float = 1.0,
) -> Assignment:
    """The ranks that `rule` (a name of `ALLOCATORS` or a number) gives the layers of this client.

    The budget is the lesser of free memory and upload: `own_bytes` of parameters, else the device's allowance. An
    allowance that follows from the upload rate is a wish and not a law: it gives way, with a note, where not even the
    smallest candidate goes through in time, and it does not bind a fixed rank, which is the user's own word. Memory,
    `own_bytes` and an allowance that the profile spells out always bind. `factor` scales the budget
    (`complexity_factors`). Of a client that holds the first `step.blocks` blocks alone, the allowance is the same and
    memory binds the ranks of these blocks alone. Raises `ConfigError` and `BudgetError`.
    """
    allocate = find_allocator(rule)
    least, upload, notes = _allowance(shape, device, rule=rule, candidates=candidates, own_bytes=own_bytes)
    table = cost_table(shape, candidates)
    free = rank_budget(
        shape, device, step=step, upload_bytes=upload if step.blocks is None else None, fractions=fractions
    )
    whole = int(table[:, -1].sum()) if upload is None else upload * TRAINING_COPIES
    budget = scale_budget(free if step.blocks is None else whole, factor, least_bytes=least * TRAINING_COPIES)
    ranks = allocate(importance, table, candidates, budget_bytes=budget, max_rank=device.max_rank)
    held = step.blocks or 0
    if sum(layer_cost(shape, layer, rank) for layer, rank in enumerate(ranks[:held])) > free:
        # Memory binds what is on the device alone; the blocks above the cut keep theirs.
        below = allocate(importance[:held], table[:held], candidates, budget_bytes=free, max_rank=device.max_rank)
        ranks = (*below, *ranks[held:])
    memory = device_memory(shape, device, ranks=ranks, step=step)
    check_memory(memory, name=device.name)
    sent = adapter_bytes(shape, ranks)
    return Assignment(
        ranks=ranks,
        budget_bytes=budget,
        used_bytes=sent * TRAINING_COPIES,
        upload_bytes=sent,
        largest_rank=device_rank(shape, budget_bytes=budget),
        memory=memory,
        notes=notes,
    )


def _allowance(
    shape: ModelShape, device: Device, *, rule: str, candidates: Sequence[int], own_bytes: int | None
) -> tuple[int, int | None, tuple[str, ...]]:
    """(parameter bytes of the smallest adapters, bytes that may be uploaded or None for any, what to tell of that)."""
    chosen = rule in ALLOCATORS
    smallest = usable_candidates(candidates, max_rank=device.max_rank)[0] if chosen else int(rule)
    least = adapter_bytes(shape, [smallest] * shape.num_layers)
    bound = device.own_adapter_bytes if own_bytes is None else own_bytes
    _check_bound(shape, bound, rank=smallest, least=least)
    if bound is not None or not chosen:
        return least, bound, ()
    if least <= device.adapter_bytes:
        return least, device.adapter_bytes, ()
    return least, least, (_stretch_note(device, rank=smallest, least=least),)


def _check_bound(shape: ModelShape, bound: int | None, *, rank: int, least: int) -> None:
    if bound is not None and 1 <= bound < least:
        raise BudgetError(
            f"adapter_bytes {bound:,} does not hold rank {rank} in each of {shape.num_layers} layers ({least:,} bytes "
            "of parameters); give more bytes or a smaller rank candidate"
        )


def _stretch_note(device: Device, *, rank: int, least: int) -> str:
    return (
        f"{device.name}: an upload allowance of {device.adapter_bytes:,} bytes does not hold rank {rank} in every "
        f"layer; {least:,} bytes ({least / device.up_bytes_per_second:.1f} s) are allowed instead"
    )
