"""Example-level differential privacy of a client's training: DP-SGD with Poisson batches (`--dp example`).

Abadi et al. 2016, "Deep Learning with Differential Privacy", arXiv:1607.00133, algorithm 1. An example is in a batch
with probability q = L / n, and

    g = (1 / L) (sum_i g_i min(1, C / ||g_i||) + z C xi),   xi ~ N(0, I)

is the gradient of all that the client trains together: L is `--batch-size`, C is `--clip`. z is the least that keeps
`--epsilon` at `--delta` over all steps of the run, by privacy loss distributions (add or remove one example).

The gradients of single examples cost no pass more: in the pack each example is a client by itself, whose adapters and
head are those of its client. Training losses are not reported.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_fl.client.batching import dropout_masks, forward_to_heads, make_row, read_logits
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.local_training import LocalTrainer, num_steps, step_all, train
from atlas_fl.client.options import TrainOptions
from atlas_fl.params import Params
from atlas_fl.storage.extras import import_extra


def _accounting() -> Any:
    return import_extra("dp_accounting", extra="dp", asked="--dp example needs")


def _delta(examples: int, options: TrainOptions) -> float:
    """The delta of a client; by default n^-1.1, below one over its examples."""
    return examples**-1.1 if options.delta is None else options.delta


@lru_cache(maxsize=1024)
def epsilon_of(q: float, noise: float, steps: int, delta: float) -> float:
    """The epsilon of so many steps at this rate q and noise multiplier."""
    library = _accounting()
    accountant = library.pld.PLDAccountant(value_discretization_interval=1e-4 if noise > 0.5 else 1e-3)  # for speed
    accountant.compose(library.PoissonSampledDpEvent(q, library.GaussianDpEvent(noise)), steps)
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=1024)
def noise_of(q: float, steps: int, epsilon: float, delta: float) -> float:
    """The least noise multiplier of which so many steps at this rate q spend no more than epsilon."""
    library = _accounting()

    def event(noise: float) -> Any:
        return library.SelfComposedDpEvent(library.PoissonSampledDpEvent(q, library.GaussianDpEvent(noise)), steps)

    # a coarser grid rounds epsilon up by less than a hundredth, in a fifth of the time
    rough = partial(library.pld.PLDAccountant, value_discretization_interval=1e-3)
    return float(library.calibrate_dp_mechanism(rough, event, epsilon, delta, tol=1e-3))


def _rate(examples: int, options: TrainOptions) -> float:
    return min(1.0, options.batch_size / examples)


def noise_multiplier(examples: int, options: TrainOptions) -> float:
    """The z of a client with so many examples, which spends `epsilon` over the rounds of the run.

    >>> options = TrainOptions(seed=0, rounds=45, epochs=1, batch_size=16, epsilon=8.834, delta=1e-3)
    >>> round(noise_multiplier(160, options), 2)
    1.16
    """
    steps = options.rounds * num_steps(examples, options)
    return noise_of(_rate(examples, options), steps, options.epsilon, _delta(examples, options))


def spent_epsilon(examples: int, options: TrainOptions, *, round: int) -> float:
    """The epsilon that a client has spent after this round, if it has trained in every one."""
    noise, steps = noise_multiplier(examples, options), round * num_steps(examples, options)
    return epsilon_of(_rate(examples, options), noise, steps, _delta(examples, options))


def privacy_note(examples: Collection[int], options: TrainOptions) -> tuple[str, ...]:
    """One line with the budget and the noise of clients with so many examples; none without differential privacy."""
    if options.dp == "none":
        return ()
    noise = [noise_multiplier(count, options) for count in examples]
    chance = "n^-1.1 for n examples" if options.delta is None else f"{options.delta:g}"
    return (
        f"each training example has epsilon {options.epsilon:g} at delta {chance} over {options.rounds} rounds, by"
        f" noise of {min(noise):.2f} to {max(noise):.2f} times --clip; validation and test examples are not covered,"
        " and a simulation draws its noise from --seed",
    )


def private_step(active: Mapping[int, LocalTrainer], done: int, site: Site) -> None:
    """One step of each member by the clipped and noisy sum of its examples' gradients."""
    members = list(active.values())
    batches = [next(member.batches) for member in members]
    owners = [k for k, batch in enumerate(batches) for _ in range(len(batch))]
    copies = [_copy(members[k].params) for k in owners]
    if owners:
        singles = [batch.take(np.array([place])) for batch in batches for place in range(len(batch))]
        sources = [members[k].dropout(done) for k in owners]
        apart = [replace(source, path=(*source.path, number)) for number, source in enumerate(sources)]
        mask = dropout_masks(apart, device=site.backbone.device)
        row = make_row(singles, site)
        with forward_to_heads(row, copies, site, mask=mask) as features:
            with site.autocast():
                logits = read_logits(site.backbone, copies, features, mask=mask)
            losses = [
                members[k].loss(own, labels, single)
                for k, own, labels, single in zip(owners, logits, row.labels, singles, strict=True)
            ]
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    for k, member in enumerate(members):
        own = [copy for copy, owner in zip(copies, owners, strict=True) if owner == k]
        for name, gradient in noisy_sum(own, member.leaves, member, done).items():
            member.leaves[name].grad = gradient.div_(member.options.batch_size)
        member.losses.append(torch.tensor(float("nan")))
    step_all(members, done)


def _copy(params: Params) -> dict[str, Tensor]:
    """The same numbers as tensors whose gradient is apart."""
    return {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in params.items()}


def noisy_sum(copies: Sequence[Params], leaves: Params, member: LocalTrainer, done: int) -> dict[str, Tensor]:
    """The clipped gradients of these examples and the noise, by tensor; one that is not finite is left out."""
    options, bound = member.options, member.options.clip
    total = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    for copy in copies:
        gradients = {name: grad for name in leaves if (grad := copy[name].grad) is not None}
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(one) for one in gradients.values()]))
        if torch.isfinite(norm):
            for name, gradient in gradients.items():
                total[name].add_(gradient, alpha=min(1.0, bound / max(float(norm), 1e-12)))
    deviation = noise_multiplier(member.examples, options) * bound
    draw = partial(torch.normal, 0.0, deviation, generator=member.noise(done))
    return {name: one.add_(draw(size=one.shape).to(one)) for name, one in sorted(total.items())}


def train_privately(jobs: Sequence[Job], site: Site) -> list[Update]:
    """Every client's trained model, with the epsilon that it has spent among its metrics."""
    updates = train(jobs, site, step=private_step)
    return [
        replace(
            update, metrics={**update.metrics, "epsilon": spent_epsilon(update.examples, job.options, round=job.round)}
        )
        for job, update in zip(jobs, updates, strict=True)
    ]
