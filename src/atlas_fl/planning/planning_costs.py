"""What planning takes of each client: bytes, seconds and memory of fingerprints, importance and scores.

What planning sends through a client's cut, by its phases: fingerprint, importance, scores for an adaptive graph.

Every batch counts as its number of examples, each as long as the client's mean one: exact where all of them are equally
long. A warm-up that ends early sends less.

What planning takes of a client and, over its cut, of the server: seconds and memory of each phase.

From the models that predict a round: operations over the profile's FLOP/s, bytes over the link's rate and a latency for
each message; activations, gradients and their sums beside the frozen weights. Examples are as long as the client's
mean one for seconds, and the longest of them for memory. A warm-up that ends early takes less.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from atlas_fl.client.fingerprint import is_look, parts_message, verdict
from atlas_fl.client.importance import last_weights, sums_message
from atlas_fl.client.options import FingerprintOptions
from atlas_fl.data.clients import ClientData
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import LORA_A, LORA_B, head_keys
from atlas_fl.planning.round_costs import SERVER, head_params, step_of
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

BATCHES = 4
"""On which importance is measured."""


def planning_bytes(assembly: Assembly, client: ClientData, cut: Cut) -> dict[str, Sizes]:
    """Bytes through this cut, by phase and direction, while the client is planned; at most these where it warms up."""
    options, clustered = fingerprint_options(assembly.config), strategy_of(assembly.config).clustered
    way, found = _Way(assembly, client, cut), dict[str, Sizes]()
    if options.kind == "delta":
        found["fingerprint"] = _warm_up(way, options)
    elif clustered:
        found["fingerprint"] = _gradients(way, options)
    found["importance"] = _importance(way)
    if clustered and assembly.config.mixing.graph == "adaptive":
        scored = assembly.site.data[client.name].splits["validation"]
        found["evaluate"] = way.passes(scored, [len(scored)], backward=False)
    return found


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What is known of some examples."""

    tokens: float
    """Of one example, in the mean."""
    reads: float
    written: bool
    label: torch.dtype


class _Way:
    """The way of one client's messages."""

    def __init__(self, assembly: Assembly, client: ClientData, cut: Cut) -> None:
        self.assembly, self.client, self.cut = assembly, client, cut
        self.train = assembly.site.data[client.name].splits["train"]
        self.names = assembly.start(client, (1,) * assembly.shape.num_layers)

    def passes(self, data: EncodedExamples, counts: list[int], *, backward: bool, below: bool = True) -> Sizes:
        """Bytes of a pass over so many examples each; with the gradients where it goes `backward`, and `below`."""
        sizes, known = Counter[str](), _measured(data)
        for count, times in Counter(counts).items():
            for way, size in self._messages(known, count, backward=backward, below=below):
                sizes[way] += times * size
        return dict(sizes)

    def _messages(self, known: _Measured, count: int, *, backward: bool, below: bool) -> Iterator[tuple[str, int]]:
        hidden, wire = self.assembly.shape.hidden, self.cut.wire
        rows, reads = round(count * known.tokens), round(count * known.reads)
        beside = {"lengths": _meta(count, torch.int32)}
        if known.written:
            beside["places"] = _meta(reads, torch.int32)
        yield "up", message_size(rows, hidden, wire=wire, extra=beside)
        if self.cut.head == "server":
            yield "up", encoded_size({"labels": _meta(reads, known.label)})
        else:
            yield "down", message_size(reads, hidden, wire=wire)
            if backward:
                yield "up", message_size(reads, hidden, wire=wire)
        if backward and below:
            yield "down", message_size(rows, hidden, wire=wire)


def _gradients(way: _Way, options: FingerprintOptions) -> Sizes:
    backbone, cut = way.assembly.site.backbone, way.cut
    above = len(backbone.blocks) - cut.blocks
    names = [*last_weights(backbone, options.blocks), *head_keys(way.names)]
    held = select_client_side(backbone, names, blocks=cut.blocks, head=cut.head == "client")
    sizes = Counter(way.passes(way.train, gradient_counts(options), backward=True, below=options.blocks > above))
    sizes["up"] += 2 * _parts(len(held), options)
    return dict(sizes)


def _importance(way: _Way) -> Sizes:
    size = way.assembly.config.training.batch_size
    sizes = Counter(way.passes(way.train, [size] * BATCHES, backward=True))
    sizes["up"] += encoded_size(sums_message([np.zeros(way.cut.blocks)] * BATCHES))
    return dict(sizes)


def _warm_up(way: _Way, options: FingerprintOptions) -> Sizes:
    """Both halves for all steps, with a look at their agreement every few."""
    backbone, cut = way.assembly.site.backbone, way.cut
    trained = [name for name in way.names if not name.endswith(LORA_A)]
    held = select_client_side(backbone, trained, blocks=cut.blocks, head=cut.head == "client")
    sizes = Counter[str]()
    for counts in warm_up_counts(len(way.train), options):
        sizes.update(way.passes(way.train, counts, backward=True))
        if options.train.clip > 0:
            sizes["up"] += len(counts) * encoded_size({NORMS: _meta(len(held), torch.float32)})
            sizes["down"] += len(counts) * encoded_size({NORMS: _meta(len(trained) - len(held), torch.float32)})
    looks = num_looks(options)
    factors = sum(name.endswith(LORA_B) for name in held)
    sizes["up"] += 2 * (looks + 1) * _parts(factors, options)
    sizes["down"] += looks * encoded_size(verdict(True))
    return dict(sizes)


def gradient_counts(options: FingerprintOptions) -> list[int]:
    """How many examples each batch of a fingerprint by gradients has, of both halves."""
    return [options.train.batch_size] * (2 * options.batches)


def warm_up_counts(examples: int, options: FingerprintOptions) -> list[list[int]]:
    """How many of so many examples each step of a warm-up has, of either half, where it takes all its steps."""
    halves = [(len(range(half, examples, 2)), options.most(half)) for half in (0, 1)]
    return [_steps(size if most is None else min(most, size), options) for size, most in halves]


def num_looks(options: FingerprintOptions) -> int:
    """How often a warm-up of all its steps looks at the agreement of its halves."""
    return sum(is_look(done, options) for done in range(1, options.steps + 1))


def _steps(examples: int, options: FingerprintOptions) -> list[int]:
    """How many examples each step has, going round them pass by pass."""
    size = options.train.batch_size
    once = [min(size, examples - start) for start in range(0, examples, size)]
    return [once[step % len(once)] for step in range(options.steps)]


def _parts(count: int, options: FingerprintOptions) -> int:
    """Bytes of a client's part of one sketch, of so many tensors."""
    return encoded_size(parts_message([np.zeros(options.sketch_dim)] * count)) if count else 0


def _measured(data: EncodedExamples) -> _Measured:
    reads = 1.0 if data.target_mask is None else float(data.num_targets.mean())
    return _Measured(
        tokens=float(data.lengths.mean()),
        reads=reads,
        written=data.target_mask is not None,
        label=torch.float32 if data.labels.dtype.kind == "f" else torch.int64,
    )


def _meta(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device="meta")


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One phase of one client."""

    probe: MeasurementCost
    data: EncodedExamples
    examples: int
    """Of all passes together."""
    passes: int
    at_once: int = 1
    """Batches that lie in one row."""
    looks: int = 0
    """Questions beside those of the passes."""

    @property
    def share(self) -> float:
        """How often it goes through the data."""
        return self.examples / len(self.data)


def planning_efforts(
    assembly: Assembly, client: ClientData, device: Device, cut: Cut | None
) -> dict[str, dict[str, float]]:
    """By phase, `client_seconds`, `server_seconds`, `link_seconds`, `memory_bytes` of the device and
    `server_memory_bytes` of the server for this client, beside the frozen weights that it has once for all.

    The link's are of what crosses the cut. A phase that is not there takes nothing.
    """
    sizes = {} if cut is None else planning_bytes(assembly, client, cut)
    works = _works(assembly, client)
    return {
        phase: _seconds(assembly, device, work, cut, sizes.get(phase, {}))
        | _memory(assembly, client, device, work, cut)
        for phase, work in works.items()
    }


def _works(assembly: Assembly, client: ClientData) -> dict[str, _Work]:
    options, clustered = fingerprint_options(assembly.config), strategy_of(assembly.config).clustered
    splits, size = assembly.site.data[client.name].splits, assembly.config.training.batch_size
    train, found = splits["train"], dict[str, _Work]()
    if options.kind == "delta":
        counts, looks = warm_up_counts(len(train), options), num_looks(options)
        probe = _adapters(assembly, client)
        found["fingerprint"] = _Work(
            probe=probe, data=train, examples=sum(map(sum, counts)), passes=options.steps, at_once=2, looks=looks
        )
    elif clustered:
        batches = gradient_counts(options)
        probe = _last_weights(assembly, client, options)
        found["fingerprint"] = _Work(probe=probe, data=train, examples=sum(batches), passes=len(batches))
    merged = _merged(assembly, client)
    found["importance"] = _Work(probe=merged, data=train, examples=BATCHES * size, passes=BATCHES)
    if clustered and assembly.config.mixing.graph == "adaptive":
        scored = splits["validation"]
        found["evaluate"] = _Work(probe=_forward(assembly), data=scored, examples=len(scored), passes=1)
    return found


def _adapters(assembly: Assembly, client: ClientData) -> MeasurementCost:
    """A warm-up trains two models of the smallest rank side by side; A is frozen in both."""
    shape, rank = assembly.shape, warmup_rank(assembly.config)
    return MeasurementCost(
        lowest_block=0,
        products=tuple(sum(2 * rank * d_in + 3 * rank * d_out for d_in, d_out in own) for own in shape.layers),
        resident_bytes=tuple(2 * layer_cost(shape, layer, rank) for layer in range(shape.num_layers)),
        inputs=shape.layers,
        rank=rank,
        head_bytes=2 * TRAINING_COPIES * VALUE_BYTES * head_params(assembly, client),
    )


def _last_weights(assembly: Assembly, client: ClientData, options: FingerprintOptions) -> MeasurementCost:
    """Gradients of the last blocks' own weights: those of one batch, and what they add up to."""
    shape, lowest = assembly.shape, assembly.shape.num_layers - options.blocks
    taken = tuple(size if block >= lowest else 0 for block, size in enumerate(shape.block_params))
    return MeasurementCost(
        lowest_block=lowest,
        products=taken,
        resident_bytes=tuple(2 * VALUE_BYTES * size for size in taken),
        inputs=(block_matrices(shape),) * shape.num_layers,
        head_bytes=2 * VALUE_BYTES * head_params(assembly, client),
    )


def _merged(assembly: Assembly, client: ClientData) -> MeasurementCost:
    """Gradients of the adapted weights of all blocks, with their adapters merged into copies."""
    shape = assembly.shape
    sizes = tuple(sum(d_in * d_out for d_in, d_out in own) for own in shape.layers)
    return MeasurementCost(
        lowest_block=0,
        products=sizes,
        resident_bytes=tuple(2 * VALUE_BYTES * size for size in sizes),
        inputs=shape.layers,
        head_bytes=2 * VALUE_BYTES * head_params(assembly, client),
    )


def _forward(assembly: Assembly) -> MeasurementCost:
    """Scores of the warmed-up models: a forward pass that records nothing."""
    shape, rank = assembly.shape, warmup_rank(assembly.config)
    return MeasurementCost(
        lowest_block=shape.num_layers,
        products=tuple(sum(rank * (d_in + d_out) for d_in, d_out in own) for own in shape.layers),
        resident_bytes=(0,) * shape.num_layers,
        inputs=shape.layers,
        rank=rank,
    )


def _seconds(
    assembly: Assembly, device: Device, work: _Work, cut: Cut | None, sizes: Mapping[str, int]
) -> dict[str, float]:
    shape, lengths = assembly.shape, work.data.lengths.astype(float)
    length = float((lengths**2).sum() / lengths.sum())
    logits = float(work.data.num_targets.sum()) * shape.vocabulary * work.share
    own, rest = _sides(assembly, cut)
    below, above = (
        measuring_flops(
            shape,
            work.probe,
            blocks,
            tokens=float(lengths.sum()) * work.share,
            length=length,
            logits=logits if has_head else 0,
        )
        for blocks, has_head in ((own, cut is None or cut.head == "client"), (rest, cut and cut.head == "server"))
    )
    sent = RoundTraffic(
        up_bytes=sizes.get("up", 0),
        down_bytes=sizes.get("down", 0),
        messages=0 if cut is None else _messages(work, cut),
    )
    return {
        "client_seconds": below / device.flops_per_second,
        "server_seconds": above / SERVER.flops_per_second,
        "link_seconds": crossing_seconds(sent, device),
    }


def _messages(work: _Work, cut: Cut) -> int:
    """A question and its answer for a pass, and as many for its way back where the head is at the client."""
    back = cut.head == "client" and work.probe.lowest_block < len(work.probe.inputs)
    return work.passes * (4 if back else 2) + 2 * work.looks


def _memory(assembly: Assembly, client: ClientData, device: Device, work: _Work, cut: Cut | None) -> dict[str, float]:
    shape, (below, above) = assembly.shape, _sides(assembly, cut)
    held, whole = step_of(assembly, client, cut), step_of(assembly, client, None)
    if work.probe.lowest_block == shape.num_layers:  # a split in as few rows as may be
        tokens = max(int(work.data.lengths.max()), min(int(work.data.lengths.sum()), assembly.site.max_tokens))
        logits = int(work.data.num_targets.sum()) * shape.vocabulary
    else:
        tokens, logits = work.at_once * whole.tokens, work.at_once * whole.logits
    crossing = 0 if cut is None else tokens * shape.hidden * (1 if work.probe.lowest_block == shape.num_layers else 2)
    at_client = cut is None or cut.head == "client"
    sides = [
        measuring_bytes(
            shape,
            work.probe,
            blocks,
            tokens=tokens,
            crossing=crossing,
            logits=logits if head else 0,
            head=head,
            checkpointing=whole.checkpointing,
        )
        if blocks
        else 0
        for blocks, head in ((below, at_client), (above, not at_client))
    ]
    frozen = device_memory(shape, device, ranks=(0,) * shape.num_layers, step=held)
    return {
        "memory_bytes": frozen.weights_bytes + frozen.reserve_bytes + sides[0],
        "server_memory_bytes": sides[1],
    }


def _sides(assembly: Assembly, cut: Cut | None) -> tuple[range, range]:
    """The blocks on the client, and those on the server."""
    layers = assembly.shape.num_layers
    at = layers if cut is None else cut.blocks
    return range(at), range(at, layers)
