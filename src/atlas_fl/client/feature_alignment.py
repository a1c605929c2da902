"""FedPAC's feature alignment: a term of the local loss that pulls features to the means of their class over clients.

    lambda / n  sum_i  1/d || h(x_i) - c_{y_i} ||^2        c_y = sum_k n_k^y mu_k^y / sum_k n_k^y

h(x) are the d features that enter the last layer of the head, mu_k^y client k's mean of them over its n_k^y training
examples of class y (`client.class_features`). The server sends the c of a task to those of its clients that train. Xu,
Tong and Huang, "Personalized federated learning with feature alignment and classifier collaboration", ICLR 2023,
arXiv:2306.11867.
"""

import torch
from torch import Tensor

from atlas_fl.params import Params

CENTROIDS, SEEN = "means", "seen"
"""Of what is sent: c, (classes, width) float32, and which classes have one, (classes,) bool."""


def alignment_loss(features: Tensor, labels: Tensor, centroids: Params) -> Tensor:
    """The term with a lambda of 1, float32, of (examples, width) features; 0 for examples of classes without a mean."""
    targets, is_seen = centroids[CENTROIDS].to(features.device), centroids[SEEN].to(features.device)
    distances = (features.float() - targets[labels]).square().mean(dim=1)
    return torch.where(is_seen[labels], distances, torch.zeros_like(distances)).mean()
