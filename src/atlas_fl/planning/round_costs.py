"""Costs of a round for one client, its model whole or cut: heaviest step, ranks, bytes, seconds, memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from atlas_fl.client.local_training import num_steps
from atlas_fl.data.clients import ClientData
from atlas_fl.errors import BudgetError
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import Params, head_keys, num_values, select, shared_params
from atlas_fl.planning.method_traffic import method_bytes
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
    with_extra_bytes,
)
from atlas_fl.ranks.devices import DEVICES, Device
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import train_options
from atlas_fl.setup.participation import num_participants
from atlas_fl.split.channel import NORMS, Cut
from atlas_fl.split.codec import message_size
from atlas_fl.split.model import select_client_side
from atlas_fl.storage.tensors import encoded_size

MOST_PREDICTED = 1e15
"""Seconds and bytes of a client's round or of one phase of its planning: what is added up from these over a run can be
written and read again (`storage.json_shapes.LARGEST`)."""
SERVER_DEVICE: Device = DEVICES["workstation"]
"""The profile that the server's side of a cut is predicted with."""


def check_costs(client: ClientData, device: Device, costs: Mapping[str, Mapping[str, float]]) -> None:
    """Raise `BudgetError` where a predicted number of this client is none that a plan may hold.

    `costs` are seconds and bytes by what takes them.
    """
    for work, numbers in costs.items():
        for name, value in numbers.items():
            # NaN is in no range
            if not 0 <= value <= MOST_PREDICTED:
                raise BudgetError(
                    f"{name.replace('_', ' ')} of {work} at {client.name} are predicted to be {value:g} on device"
                    f" {device.name}; allowed: up to {MOST_PREDICTED:g}; take a faster device or fewer examples"
                )


def assign_client_ranks(
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
    fractions = None
    if config.budget != "memory":
        fractions = MemoryFractions(base=config.alpha_base, activations=config.alpha_act, optimizer=config.alpha_opt)
    return assign_ranks(
        assembly.shape,
        device,
        importance=importance,
        rule=config.ranks,
        candidates=config.candidates,
        step=heaviest_step(assembly, client, cut),
        allowance_bytes=config.adapter_bytes,
        fractions=fractions,
        factor=factor,
    )


def heaviest_step(assembly: Assembly, client: ClientData, cut: Cut | None) -> TrainingStep:
    """The client's heaviest step: as many of its longest examples as a batch holds; of a cut model, its own side."""
    size, data = assembly.config.training.batch_size, _train_examples(assembly, client)
    lengths, targets = (np.sort(counts)[::-1] for counts in (data.lengths, data.num_targets))
    tokens, has_head = int(lengths[:size].sum()), cut is None or cut.head == "client"
    return TrainingStep(
        tokens=tokens,
        blocks=None if cut is None else cut.blocks,
        head_params=num_head_params(assembly, client) if has_head else 0,
        checkpointing=assembly.config.model.gradient_checkpointing,
        logits=int(targets[:size].sum()) * assembly.shape.vocabulary if has_head else 0,
        crossing=0 if cut is None else 2 * tokens * assembly.shape.hidden,
    )


def predict_client_round(
    assembly: Assembly,
    client: ClientData,
    device: Device,
    ranks: Sequence[int],
    *,
    cut: Cut | None,
    communicates: bool,
) -> RoundPrediction:
    """A round of this client at these ranks; of a cut model the client's memory, and the seconds of both sides."""
    client_side = _predict_client_side(assembly, client, device, ranks, cut=cut, communicates=communicates)
    if cut is None:
        return client_side
    whole_model = _predict_client_side(assembly, client, device, ranks, cut=None, communicates=communicates)
    return predict_cut_round(
        client_side, whole_model, device, server=SERVER_DEVICE, crossings=cut_traffic_of(assembly, client, cut)
    )


def cut_traffic_of(assembly: Assembly, client: ClientData, cut: Cut) -> RoundTraffic:
    """Traffic through this client's cut in a round of training, all kinds of messages together."""
    sizes = crossing_bytes(assembly, client, cut)
    steps = num_steps(
        len(_train_examples(assembly, client)), train_options(assembly.config, with_images=assembly.has_images)
    )
    return RoundTraffic(
        up_bytes=sum(size for name, size in sizes.items() if name.endswith("up")),
        down_bytes=sum(size for name, size in sizes.items() if name.endswith("down")),
        messages=steps * (2 if cut.head == "server" else 4),
    )


def _predict_client_side(
    assembly: Assembly, client: ClientData, device: Device, ranks: Sequence[int], *, cut: Cut | None, communicates: bool
) -> RoundPrediction:
    share = assembly.config.mixing.share if communicates else ()
    data = _train_examples(assembly, client)
    passes = _num_passes(assembly, data)
    lengths, step = data.lengths.astype(np.float64), heaviest_step(assembly, client, cut)
    prediction = predict_round(
        assembly.shape,
        device,
        ranks=ranks,
        step=step,
        tokens=int(lengths.sum() * passes),
        length=float((lengths**2).sum() / lengths.sum()),
        share=share,
        overhead_bytes=_message_overhead(assembly, client, ranks, share, step, cut),
        logits=int(data.num_targets.sum() * assembly.shape.vocabulary * passes) if step.logits else 0,
    )
    if not share or cut is not None:
        return prediction
    up, down = method_bytes(
        assembly.config,
        train_options(assembly.config, with_images=assembly.has_images),
        assembly.initial_params(client, tuple(ranks)),
        participants=num_participants(len(assembly.clients), assembly.config.training.participation),
        labels=client.task.num_labels,
    )
    return with_extra_bytes(prediction, device, up=up, down=down)


def _num_passes(assembly: Assembly, data: EncodedExamples) -> float:
    """Passes of a client over its data in a round; a fraction where its steps are limited."""
    options = train_options(assembly.config, with_images=assembly.has_images)
    per_pass = -(-len(data) // options.batch_size)
    full_passes, extra_steps = divmod(num_steps(len(data), options), per_pass)
    return full_passes + min(extra_steps * options.batch_size, len(data)) / len(data)


def crossing_bytes(assembly: Assembly, client: ClientData, cut: Cut) -> dict[str, int]:
    """Bytes through the cut in a round of training, by `kind_direction`: every batch as long as the mean."""
    training, data = assembly.config.training, _train_examples(assembly, client)
    steps = num_steps(len(data), train_options(assembly.config, with_images=assembly.has_images))
    sizes = _pass_bytes(assembly, data, cut, steps=steps, epochs=training.local_epochs)
    hidden, tokens = assembly.shape.hidden, int(data.lengths.sum()) * training.local_epochs
    if cut.blocks:
        sizes["gradient_down"] = _even_message_bytes(tokens, steps, lambda n: message_size(n, hidden, wire=cut.wire))
    if cut.head == "client":
        outputs = _num_outputs(data) * training.local_epochs
        sizes["gradient_up"] = _even_message_bytes(outputs, steps, lambda n: message_size(n, hidden, wire=cut.wire))
    if training.clip > 0:
        below, above = (
            steps * encoded_size({NORMS: meta_tensor(n, torch.float32)})
            for n in _num_trained_tensors(assembly, client, cut)
        )
        sizes |= {"control_up": below, "control_down": above}
    return sizes


def _num_trained_tensors(assembly: Assembly, client: ClientData, cut: Cut) -> tuple[int, int]:
    """Number of tensors that train on the client's side of its cut, and on the server's."""
    names = assembly.initial_params(client, (1,) * assembly.shape.num_layers)
    below = len(select_client_side(assembly.site.backbone, names, blocks=cut.blocks, head=cut.head == "client"))
    return below, len(names) - below


def evaluation_bytes(assembly: Assembly, client: ClientData, cut: Cut) -> int:
    """Bytes through the cut in one evaluation, both ways: validation and test examples in one message each."""
    splits = assembly.site.data[client.name].splits
    return sum(sum(_pass_bytes(assembly, splits[name], cut, steps=1).values()) for name in splits if name != "train")


def _pass_bytes(assembly: Assembly, data: EncodedExamples, cut: Cut, *, steps: int, epochs: int = 1) -> dict[str, int]:
    """Bytes of forward passes over these examples, without any gradient."""
    hidden, outputs, tokens = assembly.shape.hidden, _num_outputs(data) * epochs, int(data.lengths.sum()) * epochs
    extra = {"lengths": meta_tensor(len(data) * epochs // steps, torch.int32)}
    if data.target_mask is not None:
        extra["places"] = meta_tensor(outputs // steps, torch.int32)
    up = _even_message_bytes(tokens, steps, lambda n: message_size(n, hidden, wire=cut.wire, extra=extra))
    if cut.head == "client":
        down = _even_message_bytes(outputs, steps, lambda n: message_size(n, hidden, wire=cut.wire))
        return {"activation_up": up, "activation_down": down}
    dtype = torch.float32 if data.labels.dtype.kind == "f" else torch.int64
    return {
        "activation_up": up,
        "label_up": _even_message_bytes(outputs, steps, lambda n: encoded_size({"labels": meta_tensor(n, dtype)})),
    }


def _even_message_bytes(total: int, steps: int, size_of: Callable[[int], int]) -> int:
    """Bytes of `steps` messages that hold `total` rows as evenly as possible."""
    rows, num_larger = divmod(total, steps)
    return (steps - num_larger) * size_of(rows) + num_larger * size_of(rows + 1)


def meta_tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of so many values that takes no memory."""
    return torch.empty(count, dtype=dtype, device="meta")


def _num_outputs(data: EncodedExamples) -> int:
    return len(data) if data.target_mask is None else int(data.num_targets.sum())


def server_memory(
    assembly: Assembly, client: ClientData, cut: Cut, ranks: Sequence[int], *, owners: Sequence[int] = ()
) -> dict[str, int]:
    """Bytes on the server for this client by part; the frozen weights are there once for all clients.

    Of adapters that several `owners` (by block) share, the client has a copy that computes and its gradient, and its
    share of the one set that moves: the parameters, their gradient and both moments.
    """
    shape, client_step = assembly.shape, heaviest_step(assembly, client, cut)
    whole_step = heaviest_step(assembly, client, None)
    whole_step = replace(whole_step, head_params=whole_step.head_params - client_step.head_params)
    activations = [
        activation_bytes(
            shape, whole_step.tokens, n, rank=max(ranks, default=0), checkpointing=whole_step.checkpointing
        )
        for n in (shape.num_layers, cut.blocks)
    ]
    trained = TRAINING_COPIES * 4 * whole_step.head_params
    for layer in range(cut.blocks, shape.num_layers):
        sharing, size = owners[layer] if owners else 1, layer_cost(shape, layer, ranks[layer])
        trained += size if sharing == 1 else size // 2 + size // sharing
    return {
        "frozen weights": sum(shape.block_bytes[cut.blocks :]) + shape.tail_bytes,
        "activations": HEAP_COPIES * (activations[0] - activations[1] + 4 * client_step.crossing),
        "adapters and optimizer": trained,
    }


def _message_overhead(
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
    params: Params = assembly.initial_params(client, tuple(ranks))
    client_ranks = ranks
    if cut is not None:
        client_ranks = ranks[: cut.blocks]
        client_side = select_client_side(assembly.site.backbone, params, blocks=cut.blocks, head=cut.head == "client")
        params = select(params, [name for name in params if name in client_side])
    shared = shared_params(params, share)
    return encoded_size(shared) - message_bytes(assembly.shape, client_ranks, share=share, head_params=step.head_params)


def num_head_params(assembly: Assembly, client: ClientData) -> int:
    """Parameters of the client's head; 0 where it writes text."""
    params = assembly.initial_params(client, (1,) * assembly.shape.num_layers)
    return num_values(select(params, head_keys(params)))


def _train_examples(assembly: Assembly, client: ClientData) -> EncodedExamples:
    return assembly.site.data[client.name].splits["train"]
