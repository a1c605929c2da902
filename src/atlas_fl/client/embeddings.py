"""Embeddings of a client's texts: the mean last hidden state of each, or of its prompt, in the frozen model."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from atlas_fl.client.batching import rows_in_order
from atlas_fl.client.job import Site
from atlas_fl.errors import ConfigError
from atlas_fl.models.backbone import token_states
from atlas_fl.models.tokenization import EncodedExamples


@torch.inference_mode()
def embed(examples: EncodedExamples, site: Site) -> Tensor:
    """The embedding of every example, (examples, hidden) float32; of a text to write that of its prompt.

    Raises `ConfigError` for a model that runs through the stock path.
    """
    backbone, embeddings = site.backbone, torch.empty(len(examples), site.backbone.hidden)
    if backbone.family.stock:
        raise ConfigError(
            f"embeddings are means of the states of packed texts, and {backbone.name!r} ({backbone.family.model_type})"
            " runs through the stock path; take another --fingerprint, --client-parts 1, or another model"
        )
    for places, taken, row in rows_in_order(examples, replace(site, first_adapted=0)):
        with site.autocast(scaled=False):
            states = token_states(backbone, row.ids, row.types, row.layout).float().cpu()
        given = np.repeat(taken.num_targets >= taken.lengths - 1, taken.lengths)  # texts that follow nothing
        given |= np.True_ if taken.target_mask is None else ~taken.target_mask
        owner = torch.from_numpy(np.repeat(np.arange(len(taken)), taken.lengths)[given])
        sums = torch.zeros(len(taken), backbone.hidden).index_add_(0, owner, states[torch.from_numpy(given)])
        embeddings[places] = sums / torch.bincount(owner, minlength=len(taken))[:, None]
    return embeddings
