"""The server's side of a cut client's warm-up: two models of one job, whose agreement ends it."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np
import torch

from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.clients.fingerprint import FingerprintOptions, answered, half_job, is_look, lora_b, mean, verdict
from atlas_fl.clients.halves import Half, Question, TrainingHalf
from atlas_fl.clients.measure_above import GradientsHalf, parts_below, sketch_of
from atlas_fl.clients.server_side import Read
from atlas_fl.clients.side import Payloads, Side
from atlas_fl.io.tensors import encode
from atlas_fl.tree import LORA_B
from atlas_fl.types import Params


class WarmingHalf:
    """Both halves' adapters above the cut, trained as in a round, in one row."""

    def __init__(self, job: Job, site: Site) -> None:
        options: FingerprintOptions = job.options
        self.side, self._options = Side(job, site), options
        self._halves = tuple(TrainingHalf(half_job(job, half), site, place=half) for half in (0, 1))
        self.places = self._halves[0].places
        # As a member of a pack holds them, whose order decides on the sketch's last bits.
        self._names = sorted(key for key in job.params if key.endswith(LORA_B))
        self._below = [name for name in self._names if name in self.side.below.params]
        self._looked, self._agreed = 0, False

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
            half.close(payloads)
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

    def finish(self, update: Update, payloads: Payloads) -> Update:
        """The mean of both halves' models, of the client's side and ours, and both sketches."""
        first, second = (half.ended(payloads) for half in self._halves)
        sketches = [self._sketch(place, own.params, payloads) for place, own in enumerate((first, second))]
        if _shapes(update.params) != _shapes(self.side.below.params):
            raise self.side.refused("a warmed-up model")
        params = {**update.params, **mean(first.params, second.params)}
        loss = update.metrics.get("loss", math.nan)
        if self.side.cut.head == "server":
            loss = (first.metrics["loss"] + second.metrics["loss"]) / 2
        crossed = Counter(self.side.crossed)
        for half in self._halves:
            crossed.update(half.side.crossed)
        return answered(
            self.side.job,
            sketches,
            {key: params[key] for key in sorted(params)},
            steps=max(half.side.done for half in self._halves),
            loss=loss,
            crossed=dict(crossed),
        )


def _shapes(params: Params) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in params.items()}


def fingerprint_half(job: Job, site: Site) -> Half:
    """The server's half of a cut client's fingerprint, of whatever kind."""
    return _KINDS[job.options.kind](job, site)


_KINDS: Mapping[str, Callable[[Job, Site], Half]] = {
    "delta": WarmingHalf,
    "fisher": GradientsHalf,
    "gradient": GradientsHalf,
}
