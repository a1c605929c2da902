"""What a client tells about its task without showing its data: two sketches, from disjoint halves of its examples.

Three sources (MATH 1). `delta`: LoRA B after a short warm-up from one shared, frozen A, so that the two halves'
mean is exact and the client can start round one from it. `gradient` and `fisher`: mean and root mean square of the
batch gradients of the last two blocks' and the head's weights at the shared initialisation.
"""

import math
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
from atlas_fl.tree import HEAD, LORA_A, LORA_B
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
    stride: int = 10
    """Warm-up steps between two looks at the halves' agreement."""
    reliability: float = 0.5
    """Agreement of the halves at which the warm-up ends early."""

    @property
    def batch_size(self) -> int:
        """Examples in a step of both halves together; engines size packs by it."""
        return 2 * self.train.batch_size


def fingerprint(jobs: Sequence[Job], site: Site) -> list[Update]:
    """Two unit sketches of every client under `sketch.first` and `sketch.second`, and its warmed-up params.

    `metrics` hold the halves' agreement and the steps that were taken.
    """
    by_kind = {"delta": _delta, "gradient": _gradient, "fisher": _fisher}
    return by_kind[jobs[0].options.kind](jobs, site)


def _delta(jobs: Sequence[Job], site: Site) -> list[Update]:
    """Warm up both halves until they agree or the steps are spent; sketch what B has become."""
    halves = {job.client: [job.params, job.params] for job in jobs}
    sketches: dict[str, list[np.ndarray]] = {}
    taken = dict.fromkeys(halves, 0)
    active = list(jobs)
    for stride in range(math.ceil(jobs[0].options.steps / jobs[0].options.stride)):
        work = [_half_job(job, halves[job.client][half], half, stride) for job in active for half in (0, 1)]
        trained = train(work, site)
        for job, first, second in zip(active, trained[::2], trained[1::2], strict=True):
            halves[job.client] = [first.params, second.params]
            sketches[job.client] = [_sketch(_lora_b(part.params), job.options) for part in (first, second)]
            taken[job.client] += int(first.metrics["steps"])
        active = [job for job in active if float(np.dot(*sketches[job.client])) < job.options.reliability]
        if not active:
            break
    return [_answer(job, sketches[job.client], _mean(*halves[job.client]), taken[job.client]) for job in jobs]


def _half_job(job: Job, params: Params, half: int, stride: int) -> Job:
    options: FingerprintOptions = job.options
    steps = min(options.stride, options.steps - stride * options.stride)
    training = replace(options.train, half=half, max_steps=steps, epochs=steps, frozen=(LORA_A,), hash_loaded=False)
    # Rounds of training count from one; the warm-up's own orders are drawn before them.
    return replace(job, params=params, round=-stride, options=training)


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
        sketches = []
        for half in (0, 1):
            totals: dict[str, Tensor] = {}
            for gradient in batch_gradients(job, site, half=half, blocks=2, count=job.options.batches):
                totals = {key: add(totals.get(key), value) for key, value in gradient.items()}
            sketches.append(_sketch({key: finish(total) for key, total in totals.items()}, job.options))
        updates.append(_answer(job, sketches, job.params, 0))
    return updates


def _sketch(tensors: Mapping[str, Tensor], options: FingerprintOptions) -> np.ndarray:
    return sketch(tensors, dim=options.sketch_dim, seed=options.train.seed)


def _mean(first: Params, second: Params) -> dict[str, Tensor]:
    """The mean of the halves; A is the same in both, so the mean of the products is the product of the means."""
    return {key: (first[key] + second[key]) / 2 if key.endswith(LORA_B) or key.startswith(HEAD) else first[key] for key in first}  # fmt: skip


def _answer(job: Job, sketches: Sequence[np.ndarray], params: Params, steps: int) -> Update:
    first, second = (torch.from_numpy(half) for half in sketches)
    return Update(
        client=job.client,
        params={**params, FIRST: first, SECOND: second},
        examples=0,
        metrics={"agreement": float(first @ second), "steps": float(steps)},
    )
