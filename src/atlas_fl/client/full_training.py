"""Training all weights of a model, by SGD or under a mask.

How whole weights move in one round, from a loss that is scaled where gradients are fp16.

What a client of the vision line can be asked to do: train all weights by SGD, or those under a mask; be scored.

Its parameters are the weights that train, by their stock names, and the head. They are put into the shared module for
the length of a call (`torch.func.functional_call`), so no model is built or copied for a client.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from atlas_fl.client.evaluation import EvaluateOptions
from atlas_fl.client.job import Job, Update
from atlas_fl.client.local_training import Schedule, rate_factor
from atlas_fl.client.optimizer import LossScale, OptimizerName, Transform, gradient_chain, make_optimizer
from atlas_fl.data.clients import ClientData
from atlas_fl.data.metrics import by_class, scores
from atlas_fl.data.task import Images
from atlas_fl.models.vision import Vision, augment, image_logits, preprocess
from atlas_fl.params import Params, Split, digest
from atlas_fl.rng import generator, torch_generator
from atlas_fl.sparse.codec import RandomMask
from atlas_fl.sparse.masks import Mask
from atlas_fl.sparse.optimizer import extract_momentum, load_momentum


@dataclass(kw_only=True)
class Descent:
    """What moves one client's weights in one round."""

    optimizer: torch.optim.Optimizer
    scale: LossScale
    transform: Transform

    def move(self, loss: Tensor, leaves: Params) -> None:
        """A step down the gradient of this loss, where it is finite."""
        (loss * self.scale.value).backward()  # type: ignore[no-untyped-call]
        if self.transform(leaves, None):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True, kw_only=True)
class ImageSite:
    """A place where image clients compute: one shared module and the images of those who are here."""

    vision: Vision
    data: Mapping[str, ClientData]
    batch_images: int = 64
    """Most images in a pass that keeps no gradients."""
    pack_images: int = 64
    """Most images of several clients that are scored together."""
    bf16: bool = False
    fp16: bool = False
    """Like bf16, with losses scaled so that small gradients do not vanish."""

    def autocast(self) -> torch.autocast:
        """The arithmetic of the forward pass."""
        dtype = torch.float16 if self.fp16 else torch.bfloat16
        return torch.autocast(self.vision.device.type, dtype=dtype, enabled=self.bf16 or self.fp16)


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeOptions:
    """How a client trains whole weights. The learning rate follows the schedule round by round."""

    seed: int
    rounds: int = 1
    steps: int | None = None
    """Steps of a round; `epochs` passes where there is no number."""
    epochs: int = 1
    batch_size: int = 16
    lr: float = 1e-3
    schedule: Schedule = "constant"
    warmup: float = 0.0
    optimizer: OptimizerName = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    proximal_mu: float = 0.0
    """Weight of FedProx's term (`client.optimizer`); 0 for none."""
    carry_momentum: bool = False
    """Begin with the job's momentum, and hand back what there is at the end."""
    weight_decay: float = 0.0
    clip: float = 0.0
    dropout: float = 0.0
    """On what the head reads."""
    label_smoothing: float = 0.0
    crop: int = 0
    """Border in pixels out of which images are cropped at random."""
    flip: bool = False
    mask: Mask | None = None
    """Which weights may move; None for all."""
    drawn: RandomMask | None = None
    """How the mask was drawn, if it was: all that needs to travel of it."""
    hash_loaded: bool = False


def num_steps(examples: int, options: WholeOptions) -> int:
    """Steps of one round."""
    return options.steps or options.epochs * math.ceil(examples / options.batch_size)


def batches(rows: Images, job: Job) -> Iterator[Images]:
    """The client's mini-batches of this round, pass after pass in orders of its own until the steps are done."""
    options: WholeOptions = job.options
    left, epoch = num_steps(len(rows), options), 0
    while True:
        order = generator(options.seed, "order", job.client, job.round, epoch).permutation(len(rows))
        for start in range(0, len(order), options.batch_size):
            if left == 0:
                return
            left -= 1
            yield rows.take(order[start : start + options.batch_size])
        epoch += 1


def train_whole(jobs: Sequence[Job], site: ImageSite) -> list[Update]:
    """Every client's trained weights, one client after another.

    Momentum begins at zero (McMahan et al. 2017), or where the client left it, as in the local momentum of Yu, Jin and
    Yang (arXiv:1905.03817) without the average over buffers.
    """
    return [_trained(job, site) for job in jobs]


def _trained(job: Job, site: ImageSite) -> Update:
    began, options = time.perf_counter(), job.options
    device = site.vision.device
    # Sorted, because the clipped norm is a sum and its last bits follow the order.
    leaves = {k: t.detach().to(device, copy=True).requires_grad_() for k, t in sorted(job.params.items())}
    loaded = digest(leaves) if options.hash_loaded else None
    descent = _descent(leaves, job, site)
    rows, losses = images_of(site, job.client, "train"), []
    for step, batch in enumerate(batches(rows, job)):
        loss = _loss(leaves, batch, site, job, step=step)
        descent.move(loss, leaves)
        losses.append(loss.detach())
    return Update(
        client=job.client,
        params={key: leaves[key].detach().cpu() for key in job.params},
        examples=len(rows),
        metrics={
            "loss": float(torch.stack(losses).double().mean()),
            "seconds": time.perf_counter() - began,
            "steps": float(len(losses)),
            **({"skipped": float(descent.scale.skipped)} if site.fp16 else {}),
        },
        loaded=loaded,
        keys=len(leaves),
        momentum=extract_momentum(descent.optimizer, leaves, masks=options.mask) if options.carry_momentum else {},
    )


def _descent(leaves: Params, job: Job, site: ImageSite) -> Descent:
    """What moves these weights in the job's round."""
    options: WholeOptions = job.options
    rate = rate_factor(options.schedule, warmup=options.warmup, step=max(job.round, 1) - 1, steps=options.rounds)
    scale = LossScale(enabled=site.fp16, grows=True)
    optimizer = make_optimizer(leaves, replace(options, lr=options.lr * rate), masks=options.mask, skips=site.fp16)
    load_momentum(optimizer, leaves, job.momentum, masks=options.mask)
    return Descent(optimizer=optimizer, scale=scale, transform=gradient_chain(leaves, options, scale))


def _loss(leaves: Params, batch: Images, site: ImageSite, job: Job, *, step: int) -> Tensor:
    """The loss of this batch, from which gradients can be had."""
    options: WholeOptions = job.options
    seen = preprocess(site.vision, _augmented(batch, job, step=step))
    with site.autocast():
        logits = image_logits(site.vision, leaves, seen, dropout_mask=_drop(job, len(batch), site, step=step))
    labels = torch.from_numpy(batch.label).to(logits.device)
    return cross_entropy(logits.float(), labels, label_smoothing=options.label_smoothing)


def _augmented(batch: Images, job: Job, *, step: int) -> Tensor:
    """The batch's pixels, (n, height, width, channels) uint8, as this client and step see them."""
    options: WholeOptions = job.options
    pixels = torch.from_numpy(np.array(batch.pixels))
    if not options.crop and not options.flip:
        return pixels
    stream = torch_generator(options.seed, "augment", job.client, job.round, step)
    moved: Tensor = augment(pixels, padding=options.crop, flip=options.flip, generator=stream)
    return moved


def _drop(job: Job, count: int, site: ImageSite, *, step: int) -> Tensor | None:
    """The inverted-dropout mask of the head's input, (images, features), from the client's own generator."""
    p = job.options.dropout
    if not p:
        return None
    stream = torch_generator(job.options.seed, "dropout", job.client, job.round, step, "head")
    keep = torch.full((count, site.vision.hidden), 1 - p)
    return torch.bernoulli(keep, generator=stream).div_(1 - p).to(site.vision.device)


@torch.inference_mode()
def evaluate_whole(jobs: Sequence[Job], site: ImageSite) -> list[Update]:
    """Loss and metrics of every client, in the order of the jobs. Clients with one model share its passes."""
    began, logits = time.perf_counter(), dict[int, np.ndarray]()
    for places in same_models(jobs):
        rows = [images_of(site, jobs[k].client, jobs[k].options.split) for k in places]
        found = _all_logits(np.concatenate([own.pixels for own in rows]), jobs[places[0]].params, site)
        logits |= dict(zip(places, np.split(found, np.cumsum([len(own) for own in rows])[:-1]), strict=True))
    seconds = (time.perf_counter() - began) / max(1, len(jobs))
    return [_scored(job, logits[k], site, seconds=seconds) for k, job in enumerate(jobs)]


def same_models(jobs: Sequence[Job]) -> list[list[int]]:
    """The places of the jobs by their model: models are equal where all their tensors are the very same."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, job in enumerate(jobs):
        groups.setdefault(tuple(id(tensor) for tensor in job.params.values()), []).append(place)
    return list(groups.values())


def _all_logits(pixels: np.ndarray, params: Params, site: ImageSite) -> np.ndarray:
    placed = {key: tensor.to(site.vision.device) for key, tensor in params.items()}
    found = []
    for start in range(0, len(pixels), site.batch_images):
        with site.autocast():
            own = image_logits(site.vision, placed, preprocess(site.vision, pixels[start : start + site.batch_images]))
        found.append(own.float().cpu().numpy())
    return np.concatenate(found)


def _scored(job: Job, logits: np.ndarray, site: ImageSite, *, seconds: float) -> Update:
    options: EvaluateOptions = job.options
    rows = images_of(site, job.client, options.split)
    metrics = {**scores(site.data[job.client].task, rows.label, logits), "seconds": seconds}
    classes = by_class(rows.label, logits) if options.split == "test" else {}
    return Update(client=job.client, params=job.params, examples=len(rows), metrics=metrics, classes=classes)


def images_of(site: ImageSite, client: str, split: Split) -> Images:
    """A client's images of a split."""
    data = site.data[client]
    rows = {"train": data.train, "validation": data.validation, "test": data.test}[split]
    assert isinstance(rows, Images), "assembled from image tasks alone"
    return rows
