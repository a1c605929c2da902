"""Which of the cuts that fit a device is taken: the best weighted score, or the smallest predicted round time.

    score = 0.35 memory + 0.30 communication + 0.25 importance + 0.10 balance, each from 0 to 1

| part | what it is |
|---|---|
| memory | share of the device's memory that the client's part leaves free |
| communication | share of the round that the link does not take: 1 - link seconds / all seconds |
| importance | share of the utility sum I * r above the cut, where the gradient has crossed no wire |
| balance | lesser of the two sides' computing seconds over the greater |

The weights are those of the first ATLAS; its communication term counted layers, this one counts seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Objective: TypeAlias = Literal["score", "time"]

WEIGHTS: Mapping[str, float] = {"memory": 0.35, "communication": 0.30, "importance": 0.25, "balance": 0.10}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A cut that fits, with what it costs in a round."""

    blocks: int
    """Blocks on the client."""
    memory: float
    """Share of the device's memory that is used, 0 to 1."""
    importance: float
    """Share of the utility above the cut, 0 to 1."""
    client_seconds: float
    server_seconds: float
    link_seconds: float

    @property
    def seconds(self) -> float:
        """The whole round; no two parts of it run at once."""
        return self.client_seconds + self.server_seconds + self.link_seconds


def terms(candidate: Candidate) -> dict[str, float]:
    """The four parts of the score before they are weighed, each from 0 to 1."""
    sides = (candidate.client_seconds, candidate.server_seconds)
    return {
        "memory": 1 - candidate.memory,
        "communication": 1 - candidate.link_seconds / candidate.seconds if candidate.seconds else 1.0,
        "importance": candidate.importance,
        "balance": min(sides) / max(sides) if max(sides) else 1.0,
    }


def score(candidate: Candidate) -> float:
    """The weighted sum of `terms`, 0 to 1."""
    return sum(WEIGHTS[name] * value for name, value in terms(candidate).items())


def choose(candidates: Sequence[Candidate], objective: Objective) -> tuple[Candidate, str]:
    """The best of at least one candidate, the one with fewer blocks where two are equal, and the reason in words.

    The reason also says what the other objective would take.
    """
    ordered = sorted(candidates, key=lambda own: own.blocks)
    of = f"{len(ordered)} cut{'s' if len(ordered) > 1 else ''} that fit{'' if len(ordered) > 1 else 's'}"
    quickest, best = min(ordered, key=lambda own: own.seconds), max(ordered, key=score)
    time, worth = f"smallest round time, {quickest.seconds:.1f} s", f"best score, {score(best):.2f}"
    if objective == "time":
        return quickest, f"{time}, of {of}; {_also(worth, best, quickest)}"
    parts = ", ".join(f"{name} {value:.2f}" for name, value in terms(best).items())
    return best, f"{worth}, of {of} ({parts}); {_also(time, quickest, best)}"


def _also(words: str, own: Candidate, taken: Candidate) -> str:
    return f"{words}, {'as well' if own is taken else f'at block {own.blocks}'}"
