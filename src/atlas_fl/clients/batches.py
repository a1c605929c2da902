"""How a client goes through its examples: the options of its training, its steps and its mini-batches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from atlas_fl.clients.base import Job
from atlas_fl.clients.schedule import Schedule
from atlas_fl.models.augment import augment
from atlas_fl.models.tokens import Encoded
from atlas_fl.rng import generator, torch_generator


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How a client trains. A run has `rounds * steps` steps; the schedule runs over all of them."""

    seed: int
    rounds: int = 1
    epochs: int = 1
    max_steps: int | None = None
    batch_size: int = 16
    lr: float = 1e-3
    schedule: Schedule = "constant"
    warmup: float = 0.0
    weight_decay: float = 0.0
    clip: float = 1.0
    dropout: float = 0.0
    frozen: tuple[str, ...] = ()
    """Endings of the names that do not train, e.g. `(".lora_A",)`."""
    half: int | None = None
    """Train on the even (0) or odd (1) examples only, for fingerprints that check themselves."""
    most: int | None = None
    """Train on at most so many of these examples; which ones is drawn from the seed, once for all rounds."""
    label_smoothing: float = 0.0
    """Share of a class label that is spread over all classes."""
    crop: int = 0
    """Border in pixels out of which images are cropped at random."""
    flip: bool = False
    """Mirror every second image."""
    hash_loaded: bool = False
    """Hash what was really loaded, for the audit."""


def num_steps(examples: int, options: TrainOptions) -> int:
    """Steps of one round."""
    full = options.epochs * math.ceil(examples / options.batch_size)
    return full if options.max_steps is None else min(full, options.max_steps)


def positions(count: int, client: str, options: TrainOptions) -> np.ndarray:
    """Which of a client's `count` examples these options train on, (m,) int64 ascending."""
    index = np.arange(count) if options.half is None else np.arange(options.half, count, 2)
    if options.most is None or options.most >= len(index):
        return index
    drawn = generator(options.seed, "subset", client, options.half or 0)
    return np.sort(drawn.choice(index, size=options.most, replace=False))


def batches(data: Encoded, job: Job) -> Iterator[Encoded]:
    """The client's mini-batches of this round, in the order that its own generator draws."""
    options: TrainOptions = job.options
    index = positions(len(data), job.client, options)
    steps, step = num_steps(len(index), options), 0
    for epoch in range(options.epochs):
        order = generator(options.seed, "order", job.client, job.round, epoch).permutation(index)
        for start in range(0, len(order), options.batch_size):
            if step == steps:
                return
            yield _augmented(data.take(order[start : start + options.batch_size]), job, step=step)
            step += 1


def _augmented(batch: Encoded, job: Job, *, step: int) -> Encoded:
    """The batch with its images, if it has any, as this client and step see them."""
    options: TrainOptions = job.options
    if batch.pixels is None or not (options.crop or options.flip):
        return batch
    stream = torch_generator(options.seed, "augment", job.client, job.round, step)
    seen = augment(torch.from_numpy(batch.pixels), padding=options.crop, flip=options.flip, generator=stream)
    return replace(batch, pixels=seen.numpy())
