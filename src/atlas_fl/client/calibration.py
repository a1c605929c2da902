"""Calibration of whole models by clients before round one: sums for the ridge head, sensitivities for the mask.

The head comes first: ridge regression on frozen features, from sums that the server adds up.

    W = (sum_k X_k^T X_k + lambda I)^-1 sum_k X_k^T Y_k

X_k is (examples, features + 1), the last column ones, Y_k (examples, classes) one-hot less its mean over classes. Equal
to the regression on all images in one place (Hoerl & Kennard 1970); what leaves a client are the two sums, no image and
no feature of one.

Its predictions are nearly probabilities, and as logits these are small: cross-entropy would first of all enlarge them,
and distort the features on the way. So the head is multiplied by the one of `SCALES` with the least cross-entropy over
some 1,600 validation images, as many of each client (temperature scaling, Guo et al. 2017).

The sensitivity of a client's predictions to each weight is its diagonal Fisher information (`sparse.fisher`).
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from atlas_fl.client.batching import body_of, collate_packed, features_of_row, forward
from atlas_fl.client.draws import Draws
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.options import SensitivityOptions
from atlas_fl.models import backbone, tokenization, vision
from atlas_fl.params import HEAD, Params
from atlas_fl.sparse.fisher import fisher_scores

GRAM, CROSS = "gram", "cross"
BIAS, WEIGHT = HEAD + "bias", HEAD + "weight"


SCALES = tuple(2.0**power for power in range(8))
"""Factors that a head may be multiplied by."""
LOSSES = "losses"
SCALED_BY = 1600
"""Validation images of a task's clients that choose the scale, or all where they have fewer."""


@torch.inference_mode()
def ridge_sums(job: Job, site: Site) -> Update:
    """X^T X (features + 1, features + 1) and X^T Y (features + 1, classes) of the client, float64."""
    data, labels = site.data[job.client].splits["train"], site.data[job.client].task.num_labels
    size = site.backbone.width + 1
    gram = torch.zeros(size, size, dtype=torch.float64)
    cross = torch.zeros(size, labels, dtype=torch.float64)
    for start in range(0, len(data), site.max_tokens):
        batch = data.take(np.arange(start, min(start + site.max_tokens, len(data))))
        features = _features(job, batch, site).double().cpu()
        x = torch.cat([features, torch.ones(len(batch), 1, dtype=torch.float64)], dim=1)
        y = one_hot(torch.from_numpy(batch.labels), labels).double() - 1 / labels
        gram += x.T @ x
        cross += x.T @ y
    return Update(client=job.client, params={GRAM: gram, CROSS: cross}, examples=len(data), metrics={})


@torch.inference_mode()
def scale_losses(job: Job, site: Site) -> Update:
    """The summed cross-entropy of the client with its head times each of `SCALES`, (scales,) float64."""
    data = site.data[job.client].splits["validation"]
    batch = data.take(np.arange(min(job.options.examples, len(data))))
    logits = backbone.head_logits(site.backbone, job.params, _features(job, batch, site)).double().cpu()
    labels = torch.from_numpy(batch.labels)
    losses = torch.stack([cross_entropy(scale * logits, labels, reduction="sum") for scale in SCALES])
    return Update(client=job.client, params={LOSSES: losses}, examples=len(batch), metrics={})


def _features(job: Job, batch: tokenization.EncodedExamples, site: Site) -> Tensor:
    """Features of these images, (images, features), by the job's model."""
    return features_of_row(
        collate_packed([batch], device=site.backbone.device), site.backbone, body_of([job.params], site)
    )


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


def sensitivity(job: Job, site: Site) -> Update:
    """The sum over the client's examples of the squared per-example gradients, by weight; sums of clients add up."""
    options: SensitivityOptions = job.options
    data = site.data[job.client].splits["train"]
    draws = Draws(client=job.client, seed=options.seed, secret=site.secrets.get(job.client))
    order = draws.generator("sensitivity", asked=(options.examples,)).permutation(len(data))
    batch = data.take(order[: options.examples])
    params = {key: tensor.to(site.backbone.device) for key, tensor in job.params.items()}
    logits, inputs = partial(_text_logits, batch, site), torch.arange(len(batch))
    if batch.pixels is not None:
        logits, inputs = partial(vision.image_logits, site.vision), vision.preprocess(site.vision, batch.pixels)
    scores = fisher_scores(
        logits,
        params,
        names=options.names,
        inputs=inputs,
        targets=torch.from_numpy(batch.labels) if options.labels == "true" else None,
        seed=draws.derive("sensitivity"),
    )
    return Update(client=job.client, params=scores, examples=len(batch), metrics={})


def _text_logits(batch: tokenization.EncodedExamples, site: Site, params: Params, index: Tensor) -> Tensor:
    """Logits (1, classes) of one text, whose index this is."""
    row = collate_packed([batch.take(index.numpy())], device=site.backbone.device)
    with forward(row, [params], site) as (logits,):
        return logits
