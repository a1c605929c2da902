"""Importance of layers for a client, from gradients of the frozen weights of all blocks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from atlas_fl.client.batching import PackedBatch, body_of, call_with_params, features_of_row, make_row
from atlas_fl.client.draws import Draws
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.local_training import example_loss, positions
from atlas_fl.client.options import ImportanceOptions, TrainOptions
from atlas_fl.models.backbone import Backbone, block_index, head_logits
from atlas_fl.models.lora import merged_weight
from atlas_fl.models.weights import dense
from atlas_fl.params import Params, head_keys
from atlas_fl.ranks.allocation import Layers, layer_importance, normalise_importance, rngwp


def batch_gradients(
    job: Job, site: Site, *, half: int, blocks: int, count: int, most: int | None = None
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """(loss, gradients) of the batches of one half (`gradient_batches`): of the last `blocks` blocks' matrices, and of
    its head.

    The blocks below need no gradient and record nothing, so that only what is needed is computed.
    Evaluation mode, no dropout; the job's own adapters are not attached: this is the shared initialisation.
    """
    leaves, head = last_weights(site.backbone, blocks), head_leaves(job, site)
    # Gradients of blocks below the first adapted one need all of the forward pass.
    at = site if len(site.backbone.blocks) - blocks >= site.first_adapted else replace(site, first_adapted=0)
    for row in half_rows(job, at, half=half, count=count, most=most):
        yield loss_gradient(row, site, leaves, head)


def head_leaves(job: Job, site: Site) -> dict[str, Tensor]:
    """The job's head as tensors whose gradient can be taken; empty where it has none."""
    # Copied, because what came in a message lies at any address, and on that a product's last bits depend.
    return {
        key: job.params[key].detach().to(site.backbone.device, copy=True).requires_grad_()
        for key in head_keys(job.params)
    }


def pop_gradients(leaves: Params) -> dict[str, Tensor]:
    """The gradients of these leaves, which have none afterwards."""
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    for leaf in leaves.values():
        leaf.grad = None
    return gradients


def loss_gradient(row: PackedBatch, site: Site, leaves: Params, head: Params) -> tuple[Tensor, dict[str, Tensor]]:
    """One batch's mean loss, a scalar, and its gradient with respect to these weights and this head."""

    def gradients() -> tuple[Tensor, dict[str, Tensor]]:
        with site.autocast(scaled=False):
            pooled = features_of_row(row, site.backbone, body_of([head], site))
            loss = example_loss(head_logits(site.backbone, head, pooled).float(), row.labels[0])
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), pop_gradients({**leaves, **head})

    return call_with_params(site.backbone.model, leaves, gradients)


def last_weights(backbone: Backbone, blocks: int, *, end: int | None = None) -> dict[str, Tensor]:
    """The matrices in the last blocks, or the last ones below block `end`, as tensors whose gradient can be taken.

    Without biases: softmax ignores a shift, so the gradient of a key's bias is rounding noise and nothing else, which
    a fingerprint would blow up to the size of every other tensor.
    """
    end = len(backbone.blocks) if end is None else end
    prefix = backbone.family.block_lists
    return {
        name: dense(parameter.detach(), torch.float32).to(backbone.device).requires_grad_()
        for name, parameter in backbone.parameters.items()
        if parameter.ndim > 1 and name.startswith(prefix) and end - blocks <= block_index(backbone, name) < end
    }


def half_rows(job: Job, site: Site, *, half: int, count: int, most: int | None = None) -> Iterator[PackedBatch]:
    """The batches of one half, or of at most `most` of its examples; the last one is filled from the beginning.

    Measured again in a later round, they come in another order.
    """
    data = site.data[job.client].splits["train"]
    options: TrainOptions = job.options.train
    secret = site.secrets.get(job.client)
    index = positions(len(data), job.client, replace(options, half=half, most=most), secret=secret)
    again = (job.round,) if job.round else ()
    draws = Draws(client=job.client, seed=options.seed, secret=secret)
    order = draws.generator("gradients", half, *again, asked=(options.batch_size, count, most)).permutation(index)
    size = min(options.batch_size, max(1, len(order)))
    examples = np.resize(order, (gradient_batches(job, site, half=half, count=count, most=most), size))
    yield from (make_row([data.take(batch)], site) for batch in examples)


def gradient_batches(job: Job, site: Site, *, half: int, count: int, most: int | None = None) -> int:
    """The number of batches of one half: `count`, or as many as its examples fill, which both sides of a cut know.

    Further ones would hold the same examples again, and add next to nothing to a mean or root mean square.
    """
    options: TrainOptions = replace(job.options.train, half=half, most=most)
    examples = len(positions(len(site.data[job.client].splits["train"]), job.client, options, secret=None))
    return min(count, max(1, math.ceil(examples / options.batch_size)))


IMPORTANCE = "importance"


def importance(job: Job, site: Site) -> Update:
    """The client's importance of each block, (blocks,) float64 that sums to one, under `importance`.

    Taken over the weights that adapters would change, at the client's own model with its adapters merged:
    mean squared gradient per weight, or |weight * gradient| smoothed over batches (`rngwp`, HSplitLoRA).
    """
    options: ImportanceOptions = job.options
    leaves, head = merged_leaves(job, site, site.modules), head_leaves(job, site)
    gradients = (
        loss_gradient(row, site, leaves, head)[1] for row in half_rows(job, site, half=0, count=options.batches)
    )
    sums = [layer_sums(gradient, leaves, site, kind=options.kind) for gradient in gradients]
    return importance_update(job, sums, site)


def importance_update(job: Job, sums: Sequence[np.ndarray], site: Site) -> Update:
    """The client's answer, from every batch's sums by block, (blocks,) each; 0 for a block without adapters."""
    sizes = _by_layer(
        site, {name: float(module.get_parameter("weight").numel()) for name, module in site.modules.items()}
    )
    adapted, shares = sizes > 0, np.zeros(len(sizes))
    shares[adapted] = _shares([layer_sum[adapted] for layer_sum in sums], sizes[adapted], kind=job.options.kind)
    return Update(client=job.client, params={IMPORTANCE: torch.from_numpy(shares)}, examples=0, metrics={})


def merged_leaves(job: Job, site: Site, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The weights of these layers with the job's adapters merged, as tensors whose gradient can be taken."""
    stored = site.backbone.parameters
    return {
        f"{name}.weight": merged_weight(module, name, job.params, site.scale, stored[f"{name}.weight"]).requires_grad_()
        for name, module in modules.items()
    }


def layer_sums(gradients: Params, leaves: Params, site: Site, *, kind: str) -> np.ndarray:
    """The squares of one batch's gradients, or |weight * gradient|, summed by block, (blocks,) float64."""
    sums = {}
    for name, leaf in leaves.items():
        gradient = gradients[name]
        numbers = gradient.double().square() if kind == "gradient" else (leaf.detach() * gradient).double().abs()
        sums[name] = float(numbers.sum())
    return _by_layer(site, sums)


def _by_layer(site: Site, sums: Mapping[str, float]) -> np.ndarray:
    """Sums of single weights' numbers gathered by block, (blocks,) float64."""
    layers = np.zeros(len(site.backbone.blocks))
    for name, value in sums.items():
        layers[block_index(site.backbone, name)] += value
    return layers


def _shares(sums: Sequence[np.ndarray], sizes: np.ndarray, *, kind: str) -> Layers:
    """Shares of the layers, from every batch's sums by layer and the layers' sizes, (layers,) each."""
    if kind == "gradient":
        return layer_importance(np.sum(sums, axis=0), sizes)
    smoothed = rngwp(None, sums[0], sizes)
    for layer_sum in sums[1:]:
        smoothed = rngwp(smoothed, layer_sum, sizes)
    return normalise_importance(smoothed)
