"""A pack's next row of tokens: every client's mini-batch, one after another."""

from collections.abc import Sequence
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
    counts: tuple[int, ...]  # examples of every client


def make_row(batches: Sequence[Encoded], *, device: torch.device) -> Row:
    """One row of these batches, a client each."""
    stops = np.cumsum([batch.offsets[-1] for batch in batches]).tolist()
    return Row(
        ids=torch.from_numpy(np.concatenate([batch.ids for batch in batches])).to(device),
        types=torch.from_numpy(np.concatenate([batch.types for batch in batches])).to(device),
        labels=tuple(torch.from_numpy(batch.labels).to(device) for batch in batches),
        layout=make_layout(np.concatenate([batch.lengths for batch in batches]).tolist(), device=device),
        segments=tuple(Segment(start=start, stop=stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)),
        counts=tuple(len(batch) for batch in batches),
    )


def forward(row: Row, clients: Sequence[Params], site: Site, *, mask: MaskOf | None = None) -> list[Tensor]:
    """Every client's logits on its own examples, (examples, labels) in float32."""
    adapters = Adapters(clients=clients, segments=row.segments, scale=site.scale, mask=mask)
    with site.autocast():
        with attached(site.modules, adapters):
            pooled = features(site.backbone, row.ids, row.types, row.layout)
        logits = []
        for k, (params, own) in enumerate(zip(clients, pooled.split(row.counts), strict=True)):
            drop = None if mask is None else mask(k, "head", (own.shape[0], own.shape[1]))
            logits.append(apply_head(site.backbone.family, params, own if drop is None else own * drop).float())
    return logits


def dropout_masks(names: Sequence[str], *, p: float, path: tuple[object, ...], seed: int, device: torch.device) -> MaskOf | None:  # fmt: skip
    """Inverted-dropout masks drawn from a generator of each client's own, or None when p is zero.

    A mask depends on (seed, client, path, module) alone: packing, recomputation and splitting draw the same.
    """
    if p == 0:
        return None

    def mask(k: int, module: str, shape: tuple[int, int]) -> Tensor:
        source = torch_generator(seed, "dropout", names[k], *path, module)
        return torch.bernoulli(torch.full(shape, 1 - p), generator=source).div_(1 - p).to(device)

    return mask
