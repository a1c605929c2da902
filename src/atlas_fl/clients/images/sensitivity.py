"""How sensitive a client's predictions are to each weight: its diagonal Fisher information, for masks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from atlas_fl.clients.base import Job, Update
from atlas_fl.clients.images.whole import ImageSite, images_of
from atlas_fl.models.vision import image_logits, prepare
from atlas_fl.rng import generator, seed_of
from atlas_fl.sparse.fisher import fisher
from atlas_fl.types import Params


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

    found = fisher(
        logits,
        placed,
        names=options.names,
        inputs=prepare(site.vision, batch.pixels),
        labels=options.labels,
        targets=torch.from_numpy(batch.label) if options.labels == "true" else None,
        seed=seed_of(options.seed, "sensitivity", job.client),
    )
    return Update(client=job.client, params=found.sums, examples=found.examples, metrics={})
