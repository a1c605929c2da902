"""The server half of fingerprints and importance over a cut: gradients above it."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from atlas_fl.client.batching import modules_of
from atlas_fl.client.fingerprint import (
    PARTS,
    add_gradient,
    fingerprint_update,
    names_below_cut,
    parts_of_gradients,
)
from atlas_fl.client.importance import (
    IMPORTANCE,
    head_leaves,
    importance_update,
    last_weights,
    layer_sums,
    merged_leaves,
    pop_gradients,
)
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.options import FingerprintOptions, ImportanceOptions
from atlas_fl.client.split_server import CutMessages, GradientHalf, Payloads
from atlas_fl.clustering.sketch import combine_parts
from atlas_fl.errors import DataError, ProtocolError
from atlas_fl.params import Params
from atlas_fl.split.channel import Cut


class MeasuringHalf(GradientHalf):
    """Gradients of one client's job above its cut, batch after batch, and the measure that is made of them."""

    def __init__(
        self, side: CutMessages, leaves: Params, measure: "_Sketches | _Shares", *, batches: int, wants: bool
    ) -> None:
        """`leaves` are the weights above the cut that are measured; the client `wants` the gradients of its rows."""
        head = head_leaves(replace(side.job, params=side.above), side.site)
        super().__init__(side, head, steps=batches, wants=wants, weights=leaves)
        self._measured, self._measure = {**leaves, **head}, measure
        self._losses: list[float] = []

    def take_gradients(self, loss: Tensor | None) -> dict[str, bytes]:
        """Measure the gradients of a batch."""
        self._losses += [] if loss is None else [float(loss)]
        self._measure.add(self.side.done, pop_gradients(self._measured))
        return {}

    def update(self, payloads: Payloads) -> Update:
        """The measure of both sides; the loss is there where the head is."""
        update = self._measure.end(payloads, self._losses)
        if self.side.cut.head == "server":
            return update
        return replace(update, metrics={name: value for name, value in update.metrics.items() if name != "loss"})


def blocks_below(options: FingerprintOptions, cut: Cut, *, total: int) -> int:
    """Number of its last blocks that a client with this cut takes gradients of, in a model of `total` blocks."""
    return min(cut.blocks, max(0, options.blocks - (total - cut.blocks)))


def fingerprint_half(job: Job, site: Site) -> MeasuringHalf:
    """The server's half of a fingerprint of gradients."""
    options: FingerprintOptions = job.options
    side = CutMessages(job, site)
    names = [*last_weights(site.backbone, options.blocks), *head_leaves(job, site)]
    above = len(site.backbone.blocks) - side.cut.blocks
    client_blocks = blocks_below(options, side.cut, total=len(site.backbone.blocks))
    side.below = replace(side.below, options=replace(options, blocks=client_blocks))
    leaves = last_weights(site.backbone, min(options.blocks, above))
    sketches = _Sketches(side, names=names, below=names_below_cut(names, job, site))
    return MeasuringHalf(side, leaves, sketches, batches=2 * options.batches, wants=client_blocks > 0)


def importance_half(job: Job, site: Site) -> MeasuringHalf:
    """The server's half of a measurement of importance."""
    options: ImportanceOptions = job.options
    side, total = CutMessages(job, site), len(site.backbone.blocks)
    leaves = merged_leaves(job, site, modules_of(site, range(side.cut.blocks, total)))
    wants = bool(modules_of(site, range(side.cut.blocks)))
    return MeasuringHalf(side, leaves, _Shares(side, leaves), batches=options.batches, wants=wants)


class _Sketches:
    """Sums the gradients of the last blocks above the cut, and joins both sides' parts of the sketches."""

    def __init__(self, side: CutMessages, *, names: Sequence[str], below: Sequence[str]) -> None:
        self._side, self._names, self._below = side, names, below
        self._totals: list[dict[str, Tensor]] = [{}, {}]

    def add(self, done: int, gradient: dict[str, Tensor]) -> None:
        """Add to the sums of the half of the data that this batch is of."""
        options: FingerprintOptions = self._side.job.options
        half = done // options.batches
        self._totals[half] = add_gradient(self._totals[half], gradient, kind=options.kind)

    def end(self, payloads: Payloads, losses: Sequence[float]) -> Update:
        """Both sketches, of the client's parts and ours."""
        sketches = [self._whole_sketch(half, payloads) for half in (0, 1)]
        loss = float(np.mean(losses)) if losses else math.nan
        return fingerprint_update(self._side.job, sketches, self._side.above, steps=0, loss=loss, crossed={})

    def _whole_sketch(self, half: int, payloads: Payloads) -> np.ndarray:
        options: FingerprintOptions = self._side.job.options
        parts = parts_of_gradients(self._totals[half], options)
        if self._below:
            below = self._side.decode(payloads, "fingerprint", index=half).get(PARTS)
            if not _are_numbers(below, (len(self._below), options.sketch_dim)):
                raise self._side.refusal("parts of a sketch")
            assert below is not None
            parts |= dict(zip(self._below, below.numpy(), strict=True))
        try:
            return combine_parts(parts[name] for name in self._names)
        except DataError as error:
            raise ProtocolError(str(error)) from None


class _Shares:
    """Measures the blocks above the cut, and makes shares of both sides' sums."""

    def __init__(self, side: CutMessages, leaves: Params) -> None:
        self._side, self._leaves = side, leaves
        self._sums: list[np.ndarray] = []

    def add(self, done: int, gradient: dict[str, Tensor]) -> None:  # noqa: ARG002 - batches are alike
        """Take one more batch's sums by block."""
        options: ImportanceOptions = self._side.job.options
        self._sums.append(layer_sums(gradient, self._leaves, self._side.site, kind=options.kind))

    def end(self, payloads: Payloads, losses: Sequence[float]) -> Update:  # noqa: ARG002 - importance has no loss
        """The importance of all blocks."""
        side, blocks = self._side, self._side.cut.blocks
        below = side.decode(payloads, "fingerprint").get(IMPORTANCE)
        if not _are_numbers(below, (side.job.options.batches, blocks)):
            raise side.refusal("importance")
        assert below is not None
        sums = [np.concatenate([low, whole_sums[blocks:]]) for low, whole_sums in zip(below.numpy(), self._sums)]
        try:
            return importance_update(side.job, sums, side.site, crossed={})
        except DataError as error:
            raise ProtocolError(f"{side.job.client}: {error}") from None


def _are_numbers(numbers: Tensor | None, shape: tuple[int, int]) -> bool:
    if numbers is None or numbers.dtype is not torch.float64 or numbers.shape != shape:
        return False
    return bool(numbers.isfinite().all())
