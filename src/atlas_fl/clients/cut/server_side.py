"""The server's side of cut models: the blocks above the cuts of many clients, computed as one pack.

A client's question carries its rows; what answers it is a pass over the rows of all who ask at one moment, each with
its own adapters, from its own cut on. The server keeps every client's upper adapters and their optimizer for one job,
and the frozen weights once for all. Between two messages it keeps no graph: where the head is at the client, the
gradient of the features comes with the second question, and the pass is computed again for it, with whoever asks then.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from atlas_fl.clients.base import Site
from atlas_fl.clients.member import example_loss
from atlas_fl.clients.rows import Dropout, dropout_masks, modules_of, read_logits, segments_of
from atlas_fl.lora.packed import Adapters, MaskOf, attached
from atlas_fl.models.backbone import picked
from atlas_fl.models.blocks import features_of, through
from atlas_fl.models.packing import make_layout
from atlas_fl.types import Params


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """One model's rows at its cut, and what is to become of them."""

    rows: Tensor
    """(tokens, hidden) float32 as they came, on the server's device; a leaf where their gradient is wanted."""
    blocks: int
    lengths: tuple[int, ...]
    places: Tensor | None
    """(reads,) int64, the tokens that the head reads, where text is written; else every sequence's pooled token."""
    params: Params
    """The adapters above the cut, and the head where it is the server's."""
    dropout: Dropout
    labels: Tensor | None = None
    """Of the examples whose loss or logits are computed here; None where the head is the client's."""
    upper: Tensor | None = None
    """(reads, hidden), the gradient of the features, where it comes from the client."""

    @property
    def reads(self) -> int:
        """How many tokens the head reads."""
        return len(self.lengths) if self.places is None else len(self.places)


@dataclass(frozen=True, kw_only=True, eq=False)
class Read:
    """What a pass gives of one entry: features where the head is the client's, logits and loss where it is here."""

    features: Tensor
    """(reads, hidden)."""
    logits: Tensor | None = None
    """(reads, labels), float32."""
    loss: Tensor | None = None


def pass_over(entries: Sequence[Entry], site: Site, *, backward: bool) -> list[Read]:
    """What is read of every entry, in their order; with `backward`, gradients lie in their rows and params.

    Losses are means over an entry's own examples and are summed, so each gradient is the entry's own.
    """
    device = site.backbone.device
    order = sorted(range(len(entries)), key=lambda k: entries[k].blocks)
    ordered = [entries[k] for k in order]
    mask = dropout_masks([entry.dropout for entry in ordered], device=device)
    with torch.set_grad_enabled(backward), ExitStack() as adapted:
        with site.autocast():
            features = torch.split(_features(ordered, site, mask, adapted), [entry.reads for entry in ordered])
            logits = [_logits(entry, k, own, site, mask) for k, (entry, own) in enumerate(zip(ordered, features))]
        read = [_read(*own) for own in zip(ordered, features, logits, strict=True)]
        if backward:
            roots = [one.features if one.loss is None else one.loss for one in read]
            # Inside, because a checkpointed backward pass runs the layers again and must find the adapters in place.
            torch.autograd.backward(roots, [entry.upper for entry in ordered])
    by_place = dict(zip(order, read, strict=True))
    return [by_place[k] for k in range(len(entries))]


def _features(ordered: Sequence[Entry], site: Site, mask: MaskOf | None, adapted: ExitStack) -> Tensor:
    """Features of all entries, (reads, hidden); each joins the row at its own cut. `adapted` keeps the adapters on."""
    backbone = site.backbone
    hidden = ordered[0].rows.new_empty(0, ordered[0].rows.shape[1])
    pick = None
    bounds = [*sorted({entry.blocks for entry in ordered}), len(backbone.blocks)]
    for start, stop in pairwise(bounds):
        present = [entry for entry in ordered if entry.blocks <= start]
        hidden = torch.cat([hidden, *(entry.rows for entry in present if entry.blocks == start)])
        layout = make_layout([n for entry in present for n in entry.lengths], device=backbone.device)
        if stop == bounds[-1]:
            pick = picked(backbone.family, layout, _reads(present))
        adapters = Adapters(
            clients=[entry.params for entry in present],
            segments=segments_of([len(entry.rows) for entry in present]),
            pooled=segments_of([entry.reads for entry in present]),
            scale=site.scale,
            mask=mask,
        )
        adapted.enter_context(attached(modules_of(site, range(start, stop)), adapters))
        hidden = through(backbone, hidden, layout, range(start, stop), pick=pick)
    assert pick is not None, "the last block is above every cut"
    return features_of(backbone, hidden, pick)


def _reads(present: Sequence[Entry]) -> Tensor | None:
    """Where what the heads read lies in the row; None where all read their sequences' pooled tokens."""
    if all(entry.places is None for entry in present):
        return None
    starts = [segment.start for segment in segments_of([len(entry.rows) for entry in present])]
    return torch.cat([_places(entry) + start for entry, start in zip(present, starts, strict=True)])


def _places(entry: Entry) -> Tensor:
    if entry.places is not None:
        return entry.places
    # A model that writes is causal, and its last token speaks for a sequence.
    return torch.tensor(entry.lengths, device=entry.rows.device).cumsum(0) - 1


def _logits(entry: Entry, place: int, features: Tensor, site: Site, mask: MaskOf | None) -> Tensor | None:
    if entry.labels is None:
        return None
    own = None if mask is None else (lambda _, module, shape: mask(place, module, shape))
    return read_logits(site.backbone, [entry.params], [features], mask=own)[0]


def _read(entry: Entry, features: Tensor, logits: Tensor | None) -> Read:
    if logits is None or entry.labels is None:
        return Read(features=features)
    return Read(features=features, logits=logits, loss=example_loss(logits, entry.labels))
