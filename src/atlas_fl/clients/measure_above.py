"""The server's side of what a plan needs of a cut client: gradients of the frozen weights above the cut.

Of a weight that clients share, a pass over several clients gives the sum of their gradients, so each is answered alone.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from atlas_fl.clients.above import Above
from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.clients.fingerprint import PARTS, FingerprintOptions, added, averaged, held_below, parts_of
from atlas_fl.clients.fingerprint import answered as fingerprinted
from atlas_fl.clients.gradients import head_leaves, last_weights
from atlas_fl.clients.half import Question
from atlas_fl.clients.importance import IMPORTANCE, ImportanceOptions, layer_sums, merged_leaves
from atlas_fl.clients.importance import answered as weighed
from atlas_fl.clients.rows import modules_of
from atlas_fl.clients.server_side import Read
from atlas_fl.clients.side import Payloads, Side
from atlas_fl.clients.together import Together
from atlas_fl.clustering.sketch import joined
from atlas_fl.errors import DataError, ProtocolError
from atlas_fl.types import Params


class GradientsHalf:
    """Sums the gradients of the last blocks above the cut, and joins both sides' parts of the sketches."""

    places: tuple[int, ...] = ()
    together: Together | None = None

    def __init__(self, job: Job, site: Site) -> None:
        options: FingerprintOptions = job.options
        self.side, self._options = Side(job, site), options
        blocks, above = self.side.cut.blocks, len(site.backbone.blocks) - self.side.cut.blocks
        self._names = [*last_weights(site.backbone, options.blocks), *head_leaves(job, site)]
        self._below = held_below(self._names, job, site)
        # A client counts its blocks from its own last one.
        own = min(blocks, max(0, options.blocks - above))
        self.side.below = replace(self.side.below, options=replace(options, blocks=own))
        leaves = last_weights(site.backbone, min(options.blocks, above))
        self._above = Above(self.side, site, leaves, batches=2 * options.batches, wants=own > 0)
        self._totals: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})

    def close(self, what: str, done: int, payloads: Payloads) -> None:
        """Nothing is left of the message before."""

    def is_ready(self) -> bool:
        """Always: nothing is trained."""
        return True

    def last(self, payloads: Payloads) -> None:
        """Nothing is left to be told."""

    def read(self, what: str, done: int, payloads: Payloads) -> Question:
        """Rows of the next batch, or the gradient of its features."""
        return Question(half=self, what=what, entries=(self._above.read(what, done, payloads),), alone=True)

    def answer(self, question: Question, found: Sequence[Read]) -> dict[str, bytes]:  # noqa: ARG002 - it is computed here
        """Features, or the gradient of the rows where the fingerprint reaches below the cut."""
        half = self.side.done // self._options.batches
        return self._above.answer(question.what, question.entries[0], lambda gradient: self._add(half, gradient))

    def _add(self, half: int, gradient: dict[str, Tensor]) -> None:
        sums = added(self._totals[half], gradient, kind=self._options.kind)
        self._totals = (sums, self._totals[1]) if half == 0 else (self._totals[0], sums)

    def end(self, payloads: Payloads) -> Update:
        """Both sketches, of the client's parts and ours; the loss is there where the head is."""
        self._above.end()
        sketches = [self._joined(half, payloads) for half in (0, 1)]
        loss = float(np.mean(self._above.losses)) if self._above.losses else math.nan
        return told_here(
            fingerprinted(self.side.job, sketches, self.side.above, steps=0, loss=loss, crossed={}), self.side
        )

    def _joined(self, half: int, payloads: Payloads) -> np.ndarray:
        options = self._options
        below = parts_below(self.side, payloads, half, self._below, dim=options.sketch_dim)
        return sketch_of(self._names, below, averaged(self._totals[half], kind=options.kind), options)


class ImportanceHalf:
    """Measures the blocks above the cut, and makes shares of both sides' sums."""

    places: tuple[int, ...] = ()
    together: Together | None = None

    def __init__(self, job: Job, site: Site) -> None:
        options: ImportanceOptions = job.options
        self.side, self._options, self._site = Side(job, site), options, site
        blocks, total = self.side.cut.blocks, len(site.backbone.blocks)
        self._leaves = merged_leaves(job, site, modules_of(site, range(blocks, total)))
        wants = bool(modules_of(site, range(blocks)))
        self._above = Above(self.side, site, self._leaves, batches=options.batches, wants=wants)
        self._sums: list[np.ndarray] = []

    def close(self, what: str, done: int, payloads: Payloads) -> None:
        """Nothing is left of the message before."""

    def is_ready(self) -> bool:
        """Always: nothing is trained."""
        return True

    def last(self, payloads: Payloads) -> None:
        """Nothing is left to be told."""

    def read(self, what: str, done: int, payloads: Payloads) -> Question:
        """Rows of the next batch, or the gradient of its features."""
        return Question(half=self, what=what, entries=(self._above.read(what, done, payloads),), alone=True)

    def answer(self, question: Question, found: Sequence[Read]) -> dict[str, bytes]:  # noqa: ARG002 - it is computed here
        """Features, or the gradient of the rows."""
        return self._above.answer(question.what, question.entries[0], self._add)

    def _add(self, gradient: dict[str, Tensor]) -> None:
        self._sums.append(layer_sums(gradient, self._leaves, self._site, kind=self._options.kind))

    def end(self, payloads: Payloads) -> Update:
        """The importance of all blocks."""
        self._above.end()
        below = self.side.opened(payloads, 0, "fingerprint").get(IMPORTANCE)
        if not _are_numbers(below, (self._options.batches, self.side.cut.blocks)):
            raise self.side.refused("importance")
        assert below is not None
        sums = [np.concatenate([low, own[self.side.cut.blocks :]]) for low, own in zip(below.numpy(), self._sums)]
        try:
            return weighed(self.side.job, sums, self._site, crossed={})
        except DataError as error:
            raise ProtocolError(f"{self.side.job.client}: {error}") from None


def told_here(own: Update, side: Side) -> Update:
    """The answer without the loss where that is the client's, who has the head."""
    if side.cut.head == "server":
        return own
    return replace(own, metrics={name: value for name, value in own.metrics.items() if name != "loss"})


def parts_below(side: Side, payloads: Payloads, half: int, names: Sequence[str], *, dim: int) -> dict[str, np.ndarray]:
    """What the client's tensors of these names add to a half's sketch.

    Raises `ProtocolError` where that is not what was sent.
    """
    if not names:
        return {}
    parts = side.opened(payloads, half, "fingerprint").get(PARTS)
    if not _are_numbers(parts, (len(names), dim)):
        raise side.refused("parts of a sketch")
    assert parts is not None
    return dict(zip(names, parts.numpy(), strict=True))


def sketch_of(
    names: Iterable[str], below: Mapping[str, np.ndarray], above: Params, options: FingerprintOptions
) -> np.ndarray:
    """The sketch of the tensors of these names, in a whole model's order: of the client's parts and our tensors."""
    try:
        parts = {**below, **parts_of(above, options)}
        return joined(parts[name] for name in names)
    except DataError as error:
        raise ProtocolError(str(error)) from None


def _are_numbers(found: Tensor | None, shape: tuple[int, int]) -> bool:
    if found is None or found.dtype is not torch.float64 or found.shape != shape:
        return False
    return bool(found.isfinite().all())
