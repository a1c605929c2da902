"""Packs of clients and packed batches: the mini-batches of many clients as one row of tokens, without padding."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from atlas_fl.client.draws import Draws
from atlas_fl.client.job import Job, Site
from atlas_fl.data.clients import group_by
from atlas_fl.frozen import Frozen
from atlas_fl.models import attention, stock, vision
from atlas_fl.models.backbone import Backbone, backbone_features, block_index, head_logits
from atlas_fl.models.lora import Adapters, DropoutMaskFn, attach_adapters
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.params import PARTS, Params, head_keys, split_body_and_head
from atlas_fl.split.model import client_forward, server_forward

PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")


def packs(jobs: Sequence[Job], site: Site) -> Iterator[list[Job]]:
    """The jobs in groups whose mini-batches hold on average at most `site.max_tokens` tokens together.

    A job that is larger than that alone makes a pack of one, and so do one that trains a whole model and one on the
    stock path.
    """
    if site.trainable == "full":
        yield from _full_packs(jobs, site)
    elif site.backbone.family.stock:
        yield from ([job] for job in jobs)
    else:
        yield from greedy_packs([(job, tokens_of(job, site)) for job in jobs], site.max_tokens)


def _full_packs(jobs: Sequence[Job], site: Site) -> Iterator[list[Job]]:
    """Jobs of whole models one by one; evaluations of one model together, up to `site.max_tokens` tokens."""
    if not all(hasattr(job.options, "split") for job in jobs):
        yield from ([job] for job in jobs)
        return
    for indices in same_models(jobs):
        evaluated = [jobs[index] for index in indices]
        sized = [(job, float(site.data[job.client].splits[job.options.split].offsets[-1])) for job in evaluated]
        yield from greedy_packs(sized, site.max_tokens)


def same_models(jobs: Sequence[Job]) -> list[list[int]]:
    """The indices of the jobs by their model: models are equal where all their tensors are the very same."""
    return list(group_by(range(len(jobs)), lambda index: tuple(map(id, jobs[index].params.values()))).values())


def tokens_of(job: Job, site: Site) -> float:
    """Tokens of a mini-batch on average; 0 for an action without mini-batches, which bounds its own rows."""
    data = site.data[job.client].splits["train"]
    return getattr(job.options, "batch_size", 0) * float(data.both.offsets[-1]) / max(1, len(data))


def greedy_packs(parts: Iterable[tuple[PartT, float]], most: float) -> Iterator[list[PartT]]:
    """The parts in their order, in packs whose sizes sum to at most `most`; a larger part is a pack of its own."""
    pack: list[PartT] = []
    tokens = 0.0
    for part, size in parts:
        if pack and tokens + size > most:
            yield pack
            pack, tokens = [], 0.0
        pack.append(part)
        tokens += size
    if pack:
        yield pack


class PackedBatch(Frozen):
    """The tokens of several clients' batches in one row, and who owns which."""

    ids: Tensor  # (tokens,) int64; of images none
    types: Tensor  # (tokens,) int64; of images none
    labels: tuple[Tensor, ...]  # of every client, (examples,), or (tokens to be written,)
    layout: attention.PackedLayout
    segments: tuple[range, ...]  # tokens of every client
    pooled: tuple[range, ...]  # what is read of every client: its sequences, or its tokens to be written
    counts: tuple[int, ...]  # how many these are
    lengths: tuple[Tensor, ...]  # of every client, (sequences,) int32
    target_positions: tuple[Tensor | None, ...]  # of every client that writes, (reads,) int32 in its own tokens
    output_positions: Tensor | None = (
        None  # (reads,) int64, where they lie; None where all are the sequences' pooled tokens
    )
    pixels: tuple[Tensor, ...] = ()  # of every client, (examples, height, width, channels) uint8; of texts none
    prefix: Tensor | None = None  # (tokens, hidden), output of the lowest blocks, where it is there already
    prefix_blocks: int = 0  # how many these are


def collate_packed(batches: Sequence[EncodedExamples], *, device: torch.device) -> PackedBatch:
    """One row of these batches, a client each."""
    segments = segments_of([int(batch.offsets[-1]) for batch in batches])
    counts = [len(batch) if batch.target_mask is None else int(batch.target_mask.sum()) for batch in batches]
    labels = [batch.labels if batch.target_mask is None else batch.ids[batch.target_mask] for batch in batches]
    reads = None
    if any(batch.target_mask is not None for batch in batches):
        positions = [_output_positions(batch) + segment.start for batch, segment in zip(batches, segments, strict=True)]
        reads = torch.from_numpy(np.concatenate(positions)).to(device)
    return PackedBatch(
        ids=torch.from_numpy(np.concatenate([batch.ids for batch in batches])).to(device),
        types=torch.from_numpy(np.concatenate([batch.types for batch in batches])).to(device),
        labels=tuple(torch.from_numpy(own_labels).to(device) for own_labels in labels),
        layout=attention.make_layout(np.concatenate([batch.lengths for batch in batches]).tolist(), device=device),
        segments=segments,
        pooled=segments_of(counts),
        counts=tuple(counts),
        lengths=tuple(torch.from_numpy(batch.lengths.astype(np.int32)) for batch in batches),
        target_positions=tuple(
            None if batch.target_mask is None else torch.from_numpy(_output_positions(batch).astype(np.int32))
            for batch in batches
        ),
        output_positions=reads,
        pixels=tuple(torch.from_numpy(np.array(batch.pixels)) for batch in batches if batch.pixels is not None),
    )


def make_row(batches: Sequence[EncodedExamples], site: Site) -> PackedBatch:
    """One row of these batches, a client each, with the prefix where the lowest blocks carry no adapters."""
    row = collate_packed(batches, device=site.backbone.device)
    if not site.first_adapted or site.backbone.family.stock:
        return row
    states = [site.prefix_cache.states(batch, lambda part: _prefix_states(part, site)) for batch in batches]
    return replace(row, prefix=torch.cat(states), prefix_blocks=site.first_adapted)


def _prefix_states(examples: EncodedExamples, site: Site) -> Tensor:
    """Input of the first adapted block, (tokens, hidden) of these examples."""
    row = collate_packed([examples], device=site.backbone.device)
    # In inference mode, as evaluations have it, the states could not be kept for training.
    with torch.inference_mode(False), torch.no_grad(), site.autocast():
        if not row.pixels:
            return client_forward(site.backbone, row.ids, row.types, row.layout, blocks=site.first_adapted)
        seen = vision.preprocess(site.vision, row.pixels[0])
        states: Tensor = vision.run_image_blocks(site.vision, seen, blocks=site.first_adapted)
        return states.flatten(0, 1)


def _output_positions(batch: EncodedExamples) -> np.ndarray:
    """The token before each one that is to be written, or the last of every sequence: a causal model's pooled token."""
    return batch.offsets[1:] - 1 if batch.target_mask is None else np.flatnonzero(batch.target_mask) - 1


def segments_of(sizes: Sequence[int]) -> tuple[range, ...]:
    """Segments of these sizes, one after another."""
    stops = np.cumsum(sizes).tolist()
    return tuple(range(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True))


@contextmanager
def forward(row: PackedBatch, clients: Sequence[Params], site: Site) -> Iterator[list[Tensor]]:
    """Every client's logits on its own examples, (examples, labels), or (tokens to be written, vocabulary); float32.

    A context, and its arguments, as `forward_to_heads` is, without dropout.
    """
    with forward_to_heads(row, clients, site) as features:
        with site.autocast():
            logits = read_logits(site.backbone, clients, features, mask=None)
        yield logits


@contextmanager
def forward_to_heads(
    row: PackedBatch, clients: Sequence[Params], site: Site, *, mask: DropoutMaskFn | None = None
) -> Iterator[list[Tensor]]:
    """Features of every client's own examples, (examples, width), or (tokens to be written, hidden).

    A client that trains the whole model is alone in its row. A context, because a checkpointed backward pass runs the
    layers again and must find the adapters in place.
    """
    with attach_adapters(site.modules, _adapters(row, clients, site, mask)):
        with site.autocast():
            pooled = features_of_row(row, site.backbone, body_of(clients, site))
        yield list(torch.split(pooled, list(row.counts)))


@contextmanager
def client_side_forward(
    row: PackedBatch, clients: Sequence[Params], site: Site, *, blocks: int, mask: DropoutMaskFn | None = None
) -> Iterator[Tensor]:
    """Output of a site that holds `blocks` blocks, (tokens, hidden) of the row; a context as `forward` is."""
    with attach_adapters(modules_of(site, range(blocks)), _adapters(row, clients, site, mask)):
        with site.autocast():
            hidden = client_forward(site.backbone, row.ids, row.types, row.layout, blocks=blocks)
        yield hidden


def _adapters(row: PackedBatch, clients: Sequence[Params], site: Site, mask: DropoutMaskFn | None) -> Adapters:
    return Adapters(
        clients=clients,
        segments=row.segments,
        sequences=row.pooled,
        scale=site.scale,
        grouped=site.backbone.fast,
        dropout_mask=mask,
    )


def modules_of(site: Site, blocks: range) -> dict[str, nn.Module]:
    """The frozen layers of these blocks that carry adapters, by name."""
    return {name: module for name, module in site.modules.items() if block_index(site.backbone, name) in blocks}


def read_logits(
    backbone: Backbone, clients: Sequence[Params], features: Sequence[Tensor], *, mask: DropoutMaskFn | None
) -> list[Tensor]:
    """Every client's logits, float32, by its own head on its own features, (reads, hidden)."""
    logits = []
    for k, (params, client_features) in enumerate(zip(clients, features, strict=True)):
        # The model's own output embedding is frozen and takes its input whole, as the stock model's does.
        if mask is not None and head_keys(params):
            drop = mask(k, "head", (client_features.shape[0], client_features.shape[1]))
            client_features = client_features if drop is None else client_features * drop
        logits.append(head_logits(backbone, params, client_features).float())
    return logits


def body_of(clients: Sequence[Params], site: Site) -> Params:
    """The weights of the model that its only client brings; none where clients bring adapters."""
    if site.backbone.family.stock:
        (params,) = clients
        return {key.removeprefix(PARTS): tensor for key, tensor in params.items() if key.startswith(PARTS)}
    if site.trainable == "lora":
        return {}
    (params,) = clients
    return split_body_and_head(params)[0]


def features_of_row(row: PackedBatch, backbone: Backbone, body: Params = MappingProxyType({})) -> Tensor:
    """Features of a row, (reads, width).

    The weights of `body` stand in for the backbone's of these names.
    """
    if row.prefix is not None:
        return _features_above(row, row.prefix, backbone)
    if not row.pixels:
        read = partial(_stock_features if backbone.family.stock else _packed_features, row, backbone)
        return call_with_params(backbone.model, body, read) if body else read()
    assert backbone.vision is not None, "a backbone for texts is given no images"
    seen = torch.cat([vision.preprocess(backbone.vision, pixels) for pixels in row.pixels])
    features: Tensor = vision.image_features(backbone.vision, body, seen)
    return features


def _packed_features(row: PackedBatch, backbone: Backbone) -> Tensor:
    return backbone_features(backbone, row.ids, row.types, row.layout, output_positions=row.output_positions)


def _stock_features(row: PackedBatch, backbone: Backbone) -> Tensor:
    (lengths,), (reads,) = row.lengths, row.target_positions
    targets = None if reads is None else reads.to(row.ids.device).long() + 1
    return stock.stock_outputs(backbone, row.ids, row.types, lengths.tolist(), targets=targets)


def _features_above(row: PackedBatch, prefix: Tensor, backbone: Backbone) -> Tensor:
    if not row.pixels:
        blocks, reads = row.prefix_blocks, row.output_positions
        return server_forward(backbone, prefix, row.layout, blocks=blocks, output_positions=reads)
    assert backbone.vision is not None, "a backbone for texts is given no images"
    hidden = prefix.view(sum(len(pixels) for pixels in row.pixels), -1, prefix.shape[1])
    features: Tensor = vision.image_features_above(backbone.vision, hidden, blocks=row.prefix_blocks)
    return features


def call_with_params(model: nn.Module, weights: Params, work: Callable[[], ResultT]) -> ResultT:
    """The result of `work` while the model computes with these weights in the place of its own of these names.

    A backward pass belongs inside `work`: checkpointed blocks run again in it and need the same weights.
    """
    result: ResultT = functional_call(
        _Call(model), {f"model.{name}": weight for name, weight in weights.items()}, (work,)
    )
    return result


class _Call(nn.Module):
    """A call as a module, whose `model` has other weights meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


def split_by_tokens(lengths: Sequence[np.ndarray], max_tokens: int) -> list[list[tuple[int, slice]]]:
    """Parts of every client's examples, client after client, with at most `max_tokens` tokens together."""
    examples = [((k, index), size) for k, sizes in enumerate(lengths) for index, size in enumerate(sizes.tolist())]
    by_client = [group_by(pack, lambda example: example[0]) for pack in greedy_packs(examples, max_tokens)]
    return [[(k, slice(own[0][1], own[-1][1] + 1)) for k, own in groups.items()] for groups in by_client]


def in_order(lengths: np.ndarray) -> np.ndarray:
    """The examples' places, short ones first: equal lengths share one attention product."""
    return np.argsort(lengths, kind="stable")


def rows_in_order(examples: EncodedExamples, site: Site) -> Iterator[tuple[np.ndarray, EncodedExamples, PackedBatch]]:
    """(places, examples, row) of one client's examples in rows of their own, short ones first."""
    order = in_order(examples.lengths)
    for ((_, part),) in split_by_tokens([examples.lengths[order]], site.max_tokens):
        places = order[part]
        taken = examples.take(places)
        yield places, taken, make_row([taken], site)


class Dropout(Frozen):
    """Source of one client's dropout masks."""

    p: float
    draws: Draws
    path: tuple[object, ...]
    """Its round and its step."""


NO_DROPOUT = Dropout(p=0.0, draws=Draws(client="", seed=0, secret=None), path=())
"""No dropout."""


def dropout_masks(sources: Sequence[Dropout], *, device: torch.device) -> DropoutMaskFn | None:
    """Inverted-dropout masks drawn from a generator of each client's own, or None when no client drops anything.

    A mask depends on (draws, path, module) alone: packing, recomputation and splitting draw the same.
    """
    if not any(source.p for source in sources):
        return None

    def mask(k: int, module: str, shape: tuple[int, int]) -> Tensor | None:
        source = sources[k]
        if source.p == 0:
            return None
        stream = source.draws.torch_generator("dropout", *source.path, module)
        return torch.bernoulli(torch.full(shape, 1 - source.p), generator=stream).div_(1 - source.p).to(device)

    return mask
