"""Gradients of the frozen weights themselves, as fingerprints and layer importance need them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from atlas_fl.clients.base import Job, Site
from atlas_fl.clients.rows import Row, features_over, make_row
from atlas_fl.clients.train import TrainOptions, example_loss, positions
from atlas_fl.models.backbone import Backbone, layer_of, logits_of
from atlas_fl.rng import generator
from atlas_fl.split.step import Line
from atlas_fl.tree import head_keys
from atlas_fl.types import Params


def batch_gradients(
    job: Job, site: Site, *, half: int, blocks: int, count: int, most: int | None = None, line: Line | None = None
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """(loss, gradients) of `count` batches of one half: the matrices of the last `blocks` blocks, and its head.

    The blocks below need no gradient and record nothing, so that only what is needed is computed.
    Evaluation mode, no dropout; the job's own adapters are not attached: this is the shared initialisation.
    """
    leaves, head = last_weights(site.backbone, blocks), head_leaves(job, site)
    for row in half_rows(job, site, half=half, count=count, most=most):
        yield loss_gradient(row, site, leaves, head, line=line)


def head_leaves(job: Job, site: Site) -> dict[str, Tensor]:
    """The job's head as tensors whose gradient can be taken; empty where it has none."""
    # Copied, because what came in a message lies at any address, and on that a product's last bits depend.
    return {
        key: job.params[key].detach().to(site.backbone.device, copy=True).requires_grad_()
        for key in head_keys(job.params)
    }


def loss_gradient(
    row: Row, site: Site, leaves: Params, head: Params, *, line: Line | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """One batch's mean loss, a scalar, and its gradient with respect to these weights and this head.

    With a `line`, over the client's cut.
    """
    found: tuple[Tensor, dict[str, Tensor]] = swapped(_Gradient(site), leaves, row, leaves, head, line)
    return found


def swapped(work: torch.nn.Module, leaves: Params, *args: object) -> Any:
    """What this module's forward pass gives of the arguments while its `model` computes with these weights."""
    return functional_call(work, {f"model.{name}": weight for name, weight in leaves.items()}, args)


class _Gradient(torch.nn.Module):
    """The gradient as a module: weights stay swapped in its backward pass, where checkpointed blocks run again."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.model, self._site = site.backbone.model, site

    def forward(self, row: Row, leaves: Params, head: Params, line: Line | None) -> tuple[Tensor, dict[str, Tensor]]:
        with self._site.autocast(scaled=False):
            pooled = features_over(row, self._site, () if line is None else (line,))
            loss = example_loss(logits_of(self._site.backbone, head, pooled).float(), row.labels[0])
        wanted = {**leaves, **head}
        gradient = torch.autograd.grad(loss, list(wanted.values()))
        return loss.detach(), dict(zip(wanted, gradient, strict=True))


def last_weights(backbone: Backbone, blocks: int) -> dict[str, Tensor]:
    """The matrices in the last blocks, by position in the model's block list, as tensors whose gradient can be taken.

    Without biases: softmax ignores a shift, so the gradient of a key's bias is rounding noise and nothing else, which
    a fingerprint would blow up to the size of every other tensor.
    """
    first = len(backbone.blocks) - blocks
    prefix = backbone.family.blocks + "."
    return {
        name: parameter.detach().requires_grad_()
        for name, parameter in backbone.model.named_parameters()
        if parameter.ndim > 1 and name.startswith(prefix) and layer_of(backbone, name) >= first
    }


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
