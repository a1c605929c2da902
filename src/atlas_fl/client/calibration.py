"""What clients compute before round one of whole models: sums for the ridge head, sensitivities for the mask.

The head before anything else: ridge regression on frozen features, from sums that clients add up.

    W = (sum_k X_k^T X_k + lambda I)^-1 sum_k X_k^T Y_k

X_k is (examples, features + 1), the last column ones, Y_k (examples, classes) one-hot less its mean over classes. Equal
to the regression on all images in one place (Hoerl & Kennard 1970); what leaves a client are the two sums, no image and
no feature of one.

What it predicts are nearly probabilities, and as logits these are small: cross-entropy would first of all make them
larger, and take the features apart on the way. So the head is multiplied by the one of `SCALES` with the least
cross-entropy over some 1,600 validation images, as many of each client (temperature scaling, Guo et al. 2017). A few
that are all recognised would ask for the largest.

How sensitive a client's predictions are to each weight: its diagonal Fisher information, for masks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from atlas_fl.client.full_training import ImageSite, images_of
from atlas_fl.client.job import Job, Update
from atlas_fl.models.vision import image_features, image_logits, preprocess
from atlas_fl.params import HEAD, Params
from atlas_fl.rng import generator, seed_of
from atlas_fl.sparse.fisher import fisher_scores

GRAM, CROSS = "gram", "cross"
BIAS, WEIGHT = HEAD + "bias", HEAD + "weight"


SCALES = tuple(2.0**power for power in range(8))
"""What a head may be multiplied by."""
LOSSES = "losses"
SCALED_BY = 1600
"""Validation images of a task's clients that choose the scale, or all where they have fewer."""


@dataclass(frozen=True, kw_only=True)
class RidgeOptions:
    """Nothing to choose: every training example counts once."""


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """How many of a client's first validation examples are looked at."""

    examples: int


@torch.inference_mode()
def ridge_sums(jobs: Sequence[Job], site: ImageSite) -> list[Update]:
    """X^T X (features + 1, features + 1) and X^T Y (features + 1, classes) of every client, float64."""
    return [_sums(job, site) for job in jobs]


def _sums(job: Job, site: ImageSite) -> Update:
    rows, labels = images_of(site, job.client, "train"), site.data[job.client].task.num_labels
    size = site.vision.hidden + 1
    gram = torch.zeros(size, size, dtype=torch.float64)
    cross = torch.zeros(size, labels, dtype=torch.float64)
    for start in range(0, len(rows), site.batch_images):
        batch = rows.take(range(start, min(start + site.batch_images, len(rows))))
        found = image_features(site.vision, job.params, preprocess(site.vision, batch.pixels)).double().cpu()
        x = torch.cat([found, torch.ones(len(batch), 1, dtype=torch.float64)], dim=1)
        y = one_hot(torch.from_numpy(batch.label), labels).double() - 1 / labels
        gram += x.T @ x
        cross += x.T @ y
    return Update(client=job.client, params={GRAM: gram, CROSS: cross}, examples=len(rows), metrics={})


@torch.inference_mode()
def scale_losses(jobs: Sequence[Job], site: ImageSite) -> list[Update]:
    """The summed cross-entropy of every client with its head times each of `SCALES`, (scales,) float64."""
    return [_losses(job, site) for job in jobs]


def _losses(job: Job, site: ImageSite) -> Update:
    rows = images_of(site, job.client, "validation")
    batch = rows.take(range(min(job.options.examples, len(rows))))
    logits = image_logits(site.vision, job.params, preprocess(site.vision, batch.pixels)).double().cpu()
    labels = torch.from_numpy(batch.label)
    losses = torch.stack([cross_entropy(scale * logits, labels, reduction="sum") for scale in SCALES])
    return Update(client=job.client, params={LOSSES: losses}, examples=len(batch), metrics={})


def ridge_head(gram: Tensor, cross: Tensor, *, penalty: float) -> dict[str, Tensor]:
    """The head of these sums: `head.weight` (classes, features) and `head.bias` (classes,), float32.

    `penalty` is in examples: of each feature's mean square over the examples. The bias is not penalised.
    """
    count = gram[-1, -1]
    scale = gram.diagonal()[:-1].mean() / count
    shrink = torch.full((len(gram),), penalty * float(scale), dtype=gram.dtype)
    shrink[-1] = 0.0
    solved = torch.linalg.solve(gram + torch.diag(shrink), cross)
    return {WEIGHT: solved[:-1].T.float().contiguous(), BIAS: solved[-1].float().contiguous()}


@dataclass(frozen=True, kw_only=True)
class SensitivityOptions:
    """From which examples the scores are made, and with which labels."""

    seed: int
    examples: int
    """At most so many of a client's training examples, drawn once."""
    labels: Literal["sampled", "true"] = "sampled"
    names: tuple[str, ...] = ()
    """The weights that are scored."""


def sensitivity(jobs: Sequence[Job], site: ImageSite) -> list[Update]:
    """The sum over each client's examples of the squared per-example gradients, by weight; sums of clients add up."""
    return [_scores(job, site) for job in jobs]


def _scores(job: Job, site: ImageSite) -> Update:
    options: SensitivityOptions = job.options
    rows = images_of(site, job.client, "train")
    order = generator(options.seed, "sensitivity", job.client).permutation(len(rows))
    batch = rows.take(order[: options.examples])
    placed = {key: tensor.to(site.vision.device) for key, tensor in job.params.items()}

    def logits(params: Params, pixels: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = image_logits(site.vision, params, pixels)
        return found

    found = fisher_scores(
        logits,
        placed,
        names=options.names,
        inputs=preprocess(site.vision, batch.pixels),
        labels=options.labels,
        targets=torch.from_numpy(batch.label) if options.labels == "true" else None,
        seed=seed_of(options.seed, "sensitivity", job.client),
    )
    return Update(client=job.client, params=found.sums, examples=found.examples, metrics={})
