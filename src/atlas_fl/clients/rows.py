"""A pack's next row of tokens: every client's mini-batch, one after another."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atlas_fl.clients.base import Site
from atlas_fl.lora.packed import Adapters, MaskOf, Segment, attached
from atlas_fl.models.backbone import features
from atlas_fl.models.family import apply_head
from atlas_fl.models.packing import Layout, make_layout
from atlas_fl.models.tokens import Encoded
from atlas_fl.rng import torch_generator
from atlas_fl.types import Params


@dataclass(frozen=True, kw_only=True)
class Row:
    """The tokens of several clients' batches in one row, and who owns which."""

    ids: Tensor  # (tokens,) int64
    types: Tensor  # (tokens,) int64
    labels: tuple[Tensor, ...]  # of every client, (examples,)
    layout: Layout
    segments: tuple[Segment, ...]  # tokens of every client
    pooled: tuple[Segment, ...]  # sequences of every client
    counts: tuple[int, ...]  # examples of every client


def make_row(batches: Sequence[Encoded], *, device: torch.device) -> Row:
    """One row of these batches, a client each."""
    return Row(
        ids=torch.from_numpy(np.concatenate([batch.ids for batch in batches])).to(device),
        types=torch.from_numpy(np.concatenate([batch.types for batch in batches])).to(device),
        labels=tuple(torch.from_numpy(batch.labels).to(device) for batch in batches),
        layout=make_layout(np.concatenate([batch.lengths for batch in batches]).tolist(), device=device),
        segments=_segments([int(batch.offsets[-1]) for batch in batches]),
        pooled=_segments([len(batch) for batch in batches]),
        counts=tuple(len(batch) for batch in batches),
    )


def _segments(sizes: Sequence[int]) -> tuple[Segment, ...]:
    stops = np.cumsum(sizes).tolist()
    return tuple(Segment(start=start, stop=stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True))


@contextmanager
def forward(row: Row, clients: Sequence[Params], site: Site, *, mask: MaskOf | None = None) -> Iterator[list[Tensor]]:
    """Every client's logits on its own examples, (examples, labels) in float32.

    A context, because a checkpointed backward pass runs the layers again and must find the adapters in place.
    """
    adapters = Adapters(clients=clients, segments=row.segments, pooled=row.pooled, scale=site.scale, mask=mask)
    with attached(site.modules, adapters):
        with site.autocast():
            pooled = features(site.backbone, row.ids, row.types, row.layout)
            logits = []
            for k, (params, own) in enumerate(zip(clients, torch.split(pooled, list(row.counts)), strict=True)):
                drop = None if mask is None else mask(k, "head", (own.shape[0], own.shape[1]))
                logits.append(apply_head(site.backbone.family, params, own if drop is None else own * drop).float())
        yield logits


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """Where one client's dropout masks come from."""

    p: float
    seed: int
    path: tuple[object, ...]
    """The client, its round and its step."""


def dropout_masks(sources: Sequence[Dropout], *, device: torch.device) -> MaskOf | None:
    """Inverted-dropout masks drawn from a generator of each client's own, or None when no client drops anything.

    A mask depends on (seed, path, module) alone: packing, recomputation and splitting draw the same.
    """
    if not any(source.p for source in sources):
        return None

    def mask(k: int, module: str, shape: tuple[int, int]) -> Tensor | None:
        source = sources[k]
        if source.p == 0:
            return None
        stream = torch_generator(source.seed, "dropout", *source.path, module)
        return torch.bernoulli(torch.full(shape, 1 - source.p), generator=stream).div_(1 - source.p).to(device)

    return mask
