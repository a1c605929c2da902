"""One client while it trains: its batches, its leaves, its schedule and its optimizer."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from atlas_fl.clients.base import Job, Site, Update, line_of
from atlas_fl.clients.batches import TrainOptions, batches, num_steps, positions
from atlas_fl.clients.rows import Dropout
from atlas_fl.clients.schedule import rate_factor
from atlas_fl.models.backbone import Backbone
from atlas_fl.split.model import on_client
from atlas_fl.split.step import Cut
from atlas_fl.tree import HEAD, PRIVATE, digest
from atlas_fl.types import Params


def learning_rate(options: TrainOptions, *, step: int, steps: int) -> float:
    """The rate of a step (from 0) of `steps` in the whole run: linear warm-up, then the schedule down to zero.

    >>> o = TrainOptions(seed=0, lr=1.0, schedule="linear", warmup=0.2)
    >>> [round(learning_rate(o, step=s, steps=10), 3) for s in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.125]
    """
    return options.lr * rate_factor(options.schedule, warmup=options.warmup, step=step, steps=steps)


def move(optimizer: torch.optim.Optimizer, options: TrainOptions, *, round: int, done: int, steps: int) -> None:
    """A step of the optimizer after `done` of this round's `steps`, at that step's learning rate."""
    rate = learning_rate(options, step=(max(round, 1) - 1) * steps + done, steps=options.rounds * steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def example_loss(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy, or mean squared error where one output meets real numbers.

    `smoothing` is the share of a label that is spread over all classes. Of text it is the mean over all the batch's
    tokens that are to be written, as in transformers' causal models.
    """
    if labels.is_floating_point():
        return nn.functional.mse_loss(logits[:, 0], labels)
    return nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)


def trained_below(backbone: Backbone, names: Iterable[str], options: TrainOptions, cut: Cut) -> list[int]:
    """Where the trained tensors on the client's side of this cut stand among all that are trained, by their names."""
    trained = sorted(name for name in names if name != PRIVATE and not name.endswith(options.frozen))
    held = on_client(backbone, trained, blocks=cut.blocks, head=cut.head == "client")
    return [place for place, name in enumerate(trained) if name in held]


def joined_norms(own: Tensor, others: Tensor, places: Sequence[int]) -> Tensor:
    """The norms of a whole model's gradients, (own + others,), of one side's, which stand at `places`, and the rest.

    In the order of a whole model, because the norm of the norms is a sum and its last bits follow the order.
    """
    found = own.new_empty(len(own) + len(others))
    here = torch.zeros(len(found), dtype=torch.bool, device=own.device)
    here[list(places)] = True
    found[here], found[~here] = own, others.to(own)
    return found


def shared_above(backbone: Backbone, params: Params, cut: Cut | None) -> tuple[str, ...]:
    """The names, sorted, of the adapters that a client shares with its cluster: all above its cut; none without."""
    if cut is None or cut.shared is None:
        return ()
    own = on_client(backbone, params, blocks=cut.blocks, head=True)
    return tuple(sorted(name for name in params if name not in own and not name.startswith(HEAD)))


def adamw(leaves: Sequence[Tensor], options: TrainOptions) -> torch.optim.AdamW:
    """The optimizer of these leaves, which may be none."""
    on_cpu = all(leaf.device.type == "cpu" for leaf in leaves)
    return torch.optim.AdamW(
        [{"params": list(leaves)}],
        lr=options.lr,
        weight_decay=options.weight_decay,
        fused=on_cpu or None,
        foreach=None,
    )


LOSS_SCALE = 2.0**10
"""What a client's loss is multiplied by under fp16, which ends at 65504 and has 6e-5 as its least normal number
(Micikevicius et al. 2018). Less than is usual, because a round has few steps and each overflow costs one."""


class Member:
    """One client of a pack while it trains: its leaves, its batches and its optimizer."""

    def __init__(self, job: Job, site: Site, *, above: Cut | None = None) -> None:
        """`above` is the cut above which all of the job's model lies, where this is the server's half of it."""
        options: TrainOptions = job.options
        self.job, self.options = job, options
        # Sorted, because the clipped norm is a sum and its last bits follow the order.
        self.params = {
            key: tensor.detach().to(site.backbone.device, copy=True).requires_grad_(not key.endswith(options.frozen))
            for key, tensor in sorted(job.params.items())
        }
        # Read back from the leaves themselves: what is hashed is what computes.
        self.loaded = digest(self.params) if options.hash_loaded else None
        data = site.data[job.client].splits["train"]
        self.examples = len(positions(len(data), job.client, options))
        self.steps = num_steps(self.examples, options)
        self.batches = batches(data, job)
        self.leaves = [leaf for leaf in self.params.values() if leaf.requires_grad]
        cut = job.cut or above
        self.cluster = None if cut is None else cut.shared
        self.shared = shared_above(site.backbone, self.params, cut)
        self.optimizer = adamw([leaf for key, leaf in self.params.items() if key not in self.shared], options)
        self.losses: list[Tensor] = []
        self.line = line_of(job, site)
        self._below = [] if job.cut is None else trained_below(site.backbone, self.params, self.options, job.cut)
        # A power of two, so that scaling changes no digit of what neither overflows nor vanishes.
        self.loss_scale = LOSS_SCALE if site.fp16 else 1.0

    def dropout(self, done: int) -> Dropout:
        """Where the masks of this step come from."""
        path = (self.job.client, self.job.round, done)
        return Dropout(p=self.options.dropout, seed=self.options.seed, path=path)

    def norms(self) -> Tensor:
        """The norm of every gradient, (leaves,) float32, in the order of the names."""
        found = [torch.linalg.vector_norm(leaf.grad) for leaf in self.leaves if leaf.grad is not None]
        return torch.stack(found) if found else torch.zeros(0)

    def step(self, done: int, *, norms: Tensor | None = None) -> None:
        """Clip, move, forget the gradients; `norms` as for `clip`."""
        if self.clip(norms=norms):
            self.move(done)

    def clip(self, *, norms: Tensor | None = None) -> bool:
        """Whether the client moves: not where a scaled gradient has overflown, which is forgotten and halves the scale.

        `norms` are those of all gradients of a model of which only one side is here.
        """
        if self.loss_scale > 1 and not self._unscale():
            self.loss_scale /= 2
            self.forget()
            return False
        if self.options.clip > 0:
            norms = self.norms() if norms is None else norms
            if self.line is not None:
                self.line.share_norms(norms, self._below)
            total = torch.linalg.vector_norm(norms)
            torch.nn.utils.clip_grads_with_norm_(self.leaves, self.options.clip, total)
        return True

    def move(self, done: int) -> None:
        """One optimizer step of what is the client's own, at the rate of this step of its schedule."""
        move(self.optimizer, self.options, round=self.job.round, done=done, steps=self.steps)
        self.forget()

    def forget(self) -> None:
        """Without gradients from here on."""
        for leaf in self.leaves:
            leaf.grad = None

    def _unscale(self) -> bool:
        """Whether all gradients are finite; they are divided by the scale of the loss."""
        gradients = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        for gradient in gradients:
            gradient.div_(self.loss_scale)
        return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)

    def update(self, seconds: float) -> Update:
        """What goes back to the server."""
        loss = float(torch.stack(self.losses).double().mean()) if self.losses else math.nan
        return Update(
            client=self.job.client,
            params={key: leaf.detach().cpu() for key, leaf in self.params.items()},
            examples=self.examples,
            metrics={"loss": loss, "seconds": seconds, "steps": float(len(self.losses))},
            loaded=self.loaded,
            keys=len(self.params),
            crossed={} if self.line is None else dict(self.line.crossed),
        )
