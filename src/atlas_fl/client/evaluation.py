"""Evaluation: scores of every client's model on a split of its own data, greedy text generation for ROUGE included."""

import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from atlas_fl.client.batching import forward, in_order, make_row, rows_in_order, same_models, split_by_tokens
from atlas_fl.client.job import Job, Site, Update, log_prior
from atlas_fl.client.options import EvaluateOptions
from atlas_fl.client.preferences import score_preferences
from atlas_fl.data.metrics import by_class, rouge, scores, writing_scores
from atlas_fl.data.task import Task
from atlas_fl.methods.prior_correction import correct_logits
from atlas_fl.models.backbone import decode_step, head_logits, pad_left, stock_attention
from atlas_fl.models.lora import Adapters, attach_adapters
from atlas_fl.models.stock import generate
from atlas_fl.models.tokenization import EncodedExamples, concatenate
from atlas_fl.params import Params, Split


@torch.inference_mode()
def write(prompts: EncodedExamples, params: Params, site: Site, *, new_tokens: int) -> list[str]:
    """One client's texts after its prompts, at most `new_tokens` tokens each, up to the end of text or of a turn.

    Client after client and not in packs, whose attention keeps no keys and values: without a cache every token would
    cost a pass over its whole text.
    """
    placed = {key: tensor.to(site.backbone.device) for key, tensor in params.items()}
    rows = [prompts.ids[a:b].tolist() for a, b in zip(prompts.offsets[:-1], prompts.offsets[1:], strict=True)]
    write_rows = _stock_written if site.backbone.family.stock else _greedy
    ends = [site.backbone.tokenizer.eos_token_id, *prompts.ends]
    size = max(1, site.max_tokens // (max(map(len, rows)) + new_tokens))
    written = [
        ids
        for start in range(0, len(rows), size)
        for ids in write_rows(rows[start : start + size], placed, site, new_tokens, ends)
    ]
    tokenizer = site.backbone.tokenizer
    kept = [takewhile(lambda token: token not in ends, ids) for ids in written]
    return [tokenizer.decode([*ids], skip_special_tokens=True).strip() for ids in kept]


def _stock_written(
    rows: list[list[int]], params: Params, site: Site, new_tokens: int, ends: list[int]
) -> list[list[int]]:
    """The texts of a model on the stock path."""
    row = [range(0, len(rows))]
    with (
        attach_adapters(site.modules, Adapters(clients=[params], segments=row, sequences=row, scale=site.scale)),
        site.autocast(),
    ):
        return generate(site.backbone, rows, new_tokens=new_tokens, ends=ends)


def _greedy(rows: list[list[int]], params: Params, site: Site, new_tokens: int, ends: list[int]) -> list[list[int]]:
    """The likeliest next token of every text, again and again, until all have ended or are long enough."""
    backbone = site.backbone
    ids, mask = pad_left(rows, device=backbone.device)
    # The prompts go through first as a whole, and then a token of each text at a time.
    whole, single = range(0, ids.numel()), range(0, len(rows))
    adapters = Adapters(clients=[params], segments=[whole], sequences=[single], scale=site.scale)
    written: list[torch.Tensor] = []
    ended, cache = torch.zeros(len(rows), dtype=torch.bool, device=ids.device), None
    with attach_adapters(site.modules, adapters), stock_attention(backbone), site.autocast():
        while len(written) < new_tokens and not ended.all():
            read, cache = decode_step(backbone, ids, mask, cache)
            largest, token = head_logits(backbone, params, read).float().max(-1)  # (texts,)
            ended |= torch.isin(token, torch.tensor(ends, device=token.device))
            ended |= ~largest.isfinite()  # to NaN there is no next token
            written.append(token.masked_fill(ended, ends[0]))
            ids, mask = written[-1][:, None], torch.nn.functional.pad(mask, (0, 1), value=1)
    return torch.stack(written, dim=1).tolist()


@torch.inference_mode()
def evaluate(jobs: Sequence[Job], site: Site) -> list[Update]:
    """Loss and metrics of every client, in the order of the jobs; nothing is trained."""
    began = time.perf_counter()
    outputs = _whole_outputs(jobs, site) if site.trainable == "full" else _packed_outputs(jobs, site)
    answered = [{**_rouge(job, site), **score_preferences(job, site)} for job in jobs]
    seconds = (time.perf_counter() - began) / max(1, len(jobs))
    return [
        scored_update(job, site, *kept, {**answers, "seconds": seconds})
        for job, kept, answers in zip(jobs, outputs, answered, strict=True)
    ]


def scored_update(
    job: Job, site: Site, labels: np.ndarray, outputs: Sequence[np.ndarray], metrics: Mapping[str, float]
) -> Update:
    """The client's answer, from what was kept of all examples (`scores_of`), with these metrics beside the scores."""
    options: EvaluateOptions = job.options
    own_scores, classes = scores_of(site.data[job.client].task, labels, outputs, split=options.split)
    return Update(
        client=job.client,
        params=job.params,
        examples=len(site.data[job.client].splits[options.split]),
        metrics={**own_scores, **metrics},
        classes=classes,
        reported={OUTCOMES: _outcomes(job, site, labels, outputs)} if options.outcomes else {},
    )


OUTCOMES = "outcomes"
"""The kind of what is reported of single examples."""


def _outcomes(job: Job, site: Site, labels: np.ndarray, kept: Sequence[np.ndarray]) -> Params:
    """Labels, what is kept of the logits, and rows of it by example, in one order for all models of a client."""
    examples = site.data[job.client].splits[job.options.split]
    counts = examples.take(in_order(examples.lengths)).num_targets if site.data[job.client].task.writes else 1
    rows = np.broadcast_to(np.asarray(counts, np.int64), len(examples))
    values = {"labels": labels, "outputs": np.concatenate(kept), "rows": rows}
    return {name: torch.from_numpy(np.array(array)) for name, array in values.items()}


Outputs: TypeAlias = tuple[np.ndarray, list[np.ndarray]]
"""(labels, what is kept of the logits, in their order) of one client."""


def _whole_outputs(jobs: Sequence[Job], site: Site) -> list[Outputs]:
    """Outputs of whole models, in the order of the jobs: clients with one model share its passes."""
    outputs = dict[int, Outputs]()
    for indices in same_models(jobs):
        data = [site.data[jobs[k].client].splits[jobs[k].options.split] for k in indices]
        params = {key: one.to(site.backbone.device) for key, one in jobs[indices[0]].params.items()}
        every, ordered = concatenate(data), list[np.ndarray]()
        for _, _, row in rows_in_order(every, site):
            with forward(row, [params], site) as (own_logits,):
                ordered.append(own_logits.cpu().numpy())
        logits = np.concatenate(ordered)[np.argsort(in_order(every.lengths))]
        by_client = np.split(logits, np.cumsum([len(examples) for examples in data])[:-1])
        for k, examples, client_logits in zip(indices, data, by_client, strict=True):
            prior = log_prior(jobs[k], site)
            corrected = client_logits if prior is None else client_logits + prior.cpu().numpy()
            outputs[k] = (examples.labels, [corrected])
    return [outputs[k] for k in range(len(jobs))]


def _packed_outputs(jobs: Sequence[Job], site: Site) -> list[Outputs]:
    """Outputs of every client's own adapters and head, in rows of many clients, short examples first."""
    splits = [site.data[job.client].splits[job.options.split] for job in jobs]
    ordered = [split.take(in_order(split.lengths)) for split in splits]
    priors = [log_prior(job, site) for job in jobs]
    kept: list[list[np.ndarray]] = [[] for _ in jobs]
    for chunk in split_by_tokens([examples.lengths for examples in ordered], site.max_tokens):
        row = make_row([ordered[k].take(np.arange(part.start, part.stop)) for k, part in chunk], site)
        models = [on_device(jobs[k].params, site) for k, _ in chunk]  # of these alone: all may be gigabytes
        with forward(row, models, site) as logits:
            for (k, _), client_logits, labels in zip(chunk, logits, row.labels, strict=True):
                corrected = correct_logits(client_logits, priors[k])
                kept[k].append(scored_outputs(corrected, labels, site.data[jobs[k].client].task))
    return [(examples.labels, outputs) for examples, outputs in zip(ordered, kept, strict=True)]


def on_device(params: Params, site: Site) -> Params:
    """The model where it computes, in memory of its own.

    What came in a message lies in it wherever it happens to, and products of unaligned numbers may end in other bits.
    """
    return {key: tensor.to(site.backbone.device, copy=True) for key, tensor in params.items()}


def scored_outputs(logits: Tensor, labels: Tensor, task: Task) -> np.ndarray:
    """Part of the logits that is kept until all are there: themselves, or of text what is judged."""
    return (_token_scores(logits, labels) if task.writes else logits).cpu().numpy()


def scores_of(
    task: Task, labels: np.ndarray, outputs: Sequence[np.ndarray], *, split: Split
) -> tuple[dict[str, float], dict[str, list[int]]]:
    """(loss and metrics, of a test with classes the counts by class) of what was kept of all examples.

    The labels stand in the same order.
    """
    concatenated = np.concatenate(outputs)
    if task.writes:
        return writing_scores(concatenated), {}
    is_counted = split == "test" and task.num_labels > 1
    return scores(task, labels, concatenated), by_class(labels, concatenated) if is_counted else {}


def _token_scores(logits: Tensor, labels: Tensor) -> Tensor:
    """(tokens, 2) float32: each token's loss in nats, and whether it is the likeliest, which among NaN none is.

    A vocabulary is not kept.
    """
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    largest, token = logits.max(-1)
    return torch.stack([loss, ((token == labels) & largest.isfinite()).to(loss.dtype)], dim=1)


def _rouge(job: Job, site: Site) -> dict[str, float]:
    """ROUGE of what the model writes after its client's prompts; nothing where there are none or none is asked for."""
    options: EvaluateOptions = job.options
    prompts = site.data[job.client].prompts.get(options.split)
    if prompts is None or not options.new_tokens:
        return {}
    return rouge(prompts.references, write(prompts.encoded, job.params, site, new_tokens=options.new_tokens))
