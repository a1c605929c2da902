"""Gradients of the frozen weights themselves, as fingerprints and layer importance need them."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from atlas_fl.clients.base import Job, Site
from atlas_fl.clients.rows import Row, features_here, make_row
from atlas_fl.clients.train import TrainOptions, example_loss, positions
from atlas_fl.models.backbone import Backbone, layer_of, logits_of
from atlas_fl.rng import generator
from atlas_fl.tree import head_keys
from atlas_fl.types import Params


def batch_gradients(
    job: Job, site: Site, *, half: int, blocks: int, count: int, most: int | None = None
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """(loss, gradients) of `count` batches of one half: the matrices of the last `blocks` blocks, and its head.

    The blocks below need no gradient and record nothing, so that only what is needed is computed.
    Evaluation mode, no dropout; the job's own adapters are not attached: this is the shared initialisation.
    """
    backbone = site.backbone
    names = _weights_of_last(backbone, blocks)
    leaves = {name: backbone.model.get_parameter(name).detach().requires_grad_() for name in names}
    head = {key: job.params[key].detach().to(backbone.device).requires_grad_() for key in head_keys(job.params)}
    for row in half_rows(job, site, half=half, count=count, most=most):
        yield loss_gradient(row, site, leaves, head)


def loss_gradient(row: Row, site: Site, leaves: Params, head: Params) -> tuple[Tensor, dict[str, Tensor]]:
    """One batch's mean loss, a scalar, and its gradient with respect to these weights and this head."""
    swapped = {f"model.{name}": weight for name, weight in leaves.items()}
    found: tuple[Tensor, dict[str, Tensor]] = functional_call(_Gradient(site), swapped, (row, leaves, head))
    return found


class _Gradient(torch.nn.Module):
    """The gradient as a module: weights stay swapped in its backward pass, where checkpointed blocks run again."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.model, self._site = site.backbone.model, site

    def forward(self, row: Row, leaves: Params, head: Params) -> tuple[Tensor, dict[str, Tensor]]:
        backbone = self._site.backbone
        with self._site.autocast(scaled=False):
            pooled = features_here(row, backbone)
            loss = example_loss(logits_of(backbone, head, pooled).float(), row.labels[0])
        wanted = {**leaves, **head}
        gradient = torch.autograd.grad(loss, list(wanted.values()))
        return loss.detach(), dict(zip(wanted, gradient, strict=True))


def _weights_of_last(backbone: Backbone, blocks: int) -> list[str]:
    """Names of the matrices in the last blocks, by position in the model's block list.

    Without biases: softmax ignores a shift, so the gradient of a key's bias is rounding noise and nothing else, which
    a fingerprint would blow up to the size of every other tensor.
    """
    first = len(backbone.blocks) - blocks
    prefix = backbone.family.blocks + "."
    return [
        name
        for name, parameter in backbone.model.named_parameters()
        if parameter.ndim > 1 and name.startswith(prefix) and layer_of(backbone, name) >= first
    ]


def half_rows(job: Job, site: Site, *, half: int, count: int, most: int | None = None) -> Iterator[Row]:
    """`count` batches of one half, going round the half's examples, or at most so many of them, as often as needed.

    Measured again in a later round, they come in another order.
    """
    data = site.data[job.client].splits["train"]
    options: TrainOptions = job.options.train
    index = positions(len(data), job.client, replace(options, half=half, most=most))
    again = (job.round,) if job.round else ()
    order = generator(options.seed, "gradients", job.client, half, *again).permutation(index)
    wanted = np.resize(order, count * options.batch_size)
    for start in range(0, len(wanted), options.batch_size):
        yield make_row([data.take(wanted[start : start + options.batch_size])], device=site.backbone.device)
