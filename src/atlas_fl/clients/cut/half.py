"""What the upper half of a cut client is, whatever it does: questions come, answers go, an update comes out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from atlas_fl.clients.base import Update
from atlas_fl.clients.cut.server_side import Entry, Read
from atlas_fl.clients.cut.side import Payloads, Side
from atlas_fl.clients.cut.together import Together
from atlas_fl.tree import digest


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

    together: Together | None
    """Those that it shares its adapters with; None where they are its own."""

    def close(self, what: str, done: int, payloads: Payloads) -> None:
        """Take what this message says of the step before; raises `ProtocolError` where none such may come now."""
        ...

    def is_ready(self) -> bool:
        """Whether a message can be read: not while others have to step first."""
        ...

    def read(self, what: str, done: int, payloads: Payloads) -> Question:
        """The question that this message is; raises `ProtocolError` where it is none that may come now."""
        ...

    def answer(self, question: Question, found: Sequence[Read]) -> dict[str, bytes]:
        """What goes back, from what the pass gave of the question's entries."""
        ...

    def last(self, payloads: Payloads) -> None:
        """Take what is said of the last step; raises `ProtocolError` where work is missing."""
        ...

    def end(self, payloads: Payloads) -> Update:
        """What this half has come to, after its last step; raises `ProtocolError` where work is missing."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """One client's message about its cut, as it came."""

    half: Half
    what: str
    done: int
    payloads: Payloads


def joined(side: Side, update: Update, own: Update) -> Update:
    """The whole client's update, of its own and that of its upper half."""
    params = {**update.params, **own.params}
    return replace(
        update,
        params=side.job.params if own.params is side.above else {key: params[key] for key in sorted(params)},
        examples=own.examples,
        metrics={**update.metrics, **own.metrics},
        loaded=_loaded(side, update, own),
        keys=update.keys + own.keys,
        crossed=dict(side.crossed),
    )


def _loaded(side: Side, update: Update, own: Update) -> str | None:
    """The digest of the whole model where both sides loaded what they were sent; else that of what differs."""
    if update.loaded is None or update.loaded != digest(side.below.params):
        return update.loaded
    return digest(side.job.params) if own.loaded == digest(side.above) else own.loaded
