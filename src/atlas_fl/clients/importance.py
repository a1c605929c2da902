"""How much each block of the backbone matters to a client, measured by gradients through all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.clients.gradients import half_rows, loss_gradient
from atlas_fl.clients.train import TrainOptions
from atlas_fl.lora.packed import merged_weight
from atlas_fl.models.backbone import layer_of
from atlas_fl.ranks.importance import layer_importance, rngwp, shares
from atlas_fl.tree import head_keys

IMPORTANCE = "importance"


@dataclass(frozen=True, kw_only=True)
class ImportanceOptions:
    """How layer importance is measured."""

    kind: Literal["gradient", "rngwp"]
    train: TrainOptions
    """Batch size and seed of the batches."""
    batches: int

    @property
    def batch_size(self) -> int:
        """Examples in a step; engines size packs by it."""
        return self.train.batch_size


def importance(jobs: Sequence[Job], site: Site) -> list[Update]:
    """Every client's importance of each block, (blocks,) float64 that sums to one, under `importance`.

    Taken over the weights that adapters would change, at the client's own model with its adapters merged:
    mean squared gradient per weight, or |weight * gradient| smoothed over batches (`rngwp`, HSplitLoRA).
    """
    return [_update(job, _measure(job, site)) for job in jobs]


def _update(job: Job, measured: np.ndarray) -> Update:
    return Update(client=job.client, params={IMPORTANCE: torch.from_numpy(measured)}, examples=0, metrics={})


def _measure(job: Job, site: Site) -> np.ndarray:
    device = site.backbone.device
    leaves = {
        f"{name}.weight": merged_weight(module, name, job.params, site.scale).requires_grad_()
        for name, module in site.modules.items()
    }
    head = {key: job.params[key].detach().to(device).requires_grad_() for key in head_keys(job.params)}
    sizes = _by_layer(site, {name: torch.tensor(float(leaf.numel())) for name, leaf in leaves.items()})
    options: ImportanceOptions = job.options
    rows = half_rows(job, site, half=0, count=options.batches)
    gradients = (loss_gradient(row, site, leaves, head)[1] for row in rows)
    if options.kind == "gradient":
        squares = [_by_layer(site, {name: g[name].double().square().sum() for name in leaves}) for g in gradients]
        measured: np.ndarray = layer_importance(np.sum(squares, axis=0), sizes)
        return measured
    smoothed = None
    for g in gradients:
        products = {name: (leaf.detach() * g[name]).double().abs().sum() for name, leaf in leaves.items()}
        smoothed = rngwp(smoothed, _by_layer(site, products), sizes)
    assert smoothed is not None
    normalised: np.ndarray = shares(smoothed)
    return normalised


def _by_layer(site: Site, sums: Mapping[str, Tensor]) -> np.ndarray:
    """Sums of single weights' numbers gathered by block, (blocks,) float64."""
    layers = np.zeros(len(site.backbone.blocks))
    for name, value in sums.items():
        layers[layer_of(site.backbone, name)] += float(value)
    return layers
