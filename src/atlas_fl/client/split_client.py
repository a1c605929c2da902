"""The client half of a cut model: train, evaluate, fingerprint and importance with the server's half elsewhere.

    client forward -> rows up -> (server) -> gradients down -> client backward -> clip, step

With the head on the server a step is one request: rows and labels go up, the gradient comes down. With the head
here it is two: rows up and features down, their gradient up and that of the rows down. The norms of the client's
gradients go up with its next request, or with its answer to the job; those of the server's come with the gradient.
Loop, batches, optimizer and scores are those of a whole model (`client.local_training`, `client.evaluation`).

For a plan, rows cross as in training. A gradient comes down only where something here is measured: a fingerprint of the
last blocks asks nothing of those below.
"""

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from atlas_fl.client import batching, evaluation, fingerprint, importance, local_training, split_server
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.options import EvaluateOptions, FingerprintOptions, ImportanceOptions
from atlas_fl.errors import ProtocolError
from atlas_fl.models.backbone import head_logits
from atlas_fl.params import Params
from atlas_fl.split.channel import NORMS, Cut, encode_up
from atlas_fl.split.codec import ROWS, read_message, simulated_secret
from atlas_fl.split.model import client_forward
from atlas_fl.storage.tensors import encode_tensors

ServerLink: TypeAlias = Callable[[str, int, split_server.Payloads], split_server.Payloads]
"""(`loss`, `features`, `gradient` or `score`; steps before; messages) -> the answer of the other side of the cut."""


@dataclass(kw_only=True, eq=False)
class ClientSide:
    """One job's way through the cut."""

    cut: Cut
    indices: tuple[int, ...]
    """Indices of the client's trained tensors among those of the whole model."""
    server: ServerLink
    secret: bytes | None
    """Its noise is drawn from it."""
    closing: dict[str, bytes] = field(default_factory=dict)
    """Messages that the last step left to be sent."""

    def step(self, active: Mapping[int, local_training.LocalTrainer], done: int, site: Site) -> None:
        """One optimizer step of the job's model (`client.local_training.Step`)."""
        (member,) = active.values()
        batch = next(member.batches)
        row = batching.collate_packed([batch], device=site.backbone.device)
        mask = batching.dropout_masks([member.dropout(done)], device=site.backbone.device)

        def head_loss(read: Tensor) -> Tensor:
            with site.autocast():
                (logits,) = batching.read_logits(site.backbone, [member.params], [read], mask=mask)
            return member.loss(logits, row.labels[0], batch)

        with batching.client_side_forward(row, [member.params], site, blocks=self.cut.blocks, mask=mask) as hidden:
            got, loss = self.exchange(hidden, row, done, head_loss, scale=member.scale.value)
            member.losses += [] if loss is None else [loss]
            if hidden.requires_grad:
                hidden.backward(rows_of(got, "gradient", like=hidden))  # type: ignore[no-untyped-call]
        self.closing = {}
        norms = None
        if member.tells_norms:
            own_norms = member.norms()
            norms = local_training.merge_norms(own_norms, self._others(got, own_norms), self.indices)
            self.closing["0/control"] = encode_tensors({NORMS: own_norms})
        member.step(done, norms=norms)

    def _others(self, got: split_server.Payloads, own_norms: Tensor) -> Tensor:
        """The norms of the server's gradients, (tensors,) float32; raises `ProtocolError` for anything else."""
        others = read_message(message_in(got, "control")).get(NORMS)
        placed = others is not None and all(0 <= at < len(own_norms) + len(others) for at in self.indices)
        if others is None or others.dtype is not torch.float32 or others.ndim != 1 or not placed:
            raise ProtocolError("the server's norms are of other tensors; install its version of atlas-fl")
        if len(set(self.indices)) != len(own_norms):
            raise ProtocolError("the server names other tensors than are trained here; install its version")
        return others

    def up(self, hidden: Tensor, row: batching.PackedBatch) -> dict[str, bytes]:
        """The rows, with all that the server needs to go on from them."""
        reads = row.target_positions[0]
        beside = {"lengths": row.lengths[0]} | ({} if reads is None else {"places": reads})
        activation = encode_up(hidden, "activation", cut=self.cut, secret=self.secret, extra=beside)
        sent = {**self.closing, "0/activation": activation}
        if self.cut.head == "server":
            sent["0/label"] = encode_tensors({"labels": row.labels[0]})
        return sent

    def exchange(
        self,
        hidden: Tensor,
        row: batching.PackedBatch,
        done: int,
        head_loss: Callable[[Tensor], Tensor],
        *,
        scale: float = 1.0,
    ) -> tuple[split_server.Payloads, Tensor | None]:
        """(the server's answer with the gradient of the rows, the loss where the head is here).

        `head_loss` is the loss of features; its gradients, times the `scale`, then lie in what is trained or measured
        of the head.
        """
        if self.cut.head == "server":
            return self.server("loss", done, self.up(hidden, row)), None
        read = self.features(hidden, row, done).requires_grad_()
        loss = head_loss(read)
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        assert read.grad is not None, "a loss has a gradient by what it is of"
        sent = {"0/gradient": encode_up(read.grad, "gradient", cut=self.cut, secret=self.secret)}
        return self.server("gradient", done, sent), loss.detach()

    def features(self, hidden: Tensor, row: batching.PackedBatch, done: int) -> Tensor:
        """Features, (reads, hidden), as they come down."""
        got = self.server("features", done, self.up(hidden, row))
        return rows_of(got, "activation", like=hidden.new_empty(row.counts[0], hidden.shape[1]))


def message_in(got: split_server.Payloads, kind: str) -> bytes:
    """The message of this kind; raises `ProtocolError` where the answer has none."""
    if f"0/{kind}" not in got:
        raise ProtocolError(f"the server's answer has no {kind}; install its version of atlas-fl")
    return got[f"0/{kind}"]


def rows_of(got: split_server.Payloads, kind: str, *, like: Tensor) -> Tensor:
    """The rows in the server's answer as they are needed here."""
    rows = read_message(message_in(got, kind)).get(ROWS, like.new_empty(0, 0))
    if rows.shape != like.shape:
        raise ProtocolError(f"the server's {kind} is {tuple(rows.shape)}, not {tuple(like.shape)}; install its version")
    return rows.to(device=like.device, dtype=like.dtype, copy=True)


def client_side_of(job: Job, site: Site, *, indices: tuple[int, ...], server: ServerLink) -> ClientSide:
    """The way of a job of one model, for a client that is cut."""
    assert job.cut is not None, "only a cut client has a way through its cut"
    secret = site.secrets.get(job.client)
    if secret is None and site.seed is not None:
        secret = simulated_secret(site.seed, job.client)
    return ClientSide(cut=job.cut, indices=indices, server=server, secret=secret)


def train_below(job: Job, site: Site, crossing: ClientSide) -> Update:
    """The client's half of the trained model; its loss is there where the head is."""
    (update,) = local_training.train([job], site, step=crossing.step)
    return update


@torch.inference_mode()
def evaluate_below(job: Job, site: Site, crossing: ClientSide) -> Update:
    """The scores where the head is here; with the head on the server only the seconds, and the scores are there."""
    began = time.perf_counter()
    options: EvaluateOptions = job.options
    data, outputs = site.data[job.client].splits[options.split], list[np.ndarray]()
    order, at_home = batching.in_order(data.lengths), crossing.cut.head == "client"
    params = evaluation.on_device(job.params, site)
    for done, chunk in enumerate(batching.split_by_tokens([data.lengths[order]], site.max_tokens)):
        row = batching.collate_packed([data.take(order[part]) for _, part in chunk], device=site.backbone.device)
        with batching.client_side_forward(row, [params], site, blocks=crossing.cut.blocks) as hidden:
            if not at_home:
                crossing.server("score", done, crossing.up(hidden, row))
                continue
            read = crossing.features(hidden, row, done)
            with site.autocast():
                (logits,) = batching.read_logits(site.backbone, [params], [read], mask=None)
            outputs.append(evaluation.scored_outputs(logits, row.labels[0], site.data[job.client].task))
    metrics = {"seconds": time.perf_counter() - began}
    if at_home:
        return evaluation.scored_update(job, site, data.labels[order], outputs, metrics)
    return Update(client=job.client, params=job.params, examples=len(data), metrics=metrics)


def fingerprint_below(job: Job, site: Site, crossing: ClientSide) -> Update:
    """The client's own tensors' part of its fingerprint; the sketches are the server's, who has the other part."""
    options: FingerprintOptions = job.options
    leaves = importance.last_weights(site.backbone, options.blocks, end=crossing.cut.blocks)
    head = _head(job, site, crossing)
    losses, closing, done = list[float](), dict[str, bytes](), itertools.count()
    for half in (0, 1):
        rows = importance.half_rows(job, site, half=half, count=options.batches, most=options.most(half))
        gradients = (_loss_gradient(row, site, leaves, head, crossing, next(done)) for row in rows)
        parts, half_losses = fingerprint.measure_parts(gradients, options)
        losses += half_losses
        if parts:
            message = {fingerprint.PARTS: torch.from_numpy(np.stack(list(parts.values())))}
            closing[f"{half}/fingerprint"] = encode_tensors(message)
    crossing.closing = closing
    metrics = {"loss": float(np.mean(losses))} if losses else {}
    return Update(client=job.client, params=job.params, examples=0, metrics=metrics)


def importance_below(job: Job, site: Site, crossing: ClientSide) -> Update:
    """The sums of the client's own blocks; importance is a share of all blocks and so the server's."""
    options: ImportanceOptions = job.options
    blocks = crossing.cut.blocks
    leaves = importance.merged_leaves(job, site, batching.modules_of(site, range(blocks)))
    head = _head(job, site, crossing)
    sums = []
    for done, row in enumerate(importance.half_rows(job, site, half=0, count=options.batches)):
        gradients = _loss_gradient(row, site, leaves, head, crossing, done)[1]
        sums.append(importance.layer_sums(gradients, leaves, site, kind=options.kind)[:blocks])
    message = {importance.IMPORTANCE: torch.from_numpy(np.stack(sums))}  # (batches, blocks) float64
    crossing.closing = {"0/fingerprint": encode_tensors(message)}
    return Update(client=job.client, params={}, examples=0, metrics={})


def _head(job: Job, site: Site, crossing: ClientSide) -> dict[str, Tensor]:
    return importance.head_leaves(job, site) if crossing.cut.head == "client" else {}


def _loss_gradient(
    row: batching.PackedBatch, site: Site, leaves: Params, head: Params, crossing: ClientSide, done: int
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """(the batch's loss where the head is here, the gradients of the weights and of the head here)."""

    def head_loss(read: Tensor) -> Tensor:
        with site.autocast(scaled=False):
            return local_training.example_loss(head_logits(site.backbone, head, read).float(), row.labels[0])

    def gradients() -> tuple[Tensor | None, dict[str, Tensor]]:
        with site.autocast(scaled=False):
            hidden = client_forward(site.backbone, row.ids, row.types, row.layout, blocks=crossing.cut.blocks)
        got, loss = crossing.exchange(hidden, row, done, head_loss)
        if leaves:
            hidden.backward(rows_of(got, "gradient", like=hidden))  # type: ignore[no-untyped-call]
        return loss, importance.pop_gradients({**leaves, **head})

    return batching.call_with_params(site.backbone.model, leaves, gradients)
