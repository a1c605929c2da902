"""Costs of a round for one client, its model whole or cut: heaviest step, bytes, seconds, memory.

Bytes are those of encoded tensors, as the ledger has them, of the model itself and of what crosses a cut; what a method
sends beside the model is in the ledger alone.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch

from atlas_fl.client.local_training import num_steps
from atlas_fl.data.clients import ClientData
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import Params, head_keys, num_values, select, shared_params
from atlas_fl.ranks import cost_model
from atlas_fl.ranks.devices import DEVICES, Device
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import strategy_of, train_options
from atlas_fl.split import channel, codec, model
from atlas_fl.storage.tensors import encoded_size

SERVER_DEVICE: Device = DEVICES["workstation"]
"""The profile that the server's side of a cut is predicted with."""


def heaviest_step(assembly: Assembly, client: ClientData, cut: channel.Cut | None) -> cost_model.TrainingStep:
    """The client's heaviest step: as many of its longest examples as a batch holds; of a cut model, its own side."""
    size, data = assembly.config.training.batch_size, _train_examples(assembly, client)
    lengths, targets = (np.sort(counts)[::-1] for counts in (data.step_lengths, data.step_targets))
    tokens, has_head = int(lengths[:size].sum()), cut is None or cut.head == "client"
    params = _rank_one_params(assembly, client)
    return cost_model.TrainingStep(
        tokens=tokens,
        blocks=None if cut is None else cut.blocks,
        head_params=num_values(select(params, head_keys(params))) if has_head else 0,
        checkpointing=assembly.config.model.gradient_checkpointing,
        logits=int(targets[:size].sum()) * assembly.shape.vocabulary if has_head else 0,
        crossing=0 if cut is None else 2 * tokens * assembly.shape.hidden,
    )


def predict_client_round(
    assembly: Assembly, client: ClientData, device: Device, ranks: Sequence[int], *, cut: channel.Cut | None
) -> cost_model.RoundPrediction:
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
        transfer_seconds=client_part.transfer_seconds + cost_model.crossing_seconds(crossings, device),
        server_seconds=(whole_model.flops - client_part.flops) / SERVER_DEVICE.flops_per_second,
    )


def cut_traffic_of(assembly: Assembly, client: ClientData, cut: channel.Cut) -> cost_model.RoundTraffic:
    """Traffic through this client's cut in a round of training, all kinds of messages together."""
    sizes = crossing_bytes(assembly, client, cut)
    return cost_model.RoundTraffic(
        up_bytes=sum(size for name, size in sizes.items() if name.endswith("up")),
        down_bytes=sum(size for name, size in sizes.items() if name.endswith("down")),
        messages=_num_steps(assembly, client) * (2 if cut.head == "server" else 4),
    )


def _predict_client_part(
    assembly: Assembly, client: ClientData, device: Device, ranks: Sequence[int], *, cut: channel.Cut | None
) -> cost_model.RoundPrediction:
    data, step = _train_examples(assembly, client), heaviest_step(assembly, client, cut)
    lengths, passes = data.step_lengths.astype(np.float64), _num_passes(assembly, client)
    message_bytes = 0
    if strategy_of(assembly.config).communicates:
        params = assembly.initial_params(client, tuple(ranks))
        side = params if cut is None else select(params, client_side(assembly, cut, params))
        message_bytes = encoded_size(shared_params(side, assembly.config.mixing.share))
    return cost_model.predict_round(
        assembly.shape,
        device,
        ranks=ranks,
        step=step,
        tokens=int(lengths.sum() * passes),
        length=float((lengths**2).sum() / lengths.sum()),
        logits=int(data.step_targets.sum() * assembly.shape.vocabulary * passes) if step.logits else 0,
        message_bytes=message_bytes,
    )


def _num_passes(assembly: Assembly, client: ClientData) -> float:
    """Passes of a client over its data in a round; a fraction where its steps are limited."""
    batch_size, num_examples = assembly.config.training.batch_size, len(_train_examples(assembly, client))
    full_passes, extra_steps = divmod(_num_steps(assembly, client), -(-num_examples // batch_size))
    return full_passes + min(extra_steps * batch_size, num_examples) / num_examples


def crossing_bytes(assembly: Assembly, client: ClientData, cut: channel.Cut) -> dict[str, int]:
    """Bytes through the cut in a round of training, by `kind_direction`: every batch as long as the mean."""
    training, steps = assembly.config.training, _num_steps(assembly, client)
    data = _train_examples(assembly, client)
    writes = data.target_mask is not None
    examples = len(data) * training.local_epochs // steps
    tokens = int(data.step_lengths.sum()) * training.local_epochs // steps
    outputs = int(data.step_targets.sum()) * training.local_epochs // steps if writes else examples
    extra = {"lengths": _meta_tensor(examples, torch.int32)}
    if writes:
        extra["places"] = _meta_tensor(outputs, torch.int32)
    hidden = assembly.shape.hidden
    sizes = {
        "activation_up": codec.message_size(tokens, hidden, wire=cut.wire, extra=extra),
        # the gradients come without the lengths that went up
        "gradient_down": codec.message_size(tokens, hidden, wire=cut.wire),
    }
    if cut.head == "client":
        sizes["activation_down"] = codec.message_size(outputs, hidden, wire=cut.wire)
        sizes["gradient_up"] = sizes["activation_down"]
    else:
        dtype = torch.float32 if data.labels.dtype.kind == "f" else torch.int64
        shape = (outputs, *data.labels.shape[1:])
        sizes["label_up"] = encoded_size({"labels": torch.empty(shape, dtype=dtype, device="meta")})
    if training.clip > 0 or assembly.site.fp16:
        params = _rank_one_params(assembly, client)
        num_below = len(client_side(assembly, cut, params))
        sizes["control_up"] = _norms_size(num_below)
        sizes["control_down"] = _norms_size(len(params) - num_below)
    return {kind: steps * size for kind, size in sizes.items()}


def _norms_size(count: int) -> int:
    """Bytes of the message with the norms of so many gradients."""
    return encoded_size({channel.NORMS: _meta_tensor(count, torch.float32)})


def _meta_tensor(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of so many values that takes no memory."""
    return torch.empty(count, dtype=dtype, device="meta")


def server_memory(assembly: Assembly, client: ClientData, cut: channel.Cut, ranks: Sequence[int]) -> dict[str, int]:
    """Bytes on the server for this client by part; the frozen weights are there once for all clients."""
    shape, client_step = assembly.shape, heaviest_step(assembly, client, cut)
    whole_step = heaviest_step(assembly, client, None)
    whole, below = (
        cost_model.activation_bytes(
            shape, whole_step.tokens, blocks, rank=max(ranks, default=0), checkpointing=whole_step.checkpointing
        )
        for blocks in (shape.num_layers, cut.blocks)
    )
    trained = cost_model.TRAINING_COPIES * 4 * (whole_step.head_params - client_step.head_params)
    trained += sum(cost_model.layer_cost(shape, layer, ranks[layer]) for layer in range(cut.blocks, shape.num_layers))
    return {
        "frozen weights": sum(shape.block_bytes[cut.blocks :]) + shape.tail_bytes,
        "activations": cost_model.HEAP_COPIES * (whole - below + 4 * client_step.crossing),
        "adapters and optimizer": trained,
    }


def client_side(assembly: Assembly, cut: channel.Cut, names: Collection[str]) -> frozenset[str]:
    """The names of these tensors on the client's side of the cut."""
    return model.select_client_side(assembly.site.backbone, names, blocks=cut.blocks, head=cut.head == "client")


def _rank_one_params(assembly: Assembly, client: ClientData) -> Params:
    """All that the client trains, with adapters of rank one."""
    return assembly.initial_params(client, (1,) * assembly.shape.num_layers)


def _train_examples(assembly: Assembly, client: ClientData) -> EncodedExamples:
    return assembly.site.data[client.name].splits["train"]


def _num_steps(assembly: Assembly, client: ClientData) -> int:
    """Steps of this client in a round."""
    options = train_options(assembly.config, with_images=assembly.has_images)
    return num_steps(len(_train_examples(assembly, client)), options)
