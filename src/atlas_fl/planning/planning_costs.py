"""Costs of planning for each client, by phase: bytes, seconds and memory of fingerprints, importance, scores.

Bytes: what goes through a client's cut for its fingerprint, its importance and the scores of an adaptive graph. Every
example is counted with the client's mean length: exact where all are equally long.

Seconds and memory come from the models that predict a round: operations over the profile's FLOP/s, bytes over the
link's rate and a latency for each message; activations, gradients and their sums beside the frozen weights. Examples
have the client's mean length for seconds, and its maximum for memory. A warm-up that stops early costs less.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from atlas_fl.client.fingerprint import agreement_message, is_agreement_check, parts_message
from atlas_fl.client.importance import last_weights, sums_message
from atlas_fl.client.options import FingerprintOptions
from atlas_fl.data.clients import ClientData
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import LORA_A, LORA_B, head_keys
from atlas_fl.planning.round_costs import SERVER_DEVICE, heaviest_step, meta_tensor, num_head_params
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
from atlas_fl.split.channel import NORMS, Cut
from atlas_fl.split.codec import message_size
from atlas_fl.split.model import select_client_side
from atlas_fl.storage.tensors import encoded_size

Sizes: TypeAlias = dict[str, int]
"""Bytes by direction, `up` and `down`."""

IMPORTANCE_BATCHES = 4
"""Batches on which importance is measured."""


def planning_bytes(assembly: Assembly, client: ClientData, cut: Cut) -> dict[str, Sizes]:
    """Bytes through this cut, by phase and direction, while the client is planned; at most these where it warms up."""
    options, clustered = fingerprint_options(assembly.config), strategy_of(assembly.config).clustered
    traffic, sizes = _ClientTraffic(assembly, client, cut), dict[str, Sizes]()
    if options.kind == "delta":
        sizes["fingerprint"] = _warm_up_bytes(traffic, options)
    elif clustered:
        sizes["fingerprint"] = _gradient_bytes(traffic, options)
    sizes["importance"] = _importance_bytes(traffic)
    if clustered and assembly.config.mixing.graph == "adaptive":
        validation = assembly.site.data[client.name].splits["validation"]
        sizes["evaluate"] = traffic.pass_bytes(validation, [len(validation)], backward=False)
    return sizes


@dataclass(frozen=True, kw_only=True)
class _ExampleStats:
    """Mean sizes of some examples."""

    tokens: float
    """Mean tokens of one example."""
    outputs: float
    """Positions of one example at which the head predicts, in the mean."""
    writes_text: bool
    label_dtype: torch.dtype


class _ClientTraffic:
    """Sizes of the messages through one client's cut."""

    def __init__(self, assembly: Assembly, client: ClientData, cut: Cut) -> None:
        self.assembly, self.client, self.cut = assembly, client, cut
        self.train = assembly.site.data[client.name].splits["train"]
        self.names = assembly.initial_params(client, (1,) * assembly.shape.num_layers)

    def pass_bytes(self, data: EncodedExamples, counts: list[int], *, backward: bool, below: bool = True) -> Sizes:
        """Bytes of passes over batches of `counts` examples; `backward` with gradients, `below` also to the client."""
        sizes, stats = Counter[str](), _example_stats(data)
        for count, repeats in Counter(counts).items():
            for direction, size in self._message_sizes(stats, count, backward=backward, below=below):
                sizes[direction] += repeats * size
        return dict(sizes)

    def _message_sizes(
        self, stats: _ExampleStats, count: int, *, backward: bool, below: bool
    ) -> Iterator[tuple[str, int]]:
        hidden, wire = self.assembly.shape.hidden, self.cut.wire
        rows, outputs = round(count * stats.tokens), round(count * stats.outputs)
        extra = {"lengths": meta_tensor(count, torch.int32)}
        if stats.writes_text:
            extra["places"] = meta_tensor(outputs, torch.int32)
        yield "up", message_size(rows, hidden, wire=wire, extra=extra)
        if self.cut.head == "server":
            yield "up", encoded_size({"labels": meta_tensor(outputs, stats.label_dtype)})
        else:
            yield "down", message_size(outputs, hidden, wire=wire)
            if backward:
                yield "up", message_size(outputs, hidden, wire=wire)
        if backward and below:
            yield "down", message_size(rows, hidden, wire=wire)


def _gradient_bytes(traffic: _ClientTraffic, options: FingerprintOptions) -> Sizes:
    backbone, cut = traffic.assembly.site.backbone, traffic.cut
    server_blocks = len(backbone.blocks) - cut.blocks
    names = [*last_weights(backbone, options.blocks), *head_keys(traffic.names)]
    client_side = select_client_side(backbone, names, blocks=cut.blocks, head=cut.head == "client")
    sizes = Counter(
        traffic.pass_bytes(traffic.train, gradient_counts(options), backward=True, below=options.blocks > server_blocks)
    )
    sizes["up"] += 2 * _sketch_part_bytes(len(client_side), options)
    return dict(sizes)


def _importance_bytes(traffic: _ClientTraffic) -> Sizes:
    size = traffic.assembly.config.training.batch_size
    sizes = Counter(traffic.pass_bytes(traffic.train, [size] * IMPORTANCE_BATCHES, backward=True))
    sizes["up"] += encoded_size(sums_message([np.zeros(traffic.cut.blocks)] * IMPORTANCE_BATCHES))
    return dict(sizes)


def _warm_up_bytes(traffic: _ClientTraffic, options: FingerprintOptions) -> Sizes:
    """Both halves of the examples for all steps, with a check of their agreement every few steps."""
    backbone, cut = traffic.assembly.site.backbone, traffic.cut
    trained = [name for name in traffic.names if not name.endswith(LORA_A)]
    client_side = select_client_side(backbone, trained, blocks=cut.blocks, head=cut.head == "client")
    sizes = Counter[str]()
    for counts in warm_up_counts(len(traffic.train), options):
        sizes.update(traffic.pass_bytes(traffic.train, counts, backward=True))
        if options.train.clip > 0:
            sizes["up"] += len(counts) * encoded_size({NORMS: meta_tensor(len(client_side), torch.float32)})
            sizes["down"] += len(counts) * encoded_size(
                {NORMS: meta_tensor(len(trained) - len(client_side), torch.float32)}
            )
    checks = num_agreement_checks(options)
    factors = sum(name.endswith(LORA_B) for name in client_side)
    sizes["up"] += 2 * (checks + 1) * _sketch_part_bytes(factors, options)
    sizes["down"] += checks * encoded_size(agreement_message(True))
    return dict(sizes)


def gradient_counts(options: FingerprintOptions) -> list[int]:
    """Batch sizes of a fingerprint by gradients, of both halves."""
    return [options.train.batch_size] * (2 * options.batches)


def warm_up_counts(examples: int, options: FingerprintOptions) -> list[list[int]]:
    """Batch sizes of a warm-up on this number of examples, by half and step, where it takes all its steps."""
    halves = [(len(range(half, examples, 2)), options.most(half)) for half in (0, 1)]
    return [
        _step_sizes(size if max_examples is None else min(max_examples, size), options) for size, max_examples in halves
    ]


def num_agreement_checks(options: FingerprintOptions) -> int:
    """Number of times that a warm-up checks the agreement of its halves, where it takes all its steps."""
    return sum(is_agreement_check(step, options) for step in range(1, options.steps + 1))


def _step_sizes(examples: int, options: FingerprintOptions) -> list[int]:
    """Batch sizes by step, over as many passes as the steps need."""
    size = options.train.batch_size
    pass_sizes = [min(size, examples - start) for start in range(0, examples, size)]
    return [pass_sizes[step % len(pass_sizes)] for step in range(options.steps)]


def _sketch_part_bytes(count: int, options: FingerprintOptions) -> int:
    """Bytes of a client's part of one sketch, of `count` tensors."""
    return encoded_size(parts_message([np.zeros(options.sketch_dim)] * count)) if count else 0


def _example_stats(data: EncodedExamples) -> _ExampleStats:
    outputs = 1.0 if data.target_mask is None else float(data.num_targets.mean())
    return _ExampleStats(
        tokens=float(data.lengths.mean()),
        outputs=outputs,
        writes_text=data.target_mask is not None,
        label_dtype=torch.float32 if data.labels.dtype.kind == "f" else torch.int64,
    )


@dataclass(frozen=True, kw_only=True)
class _PhaseWork:
    """One phase of one client."""

    probe: MeasurementCost
    data: EncodedExamples
    examples: int
    """Examples of all passes together."""
    passes: int
    batches_per_row: int = 1
    """Batches that lie in one row."""
    agreement_checks: int = 0
    """Requests beside those of the passes."""

    @property
    def num_epochs(self) -> float:
        """Passes over the data, fractions included."""
        return self.examples / len(self.data)


def predict_planning(
    assembly: Assembly, client: ClientData, device: Device, cut: Cut | None
) -> dict[str, dict[str, float]]:
    """By phase, `client_seconds`, `server_seconds`, `link_seconds`, `memory_bytes` of the device and
    `server_memory_bytes` of the server for this client, beside the frozen weights that it has once for all.

    The link's are of what crosses the cut. A phase that is not there takes nothing.
    """
    sizes = {} if cut is None else planning_bytes(assembly, client, cut)
    works = _phase_works(assembly, client)
    return {
        phase: _predict_seconds(assembly, device, work, cut, sizes.get(phase, {}))
        | _predict_memory(assembly, client, device, work, cut)
        for phase, work in works.items()
    }


def _phase_works(assembly: Assembly, client: ClientData) -> dict[str, _PhaseWork]:
    options, clustered = fingerprint_options(assembly.config), strategy_of(assembly.config).clustered
    splits, size = assembly.site.data[client.name].splits, assembly.config.training.batch_size
    train, works = splits["train"], dict[str, _PhaseWork]()
    if options.kind == "delta":
        counts, checks = warm_up_counts(len(train), options), num_agreement_checks(options)
        probe = _warm_up_cost(assembly, client)
        works["fingerprint"] = _PhaseWork(
            probe=probe,
            data=train,
            examples=sum(map(sum, counts)),
            passes=options.steps,
            batches_per_row=2,
            agreement_checks=checks,
        )
    elif clustered:
        batches = gradient_counts(options)
        probe = _gradient_cost(assembly, client, options)
        works["fingerprint"] = _PhaseWork(probe=probe, data=train, examples=sum(batches), passes=len(batches))
    merged = _importance_cost(assembly, client)
    works["importance"] = _PhaseWork(
        probe=merged, data=train, examples=IMPORTANCE_BATCHES * size, passes=IMPORTANCE_BATCHES
    )
    if clustered and assembly.config.mixing.graph == "adaptive":
        validation = splits["validation"]
        works["evaluate"] = _PhaseWork(
            probe=_evaluation_cost(assembly), data=validation, examples=len(validation), passes=1
        )
    return works


def _warm_up_cost(assembly: Assembly, client: ClientData) -> MeasurementCost:
    """A warm-up trains two models of the smallest rank side by side; A is frozen in both."""
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


def _gradient_cost(assembly: Assembly, client: ClientData, options: FingerprintOptions) -> MeasurementCost:
    """Gradients of the last blocks' own weights: those of one batch, and what they add up to."""
    shape, lowest = assembly.shape, assembly.shape.num_layers - options.blocks
    gradient_sizes = tuple(size if block >= lowest else 0 for block, size in enumerate(shape.block_params))
    return MeasurementCost(
        lowest_block=lowest,
        products=gradient_sizes,
        resident_bytes=tuple(2 * VALUE_BYTES * size for size in gradient_sizes),
        inputs=(block_matrices(shape),) * shape.num_layers,
        head_bytes=2 * VALUE_BYTES * num_head_params(assembly, client),
    )


def _importance_cost(assembly: Assembly, client: ClientData) -> MeasurementCost:
    """Gradients of the adapted weights, with their adapters merged into copies."""
    shape = assembly.shape
    sizes = tuple(sum(d_in * d_out for d_in, d_out in matrices) for matrices in shape.layers)
    return MeasurementCost(
        lowest_block=shape.first_adapted,
        products=sizes,
        resident_bytes=tuple(2 * VALUE_BYTES * size for size in sizes),
        inputs=shape.layers,
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


def _predict_seconds(
    assembly: Assembly, device: Device, work: _PhaseWork, cut: Cut | None, sizes: Mapping[str, int]
) -> dict[str, float]:
    shape, lengths = assembly.shape, work.data.lengths.astype(float)
    length = float((lengths**2).sum() / lengths.sum())
    logits = float(work.data.num_targets.sum()) * shape.vocabulary * work.num_epochs
    client_blocks, server_blocks = _blocks_by_side(assembly, cut)
    client_flops, server_flops = (
        measuring_flops(
            shape,
            work.probe,
            blocks,
            tokens=float(lengths.sum()) * work.num_epochs,
            length=length,
            logits=logits if has_head else 0,
        )
        for blocks, has_head in (
            (client_blocks, cut is None or cut.head == "client"),
            (server_blocks, cut and cut.head == "server"),
        )
    )
    traffic = RoundTraffic(
        up_bytes=sizes.get("up", 0),
        down_bytes=sizes.get("down", 0),
        messages=0 if cut is None else _num_messages(work, cut),
    )
    return {
        "client_seconds": client_flops / device.flops_per_second,
        "server_seconds": server_flops / SERVER_DEVICE.flops_per_second,
        "link_seconds": crossing_seconds(traffic, device),
    }


def _num_messages(work: _PhaseWork, cut: Cut) -> int:
    """A request and its answer for a forward pass, and as many for a backward pass where the head is at the client."""
    has_backward = cut.head == "client" and work.probe.lowest_block < len(work.probe.inputs)
    return work.passes * (4 if has_backward else 2) + 2 * work.agreement_checks


def _predict_memory(
    assembly: Assembly, client: ClientData, device: Device, work: _PhaseWork, cut: Cut | None
) -> dict[str, float]:
    shape, (client_blocks, server_blocks) = assembly.shape, _blocks_by_side(assembly, cut)
    client_step, whole_step = heaviest_step(assembly, client, cut), heaviest_step(assembly, client, None)
    if work.probe.lowest_block == shape.num_layers:  # a split in as few rows as may be
        tokens = max(int(work.data.lengths.max()), min(int(work.data.lengths.sum()), assembly.site.max_tokens))
        logits = int(work.data.num_targets.sum()) * shape.vocabulary
    else:
        tokens, logits = work.batches_per_row * whole_step.tokens, work.batches_per_row * whole_step.logits
    crossing = 0 if cut is None else tokens * shape.hidden * (1 if work.probe.lowest_block == shape.num_layers else 2)
    at_client = cut is None or cut.head == "client"
    side_bytes = [
        measuring_bytes(
            shape,
            work.probe,
            blocks,
            tokens=tokens,
            crossing=crossing,
            logits=logits if has_head else 0,
            head=has_head,
            checkpointing=whole_step.checkpointing,
        )
        if blocks
        else 0
        for blocks, has_head in ((client_blocks, at_client), (server_blocks, not at_client))
    ]
    frozen = device_memory(shape, device, ranks=(0,) * shape.num_layers, step=client_step)
    return {
        "memory_bytes": frozen.weights_bytes + frozen.reserve_bytes + side_bytes[0],
        "server_memory_bytes": side_bytes[1],
    }


def _blocks_by_side(assembly: Assembly, cut: Cut | None) -> tuple[range, range]:
    """The blocks on the client, and those on the server."""
    layers = assembly.shape.num_layers
    cut_block = layers if cut is None else cut.blocks
    return range(cut_block), range(cut_block, layers)
