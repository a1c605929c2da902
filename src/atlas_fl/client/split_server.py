"""The server half of cut models: each request is answered by a pass over the blocks above its client's cut.

A request carries the client's rows at the cut. The server keeps every client's upper adapters and their optimizer for
one job, and the frozen weights once for all. It keeps no graph between two messages: where the head is at the client,
the gradient of the features comes with a second request, and the pass is repeated.

Messages are checked and counted before anything is computed of them (`CutMessages`).
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from atlas_fl.client import batching, evaluation, importance, local_training
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.errors import ProtocolError
from atlas_fl.frozen import Frozen
from atlas_fl.models.attention import make_layout
from atlas_fl.models.backbone import Backbone
from atlas_fl.models.lora import Adapters, attach_adapters
from atlas_fl.params import Params, digest, select
from atlas_fl.split import channel, codec, model
from atlas_fl.storage.ledger import Direction, Kind
from atlas_fl.storage.tensors import encode_tensors


class ServerInput(Frozen, eq=False):
    """One model's rows at its cut, with all that a pass above it needs."""

    rows: Tensor
    """(tokens, hidden) float32 as they came, on the server's device; a leaf where their gradient is wanted."""
    blocks: int
    lengths: tuple[int, ...]
    places: Tensor | None
    """(reads,) int64, the tokens that the head reads, where text is written; else every sequence's pooled token."""
    params: Params
    """The adapters above the cut, and the head where it is the server's."""
    dropout: batching.Dropout
    labels: Tensor | None = None
    """Labels of the examples whose loss or logits are computed here; None where the head is the client's."""
    upper: Tensor | None = None
    """(reads, hidden), the gradient of the features, where it comes from the client."""
    weights: Params | None = None
    """Weights in the place of the backbone's, whose gradients are measured, without adapters."""
    smoothing: float = 0.0
    """Label smoothing of the loss."""
    scale: float = 1.0
    """Factor of the loss in the backward pass."""

    @property
    def reads(self) -> int:
        """Number of tokens that the head reads."""
        return len(self.lengths) if self.places is None else len(self.places)


class ServerOutput(Frozen, eq=False):
    """Result of a pass: features where the head is the client's, logits and loss where it is here."""

    features: Tensor
    """(reads, hidden)."""
    logits: Tensor | None = None
    """(reads, labels), float32."""
    loss: Tensor | None = None


def forward_above(entry: ServerInput, site: Site, *, backward: bool) -> ServerOutput:
    """The output of these rows; with `backward`, the gradients lie in the rows and params."""
    if entry.weights is None:
        modules = batching.modules_of(site, range(entry.blocks, len(site.backbone.blocks)))
        return _pass(entry, site, modules, backward=backward)
    without_adapters = partial(_pass, entry, site, {}, backward=backward)
    return batching.call_with_params(site.backbone.model, entry.weights, without_adapters)


def _pass(entry: ServerInput, site: Site, modules: Mapping[str, nn.Module], *, backward: bool) -> ServerOutput:
    """The output of a pass in which these modules carry the adapters."""
    backbone, is_scaled = site.backbone, entry.weights is None
    mask = batching.dropout_masks([entry.dropout], device=backbone.device)
    adapters = Adapters(
        clients=[entry.params],
        segments=batching.segments_of([len(entry.rows)]),
        sequences=batching.segments_of([entry.reads]),
        scale=site.scale,
        dropout_mask=mask,
    )
    layout = make_layout(entry.lengths, device=backbone.device)
    with torch.set_grad_enabled(backward), attach_adapters(modules, adapters):
        with site.autocast(scaled=is_scaled):
            rows = entry.rows.to(_rows_type(backbone, entry.blocks)) if site.bf16 or site.fp16 else entry.rows
            features = model.server_forward(backbone, rows, layout, blocks=entry.blocks, output_positions=entry.places)
            logits = loss = None
            if entry.labels is not None:
                (logits,) = batching.read_logits(backbone, [entry.params], [features], mask=mask)
        if entry.labels is not None and logits is not None:
            loss = local_training.example_loss(logits, entry.labels, smoothing=entry.smoothing)
        if backward:
            # Inside, because a checkpointed backward pass runs the layers again and must find the adapters in place.
            torch.autograd.backward(features if loss is None else loss * entry.scale, entry.upper)
    return ServerOutput(features=features, logits=logits, loss=loss)


def _rows_type(backbone: Backbone, blocks: int) -> torch.dtype:
    """Type of the rows at a cut in the arithmetic of now: autocast's where what is embedded passes a linear layer."""
    token = torch.zeros(1, dtype=torch.int64, device=backbone.device)
    layout = make_layout([1], device=backbone.device)
    return model.client_forward(backbone, token, token, layout, blocks=min(1, blocks)).dtype


Payloads: TypeAlias = Mapping[str, bytes]
"""Messages through a cut by `PLACE/KIND`; the place is 1 of a sketch of the second half, else 0."""


class CutMessages:
    """A cut client's job in its two parts, and its messages, which are checked and counted here."""

    def __init__(self, job: Job, site: Site) -> None:
        assert job.cut is not None, "a client without a cut has no half here"
        self.job, self.site, self.cut = job, site, job.cut
        client_side = model.select_client_side(
            site.backbone, job.params, blocks=self.cut.blocks, head=self.cut.head == "client"
        )
        self.below = replace(job, params=select(job.params, (key for key in job.params if key in client_side)))
        self.above: Params = select(job.params, (key for key in job.params if key not in client_side))
        self.crossed: Counter[tuple[Kind, Direction]] = Counter()
        """Bytes of all messages so far."""
        self.done = 0
        """Steps, or messages of an evaluation, that are answered."""
        self._longest = max(int(examples.lengths.max()) for examples in site.data[job.client].splits.values())

    def expect(self, what: str, done: int, due: str) -> None:
        """Raise `ProtocolError` unless this question is due now."""
        if (what, done) != (due, self.done):
            raise ProtocolError(
                f"{self.job.client} asks for {what!r:.20} after {done} steps, and {due} after {self.done} is due;"
                " install the same atlas-fl on both ends"
            )

    def decode(self, payloads: Payloads, kind: Kind, *, index: int = 0) -> dict[str, Tensor]:
        """The tensors of one message, counted."""
        message = payloads.get(f"{index}/{kind}")
        if message is None:
            raise ProtocolError(f"{self.job.client} sent no {kind}; install the same atlas-fl on both ends")
        self.crossed[kind, "up"] += len(message)
        return codec.read_message(message)

    def rows_down(self, rows: Tensor, kind: Kind) -> dict[str, bytes]:
        """An answer with these rows, counted."""
        return self.count_sent(codec.encode_rows(rows, wire=self.cut.wire), kind)

    def count_sent(self, message: bytes, kind: Kind) -> dict[str, bytes]:
        """An answer with this message, counted."""
        self.crossed[kind, "down"] += len(message)
        return {f"0/{kind}": message}

    def entry(self, payloads: Payloads, params: Params, dropout: batching.Dropout, *, wants: bool) -> ServerInput:
        """The rows of one model, with labels where the head is here; a leaf where their gradient is wanted."""
        task, device = self.site.data[self.job.client].task, self.site.backbone.device
        opened = self.decode(payloads, "activation")
        rows, lengths, positions = opened.get(codec.ROWS), opened.get("lengths"), opened.get("places")
        if rows is None or rows.shape[1] != self.site.backbone.hidden or not self._are_lengths(lengths, rows):
            raise self.refusal("rows")
        assert lengths is not None
        if (positions is None) is task.writes or (
            positions is not None and not _are_within(positions, len(rows), torch.int32)
        ):
            raise self.refusal("places")
        labels = None
        if self.cut.head == "server":
            labels = self.decode(payloads, "label").get("labels")
            if not self._are_labels(labels, len(lengths) if positions is None else len(positions)):
                raise self.refusal("labels")
        return ServerInput(
            rows=rows.to(device, copy=True).requires_grad_(wants),
            blocks=self.cut.blocks,
            lengths=tuple(lengths.tolist()),
            places=None if positions is None else positions.to(device, torch.int64),
            params=params,
            dropout=dropout,
            labels=None if labels is None else labels.to(device),
        )

    def _are_lengths(self, lengths: Tensor | None, rows: Tensor) -> bool:
        if lengths is None or not _are_within(lengths, self._longest + 1, torch.int32):
            return False
        return int(lengths.min()) > 0 and int(lengths.sum()) == len(rows)

    def _are_labels(self, labels: Tensor | None, count: int) -> bool:
        task = self.site.data[self.job.client].task
        if labels is None or labels.shape != ((count, task.num_labels) if task.multilabel else (count,)):
            return False
        if task.multilabel:
            return labels.dtype is torch.float32 and bool(((labels == 0) | (labels == 1)).all())
        if task.is_regression:
            return labels.dtype is torch.float32
        vocabulary = self.site.backbone.vocabulary
        return _are_within(labels, len(vocabulary) if task.writes and vocabulary is not None else task.num_labels)

    def refusal(self, what: str) -> ProtocolError:
        """The error of a client that sent this in a form that cannot be."""
        return ProtocolError(
            f"{self.job.client} sent {what} through its cut that fit neither each other nor its task; join with the"
            " data and the version of atlas-fl that the plan was made with"
        )


def _are_within(numbers: Tensor, size: int, dtype: torch.dtype = torch.int64) -> bool:
    if numbers.dtype is not dtype or numbers.ndim != 1 or not len(numbers):
        return False
    return int(numbers.min()) >= 0 and int(numbers.max()) < size


def server_side_trainer(job: Job, site: Site) -> local_training.LocalTrainer:
    """The server's half of a cut client while it trains, as of the job's start."""
    # It draws nothing of the client's: it takes the rows that come, and counts them.
    return local_training.LocalTrainer(replace(job, params=CutMessages(job, site).above), replace(site, secrets={}))


class ServerHalf(Protocol):
    """One client's upper half for one job."""

    side: CutMessages
    places: tuple[int, ...] = ()
    """Indices of the client's trained tensors among those of the whole model."""

    def ask(self, what: str, done: int, payloads: Payloads) -> dict[str, bytes]:
        """The answer to a message; raises `ProtocolError` where no such may come now."""
        entry = self.read(what, done, payloads)
        return self.answer(what, entry, forward_above(entry, self.side.site, backward=what in ("loss", "gradient")))

    def read(self, what: str, done: int, payloads: Payloads) -> ServerInput:
        """Parse a message; raise `ProtocolError` where no such may come now."""

    def answer(self, what: str, entry: ServerInput, output: ServerOutput) -> dict[str, bytes]:
        """The answer to a message, from the output of its entry."""

    def end(self, payloads: Payloads) -> Update:
        """This half's update, after its last step; raise `ProtocolError` where work is missing."""


def merge_updates(side: CutMessages, update: Update, server_update: Update) -> Update:
    """The whole client's update, of its own and that of its upper half."""
    params = {**update.params, **server_update.params}
    return replace(
        update,
        params=side.job.params if server_update.params is side.above else {key: params[key] for key in sorted(params)},
        examples=server_update.examples,
        metrics={**update.metrics, **server_update.metrics},
        classes={**update.classes, **server_update.classes},
        reported={**update.reported, **server_update.reported},
        loaded=_loaded_digest(side, update, server_update),
        keys=update.keys + server_update.keys,
        crossed=dict(side.crossed),
    )


def _loaded_digest(side: CutMessages, update: Update, server_update: Update) -> str | None:
    """The digest of the whole model where both sides loaded what they were sent; else that of what differs."""
    if update.loaded is None or update.loaded != digest(side.below.params):
        return update.loaded
    return digest(side.job.params) if server_update.loaded == digest(side.above) else server_update.loaded


class GradientHalf(ServerHalf):
    """Answers rows with their gradient, step by step; subclasses make use of the gradients of what is above the cut.

    With the head at the client a step is two requests: features go down, and their gradient comes up.
    """

    def __init__(
        self, side: CutMessages, params: Params, *, steps: int, wants: bool, weights: Params | None = None
    ) -> None:
        """The client `wants` the gradients of its rows; `params` and `weights` are those of `ServerInput`."""
        self.side, self._steps = side, steps
        self._params, self._wants, self._weights = params, wants, weights
        self._waiting: ServerInput | None = None

    def read(self, what: str, done: int, payloads: Payloads) -> ServerInput:
        """The rows of a step, or those that wait, with the gradient of their features."""
        side = self.side
        first = "features" if side.cut.head == "client" else "loss"
        side.expect(what, done, first if self._waiting is None else "gradient")
        if self._waiting is not None:
            rows, entry = side.decode(payloads, "gradient").get(codec.ROWS), self._waiting
            if rows is None or rows.shape != (entry.reads, entry.rows.shape[1]):
                raise side.refusal("a gradient")
            self._waiting = None
            return replace(entry, upper=rows.to(entry.rows.device, copy=True))
        self.close_step(payloads)
        if done >= self._steps:
            raise ProtocolError(f"{side.job.client} goes on after its {self._steps} steps")
        entry = side.entry(payloads, self._params, self.dropout(done), wants=self._wants)
        return replace(entry, weights=self._weights)

    def answer(self, what: str, entry: ServerInput, output: ServerOutput) -> dict[str, bytes]:
        """Features, or the gradient of the rows and what `take_gradients` adds."""
        if what == "features":
            self._waiting = entry
            return self.side.rows_down(output.features, "activation")
        rows = {} if entry.rows.grad is None else self.side.rows_down(entry.rows.grad, "gradient")
        answer = {**rows, **self.take_gradients(None if output.loss is None else output.loss.detach())}
        self.side.done += 1
        return answer

    def end(self, payloads: Payloads) -> Update:
        """This half's update."""
        if self.side.done < self._steps or self._waiting is not None:
            raise ProtocolError(
                f"{self.side.job.client} ends after {self.side.done} of {self._steps} steps; install our version"
            )
        self.close_step(payloads)
        return self.update(payloads)

    def measured_gradients(self) -> dict[str, Tensor]:
        """The gradients of the weights and of the head here, which have none afterwards."""
        return importance.pop_gradients({**(self._weights or {}), **self._params})

    def close_step(self, payloads: Payloads) -> None:
        """End the step before, of which the client tells something beside its next rows."""

    def dropout(self, done: int) -> batching.Dropout:  # noqa: ARG002 - the same in every step
        """Where the masks of this step come from."""
        return batching.NO_DROPOUT

    @abstractmethod
    def take_gradients(self, loss: Tensor | None) -> dict[str, bytes]:
        """Take the gradients of a step, whose loss is known where the head is here; what its answer says of them."""

    @abstractmethod
    def update(self, payloads: Payloads) -> Update:
        """This half's update, after its last step."""


class TrainingHalf(GradientHalf):
    """Trains the blocks above the cut, with an optimizer of their own, in step with the client's."""

    def __init__(self, job: Job, site: Site) -> None:
        side, self._member = CutMessages(job, site), server_side_trainer(job, site)
        self.places = tuple(local_training.client_side_indices(site.backbone, job.params, job.options, side.cut))
        super().__init__(side, self._member.params, steps=self._member.steps, wants=bool(self.places))
        self._is_open = False

    def read(self, what: str, done: int, payloads: Payloads) -> ServerInput:
        """The rows of a step, with what its loss is computed by."""
        entry, options = super().read(what, done, payloads), self._member.options
        return replace(entry, smoothing=options.label_smoothing, scale=self._member.scale.value)

    def dropout(self, done: int) -> batching.Dropout:
        """Where the masks of this step come from."""
        return self._member.dropout(done)

    def take_gradients(self, loss: Tensor | None) -> dict[str, bytes]:
        """Tell the norms of this half's gradients."""
        self._member.losses += [] if loss is None else [loss]
        self._is_open = True
        if not self._member.tells_norms:
            return {}
        return self.side.count_sent(encode_tensors({channel.NORMS: self._member.norms()}), "control")

    def close_step(self, payloads: Payloads) -> None:
        """Step, now that the client has told the norms of its gradients."""
        if not self._is_open:
            return
        norms, self._is_open = None, False
        if self._member.tells_norms:
            others = self.side.decode(payloads, "control").get(channel.NORMS)
            if others is None or others.dtype is not torch.float32 or others.shape != (len(self.places),):
                raise self.side.refusal("norms")
            norms = local_training.merge_norms(others.to(self._member.norms()), self._member.norms(), self.places)
        self._member.step(self.side.done - 1, norms=norms)

    def update(self, payloads: Payloads) -> Update:  # noqa: ARG002 - the norms were the last of it
        """The trained upper part."""
        update = self._member.update(0.0)
        here = {"loss": update.metrics["loss"]} if self.side.cut.head == "server" else {}
        return replace(update, metrics={**here, "steps": float(self.side.done)})


class EvaluationHalf(ServerHalf):
    """Goes on from rows without training; the scores are there where the head is."""

    def __init__(self, job: Job, site: Site) -> None:
        self.side = CutMessages(job, site)
        self._params = evaluation.on_device(self.side.above, site)
        self._task = site.data[job.client].task
        self._examples = len(site.data[job.client].splits[job.options.split])
        self._outputs, self._labels = list[np.ndarray](), list[Tensor]()
        self._scored = 0

    def read(self, what: str, done: int, payloads: Payloads) -> ServerInput:
        """Rows of some examples, each of which comes once."""
        self.side.expect(what, done, "features" if self.side.cut.head == "client" else "score")
        entry = self.side.entry(payloads, self._params, batching.NO_DROPOUT, wants=False)
        self._scored += len(entry.lengths)
        return entry

    def answer(self, what: str, entry: ServerInput, output: ServerOutput) -> dict[str, bytes]:  # noqa: ARG002
        """Features, or nothing where the scores are here."""
        self.side.done += 1
        if output.logits is None or entry.labels is None:
            return self.side.rows_down(output.features, "activation")
        self._outputs.append(evaluation.scored_outputs(output.logits, entry.labels, self._task))
        self._labels.append(entry.labels.cpu())
        return {}

    def end(self, payloads: Payloads) -> Update:  # noqa: ARG002 - nothing is left to be told
        """All scores."""
        if self._scored != self._examples:
            raise ProtocolError(
                f"{self.side.job.client} sent {self._scored} of {self._examples} examples; join with the same data"
            )
        job = replace(self.side.job, params=self.side.above)
        if self.side.cut.head == "server":
            return evaluation.scored_update(job, self.side.site, torch.cat(self._labels).numpy(), self._outputs, {})
        return Update(client=job.client, params=job.params, examples=self._examples, metrics={})
