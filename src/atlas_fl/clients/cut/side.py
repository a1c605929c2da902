"""What a server reads of a cut client's messages: checked before anything is computed of it, and counted.

A wrong shape or label is refused here, not in the middle of a pack that its client shares with others.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from atlas_fl.clients.base import Job, Site
from atlas_fl.clients.cut.server_side import Entry
from atlas_fl.clients.rows import Dropout
from atlas_fl.errors import ProtocolError
from atlas_fl.io.ledger import Direction, Kind
from atlas_fl.split.codec import ROWS, read_message
from atlas_fl.split.model import on_client
from atlas_fl.tree import select
from atlas_fl.types import Params

Payloads: TypeAlias = Mapping[str, bytes]
"""Messages through a cut by `PLACE/KIND`: which of a job's models, and what of it."""


class Side:
    """A cut client's job taken apart: what is the client's, what is here, and how its messages are read and counted."""

    def __init__(self, job: Job, site: Site) -> None:
        assert job.cut is not None, "a client without a cut has no half here"
        self.job, self.site, self.cut = job, site, job.cut
        held = on_client(site.backbone, job.params, blocks=self.cut.blocks, head=self.cut.head == "client")
        self.below = replace(job, params=select(job.params, (key for key in job.params if key in held)))
        self.above: Params = select(job.params, (key for key in job.params if key not in held))
        self.crossed: Counter[tuple[Kind, Direction]] = Counter()
        """Bytes of all messages so far."""
        self.done = 0
        """Steps, or messages of an evaluation, that are answered."""
        self._longest = max(int(own.lengths.max()) for own in site.data[job.client].splits.values())

    def expect(self, what: str, done: int, due: str) -> None:
        """Nothing where this question is due now; else raises `ProtocolError`."""
        if (what, done) != (due, self.done):
            raise ProtocolError(
                f"{self.job.client} asks for {what!r:.20} after {done} steps, and {due} after {self.done} is due;"
                " install the same atlas-fl on both ends"
            )

    def opened(self, payloads: Payloads, place: int, kind: Kind) -> dict[str, Tensor]:
        """The tensors of one message, counted."""
        message = payloads.get(f"{place}/{kind}")
        if message is None:
            raise ProtocolError(f"{self.job.client} sent no {kind}; install the same atlas-fl on both ends")
        self.crossed[kind, "up"] += len(message)
        return read_message(message)

    def sent(self, message: bytes, kind: Kind) -> bytes:
        """The message, counted."""
        self.crossed[kind, "down"] += len(message)
        return message

    def entry(self, payloads: Payloads, place: int, params: Params, dropout: Dropout, *, wants: bool) -> Entry:
        """The rows of one model, with labels where the head is here; a leaf where their gradient is wanted."""
        task, device = self.site.data[self.job.client].task, self.site.backbone.device
        opened = self.opened(payloads, place, "activation")
        rows, lengths, places = opened.get(ROWS), opened.get("lengths"), opened.get("places")
        if rows is None or rows.shape[1] != self.site.backbone.hidden or not self._are_lengths(lengths, rows):
            raise self.refused("rows")
        assert lengths is not None
        if (places is None) is task.writes or (places is not None and not _are_within(places, len(rows), torch.int32)):
            raise self.refused("places")
        labels = None
        if self.cut.head == "server":
            labels = self.opened(payloads, place, "label").get("labels")
            if not self._are_labels(labels, len(lengths) if places is None else len(places)):
                raise self.refused("labels")
        return Entry(
            rows=rows.to(device).requires_grad_(wants),
            blocks=self.cut.blocks,
            lengths=tuple(lengths.tolist()),
            places=None if places is None else places.to(device, torch.int64),
            params=params,
            dropout=dropout,
            labels=None if labels is None else labels.to(device),
        )

    def _are_lengths(self, lengths: Tensor | None, rows: Tensor) -> bool:
        if lengths is None or not _are_within(lengths, self._longest + 1, torch.int32):
            return False
        return int(lengths.min()) > 0 and int(lengths.sum()) == len(rows)

    def _are_labels(self, labels: Tensor | None, count: int) -> bool:
        task = self.site.data[self.job.client].task
        if labels is None or labels.shape != (count,):
            return False
        if task.is_regression:
            return labels.dtype is torch.float32
        vocabulary = self.site.backbone.vocabulary
        return _are_within(labels, len(vocabulary) if task.writes and vocabulary is not None else task.num_labels)

    def refused(self, what: str) -> ProtocolError:
        """The error of a client that sent this in a form that cannot be."""
        return ProtocolError(
            f"{self.job.client} sent {what} through its cut that fit neither each other nor its task; join with the"
            " data and the version of atlas-fl that the plan was made with"
        )


def _are_within(numbers: Tensor, size: int, dtype: torch.dtype = torch.int64) -> bool:
    if numbers.dtype is not dtype or numbers.ndim != 1 or not len(numbers):
        return False
    return int(numbers.min()) >= 0 and int(numbers.max()) < size
