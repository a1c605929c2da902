"""Prior correction: a client's logits plus the log frequencies of its own classes, in training and in evaluation.

    z_c <- z_c + log pi_k(c),   pi_k(c) = (n_kc + 1) / (n_k + C)

n_kc are the training examples of class c at client k, which knows them; nothing of it is sent. The shared model then
learns what the classes look like and not how frequent they are somewhere, so heads can be averaged where label mixes
differ. Logit adjustment (Menon et al. 2021, arXiv:2007.07314), balanced softmax (Ren et al. 2020, arXiv:2007.10740).

An exported model has log pi_k in the bias of its head, where the head has one (`fold_prior`).
"""

import torch
from torch import Tensor

from atlas_fl.models.registry import Family
from atlas_fl.params import Params


def log_frequencies(counts: Tensor) -> Tensor:
    """log pi_k, (classes,) float32, of the numbers of training examples by class."""
    smoothed = counts + 1.0
    return torch.log(smoothed / smoothed.sum())


def correct_logits(logits: Tensor, prior: Tensor | None) -> Tensor:
    """The logits (examples, classes) of a client with its prior; the very same without one."""
    return logits if prior is None else logits + prior


def fold_prior(params: Params, prior: Tensor, *, family: Family) -> Params | None:
    """The model whose own logits are the corrected ones; None where the head has no bias that could hold log pi_k."""
    bias = family.head[-1].key + "bias"
    if bias not in params:
        return None
    return {**params, bias: params[bias] + prior.to(params[bias].device)}
