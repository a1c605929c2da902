"""What a round costs one client, with its model whole or cut: the step, the ranks under it, bytes, seconds, memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from atlas_fl.client.local_training import num_steps
from atlas_fl.data.clients import ClientData
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import Params, head_keys, num_values, select, shared_params
from atlas_fl.ranks.allocation import RankAssignment, assign_ranks
from atlas_fl.ranks.cost_model import (
    HEAP_COPIES,
    TRAINING_COPIES,
    MemoryFractions,
    RoundPrediction,
    RoundTraffic,
    TrainingStep,
    activation_bytes,
    layer_cost,
    message_bytes,
    predict_cut_round,
    predict_round,
)
from atlas_fl.ranks.devices import DEVICES, Device
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import train_options
from atlas_fl.split.channel import NORMS, Cut
from atlas_fl.split.codec import message_size
from atlas_fl.split.model import select_client_side
from atlas_fl.storage.ledger import payload_bytes
from atlas_fl.storage.tensors import encoded_size

SERVER: Device = DEVICES["workstation"]
"""The profile that the server's side of a cut is predicted with."""


def assign(
    assembly: Assembly,
    client: ClientData,
    device: Device,
    importance: np.ndarray,
    *,
    factor: float = 1.0,
    cut: Cut | None = None,
) -> RankAssignment:
    """The ranks of one client on its device under this config, from its importance (layers,) by layer.

    `factor` scales the budget; raises `BudgetError` where nothing fits.
    """
    config = assembly.config.ranks
    return assign_ranks(
        assembly.shape,
        device,
        importance=importance,
        rule=config.ranks,
        candidates=config.candidates,
        step=step_of(assembly, client, cut),
        allowance_bytes=config.adapter_bytes,
        fractions=_fractions(assembly),
        factor=factor,
    )


def _fractions(assembly: Assembly) -> MemoryFractions | None:
    config = assembly.config.ranks
    if config.budget == "memory":
        return None
    return MemoryFractions(base=config.alpha_base, activations=config.alpha_act, optimizer=config.alpha_opt)


def step_of(assembly: Assembly, client: ClientData, cut: Cut | None) -> TrainingStep:
    """The client's heaviest step: as many of its longest examples as a batch holds; of a cut model, its own side."""
    size, data = assembly.config.training.batch_size, _train(assembly, client)
    lengths, written = (np.sort(counts)[::-1] for counts in (data.lengths, data.num_targets))
    tokens, has_head = int(lengths[:size].sum()), cut is None or cut.head == "client"
    return TrainingStep(
        tokens=tokens,
        blocks=None if cut is None else cut.blocks,
        head_params=head_params(assembly, client) if has_head else 0,
        checkpointing=assembly.config.model.gradient_checkpointing,
        logits=int(written[:size].sum()) * assembly.shape.vocabulary if has_head else 0,
        crossing=0 if cut is None else 2 * tokens * assembly.shape.hidden,
    )


def predict(
    assembly: Assembly,
    client: ClientData,
    device: Device,
    ranks: Sequence[int],
    *,
    cut: Cut | None,
    communicates: bool,
) -> RoundPrediction:
    """A round of this client at these ranks; of a cut model the client's memory, and the seconds of both sides."""
    held = _predict(assembly, client, device, ranks, cut=cut, communicates=communicates)
    if cut is None:
        return held
    whole = _predict(assembly, client, device, ranks, cut=None, communicates=communicates)
    return predict_cut_round(held, whole, device, server=SERVER, crossings=crossings_of(assembly, client, cut))


def crossings_of(assembly: Assembly, client: ClientData, cut: Cut) -> RoundTraffic:
    """What crosses this client's cut in a round of training, all kinds together."""
    sizes = crossing_bytes(assembly, client, cut)
    steps = num_steps(len(_train(assembly, client)), train_options(assembly.config, with_images=assembly.has_images))
    return RoundTraffic(
        up_bytes=sum(size for name, size in sizes.items() if name.endswith("up")),
        down_bytes=sum(size for name, size in sizes.items() if name.endswith("down")),
        messages=steps * (2 if cut.head == "server" else 4),
    )


def _predict(
    assembly: Assembly, client: ClientData, device: Device, ranks: Sequence[int], *, cut: Cut | None, communicates: bool
) -> RoundPrediction:
    share = assembly.config.mixing.share if communicates else ()
    data = _train(assembly, client)
    passes = _passes(assembly, data)
    lengths, step = data.lengths.astype(np.float64), step_of(assembly, client, cut)
    return predict_round(
        assembly.shape,
        device,
        ranks=ranks,
        step=step,
        tokens=int(lengths.sum() * passes),
        length=float((lengths**2).sum() / lengths.sum()),
        share=share,
        overhead_bytes=_overhead(assembly, client, ranks, share, step, cut),
        logits=int(data.num_targets.sum() * assembly.shape.vocabulary * passes) if step.logits else 0,
    )


def _passes(assembly: Assembly, data: EncodedExamples) -> float:
    """How often a client goes through its data in a round: no whole number where its steps are counted."""
    options = train_options(assembly.config, with_images=assembly.has_images)
    per_pass = -(-len(data) // options.batch_size)
    whole, rest = divmod(num_steps(len(data), options), per_pass)
    return whole + min(rest * options.batch_size, len(data)) / len(data)


def crossing_bytes(assembly: Assembly, client: ClientData, cut: Cut) -> dict[str, int]:
    """Bytes through the cut in a round of training, by `kind_direction`: every batch as long as the mean."""
    training, data = assembly.config.training, _train(assembly, client)
    steps = num_steps(len(data), train_options(assembly.config, with_images=assembly.has_images))
    sizes = _pass_bytes(assembly, data, cut, steps=steps, epochs=training.local_epochs)
    hidden, tokens = assembly.shape.hidden, int(data.lengths.sum()) * training.local_epochs
    if cut.blocks:
        sizes["gradient_down"] = _spread(tokens, steps, lambda n: message_size(n, hidden, wire=cut.wire))
    if cut.head == "client":
        reads = _reads(data) * training.local_epochs
        sizes["gradient_up"] = _spread(reads, steps, lambda n: message_size(n, hidden, wire=cut.wire))
    if training.clip > 0:
        below, above = (steps * encoded_size({NORMS: _meta(n, torch.float32)}) for n in _trained(assembly, client, cut))
        sizes |= {"control_up": below, "control_down": above}
    return sizes


def _trained(assembly: Assembly, client: ClientData, cut: Cut) -> tuple[int, int]:
    """How many tensors train on the client's side of its cut, and on the server's."""
    names = assembly.start(client, (1,) * assembly.shape.num_layers)
    below = len(select_client_side(assembly.site.backbone, names, blocks=cut.blocks, head=cut.head == "client"))
    return below, len(names) - below


def evaluation_bytes(assembly: Assembly, client: ClientData, cut: Cut) -> int:
    """Bytes through the cut in one evaluation, both ways: validation and test examples in one message each."""
    splits = assembly.site.data[client.name].splits
    return sum(sum(_pass_bytes(assembly, splits[name], cut, steps=1).values()) for name in splits if name != "train")


def _pass_bytes(assembly: Assembly, data: EncodedExamples, cut: Cut, *, steps: int, epochs: int = 1) -> dict[str, int]:
    """Bytes of forward passes over these examples, without any gradient."""
    hidden, reads, tokens = assembly.shape.hidden, _reads(data) * epochs, int(data.lengths.sum()) * epochs
    beside = {"lengths": _meta(len(data) * epochs // steps, torch.int32)}
    if data.target_mask is not None:
        beside["places"] = _meta(reads // steps, torch.int32)
    up = _spread(tokens, steps, lambda n: message_size(n, hidden, wire=cut.wire, extra=beside))
    if cut.head == "client":
        down = _spread(reads, steps, lambda n: message_size(n, hidden, wire=cut.wire))
        return {"activation_up": up, "activation_down": down}
    dtype = torch.float32 if data.labels.dtype.kind == "f" else torch.int64
    return {"activation_up": up, "label_up": _spread(reads, steps, lambda n: encoded_size({"labels": _meta(n, dtype)}))}


def _spread(total: int, steps: int, size_of: Callable[[int], int]) -> int:
    """The sizes of `steps` messages that hold `total` rows as evenly as can be."""
    rows, more = divmod(total, steps)
    return (steps - more) * size_of(rows) + more * size_of(rows + 1)


def _meta(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device="meta")


def _reads(data: EncodedExamples) -> int:
    return len(data) if data.target_mask is None else int(data.num_targets.sum())


def server_memory(
    assembly: Assembly, client: ClientData, cut: Cut, ranks: Sequence[int], *, owners: Sequence[int] = ()
) -> dict[str, int]:
    """Bytes on the server for this client by part; the frozen weights are there once for all clients.

    Of adapters that several `owners` (by block) share, the client has a copy that computes and its gradient, and its
    share of the one set that moves: the parameters, their gradient and both moments.
    """
    shape, whole, held = assembly.shape, step_of(assembly, client, None), step_of(assembly, client, cut)
    whole = replace(whole, head_params=whole.head_params - held.head_params)
    kept = [
        activation_bytes(shape, whole.tokens, n, rank=max(ranks, default=0), checkpointing=whole.checkpointing)
        for n in (shape.num_layers, cut.blocks)
    ]
    trained = TRAINING_COPIES * 4 * whole.head_params
    for layer in range(cut.blocks, shape.num_layers):
        many, size = owners[layer] if owners else 1, layer_cost(shape, layer, ranks[layer])
        trained += size if many == 1 else size // 2 + size // many
    return {
        "frozen weights": sum(shape.block_bytes[cut.blocks :]) + shape.tail_bytes,
        "activations": HEAP_COPIES * (kept[0] - kept[1] + 4 * held.crossing),
        "adapters and optimizer": trained,
    }


def _overhead(
    assembly: Assembly,
    client: ClientData,
    ranks: Sequence[int],
    share: tuple[str, ...],
    step: TrainingStep,
    cut: Cut | None,
) -> int:
    """Bytes that names and shapes add to a message of these ranks; nothing where nothing is sent."""
    if not share:
        return 0
    start: Params = assembly.start(client, tuple(ranks))
    if cut is not None:
        start = select(start, _held(assembly, start, cut))
    held = ranks if cut is None else ranks[: cut.blocks]
    sent = shared_params(start, share)
    return payload_bytes(sent) - message_bytes(assembly.shape, held, share=share, head_params=step.head_params)


def _held(assembly: Assembly, params: Params, cut: Cut) -> Iterator[str]:
    held = select_client_side(assembly.site.backbone, params, blocks=cut.blocks, head=cut.head == "client")
    return (name for name in params if name in held)


def head_params(assembly: Assembly, client: ClientData) -> int:
    """Numbers of the client's head; 0 where it writes text."""
    start = assembly.start(client, (1,) * assembly.shape.num_layers)
    return num_values(select(start, head_keys(start)))


def _train(assembly: Assembly, client: ClientData) -> EncodedExamples:
    return assembly.site.data[client.name].splits["train"]
