"""Class features: means and variances of what a client's classifier reads, by class of its training examples.

    mu_c = mean of h(x) over the examples x of class c,    s_c = mean of || h(x) - mu_c ||^2,    n_c = their number

h(x) are the features that enter the last layer of the head, by the model that the client starts the round with, without
dropout. FedPAC's server combines these layers by them (`aggregation.fedpac`): Xu, Tong and Huang 2023,
arXiv:2306.11867.
"""

import numpy as np
import torch
from torch import Tensor

from atlas_fl.client.batching import body_of, features_without_cut, make_row, split_by_tokens
from atlas_fl.client.job import Job, Site
from atlas_fl.models.lora import Adapters, attach_adapters
from atlas_fl.models.registry import last_layer_inputs
from atlas_fl.params import HEAD, Params

COUNTS, MEANS, VARIANCES = "counts", "means", "variances"


@torch.inference_mode()
def class_features(job: Job, site: Site) -> Params:
    """`counts` (classes,) int64, `means` (classes, width) and `variances` (classes,) float32; zeros without examples.

    One forward pass over all training examples, each client by itself, so that the bits do not follow the packs.
    """
    client = site.data[job.client]
    data, params = client.splits["train"], {key: one.to(site.backbone.device) for key, one in job.params.items()}
    order = np.argsort(data.lengths, kind="stable")  # short ones first: less is padded
    parts: list[Tensor] = []
    for chunk in split_by_tokens([data.lengths[order]], site.max_tokens):
        ((_, places),) = chunk
        row = make_row([data.take(order[places])], site)
        adapters = Adapters(clients=[params], segments=row.segments, sequences=row.pooled, scale=site.scale)
        with attach_adapters(site.modules, adapters), site.autocast(scaled=False):
            features = features_without_cut(row, site.backbone, body_of([params], site))
            parts.append(last_layer_inputs(site.backbone.family, params, features).double().cpu())
    return summarize(torch.cat(parts), data.labels[order], num_labels=client.task.num_labels)


def feature_width(params: Params) -> int:
    """Width of what the head of this model reads: every layer of a head reads so many numbers."""
    return next(tensor.shape[1] for key, tensor in params.items() if key.startswith(HEAD) and tensor.ndim == 2)


def summarize(features: Tensor, labels: np.ndarray, *, num_labels: int) -> Params:
    """What is reported of these features, (examples, width), with their classes, (examples,) int64."""
    classes = torch.from_numpy(np.asarray(labels, np.int64))
    counts = torch.bincount(classes, minlength=num_labels)
    divisor = counts.clamp(min=1)[:, None].double()
    features = features.double()
    means = torch.zeros(num_labels, features.shape[1], dtype=torch.float64).index_add_(0, classes, features) / divisor
    squares = (features - means[classes]).square().sum(dim=1)
    variances = torch.zeros(num_labels, dtype=torch.float64).index_add_(0, classes, squares) / divisor[:, 0]
    return {COUNTS: counts, MEANS: means.float(), VARIANCES: variances.float()}
