"""What a round will cost a client, before anything is trained: bytes, seconds and memory from sizes alone.

Seconds are the profile's: operations over FLOP/s, bytes over the link's rate, and one latency for each message.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from atlas_fl.models.shape import ModelShape
from atlas_fl.ranks.devices import Device
from atlas_fl.ranks.memory import VALUE_BYTES, Memory, Step, device_memory

SHARED = ("A", "B", "head")


@dataclass(frozen=True, kw_only=True)
class Prediction:
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


def message_bytes(
    shape: ModelShape, ranks: Sequence[int], *, share: Collection[str] = SHARED, head_params: int = 0
) -> int:
    """Bytes of the parameters in one message: of every adapted module A is rank x d_in and B is d_out x rank."""
    by_part = {
        "A": sum(rank * d_in for modules, rank in zip(shape.layers, ranks) for d_in, _ in modules),
        "B": sum(rank * d_out for modules, rank in zip(shape.layers, ranks) for _, d_out in modules),
        "head": head_params,
    }
    return VALUE_BYTES * sum(by_part[part] for part in share)


def training_flops(shape: ModelShape, ranks: Sequence[int], *, tokens: int, length: float, logits: int = 0) -> float:
    """Operations to train the first `len(ranks)` blocks on `tokens` real tokens in sequences of mean `length`.

    A frozen weight takes 2 operations forward and 2 backward (the gradient of its input alone); a LoRA weight 2 forward
    and 4 backward; attention 4 * length * hidden forward and twice that backward. Heads and embeddings are left out,
    except where text is written: each of its `logits` (tokens times vocabulary) takes 4 * hidden.
    `length` is the mean over tokens, that is sum(l^2) / sum(l) for sequences of length l.
    """
    frozen = 4 * sum(shape.block_params[: len(ranks)])
    adapters = 6 * message_bytes(shape, ranks, share=("A", "B")) // VALUE_BYTES
    attention = 12 * length * shape.hidden * len(ranks)
    return float(tokens * (frozen + adapters + attention) + 4 * shape.hidden * logits)


def predict_round(
    shape: ModelShape,
    device: Device,
    *,
    ranks: Sequence[int],
    step: Step,
    tokens: int,
    length: float,
    share: Collection[str] = SHARED,
    overhead_bytes: int = 0,
    logits: int = 0,
) -> Prediction:
    """Bytes, seconds and memory of a round in which the client trains on `tokens` tokens, all epochs together.

    `share` is what travels each way (nothing for a client that trains alone); `overhead_bytes` what the encoding adds
    to a message (names, shapes). `length` and `logits` are as in `training_flops`. What the client trains
    travels both ways, at the client's own ranks; of a client that holds only the first `step.blocks` blocks, those
    alone count.
    """
    held = ranks[: shape.num_layers if step.blocks is None else step.blocks]
    size = message_bytes(shape, held, share=share, head_params=step.head_params) + overhead_bytes if share else 0
    flops = training_flops(shape, held, tokens=tokens, length=length, logits=logits)
    up, down = size / device.up_bytes_per_second, size / device.down_bytes_per_second
    return Prediction(
        up_bytes=size,
        down_bytes=size,
        flops=flops,
        compute_seconds=flops / device.flops_per_second,
        transfer_seconds=up + down + 2 * device.latency_seconds if share else 0.0,
        memory=device_memory(shape, device, ranks=ranks, step=step),
    )


@dataclass(frozen=True, kw_only=True)
class Crossings:
    """What crosses a client's cut in a round of training, all steps together."""

    up_bytes: int
    down_bytes: int
    messages: int
    """Of both directions, one after the other."""


def crossing_seconds(crossings: Crossings, device: Device) -> float:
    """Seconds that these messages take over the link of this device, one latency each."""
    rates = (device.up_bytes_per_second, device.down_bytes_per_second)
    sizes = (crossings.up_bytes, crossings.down_bytes)
    return sizes[0] / rates[0] + sizes[1] / rates[1] + crossings.messages * device.latency_seconds


def between(device: Device, host: Device) -> Device:
    """The device with the link that it has to another one: of both the slower rate each way, and the longer latency."""
    return replace(
        device,
        up_bytes_per_second=min(device.up_bytes_per_second, host.down_bytes_per_second),
        down_bytes_per_second=min(device.down_bytes_per_second, host.up_bytes_per_second),
        latency_seconds=max(device.latency_seconds, host.latency_seconds),
    )


def over_cut(
    held: Prediction, whole: Prediction, device: Device, *, server: Device, crossings: Crossings
) -> Prediction:
    """The round of a client with a cut, from the predictions of what it has `held` and of the `whole` model.

    The server computes what is left at its own speed, and every message through the cut costs one latency.
    """
    return replace(
        held,
        up_bytes=held.up_bytes + crossings.up_bytes,
        down_bytes=held.down_bytes + crossings.down_bytes,
        transfer_seconds=held.transfer_seconds + crossing_seconds(crossings, device),
        server_seconds=(whole.flops - held.flops) / server.flops_per_second,
    )


def cut_utilities(importance: Float[np.ndarray, " layers"], ranks: Sequence[int]) -> Float[np.ndarray, "cuts 2"]:
    """The utility sum I_l * r_l on each side of every cut, float64 (layers + 1, 2).

    Row s is the cut that leaves blocks [0, s) on the client (column 0) and [s, layers) on the server (column 1).
    """
    below = np.concatenate([[0.0], np.cumsum(np.asarray(importance, dtype=np.float64) * np.asarray(ranks))])
    return np.stack([below, below[-1] - below], axis=1)
