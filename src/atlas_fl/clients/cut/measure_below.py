"""A cut client's side of what a plan needs: gradients of its own frozen weights, and the warm-up of its own adapters.

The rows cross as in training, one question a batch with the head on the server and two with the head here. A gradient
comes down only where something here is measured: a fingerprint of the last blocks asks nothing of those below.
"""

import numpy as np
import torch
from torch import Tensor

from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.clients.cut.client_side import Crossing, rows_of
from atlas_fl.clients.fingerprint import FingerprintOptions, added, averaged, parts_message, parts_of
from atlas_fl.clients.gradients import half_rows, head_leaves, last_weights, swapped
from atlas_fl.clients.importance import ImportanceOptions, layer_sums, merged_leaves, sums_message
from atlas_fl.clients.member import example_loss
from atlas_fl.clients.rows import Row
from atlas_fl.io.tensors import encode
from atlas_fl.models.backbone import logits_of
from atlas_fl.split.model import client_forward
from atlas_fl.types import Params


def gradients_below(job: Job, site: Site, crossing: Crossing) -> Update:
    """The client's own tensors' part of its fingerprint; the sketches are the server's, who has the other part."""
    options: FingerprintOptions = job.options
    leaves, head = last_weights(site.backbone, options.blocks), _head(job, site, crossing)
    losses, closing, done = list[float](), dict[str, bytes](), 0
    for half in (0, 1):
        totals: dict[str, Tensor] = {}
        rows = half_rows(job, site, half=half, count=options.batches, most=options.most(half))
        for row in rows:
            loss, gradient = _measured(row, site, leaves, head, crossing, done)
            totals, done = added(totals, gradient, kind=options.kind), done + 1
            losses += [] if loss is None else [float(loss)]
        if totals:
            parts = parts_of(averaged(totals, kind=options.kind), options)
            closing[f"{half}/fingerprint"] = encode(parts_message(list(parts.values())))
    crossing.closing = closing
    metrics = {"loss": float(np.mean(losses))} if losses else {}
    return Update(client=job.client, params=job.params, examples=0, metrics=metrics)


def importance_below(job: Job, site: Site, crossing: Crossing) -> Update:
    """The sums of the client's own blocks; importance is a share of all blocks and so the server's."""
    options: ImportanceOptions = job.options
    leaves, head = merged_leaves(job, site, site.modules), _head(job, site, crossing)
    sums = []
    for done, row in enumerate(half_rows(job, site, half=0, count=options.batches)):
        gradients = _measured(row, site, leaves, head, crossing, done)[1]
        sums.append(layer_sums(gradients, leaves, site, kind=options.kind))
    crossing.closing = {"0/fingerprint": encode(sums_message(sums))}
    return Update(client=job.client, params={}, examples=0, metrics={})


def _head(job: Job, site: Site, crossing: Crossing) -> dict[str, Tensor]:
    return head_leaves(job, site) if crossing.cut.head == "client" else {}


def _measured(
    row: Row, site: Site, leaves: Params, head: Params, crossing: Crossing, done: int
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """(the batch's loss where the head is here, the gradient of what is here)."""
    found: tuple[Tensor | None, dict[str, Tensor]] = swapped(_Gradient(site), leaves, row, leaves, head, crossing, done)
    return found


class _Gradient(torch.nn.Module):
    """As a module for the reason of that of a whole model (`clients.gradients`)."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.model, self._site = site.backbone.model, site

    def forward(
        self, row: Row, leaves: Params, head: Params, crossing: Crossing, done: int
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        site, loss, own = self._site, None, dict[str, Tensor]()
        with site.autocast(scaled=False):
            hidden = client_forward(site.backbone, row.ids, row.types, row.layout, blocks=crossing.cut.blocks)
        if crossing.cut.head == "server":
            got = crossing.far.ask("loss", done, crossing.up(hidden, row, (0,), labels=True))
        else:
            read = crossing.features(hidden, row, (0,), done).requires_grad_()
            loss, own, upper = _head_gradient(row, site, head, read)
            sent = {"0/gradient": crossing.lines[0].message(upper, "gradient")}
            got = crossing.far.ask("gradient", done, sent)
        if not leaves:
            return loss, own
        upper = rows_of(got, "gradient", (0,), like=hidden)
        below = torch.autograd.grad(hidden, list(leaves.values()), upper)
        return loss, {**dict(zip(leaves, below, strict=True)), **own}


def _head_gradient(row: Row, site: Site, head: Params, read: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """(loss, gradient of the head, gradient of the features)."""
    with site.autocast(scaled=False):
        loss = example_loss(logits_of(site.backbone, head, read).float(), row.labels[0])
    *own, upper = torch.autograd.grad(loss, [*head.values(), read])
    return loss.detach(), dict(zip(head, own, strict=True)), upper
