"""Local training of clients in packs: batches, learning-rate schedule, the training loop, each client as if alone.

The schedule runs over the steps of the whole run: a linear warm-up, then constant, linear, cosine or step decay.
`LocalTrainer` is one client while it trains: its batches, leaves, schedule and optimizer (`client.optimizer`).
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count, islice
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.client.batching import Dropout, dropout_masks, forward_to_heads, make_row, read_logits
from atlas_fl.client.draws import Draws
from atlas_fl.client.job import Job, Site, Update, log_prior, without_empty
from atlas_fl.client.optimizer import GradientMean, LossScale, gradient_chain, gradient_norms, make_optimizer
from atlas_fl.client.options import TrainOptions
from atlas_fl.client.preferences import odds_ratio_loss, preference_loss, reference_log_probs, sequence_log_probs
from atlas_fl.methods.fedpac import alignment_loss
from atlas_fl.methods.prior_correction import correct_logits
from atlas_fl.methods.registry import SECOND_MODELS
from atlas_fl.methods.second_model import SecondModel
from atlas_fl.models.backbone import Backbone
from atlas_fl.models.registry import apply_layers
from atlas_fl.models.tokenization import EncodedExamples
from atlas_fl.models.vision import augment
from atlas_fl.params import PRIVATE, Params, digest, with_frozen
from atlas_fl.sparse.masked_sgd import extract_momentum, load_momentum
from atlas_fl.split.channel import Cut
from atlas_fl.split.model import select_client_side

SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "step": lambda done: 0.1 ** ((done >= 0.5) + (done >= 0.75)),
}
"""Share of the peak by the share of the steps after the warm-up that are done, 0 to 1."""


def num_steps(examples: int, options: TrainOptions, *, round: int = 1) -> int:
    """Steps of one round of a client with so many examples, those of `head_epochs` among them."""
    first = num_head_steps(examples, options, round=round) if options.head_epochs else 0
    return first + _num_round_steps(examples, options)


def num_head_steps(examples: int, options: TrainOptions, *, round: int = 1) -> int:
    """First steps of a round, in which the head moves alone: those of `head_epochs`, or else half of the round's."""
    if not options.is_head_first or options.is_personal(round):
        return 0
    if options.head_epochs:
        return _num_round_steps(examples, replace(options, epochs=options.head_epochs))
    return math.ceil(_num_round_steps(examples, options) / 2)


def _num_round_steps(examples: int, options: TrainOptions) -> int:
    full = options.epochs * math.ceil(examples / options.batch_size)
    return full if options.max_steps is None else min(full, options.max_steps)


def positions(count: int, client: str, options: TrainOptions, *, secret: bytes | None) -> np.ndarray:
    """Which of a client's `count` examples these options train on, (m,) int64 ascending.

    Halves are alternate examples, with a secret alternate ones of an order that it draws; the first has the odd one.
    """
    draws = Draws(client=client, seed=options.seed, secret=secret)
    index = np.arange(count)
    if options.half is not None:
        order = index if secret is None else draws.generator("halves").permutation(index)
        index = np.sort(order[options.half :: 2])
    if options.most is None or options.most >= len(index):
        return index
    subset = draws.generator("subset", options.half or 0, asked=(options.most,))
    return np.sort(subset.choice(index, size=options.most, replace=False))


def batches(data: EncodedExamples, job: Job, *, secret: bytes | None) -> Iterator[EncodedExamples]:
    """The client's mini-batches of this round, in the order that its own generator draws (`client.draws`).

    Passes over the head (`head_epochs`) are drawn apart, so that what follows has the batches of a round without them.
    A half makes as many passes as the steps of the round need.
    """
    options: TrainOptions = job.options
    draws = Draws(client=job.client, seed=options.seed, secret=secret)
    index = positions(len(data), job.client, options, secret=secret)
    examples = len(index) if options.half is None else len(data)
    first = num_head_steps(examples, options, round=job.round) if options.head_epochs else 0
    asked = (options.batch_size, options.max_steps, options.half, options.most)
    take = data.take_pairs if options.learns_preferences else data.take
    chunks_of = _chunks if options.dp == "none" else _poisson_batches
    chunks = chain(
        islice(chunks_of(index, draws, job.round, "head", asked=asked, size=options.batch_size), first),
        islice(
            chunks_of(index, draws, job.round, asked=asked, size=options.batch_size),
            num_steps(examples, options, round=job.round) - first,
        ),
    )
    for step, chunk in enumerate(chunks):
        yield _augment(take(chunk), job, draws, step=step)


def _chunks(
    index: np.ndarray, draws: Draws, *path: object, asked: tuple[object, ...], size: int
) -> Iterator[np.ndarray]:
    """Batches of passes without end; none of no examples."""
    for epoch in count() if len(index) else ():
        order = draws.generator("order", *path, epoch, asked=asked).permutation(index)
        yield from (order[start : start + size] for start in range(0, len(order), size))


def _poisson_batches(
    index: np.ndarray, draws: Draws, *path: object, asked: tuple[object, ...], size: int
) -> Iterator[np.ndarray]:
    """Batches without end of examples that are each in one by chance, `size` of them on average."""
    for step in count():
        chance = draws.generator("order", *path, step, asked=asked).random(len(index))
        yield index[chance * len(index) < size]


def _augment(batch: EncodedExamples, job: Job, draws: Draws, *, step: int) -> EncodedExamples:
    """The batch with its images, if it has any, as this client and step see them."""
    options: TrainOptions = job.options
    if batch.pixels is None or not (options.crop or options.flip):
        return batch
    stream = draws.torch_generator("augment", *_round_path(job), step)
    seen = augment(torch.from_numpy(batch.pixels), padding=options.crop, flip=options.flip, generator=stream)
    return replace(batch, pixels=seen.numpy(), taken_from=None)


def _round_path(job: Job) -> tuple[object, ...]:
    """Path of a client's draws in a round: halves draw apart."""
    return (job.round,) if job.options.half is None else (job.round, "half", job.options.half)


def learning_rate(options: TrainOptions, *, step: int, steps: int) -> float:
    """The rate of a step (from 0) of `steps` in the whole run: linear warm-up, then the schedule down to zero.

    >>> o = TrainOptions(seed=0, lr=1.0, schedule="linear", warmup=0.2)
    >>> [round(learning_rate(o, step=s, steps=10), 3) for s in (0, 1, 2, 6, 9)]
    [0.5, 1.0, 1.0, 0.5, 0.125]
    """
    warm = round(options.warmup * steps)
    if step < warm:
        return options.lr * ((step + 1) / warm)
    return options.lr * SCHEDULES[options.schedule]((step - warm) / max(1, steps - warm))


def optimizer_step(
    optimizer: torch.optim.Optimizer, options: TrainOptions, *, round: int, done: int, steps: int, factor: float = 1.0
) -> None:
    """A step of the optimizer after `done` of this round's `steps`, at `factor` times the rate of the schedule."""
    past = max(round, 1) - 1
    if options.rate_by_round:
        rate = learning_rate(options, step=past, steps=options.rounds)
    else:
        rate = learning_rate(options, step=past * steps + done, steps=options.rounds * steps)
    for group in optimizer.param_groups:
        group["lr"] = rate * factor
    optimizer.step()


def example_loss(logits: Tensor, labels: Tensor, *, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy, mean squared error where one output meets real numbers, or binary for several labels a row.

    `smoothing` is the share of a label that is spread over all classes. Of text it is the mean over all the batch's
    tokens that are to be written, as in transformers' causal models.
    """
    if labels.ndim == 2:
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)
    if labels.is_floating_point():
        return nn.functional.mse_loss(logits[:, 0], labels)
    return nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)


def client_side_indices(backbone: Backbone, names: Iterable[str], options: TrainOptions, cut: Cut) -> list[int]:
    """Where the trained tensors on the client's side of this cut stand among all that are trained, by their names."""
    # in a cut model the same ones train in every round
    trained = sorted(name for name in names if name != PRIVATE and options.trains(name, round=1))
    client_side = select_client_side(backbone, trained, blocks=cut.blocks, head=cut.head == "client")
    return [index for index, name in enumerate(trained) if name in client_side]


def merge_norms(own_norms: Tensor, others: Tensor, indices: Sequence[int]) -> Tensor:
    """The norms of a whole model's gradients, (own + others,), of one side's, which stand at `indices`, and the rest.

    In the order of a whole model, because the norm of the norms is a sum and its last bits follow the order.
    """
    norms = own_norms.new_empty(len(own_norms) + len(others))
    here = torch.zeros(len(norms), dtype=torch.bool, device=own_norms.device)
    here[list(indices)] = True
    norms[here], norms[~here] = own_norms, others.to(own_norms)
    return norms


def second_of(options: TrainOptions, site: Site) -> SecondModel:
    """The kind of these options' model beside a companion."""
    return SECOND_MODELS[options.second_model](StrategyOptions(scale=site.scale), second_weight=options.second_weight)


def begin_training(job: Job, site: Site) -> tuple[Params, Params]:
    """(the model that a client begins its training with, what stands beside it)."""
    second = second_of(job.options, site)
    companion = second.companion(job.params, job.sent.get("companion", {}))
    return (companion, {}) if second.begins_there and companion else (job.params, companion)


class LocalTrainer:
    """One client of a pack while it trains: its leaves, its batches and its optimizer."""

    def __init__(self, job: Job, site: Site) -> None:
        options: TrainOptions = job.options
        self.job, self.options = job, options
        self._second = second_of(options, site)
        start, companion = begin_training(job, site)
        # Sorted, because the clipped norm is a sum and its last bits follow the order.
        self.params = self._leaves_of(start, site)
        self.gate = self._leaves_of(job.kept.get("gate", {}), site)
        self._companion = {key: tensor.to(site.backbone.device) for key, tensor in companion.items()}
        # Read back from the leaves themselves: what is hashed is what computes, or what that was made of.
        loaded = self.params if start is job.params else job.params
        self.loaded = digest(with_frozen(loaded, self._frozen)) if options.hash_loaded else None
        data = site.data[job.client].splits["train"]
        secret = site.secrets.get(job.client)
        self.examples = len(positions(len(data), job.client, options, secret=secret))
        # a half takes the steps of the round, whatever its number of batches
        whole = self.whole_examples = self.examples if options.half is None or not self.examples else len(data)
        self.steps = num_steps(whole, options, round=job.round)
        self.head_steps = num_head_steps(whole, options, round=job.round)
        self.batches = batches(data, job, secret=secret)
        self._draws = Draws(client=job.client, seed=options.seed, secret=secret)
        self._family, self._autocast = site.backbone.family, site.autocast
        self.leaves = {key: leaf for key, leaf in (*self.params.items(), *self.gate.items()) if leaf.requires_grad}
        self.scale = LossScale(enabled=site.fp16, grows=site.trainable == "full")
        self._tells_skipped = site.fp16 and site.trainable == "full"
        self.optimizer = make_optimizer(self.leaves, options, masks=job.mask, skips=site.fp16)
        load_momentum(self.optimizer, self.leaves, job.kept.get("momentum", {}), masks=job.mask)
        self.prior = log_prior(job, site)
        rewarded = options.dpo_beta is not None
        self._reference = reference_log_probs(job.client, data, site) if rewarded else np.empty(0, np.float32)
        self.losses: list[Tensor] = []
        self.tells_norms = options.clip > 0 or site.fp16
        """As one side of a cut model it tells the other the norms of its gradients, and thereby that they overflow."""
        self._mean = GradientMean() if options.control_variates and not options.is_personal(job.round) else None
        self._transform = gradient_chain(
            self.leaves,
            replace(
                options,
                seed=int(self._draws.generator("term", *_round_path(job)).integers(2**31)),
                clip=options.clip if options.dp == "none" else 0.0,  # examples are clipped each
            ),
            self.scale,
            anchor=job.sent.get("anchor", {}),
            correction=job.sent.get("correction", {}),
            frozen=self._frozen,
            mean=self._mean,
        )

    def _leaves_of(self, tensors: Params, site: Site) -> dict[str, Tensor]:
        return {
            key: tensor.detach()
            .to(site.backbone.device, copy=True)
            .requires_grad_(self.options.trains(key, round=self.job.round))
            for key, tensor in sorted(tensors.items())
        }

    @property
    def model(self) -> Params:
        """Model that this client computes with: its parameters, or a second model combined with the shared one."""
        return self._second.combine(self.params, self._companion, self.gate) if self._companion else self.params

    @property
    def _frozen(self) -> Params:
        """Frozen companion of the adapter, as the server has sent it."""
        return self._companion if self.options.second_model == "frozen" else {}

    def dropout(self, done: int) -> Dropout:
        """Where the masks of this step come from."""
        path = (*_round_path(self.job), done)
        return Dropout(p=self.options.dropout, draws=self._draws, path=path)

    def noise(self, done: int, *, deviation: float) -> dict[str, Tensor]:
        """Gaussian noise of this step for every leaf, under differential privacy."""
        sizes = {name: leaf.numel() for name, leaf in sorted(self.leaves.items())}
        drawn = self._draws.normals("noise", *_round_path(self.job), done, count=sum(sizes.values())) * deviation
        parts = zip(sizes, torch.split(drawn, list(sizes.values())), strict=True)
        return {name: part.view_as(self.leaves[name]).to(self.leaves[name]) for name, part in parts}

    def loss(self, logits: Tensor, labels: Tensor, batch: EncodedExamples) -> Tensor:
        """Loss of a batch: of its labels or tokens, or of its preferences."""
        if not self.options.learns_preferences:
            corrected = correct_logits(logits, self.prior)
            return example_loss(corrected, labels, smoothing=self.options.label_smoothing)
        log_probs = sequence_log_probs(logits, labels, batch.num_targets.tolist())
        if self.options.dpo_beta is None:
            counts = torch.from_numpy(batch.num_targets).to(log_probs)
            return odds_ratio_loss(log_probs, counts, weight=self.options.orpo_lambda or 0.0)
        assert batch.taken_from is not None, "pairs are taken from a split"
        reference = torch.from_numpy(self._reference[batch.taken_from[1]]).to(logits.device)
        beta, smoothing = self.options.dpo_beta, self.options.label_smoothing
        return preference_loss(log_probs, reference, beta=beta, smoothing=smoothing)

    def objective(self, loss: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """Objective without the terms of the gradient chain: the loss, and the pull of these features.

        They are those that enter the head.
        """
        centroids = self.job.sent.get("centroids")
        if not centroids:
            return loss
        with self._autocast():
            features = apply_layers(self._family.head[:-1], self.params, features)
        return loss + self.options.feature_alignment * alignment_loss(features, labels, centroids)

    def norms(self) -> Tensor:
        """The norm of every gradient, (leaves,) float32, in the order of the names."""
        return gradient_norms(self.leaves)

    def step(self, done: int, *, norms: Tensor | None = None) -> None:
        """One optimizer step at the rate of its schedule; none where a scaled gradient overflows.

        Gradients are unscaled, clipped and given the client's terms first, and cleared at the end. What does not move
        in this step loses its gradient. `norms` are those of all gradients of a model of which only one side is here.
        """
        is_head_step = done < self.head_steps
        for name, leaf in self.leaves.items():
            if not self.options.moves(name, round=self.job.round, is_head_step=is_head_step):
                leaf.grad = None
        if self._transform(self.leaves, norms):
            options, factor = self.options, self.options.head_rate if is_head_step else 1.0
            optimizer_step(self.optimizer, options, round=self.job.round, done=done, steps=self.steps, factor=factor)
            self._second.after_step(self.leaves)
        for leaf in self.leaves.values():
            leaf.grad = None

    def update(self, seconds: float) -> Update:
        """Answer to the server."""
        loss = float(torch.stack(self.losses).double().mean()) if self.losses else math.nan
        skipped = {"skipped": float(self.scale.skipped)} if self._tells_skipped else {}
        head_steps = {"head_steps": float(self.head_steps)} if self.head_steps else {}
        return Update(
            client=self.job.client,
            params={key: leaf.detach().cpu() for key, leaf in self.params.items()},
            examples=self.examples,
            metrics={"loss": loss, "seconds": seconds, "steps": float(len(self.losses)), **head_steps, **skipped},
            loaded=self.loaded,
            keys=len(self.params) + len(self._frozen),
            reported=without_empty({"control": {} if self._mean is None else self._mean.mean()}),
            kept=without_empty(
                {
                    "momentum": extract_momentum(self.optimizer, self.leaves, masks=self.job.mask)
                    if self.options.carry_momentum
                    else {},
                    "gate": {key: leaf.detach().cpu() for key, leaf in self.gate.items()},
                }
            ),
        )


def step_all(members: Iterable[LocalTrainer], done: int) -> None:
    """One optimizer step of these clients."""
    for member in members:
        member.step(done)


Watch: TypeAlias = Callable[[int, Mapping[int, Params]], Collection[int]]
"""(steps done, live params by the job's place) -> the places whose training ends here."""

Step: TypeAlias = Callable[[Mapping[int, LocalTrainer], int, Site], None]
"""(the active members by their job's place, steps done, site): one optimizer step of each."""


def whole_step(active: Mapping[int, LocalTrainer], done: int, site: Site) -> None:
    """A step where all blocks are here: one row of all members, or on the stock path a row of each."""
    members = list(active.values())
    for part in [[member] for member in members] if site.backbone.family.stock else [members]:
        _compute_gradients(part, done, site)
    step_all(members, done)


def _compute_gradients(members: Sequence[LocalTrainer], done: int, site: Site) -> None:
    """Each member's gradients, which lie in its leaves."""
    batches = [next(member.batches) for member in members]
    row = make_row(batches, site)
    mask = dropout_masks([member.dropout(done) for member in members], device=site.backbone.device)
    models = [member.model for member in members]
    with forward_to_heads(row, models, site, mask=mask) as features:
        with site.autocast():
            logits = read_logits(site.backbone, models, features, mask=mask)
        losses = [
            member.loss(client_logits, labels, batch)
            for client_logits, labels, batch, member in zip(logits, row.labels, batches, members, strict=True)
        ]
        objectives = [
            member.objective(loss, own, labels)
            for member, loss, own, labels in zip(members, losses, features, row.labels, strict=True)
        ]
        scaled = [objective * member.scale.value for objective, member in zip(objectives, members, strict=True)]
        torch.stack(scaled).sum().backward()  # type: ignore[no-untyped-call]
    for member, loss in zip(members, losses, strict=True):
        member.losses.append(loss.detach())


def train(jobs: Sequence[Job], site: Site, *, watch: Watch | None = None, step: Step = whole_step) -> list[Update]:
    """Every client's trained model, in the order of the jobs.

    The clients' mini-batches go through the frozen backbone together. Losses are means over a client's own batch
    and are summed over clients, so that each one's gradient is its own. A client leaves when its steps are done, or
    when `watch`, which sees the pack after every step, says so.
    """
    began = time.perf_counter()
    members = [LocalTrainer(job, site) for job in jobs]
    active = {index: member for index, member in enumerate(members) if member.steps > 0}
    done = 0
    while active:
        step(active, done, site)
        done += 1
        ended = () if watch is None else watch(done, {index: member.params for index, member in active.items()})
        active = {k: member for k, member in active.items() if member.steps > done and k not in ended}
    seconds = (time.perf_counter() - began) / max(1, len(members))
    return [member.update(seconds) for member in members]
