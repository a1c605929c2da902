"""How much each block of the backbone matters to a client, measured by gradients through all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from atlas_fl.clients.base import Job, Site, Update, line_of
from atlas_fl.clients.gradients import half_rows, head_leaves, loss_gradient
from atlas_fl.clients.train import TrainOptions
from atlas_fl.lora.packed import merged_weight
from atlas_fl.models.backbone import layer_of
from atlas_fl.ranks.importance import layer_importance, rngwp, shares
from atlas_fl.split.step import Crossed
from atlas_fl.types import Params

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
    Of a client that is cut each side measures its own blocks.
    """
    return [_measured(job, site) for job in jobs]


def _measured(job: Job, site: Site) -> Update:
    options: ImportanceOptions = job.options
    leaves, head = merged_leaves(job, site, site.modules), head_leaves(job, site)
    line = line_of(job, site)
    gradients = (
        loss_gradient(row, site, leaves, head, line=line)[1]
        for row in half_rows(job, site, half=0, count=options.batches)
    )
    sums = [layer_sums(gradient, leaves, site, kind=options.kind) for gradient in gradients]
    if line is not None and job.cut is not None:
        line.tell("fingerprint", "up", sums_message([own[: job.cut.blocks] for own in sums]))
    return answered(job, sums, site, crossed={} if line is None else dict(line.crossed))


def answered(job: Job, sums: Sequence[np.ndarray], site: Site, *, crossed: Crossed) -> Update:
    """The client's answer, from every batch's sums by block, (blocks,) each."""
    sizes = _by_layer(
        site, {name: float(module.get_parameter("weight").numel()) for name, module in site.modules.items()}
    )
    measured = _FROM_SUMS[job.options.kind](sums, sizes)
    return Update(
        client=job.client, params={IMPORTANCE: torch.from_numpy(measured)}, examples=0, metrics={}, crossed=crossed
    )


def merged_leaves(job: Job, site: Site, modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The weights of these layers with the job's adapters merged, as tensors whose gradient can be taken."""
    return {
        f"{name}.weight": merged_weight(module, name, job.params, site.scale).requires_grad_()
        for name, module in modules.items()
    }


def layer_sums(gradients: Params, leaves: Params, site: Site, *, kind: str) -> np.ndarray:
    """The squares of one batch's gradients, or |weight * gradient|, summed by block, (blocks,) float64."""
    number = _NUMBERS[kind]
    return _by_layer(site, {name: float(number(leaf.detach(), gradients[name]).sum()) for name, leaf in leaves.items()})


def sums_message(sums: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """What a cut client sends of its own blocks, (batches, blocks) float64."""
    return {IMPORTANCE: torch.from_numpy(np.stack(sums))}


def _by_layer(site: Site, sums: Mapping[str, float]) -> np.ndarray:
    """Sums of single weights' numbers gathered by block, (blocks,) float64."""
    layers = np.zeros(len(site.backbone.blocks))
    for name, value in sums.items():
        layers[layer_of(site.backbone, name)] += value
    return layers


def _mean_square(sums: Sequence[np.ndarray], sizes: np.ndarray) -> np.ndarray:
    found: np.ndarray = layer_importance(np.sum(sums, axis=0), sizes)
    return found


def _smoothed(sums: Sequence[np.ndarray], sizes: np.ndarray) -> np.ndarray:
    smoothed: np.ndarray | None = None
    for own in sums:
        smoothed = rngwp(smoothed, own, sizes)
    assert smoothed is not None
    found: np.ndarray = shares(smoothed)
    return found


_NUMBERS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gradient": lambda _, gradient: gradient.double().square(),
    "rngwp": lambda weight, gradient: (weight * gradient).double().abs(),
}
_FROM_SUMS: Mapping[str, Callable[[Sequence[np.ndarray], np.ndarray], np.ndarray]] = {
    "gradient": _mean_square,
    "rngwp": _smoothed,
}
