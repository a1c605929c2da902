"""Costs of a round for one client, its model whole or cut: heaviest step, bytes, seconds, memory.

Bytes are those of encoded tensors, as the ledger has them. What a method sends beside the model (corrections, models of
other clusters) or leaves out is its own (`methods.method.Part.extra_bytes`); two tables say the same for readers,
relative to FedAvg: `methods.method.PublishedMethod.relative_bytes` and `methods.method.Method.relative_bytes`.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch

from atlas_fl.client.local_training import num_steps
from atlas_fl.client.options import TrainOptions
from atlas_fl.config import Config
from atlas_fl.data.clients import ClientData
from atlas_fl.methods.method import message_size as params_size
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import Params, head_keys, num_values, select, shared_params
from atlas_fl.partial_sharing import is_fully_shared
from atlas_fl.ranks.cost_model import (
    HEAP_COPIES,
    TRAINING_COPIES,
    RoundPrediction,
    RoundTraffic,
    TrainingStep,
    activation_bytes,
    crossing_seconds,
    layer_cost,
    predict_round,
)
from atlas_fl.ranks.devices import DEVICES, Device
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import parts_of_config, strategy_of, train_options
from atlas_fl.setup.participation import num_participants
from atlas_fl.split.channel import NORMS, Cut
from atlas_fl.split.codec import message_size
from atlas_fl.split.model import select_client_side
from atlas_fl.storage.tensors import encoded_size

SERVER_DEVICE: Device = DEVICES["workstation"]
"""The profile that the server's side of a cut is predicted with."""


def heaviest_step(assembly: Assembly, client: ClientData, cut: Cut | None) -> TrainingStep:
    """The client's heaviest step: as many of its longest examples as a batch holds; of a cut model, its own side."""
    size, data = assembly.config.training.batch_size, _train_examples(assembly, client)
    lengths, targets = (np.sort(counts)[::-1] for counts in (data.lengths, data.num_targets))
    tokens, has_head = int(lengths[:size].sum()), cut is None or cut.head == "client"
    params = _rank_one_params(assembly, client)
    return TrainingStep(
        tokens=tokens,
        blocks=None if cut is None else cut.blocks,
        head_params=num_values(select(params, head_keys(params))) if has_head else 0,
        checkpointing=assembly.config.model.gradient_checkpointing,
        logits=int(targets[:size].sum()) * assembly.shape.vocabulary if has_head else 0,
        crossing=0 if cut is None else 2 * tokens * assembly.shape.hidden,
    )


def predict_client_round(
    assembly: Assembly, client: ClientData, device: Device, ranks: Sequence[int], *, cut: Cut | None
) -> RoundPrediction:
    """A round of this client at these ranks; of a cut model the client's memory, and the seconds of both sides."""
    client_part = _predict_client_part(assembly, client, device, ranks, cut=cut)
    if cut is None:
        return client_part
    whole_model = _predict_client_part(assembly, client, device, ranks, cut=None)
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


def _predict_client_part(
    assembly: Assembly, client: ClientData, device: Device, ranks: Sequence[int], *, cut: Cut | None
) -> RoundPrediction:
    data, step = _train_examples(assembly, client), heaviest_step(assembly, client, cut)
    lengths, passes = data.lengths.astype(np.float64), _num_passes(assembly, client)
    message_bytes, extra_bytes = 0, (0, 0)
    if strategy_of(assembly.config).communicates:
        params = assembly.initial_params(client, tuple(ranks))
        side = params if cut is None else select(params, client_side(assembly, cut, params))
        message_bytes = encoded_size(shared_params(side, assembly.config.mixing.share))
        if cut is None:
            extra_bytes = _method_bytes(assembly, client, params)
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


def _method_bytes(assembly: Assembly, client: ClientData, model: Params) -> tuple[int, int]:
    """(bytes up, bytes down) that a round has beyond the shared model once each way; below 0 for less.

    Where rounds differ, as RoLoRA's, it is the mean of two that follow each other.
    """
    config = assembly.config
    shared = shared_params(model, config.mixing.share)
    participants = num_participants(len(assembly.clients), config.training.participation)
    extra = [
        part.extra_bytes(shared, participants=participants, classes=client.task.num_labels)
        for part in parts_of_config(config)
    ]
    unsent = 0
    if _leaves_out_untrained(config):
        options = _train_options(assembly)
        unsent = sum(params_size(_untrained(shared, options, round=number)) for number in (1, 2)) // 2
    return sum(up for up, _ in extra) - unsent, sum(down for _, down in extra) - unsent


def _untrained(params: Params, options: TrainOptions, *, round: int) -> Params:
    return {key: tensor for key, tensor in params.items() if not options.trains(key, round=round)}


def _leaves_out_untrained(config: Config) -> bool:
    """Return whether parameters that do not train in a round are not sent (`experiment.untrained`)."""
    mixing = config.mixing
    is_mean = strategy_of(config).is_average and mixing.space == "factors" and not mixing.personal_models
    return is_mean and mixing.aggregate_every == 1 and is_fully_shared(mixing.share)


def _num_passes(assembly: Assembly, client: ClientData) -> float:
    """Passes of a client over its data in a round; a fraction where its steps are limited."""
    batch_size, num_examples = assembly.config.training.batch_size, len(_train_examples(assembly, client))
    full_passes, extra_steps = divmod(_num_steps(assembly, client), -(-num_examples // batch_size))
    return full_passes + min(extra_steps * batch_size, num_examples) / num_examples


def crossing_bytes(assembly: Assembly, client: ClientData, cut: Cut) -> dict[str, int]:
    """Bytes through the cut in a round of training, by `kind_direction`: every batch as long as the mean."""
    training, steps = assembly.config.training, _num_steps(assembly, client)
    data = _train_examples(assembly, client)
    sizes = _pass_bytes(assembly, data, cut, steps=steps, epochs=training.local_epochs)
    if cut.head == "client":
        sizes["gradient_up"] = sizes["activation_down"]
    # the gradients come without the lengths that went up
    tokens = int(data.lengths.sum()) * training.local_epochs
    sizes["gradient_down"] = steps * message_size(tokens // steps, assembly.shape.hidden, wire=cut.wire)
    if training.clip > 0:
        params = _rank_one_params(assembly, client)
        num_below = len(client_side(assembly, cut, params))
        sizes["control_up"] = steps * _norms_size(num_below)
        sizes["control_down"] = steps * _norms_size(len(params) - num_below)
    return sizes


def evaluation_bytes(assembly: Assembly, client: ClientData, cut: Cut) -> int:
    """Bytes through the cut in one evaluation, both ways: validation and test examples in one message each."""
    splits = assembly.site.data[client.name].splits
    passes = [_pass_bytes(assembly, splits[name], cut, steps=1, epochs=1) for name in splits if name != "train"]
    return sum(sum(sizes.values()) for sizes in passes)


def _pass_bytes(assembly: Assembly, data: EncodedExamples, cut: Cut, *, steps: int, epochs: int) -> dict[str, int]:
    """Bytes of forward passes over these examples by `kind_direction`, in steps of equal size."""
    writes = data.target_mask is not None
    tokens = int(data.lengths.sum()) * epochs // steps
    outputs = (int(data.num_targets.sum()) if writes else len(data)) * epochs // steps
    extra = {"lengths": _meta_tensor(len(data) * epochs // steps, torch.int32)}
    if writes:
        extra["places"] = _meta_tensor(outputs, torch.int32)
    sizes = {"activation_up": message_size(tokens, assembly.shape.hidden, wire=cut.wire, extra=extra)}
    if cut.head == "client":
        sizes["activation_down"] = message_size(outputs, assembly.shape.hidden, wire=cut.wire)
    else:
        dtype = torch.float32 if data.labels.dtype.kind == "f" else torch.int64
        sizes["label_up"] = encoded_size({"labels": _meta_tensor(outputs, dtype)})
    return {kind: steps * size for kind, size in sizes.items()}


def _norms_size(count: int) -> int:
    """Bytes of the message with the norms of so many gradients."""
    return encoded_size({NORMS: _meta_tensor(count, torch.float32)})


def _meta_tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of so many values that takes no memory."""
    return torch.empty(count, dtype=dtype, device="meta")


def server_memory(assembly: Assembly, client: ClientData, cut: Cut, ranks: Sequence[int]) -> dict[str, int]:
    """Bytes on the server for this client by part; the frozen weights are there once for all clients."""
    shape, client_step = assembly.shape, heaviest_step(assembly, client, cut)
    whole_step = heaviest_step(assembly, client, None)
    whole, below = (
        activation_bytes(
            shape, whole_step.tokens, blocks, rank=max(ranks, default=0), checkpointing=whole_step.checkpointing
        )
        for blocks in (shape.num_layers, cut.blocks)
    )
    trained = TRAINING_COPIES * 4 * (whole_step.head_params - client_step.head_params)
    trained += sum(layer_cost(shape, layer, ranks[layer]) for layer in range(cut.blocks, shape.num_layers))
    return {
        "frozen weights": sum(shape.block_bytes[cut.blocks :]) + shape.tail_bytes,
        "activations": HEAP_COPIES * (whole - below + 4 * client_step.crossing),
        "adapters and optimizer": trained,
    }


def client_side(assembly: Assembly, cut: Cut, names: Collection[str]) -> frozenset[str]:
    """The names of these tensors on the client's side of the cut."""
    return select_client_side(assembly.site.backbone, names, blocks=cut.blocks, head=cut.head == "client")


def _rank_one_params(assembly: Assembly, client: ClientData) -> Params:
    """All that the client trains, with adapters of rank one."""
    return assembly.initial_params(client, (1,) * assembly.shape.num_layers)


def _train_examples(assembly: Assembly, client: ClientData) -> EncodedExamples:
    return assembly.site.data[client.name].splits["train"]


def _train_options(assembly: Assembly) -> TrainOptions:
    return train_options(assembly.config, with_images=assembly.has_images)


def _num_steps(assembly: Assembly, client: ClientData) -> int:
    """Steps of this client in a round."""
    return num_steps(len(_train_examples(assembly, client)), _train_options(assembly))
