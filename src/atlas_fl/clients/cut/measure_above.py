"""The server's side of what a plan needs of a cut client: gradients of the frozen weights above the cut.

Of a weight that clients share, a pass over several clients gives the sum of their gradients, so each is answered alone.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.clients.cut.above import Above
from atlas_fl.clients.cut.half import Question
from atlas_fl.clients.cut.server_side import Read
from atlas_fl.clients.cut.side import Payloads, Side
from atlas_fl.clients.cut.together import Together
from atlas_fl.clients.fingerprint import PARTS, FingerprintOptions, added, averaged, held_below, parts_of
from atlas_fl.clients.fingerprint import answered as fingerprinted
from atlas_fl.clients.gradients import head_leaves, last_weights
from atlas_fl.clients.importance import IMPORTANCE, ImportanceOptions, layer_sums, merged_leaves
from atlas_fl.clients.importance import answered as weighed
from atlas_fl.clients.rows import modules_of
from atlas_fl.clustering.sketch import joined
from atlas_fl.errors import DataError, ProtocolError
from atlas_fl.split.step import Cut
from atlas_fl.types import Params


class Measure(Protocol):
    """What is made of the gradients above one client's cut."""

    def add(self, done: int, gradient: dict[str, Tensor]) -> None:
        """Take those of a batch, after `done` others; the tensors are used up."""
        ...

    def end(self, payloads: Payloads, losses: Sequence[float]) -> Update:
        """The answer, of all batches and of what the client says of its own blocks."""
        ...


class MeasuringHalf:
    """Passes over the blocks above one client's cut, one a batch, whatever is measured there."""

    places: tuple[int, ...] = ()
    together: Together | None = None

    def __init__(self, above: Above, measure: Measure) -> None:
        self.side, self._above, self._measure = above.side, above, measure

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
        """Features, or the gradient of the rows where something below the cut is measured."""
        done = self.side.done
        return self._above.answer(question.what, question.entries[0], lambda own: self._measure.add(done, own))

    def end(self, payloads: Payloads) -> Update:
        """What was measured on both sides; the loss is there where the head is."""
        self._above.end()
        return told_here(self._measure.end(payloads, self._above.losses), self.side)


def blocks_below(options: FingerprintOptions, cut: Cut, *, total: int) -> int:
    """Of how many of its own last blocks a client with this cut, of a model of so many, takes gradients."""
    return min(cut.blocks, max(0, options.blocks - (total - cut.blocks)))


def gradients_half(job: Job, site: Site) -> MeasuringHalf:
    """The server's half of a fingerprint of gradients."""
    options: FingerprintOptions = job.options
    side = Side(job, site)
    names = [*last_weights(site.backbone, options.blocks), *head_leaves(job, site)]
    above = len(site.backbone.blocks) - side.cut.blocks
    own = blocks_below(options, side.cut, total=len(site.backbone.blocks))
    side.below = replace(side.below, options=replace(options, blocks=own))
    leaves = last_weights(site.backbone, min(options.blocks, above))
    sketches = _Sketches(side, names=names, below=held_below(names, job, site))
    return MeasuringHalf(Above(side, site, leaves, batches=2 * options.batches, wants=own > 0), sketches)


def importance_half(job: Job, site: Site) -> MeasuringHalf:
    """The server's half of a measurement of importance."""
    options: ImportanceOptions = job.options
    side, total = Side(job, site), len(site.backbone.blocks)
    leaves = merged_leaves(job, site, modules_of(site, range(side.cut.blocks, total)))
    wants = bool(modules_of(site, range(side.cut.blocks)))
    return MeasuringHalf(Above(side, site, leaves, batches=options.batches, wants=wants), _Shares(side, site, leaves))


class _Sketches:
    """Sums the gradients of the last blocks above the cut, and joins both sides' parts of the sketches."""

    def __init__(self, side: Side, *, names: Sequence[str], below: Sequence[str]) -> None:
        self._side, self._names, self._below = side, names, below
        self._totals: list[dict[str, Tensor]] = [{}, {}]

    def add(self, done: int, gradient: dict[str, Tensor]) -> None:
        """Into the sums of the half of the data that this batch is of."""
        options: FingerprintOptions = self._side.job.options
        half = done // options.batches
        self._totals[half] = added(self._totals[half], gradient, kind=options.kind)

    def end(self, payloads: Payloads, losses: Sequence[float]) -> Update:
        """Both sketches, of the client's parts and ours."""
        sketches = [self._joined(half, payloads) for half in (0, 1)]
        loss = float(np.mean(losses)) if losses else math.nan
        return fingerprinted(self._side.job, sketches, self._side.above, steps=0, loss=loss, crossed={})

    def _joined(self, half: int, payloads: Payloads) -> np.ndarray:
        options: FingerprintOptions = self._side.job.options
        below = parts_below(self._side, payloads, half, self._below, dim=options.sketch_dim)
        return sketch_of(self._names, below, averaged(self._totals[half], kind=options.kind), options)


class _Shares:
    """Measures the blocks above the cut, and makes shares of both sides' sums."""

    def __init__(self, side: Side, site: Site, leaves: Params) -> None:
        self._side, self._site, self._leaves = side, site, leaves
        self._sums: list[np.ndarray] = []

    def add(self, done: int, gradient: dict[str, Tensor]) -> None:  # noqa: ARG002 - batches are alike
        """One more batch's sums by block."""
        options: ImportanceOptions = self._side.job.options
        self._sums.append(layer_sums(gradient, self._leaves, self._site, kind=options.kind))

    def end(self, payloads: Payloads, losses: Sequence[float]) -> Update:  # noqa: ARG002 - importance has no loss
        """The importance of all blocks."""
        side, blocks = self._side, self._side.cut.blocks
        below = side.opened(payloads, 0, "fingerprint").get(IMPORTANCE)
        if not _are_numbers(below, (side.job.options.batches, blocks)):
            raise side.refused("importance")
        assert below is not None
        sums = [np.concatenate([low, own[blocks:]]) for low, own in zip(below.numpy(), self._sums)]
        try:
            return weighed(side.job, sums, self._site, crossed={})
        except DataError as error:
            raise ProtocolError(f"{side.job.client}: {error}") from None


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
