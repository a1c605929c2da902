"""What training takes on a device, and what is left of it for adapters.

A device holds the frozen weights of its blocks, what autograd keeps of them for one step with the holes between
(`HEAP_COPIES`), the runtime, and for every trainable number four: the parameter, its gradient and Adam's two
moments. An upload holds the parameter alone. So memory and upload bound the same ranks in two units. Everything here
that is called a *cost* or a *budget* counts *training bytes*, all four copies; `rank_budget` turns an upload allowance
into them by multiplying by four.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from atlas_fl.errors import BudgetError, ConfigError
from atlas_fl.models.shape import ModelShape
from atlas_fl.ranks.devices import Device

VALUE_BYTES = 4
TRAINING_COPIES = 4  # parameter, gradient, first and second moment
LOGIT_COPIES = 4  # the logits, their log-softmax and the gradients of both: measured at 4.03 on 1500 x 50000
RESERVE_BYTES = 408 * 2**20
"""A Python process that has trained a step of two tokens takes 426 to 428 MB besides its weights: 389 MB of libraries,
and what more of these the first product and the first backward pass read into memory."""
HEAP_COPIES = 2
"""The heap over what is alive on it: glibc does not return blocks below 32 MiB, and what is freed in the order of the
backward pass leaves holes for the next forward pass that it fills in part. Measured at 1.8 to 2.3 on MiniLM; it is 1
where every block is mapped by itself (`MALLOC_MMAP_THRESHOLD_=262144`)."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a training step holds on the device besides the adapters."""

    tokens: int
    """Real tokens of the largest batch, over all its sequences."""
    blocks: int | None = None
    """Blocks that the device holds, from the bottom; all of them by default."""
    head_params: int = 0
    """Trainable numbers outside the adapters."""
    feed_forward_copies: int = 1
    """Tensors of the inner width that the activation keeps: 1 for a fused GELU or ReLU, 3 gated, 4 for GPT-2's."""
    checkpointing: bool = False
    """Whether blocks are computed again in the backward pass."""
    logits: int = 0
    """Numbers that the batch's predictions of text are made of: tokens to be written times the vocabulary."""
    crossing: int = 0
    """Numbers that wait at a cut: what goes up and the gradient that comes back."""


@dataclass(frozen=True, kw_only=True)
class Fractions:
    """The first ATLAS' budget: fixed shares of the device's memory instead of a model of it."""

    base: float = 0.35
    activations: float = 0.25
    optimizer: float = 0.15


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Where the memory of a device goes, in bytes."""

    total_bytes: int
    weights_bytes: int
    activations_bytes: int
    reserve_bytes: int
    parameters_bytes: int
    gradients_bytes: int
    moments_bytes: int

    @property
    def used_bytes(self) -> int:
        """The sum of all parts."""
        return sum(size for _, size in self.parts())

    @property
    def free_bytes(self) -> int:
        """What is left; negative where the device is too small."""
        return self.total_bytes - self.used_bytes

    def parts(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) of every part, for a table."""
        return (
            ("frozen weights", self.weights_bytes),
            ("activations", self.activations_bytes),
            ("runtime", self.reserve_bytes),
            ("adapters and head", self.parameters_bytes),
            ("gradients", self.gradients_bytes),
            ("Adam moments", self.moments_bytes),
        )


def adapter_bytes(shape: ModelShape, ranks: Sequence[int]) -> int:
    """Bytes of the adapters' parameters at these ranks, one for each layer: what an upload carries."""
    return sum(layer_cost(shape, layer, rank) for layer, rank in enumerate(ranks)) // TRAINING_COPIES


def layer_cost(shape: ModelShape, layer: int, rank: int) -> int:
    """Training bytes of one layer's adapters: the sum of (d_in + d_out) * rank over its modules, in four copies."""
    return sum(d_in + d_out for d_in, d_out in shape.layers[layer]) * rank * VALUE_BYTES * TRAINING_COPIES


def cost_table(shape: ModelShape, candidates: Sequence[int]) -> Int[np.ndarray, "layers candidates"]:
    """Training bytes of every layer at every candidate rank, int64: what the allocators want."""
    rows = [[layer_cost(shape, layer, rank) for rank in candidates] for layer in range(shape.num_layers)]
    return np.array(rows, dtype=np.int64)


def saved_values(shape: ModelShape, layer: int, *, rank: int = 0, feed_forward_copies: int = 1) -> int:
    """Numbers that autograd keeps of one token in one frozen block with LoRA on some of its modules.

    A frozen linear layer keeps nothing, since the gradient of its input needs its weight alone. So what stays is:
    query, key, value and output of the fused attention with one log-sum-exp a head; the inputs of both norms with
    their mean and deviation; the inner activation; the input of every adapted module (query, key and value share
    theirs) and its product with A. Measured with `saved_tensors_hooks`: within 1% on BERT and GPT-2, 6%
    above on Llama with grouped queries.
    """
    hidden, inner = shape.hidden, shape.intermediate
    modules = shape.layers[layer]
    attention = [d_out for d_in, d_out in modules if d_in == hidden and d_out != inner]
    inputs = hidden * (bool(attention) + (len(attention) > 3) + any(d_out == inner for _, d_out in modules))
    inputs += inner * any(d_in == inner for d_in, _ in modules)
    kept = 4 * hidden + shape.heads + 2 * (hidden + 2) + feed_forward_copies * inner
    return kept + inputs + len(modules) * rank


def activation_bytes(
    shape: ModelShape,
    tokens: int,
    blocks: int,
    *,
    rank: int = 0,
    feed_forward_copies: int = 1,
    checkpointing: bool = False,
) -> int:
    """Peak bytes of activations of a step over `tokens` real tokens through the first `blocks` blocks, in float32.

    What autograd keeps of every block, plus the gradients alive at once in one block: two of the inner width, or four
    of the hidden one. With checkpointing every block keeps its input alone and one block at a time is computed again.
    """
    kept = [saved_values(shape, layer, rank=rank, feed_forward_copies=feed_forward_copies) for layer in range(blocks)]
    working = max(2 * shape.intermediate, 4 * shape.hidden) if blocks else 0
    values = blocks * shape.hidden + max(kept, default=0) if checkpointing else sum(kept)
    return (values + working) * tokens * VALUE_BYTES


def device_memory(
    shape: ModelShape,
    device: Device,
    *,
    ranks: Sequence[int],
    step: Step,
    reserve_bytes: int = RESERVE_BYTES,
) -> Memory:
    """The memory of a device that trains these ranks, part by part; raises nothing where it does not fit."""
    blocks = shape.num_layers if step.blocks is None else step.blocks
    parameters = adapter_bytes(shape, ranks[:blocks])
    return _memory(shape, device, step, parameters=parameters, rank=max(ranks, default=0), reserve_bytes=reserve_bytes)


def _memory(shape: ModelShape, device: Device, step: Step, *, parameters: int, rank: int, reserve_bytes: int) -> Memory:
    blocks = shape.num_layers if step.blocks is None else step.blocks
    trained = parameters + step.head_params * VALUE_BYTES
    alive = activation_bytes(
        shape,
        step.tokens,
        blocks,
        rank=rank,
        feed_forward_copies=step.feed_forward_copies,
        checkpointing=step.checkpointing,
    )
    return Memory(
        total_bytes=device.memory_bytes,
        weights_bytes=shape.embedding_bytes
        - (0 if step.blocks is None else shape.tail_bytes)
        + sum(shape.block_bytes[:blocks]),
        activations_bytes=HEAP_COPIES * (alive + step.crossing * VALUE_BYTES)
        # A vocabulary's worth of numbers is a block that goes back as soon as it is freed.
        + LOGIT_COPIES * step.logits * VALUE_BYTES,
        reserve_bytes=reserve_bytes,
        parameters_bytes=trained,
        gradients_bytes=trained,
        moments_bytes=2 * trained,
    )


def check_memory(memory: Memory, *, name: str) -> None:
    """Nothing where the parts fit into the device; else a `BudgetError` with every part and what would help."""
    if memory.free_bytes >= 0:
        return
    parts = ", ".join(f"{part} {_mb(size)}" for part, size in memory.parts())
    raise BudgetError(
        f"{name} has {_mb(memory.total_bytes)} of memory and training takes {_mb(memory.used_bytes)} ({parts}); "
        "lower --batch-size, --max-length or --ranks, add --gradient-checkpointing, or take a larger device"
    )


def rank_budget(
    shape: ModelShape,
    device: Device,
    *,
    step: Step,
    upload_bytes: int | None,
    fractions: Fractions | None = None,
    reserve_bytes: int = RESERVE_BYTES,
) -> int:
    """Training bytes that the adapters of a device may take: the lesser of its free memory and four times its upload.

    `upload_bytes` bounds the parameters alone; None leaves memory as the only bound. Free memory is what
    `device_memory` leaves at the device's largest rank, or with `fractions` what those leave.
    Raises `BudgetError` where the model itself does not fit, `ConfigError` for an impossible allowance or fraction.
    """
    if upload_bytes is not None and upload_bytes < 1:
        raise ConfigError(f"adapter_bytes {upload_bytes} is not allowed; give at least 1")
    if fractions is not None:
        left = _fraction_bytes(device, fractions)
    else:
        # adapters of no size, but activations at the largest rank, so that no choice of ranks overruns the device
        empty = _memory(shape, device, step, parameters=0, rank=device.max_rank, reserve_bytes=reserve_bytes)
        check_memory(empty, name=device.name)
        left = empty.free_bytes
    return left if upload_bytes is None else min(left, upload_bytes * TRAINING_COPIES)


def _fraction_bytes(device: Device, fractions: Fractions) -> int:
    shares = (fractions.base, fractions.activations, fractions.optimizer)
    if not all(0 <= share < 1 for share in shares) or sum(shares) >= 1 or fractions.optimizer == 0:
        raise ConfigError(
            f"alpha_base, alpha_act and alpha_opt are {shares}; give values from 0 to below 1 that sum to less than 1, "
            "alpha_opt above 0"
        )
    # parameters and gradients live in the rest, the two moments in the optimizer's share: half of the bytes each
    return int(2 * min(1 - sum(shares), fractions.optimizer) * device.memory_bytes)


def device_rank(shape: ModelShape, *, budget_bytes: int) -> int:
    """The largest rank that every layer could have within these training bytes, candidates aside."""
    return budget_bytes // max(1, sum(layer_cost(shape, layer, 1) for layer in range(shape.num_layers)))


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
