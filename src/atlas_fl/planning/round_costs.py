"""Costs of a round for one client, its model whole or cut: heaviest step, ranks, bytes, seconds, memory."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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
    RoundPrediction,
    RoundTraffic,
    TrainingStep,
    activation_bytes,
    crossing_seconds,
    fraction_budget,
    layer_cost,
    predict_round,
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
"""Seconds and bytes of a client's round or of one phase of its planning: what is added up from these over a run is a
number still."""
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
    memory_budget = None
    if config.budget == "fractions":
        memory_budget = fraction_budget(
            device, base=config.alpha_base, activations=config.alpha_act, optimizer=config.alpha_opt
        )
    return assign_ranks(
        assembly.shape,
        device,
        importance=importance,
        rule=config.ranks,
        candidates=config.candidates,
        step=heaviest_step(assembly, client, cut),
        allowance_bytes=config.adapter_bytes,
        memory_budget=memory_budget,
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
    client_part = _predict_client_part(assembly, client, device, ranks, cut=cut, communicates=communicates)
    if cut is None:
        return client_part
    whole_model = _predict_client_part(assembly, client, device, ranks, cut=None, communicates=communicates)
    crossings = cut_traffic_of(assembly, client, cut)
    return replace(
        client_part,
        up_bytes=client_part.up_bytes + crossings.up_bytes,
        down_bytes=client_part.down_bytes + crossings.down_bytes,
        transfer_seconds=client_part.transfer_seconds + crossing_seconds(crossings, device),
        server_seconds=(whole_model.flops - client_part.flops) / SERVER_DEVICE.flops_per_second,
    )


def cut_traffic_of(assembly: Assembly, client: ClientData, cut: Cut) -> RoundTraffic:
    """Traffic through this client's cut in a round of training, all kinds of messages together."""
    sizes = crossing_bytes(assembly, client, cut)
    return RoundTraffic(
        up_bytes=sum(size for name, size in sizes.items() if name.endswith("up")),
        down_bytes=sum(size for name, size in sizes.items() if name.endswith("down")),
        messages=_num_steps(assembly, client) * (2 if cut.head == "server" else 4),
    )


def _num_steps(assembly: Assembly, client: ClientData) -> int:
    """Steps of this client in a round."""
    options = train_options(assembly.config, with_images=assembly.has_images)
    return num_steps(len(_train_examples(assembly, client)), options)


def _predict_client_part(
    assembly: Assembly, client: ClientData, device: Device, ranks: Sequence[int], *, cut: Cut | None, communicates: bool
) -> RoundPrediction:
    share = assembly.config.mixing.share if communicates else ()
    data, step = _train_examples(assembly, client), heaviest_step(assembly, client, cut)
    lengths, passes = data.lengths.astype(np.float64), _num_passes(assembly, client)
    message_bytes, extra_bytes = 0, (0, 0)
    if share:
        params = assembly.initial_params(client, tuple(ranks))
        side = params if cut is None else client_side(assembly, cut, params)
        shared = shared_params({name: tensor for name, tensor in params.items() if name in side}, share)
        message_bytes = encoded_size(shared)
    if share and cut is None:
        extra_bytes = method_bytes(
            assembly.config,
            train_options(assembly.config, with_images=assembly.has_images),
            params,
            participants=num_participants(len(assembly.clients), assembly.config.training.participation),
            labels=client.task.num_labels,
        )
    return predict_round(
        assembly.shape,
        device,
        ranks=ranks,
        step=step,
        tokens=int(lengths.sum() * passes),
        length=float((lengths**2).sum() / lengths.sum()),
        logits=int(data.num_targets.sum() * assembly.shape.vocabulary * passes) if step.logits else 0,
        message_bytes=message_bytes,
        extra_bytes=extra_bytes,
    )


def _num_passes(assembly: Assembly, client: ClientData) -> float:
    """Passes of a client over its data in a round; a fraction where its steps are limited."""
    batch_size, num_examples = assembly.config.training.batch_size, len(_train_examples(assembly, client))
    full_passes, extra_steps = divmod(_num_steps(assembly, client), -(-num_examples // batch_size))
    return full_passes + min(extra_steps * batch_size, num_examples) / num_examples


def crossing_bytes(assembly: Assembly, client: ClientData, cut: Cut) -> dict[str, int]:
    """Bytes through the cut in a round of training, by `kind_direction`: every batch as long as the mean."""
    training, steps = assembly.config.training, _num_steps(assembly, client)
    data = _train_examples(assembly, client)
    sizes = _pass_bytes(assembly, data, cut, steps=steps, epochs=training.local_epochs, backward=True)
    if training.clip > 0:
        params = rank_one_params(assembly, client)
        num_below = len(client_side(assembly, cut, params))
        sizes["control_up"] = steps * norms_size(num_below)
        sizes["control_down"] = steps * norms_size(len(params) - num_below)
    return sizes


def evaluation_bytes(assembly: Assembly, client: ClientData, cut: Cut) -> int:
    """Bytes through the cut in one evaluation, both ways: validation and test examples in one message each."""
    splits = assembly.site.data[client.name].splits
    passes = [_pass_bytes(assembly, splits[name], cut, steps=1, backward=False) for name in splits if name != "train"]
    return sum(sum(sizes.values()) for sizes in passes)


def _pass_bytes(
    assembly: Assembly, data: EncodedExamples, cut: Cut, *, steps: int, epochs: int = 1, backward: bool
) -> dict[str, int]:
    """Bytes of passes over these examples by `kind_direction`, in steps of as even a size as possible."""
    tokens, outputs = int(data.lengths.sum()) * epochs, num_outputs(data) * epochs
    batches = zip(_even_parts(tokens, steps), _even_parts(outputs, steps), strict=True)
    total = Counter[str]()
    for (batch_tokens, batch_outputs), repeats in Counter(batches).items():
        sizes = message_sizes(
            assembly,
            data,
            cut,
            examples=len(data) * epochs // steps,
            tokens=batch_tokens,
            outputs=batch_outputs,
            places=outputs // steps,
            backward=backward,
        )
        for kind, size in sizes.items():
            total[kind] += repeats * size
    return dict(total)


def _even_parts(total: int, parts: int) -> list[int]:
    size, num_larger = divmod(total, parts)
    return [size + 1] * num_larger + [size] * (parts - num_larger)


def message_sizes(
    assembly: Assembly,
    data: EncodedExamples,
    cut: Cut,
    *,
    examples: int,
    tokens: int,
    outputs: int,
    places: int,
    backward: bool,
) -> dict[str, int]:
    """Bytes of the messages of one batch through the cut, by `kind_direction`; `backward` with gradients.

    Args:
        examples: examples of the batch, whose lengths are sent.
        outputs: positions at which the head predicts.
        places: of these, the number that is sent where text is written.
    """
    hidden, wire = assembly.shape.hidden, cut.wire
    extra = {"lengths": _meta_tensor(examples, torch.int32)}
    if data.target_mask is not None:
        extra["places"] = _meta_tensor(places, torch.int32)
    sizes = {"activation_up": message_size(tokens, hidden, wire=wire, extra=extra)}
    if cut.head == "client":
        sizes["activation_down"] = message_size(outputs, hidden, wire=wire)
    else:
        dtype = torch.float32 if data.labels.dtype.kind == "f" else torch.int64
        sizes["label_up"] = encoded_size({"labels": _meta_tensor(outputs, dtype)})
    if backward:
        sizes["gradient_down"] = message_size(tokens, hidden, wire=wire)
    if backward and cut.head == "client":
        sizes["gradient_up"] = sizes["activation_down"]
    return sizes


def norms_size(count: int) -> int:
    """Bytes of the message with the norms of so many gradients."""
    return encoded_size({NORMS: _meta_tensor(count, torch.float32)})


def _meta_tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of so many values that takes no memory."""
    return torch.empty(count, dtype=dtype, device="meta")


def num_outputs(data: EncodedExamples) -> int:
    """Positions of these examples at which the head predicts."""
    return len(data) if data.target_mask is None else int(data.num_targets.sum())


def server_memory(
    assembly: Assembly, client: ClientData, cut: Cut, ranks: Sequence[int], *, owners: Sequence[int]
) -> dict[str, int]:
    """Bytes on the server for this client by part; the frozen weights are there once for all clients.

    Of adapters that several `owners` (by block) share, the client has a copy that computes and its gradient, and its
    share of the one set that moves: the parameters, their gradient and both moments.
    """
    shape, client_step = assembly.shape, heaviest_step(assembly, client, cut)
    whole_step = heaviest_step(assembly, client, None)
    activations = [
        activation_bytes(
            shape, whole_step.tokens, n, rank=max(ranks, default=0), checkpointing=whole_step.checkpointing
        )
        for n in (shape.num_layers, cut.blocks)
    ]
    trained = TRAINING_COPIES * 4 * (whole_step.head_params - client_step.head_params)
    for layer in range(cut.blocks, shape.num_layers):
        size = layer_cost(shape, layer, ranks[layer])
        trained += size if owners[layer] == 1 else size // 2 + size // owners[layer]
    return {
        "frozen weights": sum(shape.block_bytes[cut.blocks :]) + shape.tail_bytes,
        "activations": HEAP_COPIES * (activations[0] - activations[1] + 4 * client_step.crossing),
        "adapters and optimizer": trained,
    }


def rank_one_params(assembly: Assembly, client: ClientData) -> Params:
    """All that the client trains, with adapters of rank one."""
    return assembly.initial_params(client, (1,) * assembly.shape.num_layers)


def client_side(assembly: Assembly, cut: Cut, names: Collection[str]) -> frozenset[str]:
    """The names of these tensors on the client's side of the cut."""
    return select_client_side(assembly.site.backbone, names, blocks=cut.blocks, head=cut.head == "client")


def num_head_params(assembly: Assembly, client: ClientData) -> int:
    """Parameters of the client's head; 0 where it writes text."""
    params = rank_one_params(assembly, client)
    return num_values(select(params, head_keys(params)))


def _train_examples(assembly: Assembly, client: ClientData) -> EncodedExamples:
    return assembly.site.data[client.name].splits["train"]
