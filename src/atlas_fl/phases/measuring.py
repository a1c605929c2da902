"""What planning sends through a client's cut, by its phases: fingerprint, importance, scores for an adaptive graph.

Every batch counts as its number of examples, each as long as the client's mean one: exact where all of them are equally
long. A warm-up that ends early sends less.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from atlas_fl.assemble import Assembly
from atlas_fl.clients.fingerprint import FingerprintOptions, is_look, parts_message, verdict
from atlas_fl.clients.gradients import last_weights
from atlas_fl.clients.importance import sums_message
from atlas_fl.io.tensors import encoded_size
from atlas_fl.models.tokens import Encoded
from atlas_fl.options import fingerprint_options, strategy_of
from atlas_fl.split.codec import message_size
from atlas_fl.split.model import on_client
from atlas_fl.split.step import NORMS, Cut
from atlas_fl.tasks.clients import ClientData
from atlas_fl.tree import LORA_A, LORA_B, head_keys

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

    def passes(self, data: Encoded, counts: list[int], *, backward: bool, below: bool = True) -> Sizes:
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
    held = on_client(backbone, names, blocks=cut.blocks, head=cut.head == "client")
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
    held = on_client(backbone, trained, blocks=cut.blocks, head=cut.head == "client")
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


def _measured(data: Encoded) -> _Measured:
    reads = 1.0 if data.written is None else float(data.predictions.mean())
    return _Measured(
        tokens=float(data.lengths.mean()),
        reads=reads,
        written=data.written is not None,
        label=torch.float32 if data.labels.dtype.kind == "f" else torch.int64,
    )


def _meta(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device="meta")
