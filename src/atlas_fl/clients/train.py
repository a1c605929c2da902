"""Local training of a pack: every client gets the result that it would get alone."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import torch

from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.clients.batches import TrainOptions as TrainOptions
from atlas_fl.clients.batches import batches as batches
from atlas_fl.clients.batches import num_steps as num_steps
from atlas_fl.clients.batches import positions as positions
from atlas_fl.clients.member import Member
from atlas_fl.clients.member import example_loss as example_loss
from atlas_fl.clients.member import learning_rate as learning_rate
from atlas_fl.clients.packs import rows
from atlas_fl.clients.rows import dropout_masks, forward, make_row
from atlas_fl.clients.shared import SharedSet, shared_sets, step_all
from atlas_fl.types import Params

Watch: TypeAlias = Callable[[int, Mapping[int, Params]], Collection[int]]
"""(steps done, live params by the job's place) -> the places whose training ends here."""

Step: TypeAlias = Callable[[Mapping[int, Member], int, Site], None]
"""(the active members by their job's place, steps done, site): one optimizer step of each."""


def whole_step(sets: Sequence[SharedSet]) -> Step:
    """A step where all blocks are here; those above a cut in the server's name, some of them in these sets."""

    def step(active: Mapping[int, Member], done: int, site: Site) -> None:
        members, counts = list(active.values()), dict[Member, int]()
        # Only those who share a set are together in a pack that may be too large.
        parts = rows([member.job for member in members], site) if sets else [list(range(len(members)))]
        for places in parts:
            counts |= _gradients([members[place] for place in places], done, site)
        step_all(counts, done, sets)

    return step


def _gradients(members: Sequence[Member], done: int, site: Site) -> dict[Member, int]:
    """How many examples each member's loss is a mean over; its gradients lie in its leaves."""
    row = make_row([next(member.batches) for member in members], device=site.backbone.device)
    mask = dropout_masks([member.dropout(done) for member in members], device=site.backbone.device)
    lines = [member.line for member in members]
    with forward(row, [member.params for member in members], site, mask=mask, lines=lines) as logits:
        losses = [
            example_loss(own, labels, smoothing=member.options.label_smoothing)
            for own, labels, member in zip(logits, row.labels, members, strict=True)
        ]
        scaled = [loss * member.loss_scale for loss, member in zip(losses, members, strict=True)]
        torch.stack(scaled).sum().backward()  # type: ignore[no-untyped-call]
    for member, loss in zip(members, losses, strict=True):
        member.losses.append(loss.detach())
    return {member: len(labels) for member, labels in zip(members, row.labels, strict=True)}


def train(jobs: Sequence[Job], site: Site, *, watch: Watch | None = None, step: Step | None = None) -> list[Update]:
    """Every client's trained model, in the order of the jobs.

    The clients' mini-batches go through the frozen backbone together. Losses are means over a client's own batch
    and are summed over clients, so that each one's gradient is its own. A client leaves when its steps are done, or
    when `watch`, which sees the pack after every step, says so.
    """
    began = time.perf_counter()
    members = [Member(job, site) for job in jobs]
    step = step or whole_step(shared_sets(members))
    active = {place: member for place, member in enumerate(members) if member.steps > 0}
    done = 0
    while active:
        step(active, done, site)
        done += 1
        ended = () if watch is None else watch(done, {place: member.params for place, member in active.items()})
        active = {k: member for k, member in active.items() if member.steps > done and k not in ended}
    seconds = (time.perf_counter() - began) / max(1, len(members))
    return [member.update(seconds) for member in members]
