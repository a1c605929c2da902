"""What server and host say to each other about guests, and what the server remembers of it."""

import asyncio
from dataclasses import dataclass, field

import torch

from atlas_fl.clients.cut.side import Payloads, Side
from atlas_fl.clients.member import trained_below
from atlas_fl.engines.stream.frames import Head
from atlas_fl.engines.stream.sessions import Message
from atlas_fl.errors import ProtocolError
from atlas_fl.split.codec import ROWS, read_message
from atlas_fl.split.step import NORMS
from atlas_fl.tree import PRIVATE
from atlas_fl.types import Params

ABOUT = "about"
"""The tensor that says whose upper part it is: JSON as bytes, since a head has its limit."""


@dataclass(eq=False)
class Lodging:
    """The upper part of one guest's job at its host."""

    id: str
    side: Side
    host: str
    action: str
    rows: int = 0
    """Tokens of the guest's newest message."""
    reads: int = 0
    """How many of them its head reads."""
    answer: "asyncio.Future[Message | None] | None" = None
    """What the guest waits for; None comes where its host has gone."""
    moved: bool = False
    ended: bool = False
    """The host has given it back, and holds nothing of it any more."""
    refused: str = ""
    """Why the host did not take it."""

    def take_note(self, payloads: Payloads) -> None:
        """How many rows the guest's message has; raises `ProtocolError` where it cannot be read."""
        if (message := payloads.get("0/activation")) is not None:
            opened = read_message(message)
            beside = opened.get("places", opened.get("lengths"))
            self.rows = len(opened.get(ROWS, ()))
            self.reads = 0 if beside is None else beside.numel()

    def check_answer(self, what: object, payloads: Payloads) -> None:
        """Nothing where this can be its host's answer to the guest, who goes on from it; else raises `ProtocolError`.

        A site ends for what no server would send, and this is another site's.
        """
        expected = {name: shape for name, shape in self._shapes(what).items() if shape[0]}
        if payloads.keys() != expected.keys():
            raise ProtocolError(f"it answers with {sorted(payloads)}; allowed: {sorted(expected)}")
        for name, shape in expected.items():
            found = read_message(payloads[name]).get(NORMS if name.endswith("control") else ROWS)
            if found is None or found.dtype is not torch.float32 or tuple(found.shape) != shape:
                raise ProtocolError(f"its {name} is not {shape} float32")

    def _shapes(self, what: object) -> dict[str, tuple[int, ...]]:
        job, backbone = self.side.job, self.side.site.backbone
        if what == "features":
            return {"0/activation": (self.reads, backbone.hidden)}
        if what not in ("loss", "gradient"):
            return {}
        names = [name for name in job.params if name != PRIVATE and not name.endswith(job.options.frozen)]
        below = len(trained_below(backbone, names, job.options, self.side.cut))
        clipped = job.options.clip > 0
        return {
            "0/gradient": (self.rows if below else 0, backbone.hidden),
            "0/control": (len(names) - below if clipped else 0,),
        }


@dataclass(eq=False)
class Inbox:
    """What one host is to be told."""

    items: list[tuple[Head, Params]] = field(default_factory=list)
    stale: bool = False
    """It may hold parts that nobody asks for any more."""


def numbered(tensors: Params, place: int) -> Params:
    """The tensors of the item at this place of a message between server and host."""
    start = f"{place}:"
    return {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}
