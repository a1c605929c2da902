"""Gradients of the frozen weights above one client's cut, batch after batch.

Between two messages no graph is kept, as in training: with the head at the client the pass is computed again for the
gradient of the features.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from atlas_fl.clients.base import Site
from atlas_fl.clients.cut.halves import with_upper
from atlas_fl.clients.cut.server_side import Entry
from atlas_fl.clients.cut.side import Payloads, Side
from atlas_fl.clients.gradients import head_leaves, swapped
from atlas_fl.clients.member import example_loss
from atlas_fl.clients.rows import Dropout
from atlas_fl.errors import ProtocolError
from atlas_fl.models.backbone import logits_of
from atlas_fl.models.packing import make_layout
from atlas_fl.split.codec import encode_rows
from atlas_fl.split.model import server_forward
from atlas_fl.types import Params


class Above:
    """The gradients of one client's job above its cut, batch after batch."""

    def __init__(self, side: Side, site: Site, leaves: Params, *, batches: int, wants: bool) -> None:
        self.side, self._site, self._leaves = side, site, leaves
        self._batches, self._wants = batches, wants
        self._head = head_leaves(replace(side.job, params=side.above), site)
        self._waiting: Entry | None = None
        self.losses: list[float] = []

    def read(self, what: str, done: int, payloads: Payloads) -> Entry:
        """The rows of a batch, or those that wait with the gradient of their features, which came now."""
        at_home = self.side.cut.head == "client"
        self.side.expect(what, done, "gradient" if self._waiting else "features" if at_home else "loss")
        if self._waiting is not None:
            entry, self._waiting = with_upper(self._waiting, payloads, self.side), None
            return entry
        if done >= self._batches:
            raise ProtocolError(f"{self.side.job.client} goes on after its {self._batches} batches")
        return self.side.entry(payloads, 0, self._head, Dropout(p=0.0, seed=0, path=()), wants=self._wants)

    def answer(self, what: str, entry: Entry, take: Callable[[dict[str, Tensor]], None]) -> dict[str, bytes]:
        """Features, or the gradient of the rows where something below the cut is measured; `take` gets that of ours."""
        wire = self.side.cut.wire
        if what == "features":
            self._waiting = entry
            with torch.no_grad():
                features = swapped(_Features(self._site), self._leaves, entry)
            return {"0/activation": self.side.sent(encode_rows(features, wire=wire), "activation")}
        loss, gradient = swapped(_Gradient(self._site), self._leaves, entry, self._leaves, self._head)
        rows = gradient.pop(_ROWS, None)
        if loss is not None:
            self.losses.append(float(loss))
        take(gradient)
        self.side.done += 1
        return {} if rows is None else {"0/gradient": self.side.sent(encode_rows(rows, wire=wire), "gradient")}

    def end(self) -> None:
        """Nothing where all batches have been; else raises `ProtocolError`."""
        if self.side.done < self._batches or self._waiting is not None:
            raise ProtocolError(
                f"{self.side.job.client} ends after {self.side.done} of {self._batches} batches; install our version"
            )


_ROWS = "rows"


class _Features(torch.nn.Module):
    """What the head reads of an entry, (reads, hidden)."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.model, self._site = site.backbone.model, site

    def forward(self, entry: Entry) -> Tensor:
        return _features(entry, self._site)


class _Gradient(torch.nn.Module):
    """As a module for the reason of that of a whole model (`clients.gradients`)."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.model, self._site = site.backbone.model, site

    def forward(self, entry: Entry, leaves: Params, head: Params) -> tuple[Tensor | None, dict[str, Tensor]]:
        root, loss = _features(entry, self._site), None
        if entry.labels is not None:
            with self._site.autocast(scaled=False):
                root = example_loss(logits_of(self._site.backbone, head, root).float(), entry.labels)
            loss = root.detach()
        wanted = {**leaves, **head} | ({_ROWS: entry.rows} if entry.rows.requires_grad else {})
        found = torch.autograd.grad(root, list(wanted.values()), entry.upper)
        return loss, dict(zip(wanted, found, strict=True))


def _features(entry: Entry, site: Site) -> Tensor:
    layout = make_layout(list(entry.lengths), device=site.backbone.device)
    # Copied for its address, as a head is (`clients.gradients.head_leaves`).
    rows = entry.rows.clone()
    with site.autocast(scaled=False):
        return server_forward(site.backbone, rows, layout, blocks=entry.blocks, reads=entry.places)
