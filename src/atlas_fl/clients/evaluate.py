"""Scores of every client's model on a split of its own data."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.clients.rows import forward, make_row
from atlas_fl.tasks.metrics import scores
from atlas_fl.types import Split


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Which split to score."""

    split: Split


@torch.inference_mode()
def evaluate(jobs: Sequence[Job], site: Site) -> list[Update]:
    """Loss and metrics of every client, in the order of the jobs; nothing is trained."""
    began = time.perf_counter()
    outputs: list[list[np.ndarray]] = [[] for _ in jobs]
    # Short examples first: equal lengths share one attention product.
    data = [site.data[job.client].splits[job.options.split] for job in jobs]
    orders = [np.argsort(own.lengths, kind="stable") for own in data]
    for chunk in _chunks([own.lengths[order] for own, order in zip(data, orders, strict=True)], site.max_tokens):
        parts = [data[k].take(orders[k][part]) for k, part in chunk]
        row = make_row(parts, device=site.backbone.device)
        clients = [jobs[k].params for k, _ in chunk]
        placed = [{key: t.to(site.backbone.device) for key, t in params.items()} for params in clients]
        with forward(row, placed, site) as logits:
            for (k, _), own in zip(chunk, logits, strict=True):
                outputs[k].append(own.cpu().numpy())
    seconds = (time.perf_counter() - began) / max(1, len(jobs))
    updates = []
    for k, job in enumerate(jobs):
        metrics = scores(site.data[job.client].task, data[k].labels[orders[k]], np.concatenate(outputs[k]))
        metrics = {**metrics, "seconds": seconds}
        updates.append(Update(client=job.client, params=job.params, examples=len(data[k]), metrics=metrics))
    return updates


def _chunks(lengths: Sequence[np.ndarray], max_tokens: int) -> list[list[tuple[int, slice]]]:
    """Parts of every client's examples, client after client, with at most `max_tokens` tokens together."""
    chunks: list[list[tuple[int, slice]]] = [[]]
    room = max_tokens
    for k, own in enumerate(lengths):
        start = 0
        while start < len(own):
            fits = int(np.searchsorted(np.cumsum(own[start:]), room, side="right"))
            if fits == 0 and chunks[-1]:
                chunks.append([])
                room = max_tokens
                continue
            fits = max(fits, 1)  # one example longer than the budget still has to be scored
            chunks[-1].append((k, slice(start, start + fits)))
            room -= int(own[start : start + fits].sum())
            start += fits
    return chunks
