"""Bytes, seconds and memory of a client's work, from sizes alone and before anything is trained.

Memory. A device holds the frozen weights of its blocks, the activations that autograd saves for one step including heap
fragmentation (`HEAP_COPIES`), the runtime, and for every trainable number four values: the parameter, its gradient and
Adam's two moments. An upload holds the parameter alone. So memory and upload bound the same ranks in two units.
Everything here that is called a *cost* or a *budget* counts *training bytes*, all four copies; an upload allowance is
multiplied by four.

Rounds. Seconds are the profile's: operations over FLOP/s, bytes over the link's rate, and one latency per message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from atlas_fl.errors import BudgetError, ConfigError
from atlas_fl.frozen import Frozen
from atlas_fl.models.registry import ModelShape
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


class TrainingStep(Frozen):
    """Memory of a training step on the device besides the adapters."""

    tokens: int
    """Real tokens of the largest batch, over all its sequences."""
    blocks: int | None = None
    """Blocks that the device holds, from the bottom; all of them by default."""
    head_params: int = 0
    """Trainable numbers outside the adapters."""
    checkpointing: bool = False
    """True if blocks are computed again in the backward pass."""
    logits: int = 0
    """Numbers that the batch's predictions of text are made of: tokens to be written times the vocabulary."""
    crossing: int = 0
    """Numbers that wait at a cut: what goes up and the gradient that comes back."""


class Memory(Frozen):
    """Memory of a device by use, in bytes."""

    total_bytes: int
    parts: Mapping[str, int]
    """Bytes by what takes them."""

    @property
    def used_bytes(self) -> int:
        """The sum of all parts."""
        return sum(self.parts.values())

    @property
    def free_bytes(self) -> int:
        """Bytes that are left; negative where the device is too small."""
        return self.total_bytes - self.used_bytes


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


def saved_activations(shape: ModelShape, layer: int, *, rank: int = 0) -> int:
    """Numbers that autograd keeps of one token in one frozen block with LoRA on some of its modules.

    A frozen linear layer keeps nothing, since the gradient of its input needs its weight alone. So what stays is:
    query, key, value and output of the fused attention with one log-sum-exp a head; the inputs of both norms with
    their mean and deviation; the inner activation, once, as a fused GELU or ReLU keeps it; the input of every adapted
    module (query, key and value share theirs) and its product with A. Measured with `saved_tensors_hooks`: within 1% on
    BERT. Gated activations keep three tensors of the inner width, GPT-2's four.
    """
    hidden, inner = shape.hidden, shape.intermediate
    modules = shape.layers[layer]
    attention = [d_out for d_in, d_out in modules if d_in == hidden and d_out != inner]
    inputs = hidden * (bool(attention) + (len(attention) > 3) + any(d_out == inner for _, d_out in modules))
    inputs += inner * any(d_in == inner for d_in, _ in modules)
    values = 4 * hidden + shape.heads + 2 * (hidden + 2) + inner
    return values + inputs + len(modules) * rank


def activation_bytes(shape: ModelShape, tokens: int, blocks: int, *, rank: int = 0, checkpointing: bool = False) -> int:
    """Peak bytes of activations of a step over `tokens` real tokens through the first `blocks` blocks, in float32.

    What autograd keeps of every block, plus the gradients alive at once in one block: two of the inner width, or four
    of the hidden one. Blocks below the first adapted one record nothing. With checkpointing every block keeps its input
    alone and one block at a time is computed again.
    """
    saved = [saved_activations(shape, layer, rank=rank) for layer in range(shape.first_adapted, blocks)]
    working = max(2 * shape.intermediate, 4 * shape.hidden) if blocks else 0
    values = len(saved) * shape.hidden + max(saved, default=0) if checkpointing else sum(saved)
    return (values + working) * tokens * VALUE_BYTES


def device_memory(
    shape: ModelShape, device: Device, *, ranks: Sequence[int], step: TrainingStep, largest_rank: int | None = None
) -> Memory:
    """The memory of a device that trains these ranks, part by part; raises nothing where it does not fit.

    Activations are those of `largest_rank`, by default the largest of the ranks.
    """
    blocks = shape.num_layers if step.blocks is None else step.blocks
    trained = adapter_bytes(shape, ranks[:blocks]) + step.head_params * VALUE_BYTES
    rank = max(ranks, default=0) if largest_rank is None else largest_rank
    alive = activation_bytes(shape, step.tokens, blocks, rank=rank, checkpointing=step.checkpointing)
    tail_bytes = 0 if step.blocks is None else shape.tail_bytes
    weights = shape.embedding_bytes - tail_bytes + sum(shape.block_bytes[:blocks]) + shape.unpacked_bytes
    return Memory(
        total_bytes=device.memory_bytes,
        parts={
            "frozen weights": weights,
            # A vocabulary's worth of numbers is a block that goes back as soon as it is freed.
            "activations": HEAP_COPIES * (alive + step.crossing * VALUE_BYTES)
            + LOGIT_COPIES * step.logits * VALUE_BYTES,
            "runtime": RESERVE_BYTES,
            "adapters and head": trained,
            "gradients": trained,
            "Adam moments": 2 * trained,
        },
    )


def check_memory(memory: Memory, shape: ModelShape, *, name: str) -> None:
    """Raise `BudgetError`, with every part and what would help, unless the parts fit into the device."""
    if memory.free_bytes >= 0:
        return
    parts = ", ".join(f"{part} {_mb(size)}" for part, size in memory.parts.items())
    fewer_bits = " --base-weights bf16 or" if shape.vocabulary and not shape.unpacked_bytes else ""
    raise BudgetError(
        f"{name} has {_mb(memory.total_bytes)} of memory and training takes {_mb(memory.used_bytes)} ({parts}); "
        f"lower --batch-size, --max-length or --ranks, add{fewer_bits} --gradient-checkpointing, or take a larger"
        " device"
    )


def free_memory(shape: ModelShape, device: Device, *, step: TrainingStep) -> int:
    """Training bytes that the adapters of a device may take: its free memory at the device's largest rank.

    Raises `BudgetError` where the model itself does not fit.
    """
    # adapters of no size, but activations at the largest rank, so that no choice of ranks overruns the device
    empty = device_memory(shape, device, ranks=(0,) * shape.num_layers, step=step, largest_rank=device.max_rank)
    check_memory(empty, shape, name=device.name)
    return empty.free_bytes


def fraction_budget(device: Device, *, base: float, activations: float, optimizer: float) -> int:
    """Training bytes of adapters in the first ATLAS' budget: fixed shares of the memory instead of a model of it.

    Raises `ConfigError` where the optimizer has no share.
    """
    if not optimizer:
        raise ConfigError("--alpha-opt is 0, which leaves nothing for Adam's moments; give a value above 0")
    # parameters and gradients live in the rest, the two moments in the optimizer's share: half of the bytes each
    return int(2 * min(1 - sum((base, activations, optimizer)), optimizer) * device.memory_bytes)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


class RoundPrediction(Frozen):
    """One client's round on its device."""

    up_bytes: int
    down_bytes: int
    flops: float
    compute_seconds: float
    transfer_seconds: float
    memory: Memory
    server_seconds: float = 0.0
    """Computing on the server's side of a cut, while the client waits."""

    @property
    def seconds(self) -> float:
        """Download, training and upload, one after the other."""
        return self.compute_seconds + self.transfer_seconds + self.server_seconds


def training_flops(shape: ModelShape, ranks: Sequence[int], *, tokens: int, length: float, logits: int = 0) -> float:
    """Operations to train the first `len(ranks)` blocks on `tokens` real tokens in sequences of mean `length`.

    A frozen weight takes 2 operations forward and 2 backward (the gradient of its input alone); a LoRA weight 2 forward
    and 4 backward; attention 4 * length * hidden forward and twice that backward. Blocks below the first adapted one
    have no backward pass. Heads and embeddings are left out, except where text is written: each of its `logits` (tokens
    times vocabulary) takes 4 * hidden. `length` is the mean over tokens, that is sum(l^2) / sum(l) for sequences of
    length l.
    """
    lower = min(shape.first_adapted, len(ranks))
    frozen = 4 * sum(shape.block_params[: len(ranks)]) - 2 * sum(shape.block_params[:lower])
    adapters = 6 * adapter_bytes(shape, ranks) // VALUE_BYTES
    attention = (12 * len(ranks) - 8 * lower) * length * shape.hidden
    return float(tokens * (frozen + adapters + attention) + 4 * shape.hidden * logits)


class RoundTraffic(Frozen):
    """Traffic of a client in a round of training, all steps together: its model's, or what goes through its cut."""

    up_bytes: int
    down_bytes: int
    messages: int
    """Messages in both directions, one after the other."""


def crossing_seconds(crossings: RoundTraffic, device: Device) -> float:
    """Seconds that these messages take over the link of this device, one latency each."""
    up_seconds = crossings.up_bytes / device.up_bytes_per_second
    down_seconds = crossings.down_bytes / device.down_bytes_per_second
    return up_seconds + down_seconds + crossings.messages * device.latency_seconds


def predict_round(
    shape: ModelShape,
    device: Device,
    *,
    ranks: Sequence[int],
    step: TrainingStep,
    tokens: int,
    length: float,
    logits: int = 0,
    message_bytes: int = 0,
) -> RoundPrediction:
    """Bytes, seconds and memory of a round in which the client trains on `tokens` tokens, all epochs together.

    A message of `message_bytes` travels each way, or nothing at 0. `length` and `logits` are as in `training_flops`. Of
    a client that holds only the first `step.blocks` blocks, these alone count.
    """
    client_ranks = ranks[: shape.num_layers if step.blocks is None else step.blocks]
    flops = training_flops(shape, client_ranks, tokens=tokens, length=length, logits=logits)
    messages = RoundTraffic(up_bytes=message_bytes, down_bytes=message_bytes, messages=2 if message_bytes else 0)
    return RoundPrediction(
        up_bytes=message_bytes,
        down_bytes=message_bytes,
        flops=flops,
        compute_seconds=flops / device.flops_per_second,
        transfer_seconds=crossing_seconds(messages, device),
        memory=device_memory(shape, device, ranks=ranks, step=step),
    )


def link_between(device: Device, host: Device) -> Device:
    """The device with the link that it has to another one: of both the slower rate each way, and the longer latency."""
    return replace(
        device,
        up_bytes_per_second=min(device.up_bytes_per_second, host.down_bytes_per_second),
        down_bytes_per_second=min(device.down_bytes_per_second, host.up_bytes_per_second),
        latency_seconds=max(device.latency_seconds, host.latency_seconds),
    )


def cut_utilities(importance: Float[np.ndarray, " layers"], ranks: Sequence[int]) -> Float[np.ndarray, "cuts 2"]:
    """The utility sum I_l * r_l on each side of every cut, float64 (layers + 1, 2).

    Row s is the cut that leaves blocks [0, s) on the client (column 0) and [s, layers) on the server (column 1).
    """
    below = np.concatenate([[0.0], np.cumsum(np.asarray(importance, dtype=np.float64) * np.asarray(ranks))])
    return np.stack([below, below[-1] - below], axis=1)
