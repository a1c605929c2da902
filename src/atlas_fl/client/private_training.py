"""Training with example-level differential privacy: DP-SGD with Poisson batches (`--dp example`).

Abadi et al. 2016, "Deep Learning with Differential Privacy", arXiv:1607.00133, algorithm 1. An example is in a batch
with probability q = L / n, and

    g = (1 / L) (sum_i g_i min(1, C / ||g_i||) + z C xi),   xi ~ N(0, I)

is the gradient of all that the client trains together: L is `--batch-size`, C is `--clip`, z is of `client.privacy`.

The gradients of single examples cost no pass more: in the pack each example is a client by itself, whose adapters and
head are those of its client. Training losses are not reported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256

import numpy as np
import torch

from atlas_fl.client.batching import dropout_masks, forward_to_heads, make_row, read_logits
from atlas_fl.client.draws import secret_of_question
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.local_training import LocalTrainer, num_steps, step_all, train
from atlas_fl.client.privacy import noise_multiplier, spending
from atlas_fl.params import LORA_A, Params, digest


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
        for name, gradient in noisy_sum(own, member, done).items():
            member.leaves[name].grad = gradient.div_(member.options.batch_size)
        member.losses.append(torch.tensor(float("nan")))
    step_all(members, done)


def _copy(params: Params) -> dict[str, torch.Tensor]:
    """The same numbers as tensors whose gradient is apart."""
    return {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in params.items()}


def noisy_sum(copies: Sequence[Params], member: LocalTrainer, done: int) -> dict[str, torch.Tensor]:
    """The clipped gradients of these examples and the noise, by tensor; one that is not finite is left out."""
    bound = member.options.clip
    total = member.noise(done, deviation=noise_multiplier(member.whole_examples, member.options) * bound)
    names = [name for name in total if copies and copies[0][name].grad is not None]
    stacked = [torch.stack([grad for copy in copies if (grad := copy[name].grad) is not None]) for name in names]
    if stacked:
        norms = torch.stack([torch.linalg.vector_norm(one.flatten(1), dim=1) for one in stacked]).norm(dim=0)
        factors = torch.where(norms.isfinite(), bound / norms.clamp(min=bound), 0.0)
        for name, one in zip(names, stacked, strict=True):
            total[name] += torch.tensordot(factors[factors > 0], one[factors > 0], dims=1)
    return total


def _question(job: Job, site: Site) -> str:
    """SHA-256 over all that the answer to a job follows from but the secret, the same of both halves.

    The hash of the settings is among it, so that a setting which this list forgets makes another question too.
    """
    trees = {**job.sent, **job.kept}
    beside = {f"{kind}/{key}": tensor for kind, tree in trees.items() for key, tensor in tree.items()}
    # an audit's choice, which no draw follows; both halves have one division, and draw apart
    options = replace(job.options, hash_loaded=False, half=None if job.options.half is None else 0)
    scales = [site.scale(len(tensor)) for key, tensor in sorted(job.params.items()) if key.endswith(LORA_A)]
    examples = site.data[job.client].splits["train"].digest
    parts = (digest({**job.params, **beside}), examples, job.round, options, scales, site.settings, site.arithmetic)
    return ("halves " if options.half == 0 else "") + sha256(repr(parts).encode()).hexdigest()


def _pay(job: Job, site: Site, question: str) -> int:
    """The steps that a client has paid for, those of this job among them."""
    examples = site.data[job.client].examples
    if site.pay is None:
        return job.round * num_steps(examples, job.options)
    return site.pay(question, examples, job.options, num_steps(examples, job.options, round=job.round))


def train_privately(jobs: Sequence[Job], site: Site) -> list[Update]:
    """Every client's trained model, with what it has spent among its metrics.

    A site pays before it trains (`Site.pay`); a simulated client has paid for every round up to this one. Batches and
    noise of a client with a secret follow from that and from the question: the same one is answered alike, and by
    another model, scale or precision, other options, settings or examples nothing of the noise can be taken away again.
    """
    questions = {job.client: _question(job, site) for job in jobs if site.pay or site.secrets}
    paid = {job.client: _pay(job, site, questions.get(job.client, "")) for job in jobs}
    secrets = {name: secret_of_question(site.secrets[name], words) for name, words in questions.items() if site.secrets}
    spent = []
    for job, update in zip(jobs, train(jobs, replace(site, secrets=secrets), step=private_step), strict=True):
        is_round = job.options.half is None
        costs = spending(update.examples, job.options, paid_steps=paid[job.client]) if is_round else {}
        spent.append(replace(update, metrics={**update.metrics, **costs}))
    return spent
