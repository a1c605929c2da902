"""The server's half of one cut client for one job: what it holds, what it answers, what it ends with."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.clients.cut.half import Asked, Question
from atlas_fl.clients.cut.server_side import Entry, Read, pass_over
from atlas_fl.clients.cut.side import Payloads, Side
from atlas_fl.clients.cut.together import Together, upper_member
from atlas_fl.clients.evaluate import kept, on_device, scores_of
from atlas_fl.clients.member import joined_norms, trained_below
from atlas_fl.clients.rows import Dropout
from atlas_fl.errors import ProtocolError
from atlas_fl.io.tensors import encode
from atlas_fl.split.codec import ROWS, encode_rows
from atlas_fl.split.step import NORMS
from atlas_fl.types import Params


def answers_to(asked: Sequence[Asked], site: Site) -> list[dict[str, bytes] | ProtocolError | None]:
    """What each is answered, or why it is refused: a client's mistake is its own, not its pack's.

    None for who has to wait for others to step.
    """
    found: dict[int, dict[str, bytes] | ProtocolError | None] = dict.fromkeys(range(len(asked)))
    questions = {}
    for k, one in enumerate(asked):
        try:
            one.half.close(one.what, one.done, one.payloads)
        except ProtocolError as error:
            found[k] = error
    for k, one in enumerate(asked):
        if found[k] is None and one.half.is_ready():
            try:
                questions[k] = one.half.read(one.what, one.done, one.payloads)
            except ProtocolError as error:
                found[k] = error
    answers = answer_all(list(questions.values()), site)
    found |= dict(zip(questions, answers, strict=True))
    return [found[k] for k in range(len(asked))]


def answer_all(questions: Sequence[Question], site: Site) -> list[dict[str, bytes]]:
    """The answers to questions that wait at one moment, in their order.

    Those with a gradient are one pass, the others another, as far as `site.max_tokens` reach; some go `alone`.
    """
    answers = {k: one.half.answer(one, ()) for k, one in enumerate(questions) if one.alone}
    for backward in (True, False):
        packed = [k for k, one in enumerate(questions) if not one.alone]
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

    def __init__(self, job: Job, site: Site, *, together: Together | None = None, place: int = 0) -> None:
        self.side, self.together, self._place = Side(job, site), together, place
        self.places = tuple(trained_below(site.backbone, job.params, job.options, self.side.cut))
        self._member = upper_member(job, site) if together is None else together.members[job.client]
        self._waiting: Entry | None = None
        self._open = 0  # examples of the step that is to be closed

    def read(self, what: str, done: int, payloads: Payloads) -> Question:
        """Rows to train on, or the gradient of the features that went down; what the last step left comes before."""
        self.close(what, done, payloads)
        assert self.is_ready(), "who shares adapters is read when all have stepped"
        if self._waiting is not None:
            entry, self._waiting = with_upper(self._waiting, payloads, self.side, place=self._place), None
        else:
            if done >= self._member.steps:
                raise ProtocolError(f"{self.side.job.client} goes on after its {self._member.steps} steps")
            dropout = self._member.dropout(done)
            entry = self.side.entry(payloads, self._place, self._member.params, dropout, wants=bool(self.places))
        return Question(half=self, what=what, entries=(entry,))

    def close(self, what: str, done: int, payloads: Payloads) -> None:
        """Step, or tell the others that it can, before the next question."""
        at_home = self.side.cut.head == "client"
        self.side.expect(what, done, "gradient" if self._waiting else "features" if at_home else "loss")
        if self._waiting is None:
            self.step(payloads)

    def is_ready(self) -> bool:
        """Whether the adapters are where this client's steps are."""
        return self._waiting is not None or self.together is None or self.together.done == self.side.done

    def answer(self, question: Question, found: Sequence[Read]) -> dict[str, bytes]:
        """Features, or the gradient of the rows with the norms of this half's gradients."""
        ((entry,), (read,)) = question.entries, found
        side, wire, answer = self.side, self.side.cut.wire, dict[str, bytes]()
        if question.what == "features":
            self._waiting = entry
            return {f"{self._place}/activation": side.sent(encode_rows(read.features, wire=wire), "activation")}
        if read.loss is not None:
            self._member.losses.append(read.loss.detach())
        self.side.done, self._open = self.side.done + 1, entry.reads
        if entry.rows.grad is not None:
            answer[f"{self._place}/gradient"] = side.sent(encode_rows(entry.rows.grad, wire=wire), "gradient")
        if self._member.options.clip > 0:
            answer[f"{self._place}/control"] = side.sent(encode({NORMS: self._member.norms()}), "control")
        return answer

    def step(self, payloads: Payloads) -> None:
        """Step, now that the client has told the norms of its gradients."""
        if not self._open:
            return
        norms, count, self._open = None, self._open, 0
        if self._member.options.clip > 0:
            others = self.side.opened(payloads, self._place, "control").get(NORMS)
            if others is None or others.dtype is not torch.float32 or others.shape != (len(self.places),):
                raise self.side.refused("norms")
            norms = joined_norms(others.to(self._member.norms()), self._member.norms(), self.places)
        if self.together is None:
            self._member.step(self.side.done - 1, norms=norms)
        else:
            self.together.tell(self._member, count, norms=norms)

    def last(self, payloads: Payloads) -> None:
        """The last step; those who share adapters go on as long as one of them does."""
        side, member = self.side, self._member
        if side.done < member.steps or self._waiting is not None:
            raise ProtocolError(
                f"{side.job.client} ends after {side.done} of {member.steps} steps; install our version"
            )
        self.step(payloads)

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

    def end(self, payloads: Payloads) -> Update:
        """The trained upper part."""
        self.last(payloads)
        side, own = self.side, self._member.update(0.0)
        here = {"loss": own.metrics["loss"]} if side.cut.head == "server" else {}
        return replace(own, metrics={**here, "steps": float(side.done)})


class EvaluationHalf:
    """Goes on from rows without training; the scores are there where the head is."""

    def __init__(self, job: Job, site: Site) -> None:
        self.side = Side(job, site)
        self.places: tuple[int, ...] = ()
        self.together: Together | None = None
        self._params = on_device(self.side.above, site)
        self._task = site.data[job.client].task
        self._examples = len(site.data[job.client].splits[job.options.split])
        self._outputs, self._labels = list[np.ndarray](), list[Tensor]()
        self._scored = 0

    def close(self, what: str, done: int, payloads: Payloads) -> None:  # noqa: ARG002 - no step was before
        """Nothing is left of the message before."""
        self.side.expect(what, done, "features" if self.side.cut.head == "client" else "score")

    def is_ready(self) -> bool:
        """Always: nothing is trained."""
        return True

    def last(self, payloads: Payloads) -> None:
        """Nothing is left to be told."""

    def read(self, what: str, done: int, payloads: Payloads) -> Question:
        """Rows of some examples, each of which comes once."""
        self.close(what, done, payloads)
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

    def end(self, payloads: Payloads) -> Update:  # noqa: ARG002 - nothing is left to be told
        """All scores."""
        if self._scored != self._examples:
            raise ProtocolError(
                f"{self.side.job.client} sent {self._scored} of {self._examples} examples; join with the same data"
            )
        scores = {}
        if self.side.cut.head == "server":
            scores = scores_of(self._task, torch.cat(self._labels).numpy(), self._outputs)
        return Update(client=self.side.job.client, params=self.side.above, examples=self._examples, metrics=scores)
