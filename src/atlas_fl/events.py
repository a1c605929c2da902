"""Events of a run for whoever shows its progress: small frozen values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from atlas_fl.frozen import Frozen


@dataclass(frozen=True)
class PhaseStarted:
    """A part of the run begins, such as `fingerprints` or `round 3`."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Progress:
    """Progress of a phase; `total` is the same in every event of the phase."""

    phase: str
    done: int
    total: int


class RoundFinished(Frozen):
    """One round is trained, mixed, evaluated and recorded."""

    round: int
    rounds: int
    """Rounds of the whole run."""
    scores: Mapping[str, float]
    """Primary validation score of every client; empty in a round without evaluation."""
    loss: float
    """Mean training loss over the clients that took part."""
    seconds: float
    """Wall time of the round."""
    bytes: int
    """Bytes over the network in the round, both ways."""
    rows: Sequence[Mapping[str, Any]] = ()
    """Rows that the round has added to `metrics.jsonl`."""

    @property
    def learned(self) -> str:
        """The mean training loss, or under differential privacy, which reports none, the largest epsilon spent."""
        spent = [row["epsilon"] for row in self.rows if "epsilon" in row]
        return f"epsilon {max(spent):.2f}" if spent else f"loss {self.loss:.3f}"

    def __str__(self) -> str:
        client_scores = ", ".join(f"{client} {score:.3f}" for client, score in self.scores.items())
        scores = f"; validation: {client_scores}" if client_scores else ""
        cost = f"{self.seconds:.1f} s, {self.bytes:,} bytes"
        return f"round {self.round} of {self.rounds}: {self.learned}, {cost}{scores}"


@dataclass(frozen=True)
class Note:
    """One line that the user must see: a warning, or a decision that the run took."""

    text: str

    def __str__(self) -> str:
        return self.text


Event: TypeAlias = PhaseStarted | Progress | RoundFinished | Note
OnEvent: TypeAlias = Callable[[Event], None]
"""Called in the order of the events, from the thread that runs."""


def tell_notes(on_event: OnEvent, *lines: str) -> None:
    """Tell each of these lines as a note; an empty one says nothing."""
    for line in filter(None, lines):
        on_event(Note(line))


def ignore(_: Event) -> None:
    """Do nothing: the callback of a run that nobody watches."""
