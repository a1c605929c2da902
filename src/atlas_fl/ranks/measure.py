"""What measuring a frozen model takes, before anything is trained: operations and memory, from sizes alone.

A measurement passes through all blocks and goes back to the lowest one whose weights it takes gradients of. What is
below that block records nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from atlas_fl.models.shape import ModelShape
from atlas_fl.ranks.memory import HEAP_COPIES, LOGIT_COPIES, VALUE_BYTES, activation_bytes


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What one measurement does in every block of the whole model."""

    lowest: int
    """The lowest block that its backward pass reaches; the number of blocks where there is none."""
    products: tuple[int, ...]
    """By block, numbers each of which takes two operations a token beside those of the frozen block: of every weight
    whose gradient is taken one, of an adapter's weight one more for its forward and one for its input's gradient."""
    held_bytes: tuple[int, ...]
    """By block, bytes that are alive beside the frozen weights and the activations: gradients, their sums, copies."""
    inputs: tuple[tuple[tuple[int, int], ...], ...]
    """By block, (d_in, d_out) of the layers whose inputs the backward pass needs."""
    rank: int = 0
    head_bytes: int = 0
    """The same of the head, on the side that has it."""


def dense(shape: ModelShape) -> tuple[tuple[int, int], ...]:
    """(d_in, d_out) of the matrices of one block: four of attention and two of the feed-forward layer."""
    hidden, inner = shape.hidden, shape.intermediate
    return (*((hidden, hidden),) * 4, (hidden, inner), (inner, hidden))


def measuring_flops(
    shape: ModelShape, probe: Probe, blocks: Sequence[int], *, tokens: float, length: float, logits: float = 0
) -> float:
    """Operations in these blocks for so many tokens in sequences of mean `length` (as in `ranks.predict`).

    A frozen weight takes 2 operations forward and, where the backward pass comes by, 2 for the gradient of its input
    and 2 for its own; attention 4 * length * hidden forward and twice that backward. `logits` are tokens times
    vocabulary, on the side that has the head.
    """
    total = 0.0
    for block in blocks:
        back = block >= probe.lowest
        total += (4 if back else 2) * shape.block_params[block] + (12 if back else 4) * length * shape.hidden
        total += 2 * probe.products[block]
    return tokens * total + (4 if probe.lowest < shape.num_layers else 2) * shape.hidden * logits


def measuring_bytes(
    shape: ModelShape,
    probe: Probe,
    blocks: Sequence[int],
    *,
    tokens: int,
    crossing: int = 0,
    logits: int = 0,
    head: bool = True,
    checkpointing: bool = False,
) -> int:
    """Bytes that a pass over so many tokens takes at once on the side of these blocks, frozen weights aside.

    A forward pass that records nothing still works in one block at a time. `crossing` are numbers that wait at a cut.
    """
    back = [block for block in blocks if block >= probe.lowest]
    recorded = replace(shape, layers=tuple(probe.inputs[block] for block in back or blocks[:1]))
    alive = activation_bytes(recorded, tokens, len(recorded.layers), rank=probe.rank, checkpointing=checkpointing)
    held = sum(probe.held_bytes[block] for block in back) + (probe.head_bytes if head else 0)
    return HEAP_COPIES * (alive + crossing * VALUE_BYTES) + LOGIT_COPIES * logits * VALUE_BYTES + held
