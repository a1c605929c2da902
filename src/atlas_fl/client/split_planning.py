"""The server half of fingerprints and importance over a cut: gradients above it."""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from atlas_fl.client import batching, fingerprint, importance, split_server
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.options import FingerprintOptions
from atlas_fl.clustering.sketch import combine_parts
from atlas_fl.errors import DataError, ProtocolError
from atlas_fl.split.channel import Cut
from atlas_fl.split.model import select_client_side


def blocks_below(options: FingerprintOptions, cut: Cut, *, total: int) -> int:
    """Number of its last blocks that a client with this cut takes gradients of, in a model of `total` blocks."""
    return min(cut.blocks, max(0, options.blocks - (total - cut.blocks)))


class FingerprintHalf(split_server.GradientHalf):
    """Sums the gradients of the last blocks above the cut, and joins both sides' parts of the sketches."""

    def __init__(self, job: Job, site: Site) -> None:
        options: FingerprintOptions = job.options
        side, total = split_server.CutMessages(job, site), len(site.backbone.blocks)
        self._names = [*importance.last_weights(site.backbone, options.blocks), *importance.head_leaves(job, site)]
        below = select_client_side(site.backbone, self._names, blocks=side.cut.blocks, head=side.cut.head == "client")
        self._below = [name for name in self._names if name in below]
        self._losses: list[float] = []
        self._totals: list[dict[str, Tensor]] = [{}, {}]
        client_blocks = blocks_below(options, side.cut, total=total)
        side.below = replace(side.below, options=replace(options, blocks=client_blocks))
        leaves = importance.last_weights(site.backbone, min(options.blocks, total - side.cut.blocks))
        head = importance.head_leaves(replace(job, params=side.above), site)
        first, second = (
            importance.gradient_batches(job, site, half=half, count=options.batches, most=options.most(half))
            for half in (0, 1)
        )
        self._first = first
        super().__init__(side, head, steps=first + second, wants=client_blocks > 0, weights=leaves)

    def take_gradients(self, loss: Tensor | None) -> dict[str, bytes]:
        """Add to the sums of the half of the data that this batch is of."""
        options: FingerprintOptions = self.side.job.options
        half = int(self.side.done >= self._first)
        self._losses += [] if loss is None else [float(loss)]
        self._totals[half] = fingerprint.add_gradient(self._totals[half], self.measured_gradients(), kind=options.kind)
        return {}

    def update(self, payloads: split_server.Payloads) -> Update:
        """Both sketches, of the client's parts and ours; the loss is there where the head is."""
        sketches = [self._whole_sketch(half, payloads) for half in (0, 1)]
        loss = float(np.mean(self._losses)) if self._losses else math.nan
        update = fingerprint.fingerprint_update(self.side.job, sketches, self.side.above, steps=0, loss=loss)
        metrics = dict(update.metrics)
        if self.side.cut.head == "client":
            del metrics["loss"]
        return replace(update, metrics=metrics)

    def _whole_sketch(self, half: int, payloads: split_server.Payloads) -> np.ndarray:
        options: FingerprintOptions = self.side.job.options
        parts = fingerprint.parts_of_gradients(self._totals[half], options)
        if self._below:
            answer = self.side.decode(payloads, "fingerprint", index=half).get(fingerprint.PARTS)
            if (below := _numbers(answer, (len(self._below), options.sketch_dim))) is None:
                raise self.side.refusal("parts of a sketch")
            parts |= dict(zip(self._below, below, strict=True))
        try:
            return combine_parts(parts[name] for name in self._names)
        except DataError as error:
            raise ProtocolError(str(error)) from None


class ImportanceHalf(split_server.GradientHalf):
    """Measures the blocks above the cut, and makes shares of both sides' sums."""

    def __init__(self, job: Job, site: Site) -> None:
        side, total = split_server.CutMessages(job, site), len(site.backbone.blocks)
        self._sums: list[np.ndarray] = []
        self._leaves = importance.merged_leaves(job, site, batching.modules_of(site, range(side.cut.blocks, total)))
        head = importance.head_leaves(replace(job, params=side.above), site)
        wants = bool(batching.modules_of(site, range(side.cut.blocks)))
        self._batches = importance.gradient_batches(job, site, half=0, count=job.options.batches)
        super().__init__(side, head, steps=self._batches, wants=wants, weights=self._leaves)

    def take_gradients(self, loss: Tensor | None) -> dict[str, bytes]:  # noqa: ARG002 - importance has no loss
        """Take one more batch's sums by block."""
        kind = self.side.job.options.kind
        self._sums.append(importance.layer_sums(self.measured_gradients(), self._leaves, self.side.site, kind=kind))
        return {}

    def update(self, payloads: split_server.Payloads) -> Update:
        """The importance of all blocks."""
        side, blocks = self.side, self.side.cut.blocks
        answer = side.decode(payloads, "fingerprint").get(importance.IMPORTANCE)
        if (below := _numbers(answer, (self._batches, blocks))) is None:
            raise side.refusal("importance")
        sums = [np.concatenate([low, whole_sums[blocks:]]) for low, whole_sums in zip(below, self._sums)]
        try:
            return importance.importance_update(side.job, sums, side.site)
        except DataError as error:
            raise ProtocolError(f"{side.job.client}: {error}") from None


def _numbers(told: Tensor | None, shape: tuple[int, int]) -> np.ndarray | None:
    """The numbers that a client has told, float64 of this shape; None where they are missing, or anything else."""
    if told is None or told.dtype is not torch.float64 or told.shape != shape or not told.isfinite().all():
        return None
    return told.numpy()
