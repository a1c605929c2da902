"""What planning takes of a client and, over its cut, of the server: seconds and memory of each phase.

From the models that predict a round: operations over the profile's FLOP/s, bytes over the link's rate and a latency for
each message; activations, gradients and their sums beside the frozen weights. Examples are as long as the client's
mean one for seconds, and the longest of them for memory. A warm-up that ends early takes less.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from atlas_fl.assemble import Assembly
from atlas_fl.clients.fingerprint import FingerprintOptions
from atlas_fl.models.tokens import Encoded
from atlas_fl.options import fingerprint_options, strategy_of, warmup_rank
from atlas_fl.phases.cost import SERVER, head_params, step_of
from atlas_fl.phases.measuring import BATCHES, gradient_counts, num_looks, planning_bytes, warm_up_counts
from atlas_fl.ranks.devices import Device
from atlas_fl.ranks.measure import Probe, dense, measuring_bytes, measuring_flops
from atlas_fl.ranks.memory import TRAINING_COPIES, VALUE_BYTES, device_memory, layer_cost
from atlas_fl.ranks.predict import Crossings, crossing_seconds
from atlas_fl.split.step import Cut
from atlas_fl.tasks.clients import ClientData


@dataclass(frozen=True, kw_only=True)
class _Work:
    """One phase of one client."""

    probe: Probe
    data: Encoded
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


def _adapters(assembly: Assembly, client: ClientData) -> Probe:
    """A warm-up trains two models of the smallest rank side by side; A is frozen in both."""
    shape, rank = assembly.shape, warmup_rank(assembly.config)
    return Probe(
        lowest=0,
        products=tuple(sum(2 * rank * d_in + 3 * rank * d_out for d_in, d_out in own) for own in shape.layers),
        held_bytes=tuple(2 * layer_cost(shape, layer, rank) for layer in range(shape.num_layers)),
        inputs=shape.layers,
        rank=rank,
        head_bytes=2 * TRAINING_COPIES * VALUE_BYTES * head_params(assembly, client),
    )


def _last_weights(assembly: Assembly, client: ClientData, options: FingerprintOptions) -> Probe:
    """Gradients of the last blocks' own weights: those of one batch, and what they add up to."""
    shape, lowest = assembly.shape, assembly.shape.num_layers - options.blocks
    taken = tuple(size if block >= lowest else 0 for block, size in enumerate(shape.block_params))
    return Probe(
        lowest=lowest,
        products=taken,
        held_bytes=tuple(2 * VALUE_BYTES * size for size in taken),
        inputs=(dense(shape),) * shape.num_layers,
        head_bytes=2 * VALUE_BYTES * head_params(assembly, client),
    )


def _merged(assembly: Assembly, client: ClientData) -> Probe:
    """Gradients of the adapted weights of all blocks, with their adapters merged into copies."""
    shape = assembly.shape
    sizes = tuple(sum(d_in * d_out for d_in, d_out in own) for own in shape.layers)
    return Probe(
        lowest=0,
        products=sizes,
        held_bytes=tuple(2 * VALUE_BYTES * size for size in sizes),
        inputs=shape.layers,
        head_bytes=2 * VALUE_BYTES * head_params(assembly, client),
    )


def _forward(assembly: Assembly) -> Probe:
    """Scores of the warmed-up models: a forward pass that records nothing."""
    shape, rank = assembly.shape, warmup_rank(assembly.config)
    return Probe(
        lowest=shape.num_layers,
        products=tuple(sum(rank * (d_in + d_out) for d_in, d_out in own) for own in shape.layers),
        held_bytes=(0,) * shape.num_layers,
        inputs=shape.layers,
        rank=rank,
    )


def _seconds(
    assembly: Assembly, device: Device, work: _Work, cut: Cut | None, sizes: Mapping[str, int]
) -> dict[str, float]:
    shape, lengths = assembly.shape, work.data.lengths.astype(float)
    length = float((lengths**2).sum() / lengths.sum())
    logits = float(work.data.predictions.sum()) * shape.vocabulary * work.share
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
    sent = Crossings(
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
    back = cut.head == "client" and work.probe.lowest < len(work.probe.inputs)
    return work.passes * (4 if back else 2) + 2 * work.looks


def _memory(assembly: Assembly, client: ClientData, device: Device, work: _Work, cut: Cut | None) -> dict[str, float]:
    shape, (below, above) = assembly.shape, _sides(assembly, cut)
    held, whole = step_of(assembly, client, cut), step_of(assembly, client, None)
    if work.probe.lowest == shape.num_layers:  # a split in as few rows as may be
        tokens = max(int(work.data.lengths.max()), min(int(work.data.lengths.sum()), assembly.site.max_tokens))
        logits = int(work.data.predictions.sum()) * shape.vocabulary
    else:
        tokens, logits = work.at_once * whole.tokens, work.at_once * whole.logits
    crossing = 0 if cut is None else tokens * shape.hidden * (1 if work.probe.lowest == shape.num_layers else 2)
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
