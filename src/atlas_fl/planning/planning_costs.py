"""Costs of planning for each client, by phase: bytes, seconds and memory of fingerprints, importance, scores.

Bytes: what goes through a client's cut for its fingerprint, its importance and the scores of an adaptive graph. Every
example is counted with the client's mean length: exact where all are equally long.

Seconds and memory come from the models that predict a round: operations over the profile's FLOP/s, bytes over the
link's rate and a latency for each message; activations, gradients and their sums beside the frozen weights. Examples
have the client's mean length for seconds, and its maximum for memory. A warm-up that stops early costs less.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from atlas_fl.client.fingerprint import parts_message
from atlas_fl.client.importance import last_weights, sums_message
from atlas_fl.client.options import FingerprintOptions
from atlas_fl.data.clients import ClientData
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import head_keys
from atlas_fl.planning.round_costs import (
    SERVER_DEVICE,
    client_side,
    heaviest_step,
    message_sizes,
    num_head_params,
    num_outputs,
    rank_one_params,
)
from atlas_fl.ranks.cost_model import (
    TRAINING_COPIES,
    VALUE_BYTES,
    MeasurementCost,
    RoundTraffic,
    block_matrices,
    crossing_seconds,
    device_memory,
    layer_cost,
    measuring_bytes,
    measuring_flops,
)
from atlas_fl.ranks.devices import Device
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import fingerprint_options, strategy_of, warmup_rank
from atlas_fl.split.channel import Cut
from atlas_fl.storage.tensors import encoded_size

Sizes: TypeAlias = dict[str, int]
"""Bytes by direction, `up` and `down`."""

IMPORTANCE_BATCHES = 4
"""Batches on which importance is measured."""


@dataclass(frozen=True, kw_only=True)
class _Phase:
    """Work of one client in one phase of planning."""

    name: str
    """`fingerprint`, `importance` or `evaluate`."""
    probe: MeasurementCost
    data: EncodedExamples
    counts: Sequence[int]
    """Examples of every batch; at most these where a warm-up stops early."""
    batches_per_row: int = 1
    """Batches that lie in one row, and so cross a cut in one message."""


def predict_planning(
    assembly: Assembly, client: ClientData, device: Device, cut: Cut | None
) -> dict[str, dict[str, float]]:
    """Predicted costs of planning this client, by phase; without the phases that it does not have.

    These are `client_seconds`, `server_seconds`, `link_seconds` of what crosses the cut, `memory_bytes` of the device
    and `server_memory_bytes` of the server beside the frozen weights that it has once for all clients.
    """
    return {phase.name: _predict_phase(assembly, client, device, phase, cut) for phase in _phases(assembly, client)}


def planning_bytes(assembly: Assembly, client: ClientData, cut: Cut) -> dict[str, Sizes]:
    """Bytes through this cut, by phase and direction, while the client is planned; at most these where it warms up."""
    return {phase.name: _phase_bytes(assembly, client, phase, cut) for phase in _phases(assembly, client)}


def _phases(assembly: Assembly, client: ClientData) -> list[_Phase]:
    options, clustered = fingerprint_options(assembly.config), strategy_of(assembly.config).clustered
    splits, shape = assembly.site.data[client.name].splits, assembly.shape
    train = splits["train"]
    phases = []
    if options.kind == "delta":
        warm_up = _Phase(
            name="fingerprint",
            probe=_warm_up_cost(assembly, client),
            data=train,
            counts=_warm_up_counts(len(train), options),
            batches_per_row=2,
        )
        phases.append(warm_up)
    elif clustered:
        lowest = shape.num_layers - options.blocks
        fingerprint = _Phase(
            name="fingerprint",
            probe=_gradient_cost(
                assembly,
                client,
                lowest_block=lowest,
                sizes=[size if block >= lowest else 0 for block, size in enumerate(shape.block_params)],
                inputs=(block_matrices(shape),) * shape.num_layers,
            ),
            data=train,
            counts=[options.train.batch_size] * (2 * options.batches),  # of both halves
        )
        phases.append(fingerprint)
    importance = _Phase(
        name="importance",
        # gradients of the adapted weights, with their adapters merged into copies
        probe=_gradient_cost(
            assembly,
            client,
            lowest_block=shape.first_adapted,
            sizes=[sum(d_in * d_out for d_in, d_out in matrices) for matrices in shape.layers],
            inputs=shape.layers,
        ),
        data=train,
        counts=[assembly.config.training.batch_size] * IMPORTANCE_BATCHES,
    )
    phases.append(importance)
    if clustered and assembly.config.mixing.graph == "adaptive":
        data, probe = splits["validation"], _evaluation_cost(assembly)
        phases.append(_Phase(name="evaluate", probe=probe, data=data, counts=[len(data)]))
    return phases


def _warm_up_counts(examples: int, options: FingerprintOptions) -> list[int]:
    """Batch sizes of a warm-up on this number of examples, of all steps of both halves."""
    counts: list[int] = []
    for half in (0, 1):
        size, most = len(range(half, examples, 2)), options.most(half)
        size = size if most is None else min(most, size)
        batch_size = options.train.batch_size
        pass_sizes = [min(batch_size, size - start) for start in range(0, size, batch_size)]
        counts += [pass_sizes[step % len(pass_sizes)] for step in range(options.steps)]
    return counts


def _warm_up_cost(assembly: Assembly, client: ClientData) -> MeasurementCost:
    """Cost of a warm-up, which trains two models of the smallest rank side by side; A is frozen in both."""
    shape, rank = assembly.shape, warmup_rank(assembly.config)
    return MeasurementCost(
        lowest_block=shape.first_adapted,
        products=tuple(
            sum(2 * rank * d_in + 3 * rank * d_out for d_in, d_out in matrices) for matrices in shape.layers
        ),
        resident_bytes=tuple(2 * layer_cost(shape, layer, rank) for layer in range(shape.num_layers)),
        inputs=shape.layers,
        rank=rank,
        head_bytes=2 * TRAINING_COPIES * VALUE_BYTES * num_head_params(assembly, client),
    )


def _gradient_cost(
    assembly: Assembly,
    client: ClientData,
    *,
    lowest_block: int,
    sizes: Sequence[int],
    inputs: tuple[tuple[tuple[int, int], ...], ...],
) -> MeasurementCost:
    """Gradients of so many weights of every block: those of one batch, and what they add up to."""
    return MeasurementCost(
        lowest_block=lowest_block,
        products=tuple(sizes),
        resident_bytes=tuple(2 * VALUE_BYTES * size for size in sizes),
        inputs=inputs,
        head_bytes=2 * VALUE_BYTES * num_head_params(assembly, client),
    )


def _evaluation_cost(assembly: Assembly) -> MeasurementCost:
    """Scores of the warmed-up models: a forward pass that records nothing."""
    shape, rank = assembly.shape, warmup_rank(assembly.config)
    return MeasurementCost(
        lowest_block=shape.num_layers,
        products=tuple(sum(rank * (d_in + d_out) for d_in, d_out in matrices) for matrices in shape.layers),
        resident_bytes=(0,) * shape.num_layers,
        inputs=shape.layers,
        rank=rank,
    )


def _phase_bytes(assembly: Assembly, client: ClientData, phase: _Phase, cut: Cut) -> Sizes:
    data, num_examples = phase.data, len(phase.data)
    mean_tokens, mean_outputs = int(data.lengths.sum()) / num_examples, num_outputs(data) / num_examples
    total = Counter[str]()
    for count, repeats in Counter(phase.counts).items():
        outputs = round(count * mean_outputs)
        sizes = message_sizes(
            assembly,
            data,
            cut,
            examples=count,
            tokens=round(count * mean_tokens),
            outputs=outputs,
            places=outputs,
            backward=phase.probe.lowest_block < assembly.shape.num_layers,
        )
        for kind, size in sizes.items():
            if kind != "gradient_down" or phase.probe.lowest_block < cut.blocks:
                total[kind.rpartition("_")[2]] += repeats * size
    if phase.name == "importance":
        total["up"] += encoded_size(sums_message([np.zeros(cut.blocks)] * IMPORTANCE_BATCHES))
    if phase.name == "fingerprint":
        options, names = fingerprint_options(assembly.config), rank_one_params(assembly, client)
        weights = [*last_weights(assembly.site.backbone, options.blocks), *head_keys(names)]
        if count := len(client_side(assembly, cut, weights)):
            total["up"] += 2 * encoded_size(parts_message([np.zeros(options.sketch_dim)] * count))
    return dict(total)


def _predict_phase(
    assembly: Assembly, client: ClientData, device: Device, phase: _Phase, cut: Cut | None
) -> dict[str, float]:
    """Seconds on the device, the server and the link, and memory; examples are as long as the mean, or the longest."""
    shape, probe, data = assembly.shape, phase.probe, phase.data
    has_backward = probe.lowest_block < shape.num_layers
    num_epochs, lengths = sum(phase.counts) / len(data), data.lengths.astype(float)
    step = heaviest_step(assembly, client, None)
    if has_backward:
        tokens, logits = phase.batches_per_row * step.tokens, phase.batches_per_row * step.logits
    else:  # a split in as few rows as may be
        tokens = max(int(data.lengths.max()), min(int(data.lengths.sum()), assembly.site.max_tokens))
        logits = int(data.num_targets.sum()) * shape.vocabulary
    cut_block = shape.num_layers if cut is None else cut.blocks
    is_head_below = cut is None or cut.head == "client"
    flops, side_bytes = [], []
    for blocks, has_head in (
        (range(cut_block), is_head_below),
        (range(cut_block, shape.num_layers), not is_head_below),
    ):
        flops.append(
            measuring_flops(
                shape,
                probe,
                blocks,
                tokens=float(lengths.sum()) * num_epochs,
                length=float((lengths**2).sum() / lengths.sum()),
                logits=float(data.num_targets.sum()) * shape.vocabulary * num_epochs if has_head else 0,
            )
        )
        taken = measuring_bytes(
            shape,
            probe,
            blocks,
            tokens=tokens,
            crossing=0 if cut is None else tokens * shape.hidden * (2 if has_backward else 1),
            logits=logits if has_head else 0,
            head=has_head,
            checkpointing=step.checkpointing,
        )
        side_bytes.append(taken if blocks else 0)
    frozen = device_memory(shape, device, ranks=(0,) * shape.num_layers, step=heaviest_step(assembly, client, cut))
    return {
        "client_seconds": flops[0] / device.flops_per_second,
        "server_seconds": flops[1] / SERVER_DEVICE.flops_per_second,
        "link_seconds": 0.0 if cut is None else _link_seconds(assembly, client, device, phase, cut),
        "memory_bytes": frozen.parts["frozen weights"] + frozen.parts["runtime"] + side_bytes[0],
        "server_memory_bytes": side_bytes[1],
    }


def _link_seconds(assembly: Assembly, client: ClientData, device: Device, phase: _Phase, cut: Cut) -> float:
    """Seconds of the messages through the cut.

    These are a request and its answer for a forward pass, and as many for a backward pass where the head is at the
    client.
    """
    has_backward = cut.head == "client" and phase.probe.lowest_block < assembly.shape.num_layers
    passes = len(phase.counts) // phase.batches_per_row
    sizes = _phase_bytes(assembly, client, phase, cut)
    messages = passes * (4 if has_backward else 2)
    traffic = RoundTraffic(up_bytes=sizes.get("up", 0), down_bytes=sizes.get("down", 0), messages=messages)
    return crossing_seconds(traffic, device)
