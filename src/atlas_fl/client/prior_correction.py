"""Prior correction: a client's logits plus the log frequencies of its own classes, in training and in evaluation.

    z_c <- z_c + log pi_k(c),   pi_k(c) = (n_kc + 1) / (n_k + C)

n_kc are the training examples of class c at client k, which knows them; nothing of it is sent. The shared model then
learns what the classes look like and not how frequent they are somewhere, so heads can be averaged where label mixes
differ. Logit adjustment (Menon et al. 2021, arXiv:2007.07314), balanced softmax (Ren et al. 2020, arXiv:2007.10740).
"""

import torch
from torch import Tensor

from atlas_fl.client.job import Job, Site


def log_prior(job: Job, site: Site) -> Tensor | None:
    """log pi_k, (classes,) float32; None where the job asks for none, or the client's task has no classes."""
    data = site.data[job.client]
    if not job.options.prior_correction or not data.task.has_classes:
        return None
    labels = torch.from_numpy(data.splits["train"].labels)
    counts = torch.bincount(labels, minlength=data.task.num_labels) + 1.0
    return torch.log(counts / counts.sum()).to(site.backbone.device)


def correct_logits(logits: Tensor, prior: Tensor | None) -> Tensor:
    """The logits (examples, classes) of a client with its prior; the very same without one."""
    return logits if prior is None else logits + prior
