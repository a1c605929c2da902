"""The server's half of one cut client for one job: what it holds, what it answers, what it ends with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.clients.evaluate import kept, on_device, scores_of
from atlas_fl.clients.member import Member, joined_norms, trained_below
from atlas_fl.clients.rows import Dropout
from atlas_fl.clients.server_side import Entry, Read, pass_over
from atlas_fl.clients.side import Payloads, Side
from atlas_fl.errors import ProtocolError
from atlas_fl.io.tensors import encode
from atlas_fl.split.codec import ROWS, encode_rows
from atlas_fl.split.step import NORMS
from atlas_fl.tree import digest
from atlas_fl.types import Params


@dataclass(frozen=True, kw_only=True, eq=False)
class Question:
    """What one client asks at one moment, read and checked."""

    half: "Half"
    what: str
    entries: tuple[Entry, ...]
    alone: bool = False
    """Answered by its half itself: gradients of what clients share cannot be told apart in a pack."""

    @property
    def tokens(self) -> int:
        """Of all its rows."""
        return sum(len(entry.rows) for entry in self.entries)


class Half(Protocol):
    """One client's upper half for one job."""

    side: Side
    places: tuple[int, ...]
    """Where the client's trained tensors stand among those of the whole model."""

    def read(self, what: str, done: int, payloads: Payloads) -> Question:
        """The question that this message is; raises `ProtocolError` where it is none that may come now."""
        ...

    def answer(self, question: Question, found: Sequence[Read]) -> dict[str, bytes]:
        """What goes back, from what the pass gave of the question's entries."""
        ...

    def finish(self, update: Update, payloads: Payloads) -> Update:
        """The whole client's update, of its own and this half; raises `ProtocolError` where work is missing."""
        ...


def answer_all(questions: Sequence[Question], site: Site) -> list[dict[str, bytes]]:
    """The answers to questions that wait at one moment, in their order.

    Those with a gradient are one pass, the others another, as far as `site.max_tokens` reach; some go `alone`.
    """
    answers = {k: one.half.answer(one, ()) for k, one in enumerate(questions) if one.alone}
    for backward in (True, False):
        packed = [k for k in range(len(questions)) if k not in answers]
        alike = [k for k in packed if (questions[k].what in ("loss", "gradient")) is backward]
        for group in _packs(alike, questions, site.max_tokens):
            found = iter(pass_over([e for k in group for e in questions[k].entries], site, backward=backward))
            for k in group:
                own = [next(found) for _ in questions[k].entries]
                answers[k] = questions[k].half.answer(questions[k], own)
    return [answers[k] for k in range(len(questions))]


def _packs(places: Sequence[int], questions: Sequence[Question], max_tokens: int) -> list[list[int]]:
    packs: list[list[int]] = []
    room = 0
    for k in places:
        if not packs or questions[k].tokens > room:
            packs.append([])
            room = max_tokens
        packs[-1].append(k)
        room -= questions[k].tokens
    return packs


def with_upper(entry: Entry, payloads: Payloads, side: Side, *, place: int = 0) -> Entry:
    """The rows with the gradient of their features, which has come from the client."""
    rows = side.opened(payloads, place, "gradient").get(ROWS)
    if rows is None or rows.shape != (entry.reads, entry.rows.shape[1]):
        raise side.refused("a gradient")
    return replace(entry, upper=rows.to(entry.rows.device, copy=True))


class TrainingHalf:
    """Trains the blocks above the cut, with an optimizer of their own, in step with the client's.

    `place` is the model's among those of its job, as its messages have it.
    """

    def __init__(self, job: Job, site: Site, *, place: int = 0) -> None:
        self.side, self._place = Side(job, site), place
        self.places = tuple(trained_below(site.backbone, job.params, job.options, self.side.cut))
        self._member = Member(replace(job, params=self.side.above, cut=None), site)
        self._waiting: Entry | None = None
        self._open = False

    def read(self, what: str, done: int, payloads: Payloads) -> Question:
        """Rows to train on, or the gradient of the features that went down; what the last step left comes before."""
        at_home = self.side.cut.head == "client"
        self.side.expect(what, done, "gradient" if self._waiting else "features" if at_home else "loss")
        if self._waiting is not None:
            entry, self._waiting = with_upper(self._waiting, payloads, self.side, place=self._place), None
        else:
            self.close(payloads)
            if done >= self._member.steps:
                raise ProtocolError(f"{self.side.job.client} goes on after its {self._member.steps} steps")
            dropout = self._member.dropout(done)
            entry = self.side.entry(payloads, self._place, self._member.params, dropout, wants=bool(self.places))
        return Question(half=self, what=what, entries=(entry,))

    def answer(self, question: Question, found: Sequence[Read]) -> dict[str, bytes]:
        """Features, or the gradient of the rows with the norms of this half's gradients."""
        ((entry,), (read,)) = question.entries, found
        if question.what == "features":
            self._waiting = entry
            message = self.side.sent(encode_rows(read.features, wire=self.side.cut.wire), "activation")
            return {f"{self._place}/activation": message}
        if read.loss is not None:
            self._member.losses.append(read.loss.detach())
        self.side.done, self._open = self.side.done + 1, True
        answer: dict[str, bytes] = {}
        if entry.rows.grad is not None:
            answer[f"{self._place}/gradient"] = self.side.sent(
                encode_rows(entry.rows.grad, wire=self.side.cut.wire), "gradient"
            )
        if self._member.options.clip > 0:
            answer[f"{self._place}/control"] = self.side.sent(encode({NORMS: self._member.norms()}), "control")
        return answer

    def close(self, payloads: Payloads) -> None:
        """Step, now that the client has told the norms of its gradients."""
        if not self._open:
            return
        norms, self._open = None, False
        if self._member.options.clip > 0:
            others = self.side.opened(payloads, self._place, "control").get(NORMS)
            if others is None or others.dtype is not torch.float32 or others.shape != (len(self.places),):
                raise self.side.refused("norms")
            norms = joined_norms(others.to(self._member.norms()), self._member.norms(), self.places)
        self._member.step(self.side.done - 1, norms=norms)

    @property
    def steps(self) -> int:
        """How many steps it has in all."""
        return self._member.steps

    @property
    def params(self) -> Params:
        """The model above the cut as it is now."""
        return self._member.params

    def stop(self) -> None:
        """Let the steps so far be all."""
        self._member.steps = self.side.done

    def ended(self, payloads: Payloads) -> Update:
        """The model above the cut once all steps are done; raises `ProtocolError` where some are missing."""
        side, member = self.side, self._member
        if side.done < member.steps or self._waiting is not None:
            raise ProtocolError(
                f"{side.job.client} ends after {side.done} of {member.steps} steps; install our version"
            )
        self.close(payloads)
        return member.update(0.0)

    def finish(self, update: Update, payloads: Payloads) -> Update:
        """The whole trained model."""
        side, own = self.side, self.ended(payloads)
        metrics = {**update.metrics, "steps": float(side.done)}
        if side.cut.head == "server":
            metrics["loss"] = own.metrics["loss"]
        params = {**update.params, **own.params}
        return replace(
            update,
            params={key: params[key] for key in sorted(params)},
            examples=own.examples,
            metrics=metrics,
            loaded=self._loaded(update, own),
            keys=update.keys + own.keys,
            crossed=dict(side.crossed),
        )

    def _loaded(self, update: Update, own: Update) -> str | None:
        """The digest of the whole model where both sides loaded what they were sent; else that of what differs."""
        if update.loaded is None or update.loaded != digest(self.side.below.params):
            return update.loaded
        return digest(self.side.job.params) if own.loaded == digest(self.side.above) else own.loaded


class EvaluationHalf:
    """Goes on from rows without training; the scores are there where the head is."""

    def __init__(self, job: Job, site: Site) -> None:
        self.side = Side(job, site)
        self.places: tuple[int, ...] = ()
        self._params = on_device(self.side.above, site)
        self._task = site.data[job.client].task
        self._examples = len(site.data[job.client].splits[job.options.split])
        self._outputs, self._labels = list[np.ndarray](), list[Tensor]()
        self._scored = 0

    def read(self, what: str, done: int, payloads: Payloads) -> Question:
        """Rows of some examples, each of which comes once."""
        self.side.expect(what, done, "features" if self.side.cut.head == "client" else "score")
        entry = self.side.entry(payloads, 0, self._params, Dropout(p=0.0, seed=0, path=()), wants=False)
        self._scored += len(entry.lengths)
        return Question(half=self, what=what, entries=(entry,))

    def answer(self, question: Question, found: Sequence[Read]) -> dict[str, bytes]:
        """Features, or nothing where the scores are here."""
        ((entry,), (read,)) = question.entries, found
        self.side.done += 1
        if read.logits is None or entry.labels is None:
            return {"0/activation": self.side.sent(encode_rows(read.features, wire=self.side.cut.wire), "activation")}
        self._outputs.append(kept(read.logits, entry.labels, self._task))
        self._labels.append(entry.labels.cpu())
        return {}

    def finish(self, update: Update, payloads: Payloads) -> Update:  # noqa: ARG002 - nothing is left to be told
        """The client's update with all scores."""
        if self._scored != self._examples:
            raise ProtocolError(
                f"{self.side.job.client} sent {self._scored} of {self._examples} examples; join with the same data"
            )
        scores = {}
        if self.side.cut.head == "server":
            scores = scores_of(self._task, torch.cat(self._labels).numpy(), self._outputs)
        return replace(
            update,
            params=self.side.job.params,
            examples=self._examples,
            metrics={**scores, **update.metrics},
            crossed=dict(self.side.crossed),
        )
