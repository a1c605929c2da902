"""Covariance of a client's labels with the features of its texts: tells tasks that read the same texts apart.

A fingerprint of gradients says which texts a client has, and makes two tasks of two sources of one. The covariance

    C = 1/n sum_i (y_i - mean y) (x_i - mean x)^T

of labels y (one-hot, each of several labels, or the number itself) with features x, the mean over a text's tokens of
the frozen model's last hidden states, is free of what all texts of a client have in common. Clients whose C have one
direction want one head: -C is the gradient of the squared loss of a linear head on x that answers mean y.

One forward pass; nothing is trained.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from atlas_fl.client.batching import collate_packed, split_by_tokens
from atlas_fl.client.job import Job, Site
from atlas_fl.client.local_training import positions
from atlas_fl.client.options import FingerprintOptions, TrainOptions
from atlas_fl.clustering.sketch import sketch
from atlas_fl.models.backbone import token_inputs
from atlas_fl.models.stock import mean_states
from atlas_fl.models.tokenization import EncodedExamples

LABELS = "sketch.labels"


def label_sketch(job: Job, site: Site) -> Tensor:
    """The sketch of C of a client's training examples, float32 (sketch_dim,) of unit length.

    Zeros where labels say nothing: those of images, of texts to be written, of examples of one class.
    """
    options: FingerprintOptions = job.options
    client = site.data[job.client]
    if client.task.images or not client.task.num_labels:
        return torch.zeros(options.sketch_dim)
    data = client.splits["train"]
    secret = site.secrets.get(job.client)
    halves = [TrainOptions(seed=options.train.seed, half=half, most=options.most(half)) for half in (0, 1)]
    index = [positions(len(data), job.client, half, secret=secret) for half in halves]
    data = data.take(np.sort(np.concatenate(index)))
    parts = [part for chunk in split_by_tokens([data.lengths], site.max_tokens) for _, part in chunk]
    features = torch.cat([_features(data.take(np.arange(part.start, part.stop)), site) for part in parts])
    covariance = label_covariance(features, torch.from_numpy(data.labels), num_labels=client.task.num_labels)
    if not covariance.any():
        return torch.zeros(options.sketch_dim)
    return torch.from_numpy(sketch({LABELS: covariance}, dim=options.sketch_dim, seed=options.train.seed))


def label_covariance(features: Tensor, labels: Tensor, *, num_labels: int) -> Tensor:
    """C, float32 (num_labels, features), of features (n, features) and labels (n,): classes; numbers where it is 1.

    Several labels a row are (n, num_labels).
    """
    x = features.double()
    y = labels.double()
    if labels.ndim == 1:
        y = y[:, None] if num_labels == 1 else one_hot(labels.long(), num_labels).double()
    return ((y - y.mean(0)).T @ (x - x.mean(0)) / len(x)).float()


@torch.inference_mode()
def _features(data: EncodedExamples, site: Site) -> Tensor:
    """Mean last hidden states (examples, hidden) of these texts, float32 on the CPU; adapters are not attached."""
    row = collate_packed([data], device=site.backbone.device)
    if site.backbone.family.stock:
        with site.autocast(scaled=False):
            return mean_states(site.backbone, row.ids, row.types, data.lengths.tolist()).float().cpu()
    with site.autocast(scaled=False):
        inputs = token_inputs(site.backbone, row.ids, row.types, row.layout)
        states = site.backbone.model(**inputs, layout=row.layout).last_hidden_state[0].float()
    lengths = row.layout.ends - row.layout.starts + 1
    example = torch.repeat_interleave(torch.arange(len(data), device=states.device), lengths)
    sums = torch.zeros(len(data), states.shape[1], device=states.device).index_add_(0, example, states)
    return (sums / lengths[:, None]).cpu()
