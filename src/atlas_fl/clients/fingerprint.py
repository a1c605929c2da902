"""What a client tells about its task without showing its data: two sketches, from disjoint halves of its examples.

Three sources (MATH 1). `delta`: LoRA B after a short warm-up from one shared, frozen A, so that the two halves'
mean is exact and the client can start round one from it. `gradient` and `fisher`: mean and root mean square of the
batch gradients of the last blocks' and the head's weights at the shared initialisation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.clients.gradients import batch_gradients
from atlas_fl.clients.train import TrainOptions, train
from atlas_fl.clustering.sketch import sketch
from atlas_fl.tree import LORA_A, LORA_B
from atlas_fl.types import Params

FIRST, SECOND = "sketch.first", "sketch.second"


@dataclass(frozen=True, kw_only=True)
class FingerprintOptions:
    """How a fingerprint is taken."""

    kind: Literal["delta", "fisher", "gradient"]
    sketch_dim: int
    train: TrainOptions
    """The warm-up's training, or the batches of the gradients."""
    batches: int
    """Gradient batches of each half."""
    steps: int
    """Most warm-up steps of each half."""
    blocks: int = 2
    """Last blocks whose gradients are taken."""
    samples: int | None = None
    """Most examples of both halves together; all where it is None."""
    stride: int = 10
    """Warm-up steps between two looks at the halves' agreement."""
    reliability: float = 0.3
    """Agreement of the halves at which the warm-up ends early."""

    @property
    def batch_size(self) -> int:
        """Examples in a step of both halves together; engines size packs by it."""
        return 2 * self.train.batch_size

    def most(self, half: int) -> int | None:
        """Most examples of this half: the first takes the odd one."""
        return None if self.samples is None else (self.samples + 1 - half) // 2


def fingerprint(jobs: Sequence[Job], site: Site) -> list[Update]:
    """Two unit sketches of every client under `sketch.first` and `sketch.second`, and its warmed-up params.

    `metrics` hold the halves' agreement, the steps that were taken, and `loss`: the mean training loss of all batches
    of both halves, during the warm-up or at the shared initialisation.
    """
    by_kind = {"delta": _delta, "gradient": _gradient, "fisher": _fisher}
    return by_kind[jobs[0].options.kind](jobs, site)


def _delta(jobs: Sequence[Job], site: Site) -> list[Update]:
    """Warm up both halves until they agree or the steps are spent; sketch what B has become."""
    work = [half_job(job, half) for job in jobs for half in (0, 1)]
    trained = train(work, site, watch=lambda done, live: _agreeing(jobs, done, live))
    answers = []
    for job, first, second in zip(jobs, trained[::2], trained[1::2], strict=True):
        sketches = [delta_sketch(half.params, job.options) for half in (first, second)]
        steps = int(max(first.metrics["steps"], second.metrics["steps"]))
        loss = (first.metrics["loss"] + second.metrics["loss"]) / 2
        answers.append(_answer(job, sketches, _mean(first.params, second.params), steps=steps, loss=loss))
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
        frozen=(LORA_A,),
        hash_loaded=False,
    )
    return replace(job, options=training)


def _agreeing(jobs: Sequence[Job], done: int, live: Mapping[int, Params]) -> list[int]:
    """The places of both halves of every client whose halves agree well enough; looked at every few steps."""
    options: FingerprintOptions = jobs[0].options
    if done % options.stride:
        return []
    ended = []
    for first in (place for place in live if place % 2 == 0 and place + 1 in live):
        pair = [delta_sketch(live[place], options) for place in (first, first + 1)]
        if float(np.dot(*pair)) >= options.reliability:
            ended += [first, first + 1]
    return ended


def delta_sketch(params: Params, options: FingerprintOptions) -> np.ndarray:
    """The sketch of a warmed-up B, (sketch_dim,) float32 of unit length."""
    return _sketch({key: tensor.detach() for key, tensor in _lora_b(params).items()}, options)


def _lora_b(params: Params) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in params.items() if key.endswith(LORA_B)}


def _gradient(jobs: Sequence[Job], site: Site) -> list[Update]:
    """The mean batch gradient of each half."""
    return _from_gradients(jobs, site, lambda total, new: new if total is None else total.add_(new), torch.clone)


def _fisher(jobs: Sequence[Job], site: Site) -> list[Update]:
    """The root mean square of each half's batch gradients, the diagonal of the Fisher information up to scale."""
    return _from_gradients(
        jobs, site, lambda total, new: new.square() if total is None else total.addcmul_(new, new), torch.sqrt
    )


def _from_gradients(
    jobs: Sequence[Job],
    site: Site,
    add: Callable[[Tensor | None, Tensor], Tensor],
    finish: Callable[[Tensor], Tensor],
) -> list[Update]:
    updates = []
    for job in jobs:
        options: FingerprintOptions = job.options
        sketches, losses = [], []
        for half in (0, 1):
            totals: dict[str, Tensor] = {}
            count, most = options.batches, options.most(half)
            for loss, gradient in batch_gradients(job, site, half=half, blocks=options.blocks, count=count, most=most):
                totals = {key: add(totals.get(key), value) for key, value in gradient.items()}
                losses.append(float(loss))
            sketches.append(_sketch({key: finish(total) for key, total in totals.items()}, options))
        updates.append(_answer(job, sketches, job.params, steps=0, loss=float(np.mean(losses))))
    return updates


def _sketch(tensors: Mapping[str, Tensor], options: FingerprintOptions) -> np.ndarray:
    return sketch(tensors, dim=options.sketch_dim, seed=options.train.seed)


def _mean(first: Params, second: Params) -> dict[str, Tensor]:
    """The mean of the halves; A is the same in both, so the mean of the products is the product of the means."""
    return {key: tensor if key.endswith(LORA_A) else (tensor + second[key]) / 2 for key, tensor in first.items()}


def _answer(job: Job, sketches: Sequence[np.ndarray], params: Params, *, steps: int, loss: float) -> Update:
    first, second = (torch.from_numpy(half) for half in sketches)
    return Update(
        client=job.client,
        params={**params, FIRST: first, SECOND: second},
        examples=0,
        metrics={"agreement": float(first @ second), "steps": float(steps), "loss": loss},
    )
