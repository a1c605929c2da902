"""Fingerprints: sketches of a client's task from its data, two for two halves of its examples.

There are four sources (docs/algorithms/phase1.md). `delta`: LoRA B after a short warm-up from one shared, frozen A, so
that the two halves' mean is exact and the client can start round one from it. `gradient` and `fisher`: mean and root
mean square of the batch gradients of the last blocks' and the head's weights at the shared initialisation.
`embedding`: mean of the texts' embeddings by the frozen model.

Of a client that is cut each side sketches its own tensors, and the sketch is the sum of both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from atlas_fl.client.embeddings import embed
from atlas_fl.client.evaluation import evaluate
from atlas_fl.client.importance import batch_gradients
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.local_training import positions, train
from atlas_fl.client.options import EvaluateOptions, FingerprintOptions
from atlas_fl.clustering.fingerprints import EMBEDDING, FINGERPRINTS
from atlas_fl.clustering.sketch import combine_parts, sketch, sketch_parts
from atlas_fl.params import LORA_A, LORA_B, Params

FIRST, SECOND = "sketch.first", "sketch.second"
PARTS = "parts"
"""The name under which the parts of a cut client's own tensors travel, (tensors, sketch_dim) float64, exact."""


def fingerprint(jobs: Sequence[Job], site: Site) -> list[Update]:
    """Two unit sketches of every client under `sketch.first` and `sketch.second`, and its warmed-up params.

    `metrics` hold the halves' agreement, the steps that were taken, and `loss`: the mean training loss of all batches
    of both halves, during the warm-up or at the shared initialisation.
    """
    if jobs[0].options.kind == "delta":
        return _delta(jobs, site)
    measure = _from_embeddings if jobs[0].options.kind == EMBEDDING else _from_gradients
    return [measure(job, site) for job in jobs]


def _delta(jobs: Sequence[Job], site: Site) -> list[Update]:
    """Warm up both halves until they agree or the steps are spent; sketch the trained B."""
    work = [half_job(job, half) for job in jobs for half in (0, 1)]
    trained = train(work, site, watch=lambda done, live: _agreeing(jobs, done, live))
    answers = []
    for job, first, second in zip(jobs, trained[::2], trained[1::2], strict=True):
        sketches = [delta_sketch(half.params, job.options) for half in (first, second)]
        steps = int(max(first.metrics["steps"], second.metrics["steps"]))
        loss = (first.metrics["loss"] + second.metrics["loss"]) / 2
        answers.append(fingerprint_update(job, sketches, mean(first.params, second.params), steps=steps, loss=loss))
    return answers


def half_job(job: Job, half: int) -> Job:
    """Training of one half for all steps; whole passes, as many as the steps need."""
    options: FingerprintOptions = job.options
    training = replace(
        options.train,
        half=half,
        most=options.most(half),
        max_steps=options.steps,
        epochs=options.steps,
        trained_parts="B",
        hash_loaded=False,
    )
    return replace(job, options=training)


def _agreeing(jobs: Sequence[Job], done: int, live: Mapping[int, Params]) -> list[int]:
    """The places of both halves of every client whose halves agree well enough; looked at every few steps."""
    options: FingerprintOptions = jobs[0].options
    if done % options.stride or done >= options.steps:  # after the last step nothing depends on it
        return []
    ended = []
    for first in (index for index in live if index % 2 == 0 and index + 1 in live):
        pair = [delta_sketch(live[index], options) for index in (first, first + 1)]
        if float(np.dot(*pair)) >= options.reliability:
            ended += [first, first + 1]
    return ended


def delta_sketch(params: Params, options: FingerprintOptions) -> np.ndarray:
    """The sketch of a warmed-up B, (sketch_dim,) float32 of unit length."""
    factors = {key: params[key].detach() for key in sorted(params) if key.endswith(LORA_B)}
    return sketch(factors, dim=options.sketch_dim, seed=options.train.seed)


def _from_gradients(job: Job, site: Site) -> Update:
    """Sketch the mean batch gradient of each half, or its root mean square."""
    options: FingerprintOptions = job.options
    sketches, losses = [], list[float]()
    for half in (0, 1):
        gradients = batch_gradients(
            job, site, half=half, blocks=options.blocks, count=options.batches, most=options.most(half)
        )
        parts, half_losses = measure_parts(gradients, options)
        losses += half_losses
        sketches.append(combine_parts(parts.values()))
    params = job.params if site.trainable == "lora" else {}  # the server has whole models, and none was warmed up
    return fingerprint_update(job, sketches, params, steps=0, loss=float(np.mean(losses)))


def _from_embeddings(job: Job, site: Site) -> Update:
    """Sketch the mean embedding of each half; the loss is that of all training examples."""
    options: FingerprintOptions = job.options
    data, secret = site.data[job.client].splits["train"], site.secrets.get(job.client)
    sketches = []
    for half in (0, 1):
        chosen = replace(options.train, half=half, most=options.most(half))
        mean_embedding = embed(data.take(positions(len(data), job.client, chosen, secret=secret)), site).mean(0)
        sketches.append(sketch({EMBEDDING: mean_embedding}, dim=options.sketch_dim, seed=options.train.seed))
    (scored,) = evaluate([replace(job, options=EvaluateOptions(split="train"))], site)
    params = job.params if site.trainable == "lora" else {}
    return fingerprint_update(job, sketches, params, steps=0, loss=scored.metrics["loss"])


def add_gradient(totals: Mapping[str, Tensor], gradient: Mapping[str, Tensor], *, kind: str) -> dict[str, Tensor]:
    """The sums over batches with another one's gradients in them; the tensors are used up."""
    sums = {}
    for key, new in gradient.items():
        total = totals.get(key)
        if kind == "fisher" and total is not None:  # one pass over large tensors, and other bits than two
            sums[key] = total.addcmul_(new, new)
        else:
            term = FINGERPRINTS[kind].each(new)
            sums[key] = term if total is None else total.add_(term)
    return sums


def measure_parts(
    batches: Iterable[tuple[Tensor | None, dict[str, Tensor]]], options: FingerprintOptions
) -> tuple[dict[str, np.ndarray], list[float]]:
    """(the parts of one half's sketch, the losses of its batches that are known here), from its batches' gradients."""
    totals: dict[str, Tensor] = {}
    losses = []
    for loss, gradient in batches:
        totals = add_gradient(totals, gradient, kind=options.kind)
        losses += [] if loss is None else [float(loss)]
    return parts_of_gradients(totals, options) if totals else {}, losses


def parts_of_gradients(totals: Mapping[str, Tensor], options: FingerprintOptions) -> dict[str, np.ndarray]:
    """The parts of a sketch of what such sums come to, up to a factor."""
    tensors = {key: FINGERPRINTS[options.kind].total(total) for key, total in totals.items()}
    return sketch_parts(tensors, dim=options.sketch_dim, seed=options.train.seed)


def mean(first: Params, second: Params) -> dict[str, Tensor]:
    """The mean of the halves; A is the same in both, so the mean of the products is the product of the means."""
    return {key: tensor if key.endswith(LORA_A) else (tensor + second[key]) / 2 for key, tensor in first.items()}


def fingerprint_update(job: Job, sketches: Sequence[np.ndarray], params: Params, *, steps: int, loss: float) -> Update:
    """The client's answer: both sketches beside its params."""
    first, second = (torch.from_numpy(half) for half in sketches)
    return Update(
        client=job.client,
        params={**params, FIRST: first, SECOND: second},
        examples=0,
        metrics={"agreement": float(first @ second), "steps": float(steps), "loss": loss},
    )
