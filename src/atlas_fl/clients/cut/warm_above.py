"""The server's side of a cut client's warm-up: two models of one job, whose agreement ends it."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np

from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.clients.cut.half import Half, Question
from atlas_fl.clients.cut.halves import TrainingHalf
from atlas_fl.clients.cut.measure_above import gradients_half, parts_below, sketch_of, told_here
from atlas_fl.clients.cut.server_side import Read
from atlas_fl.clients.cut.side import Payloads, Side
from atlas_fl.clients.cut.together import Together
from atlas_fl.clients.fingerprint import FingerprintOptions, answered, half_job, is_look, lora_b, mean, verdict
from atlas_fl.io.tensors import encode
from atlas_fl.tree import LORA_B
from atlas_fl.types import Params


class WarmingHalf:
    """Both halves' adapters above the cut, trained as in a round, in one row."""

    together: Together | None = None

    def __init__(self, job: Job, site: Site) -> None:
        options: FingerprintOptions = job.options
        self.side, self._options = Side(job, site), options
        self._halves = tuple(TrainingHalf(half_job(job, half), site, place=half) for half in (0, 1))
        self.places = self._halves[0].places
        # As a member of a pack holds them, whose order decides on the sketch's last bits.
        self._names = sorted(key for key in job.params if key.endswith(LORA_B))
        self._below = [name for name in self._names if name in self.side.below.params]
        self._looked, self._agreed = 0, False

    def close(self, what: str, done: int, payloads: Payloads) -> None:
        """Nothing: the halves step when the message is read."""

    def is_ready(self) -> bool:
        """Always: the adapters of a warm-up are the client's own."""
        return True

    def read(self, what: str, done: int, payloads: Payloads) -> Question:
        """What both halves ask at once, or for a look at their agreement."""
        self.side.done = max(half.side.done for half in self._halves)
        both = all(half.steps for half in self._halves)
        if both and is_look(self.side.done, self._options) and self._looked != self.side.done:
            self.side.expect(what, done, "agree")
            self._look(payloads)
            return Question(half=self, what=what, entries=(), alone=True)
        asked = [half.read(what, done, payloads) for half in self._halves if half.steps]
        return Question(half=self, what=what, entries=tuple(chain.from_iterable(one.entries for one in asked)))

    def _look(self, payloads: Payloads) -> None:
        for half in self._halves:
            half.step(payloads)
        first, second = (self._sketch(place, half.params, payloads) for place, half in enumerate(self._halves))
        self._looked, self._agreed = self.side.done, float(np.dot(first, second)) >= self._options.reliability
        if self._agreed:
            for half in self._halves:
                half.stop()

    def _sketch(self, place: int, params: Params, payloads: Payloads) -> np.ndarray:
        below = parts_below(self.side, payloads, place, self._below, dim=self._options.sketch_dim)
        return sketch_of(self._names, below, lora_b(params), self._options)

    def answer(self, question: Question, found: Sequence[Read]) -> dict[str, bytes]:
        """What each half answers, or whether they agree."""
        if question.what == "agree":
            return {"0/control": self.side.sent(encode(verdict(self._agreed)), "control")}
        active, answer = [half for half in self._halves if half.steps], dict[str, bytes]()
        for half, entry, read in zip(active, question.entries, found, strict=True):
            answer |= half.answer(Question(half=half, what=question.what, entries=(entry,)), (read,))
        return answer

    def last(self, payloads: Payloads) -> None:
        """The last step of both."""
        for half in self._halves:
            half.last(payloads)

    def end(self, payloads: Payloads) -> Update:
        """The mean of both halves' models above the cut, and both sketches."""
        first, second = (half.end(payloads) for half in self._halves)
        sketches = [self._sketch(place, own.params, payloads) for place, own in enumerate((first, second))]
        for half in self._halves:
            self.side.crossed.update(half.side.crossed)
        losses = [own.metrics.get("loss", math.nan) for own in (first, second)]
        own = answered(
            self.side.job,
            sketches,
            mean(first.params, second.params),
            steps=max(half.side.done for half in self._halves),
            loss=sum(losses) / 2,
            crossed={},
        )
        return told_here(own, self.side)


def fingerprint_half(job: Job, site: Site) -> Half:
    """The server's half of a cut client's fingerprint, of whatever kind."""
    return _KINDS[job.options.kind](job, site)


_KINDS: Mapping[str, Callable[[Job, Site], Half]] = {
    "delta": WarmingHalf,
    "fisher": gradients_half,
    "gradient": gradients_half,
}
