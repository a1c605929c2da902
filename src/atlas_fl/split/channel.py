"""A pass through cut models: forwards and, in training, backwards over every client's cut.

    client forward -> encode -> server forward, loss, backward -> encode -> client backward

Clients and server share one frozen backbone in a simulation, so a pack's row goes through it once: at block s the rows
of the clients that are cut there become bytes and rows again, and so do their gradients on the way back. Above its
cut a client's rows belong to the server, which thus computes the suffixes of all of them as one pack. Clients with
other cuts, and with none, lie in the same row. What is computed is the function of the whole model wherever the
wire changes no number (`fp32` without noise): to the last bit.

With `head="server"` the labels go up. With `head="client"` the features come down, and their gradient goes up.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from atlas_fl.errors import ProtocolError
from atlas_fl.models.attention import Layout
from atlas_fl.models.backbone import Backbone, embed, features_of, picked, through
from atlas_fl.split.codec import WireName, decode_rows, encode_rows, with_noise
from atlas_fl.storage.ledger import Direction, Kind
from atlas_fl.storage.tensors import encode

Crossed: TypeAlias = Mapping[tuple[Kind, Direction], int]
"""Bytes through one client's cut by kind and direction."""


NORMS = "norms"
"""The name under which one side's norms travel."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Where and how one client's model is cut."""

    blocks: int
    """Blocks on the client, from the bottom; at least one stays on the server."""
    wire: WireName = "fp32"
    """How rows are encoded in both directions."""
    noise: float = 0.0
    """Standard deviation of the noise on what leaves the client, in root mean squares of each row."""
    head: Literal["client", "server"] = "server"
    """Who holds the head, and so who needs the labels."""
    shared: int | None = None
    """The cluster that this client shares the adapters above its cut with; None: they are its own."""


NO_CUTS: Mapping[str, Cut] = MappingProxyType({})
"""The cuts of clients that are all whole."""


class Line:
    """One client's connection through its cut: encodes, decodes and counts every message."""

    def __init__(self, cut: Cut, *, secret: bytes | None = None) -> None:
        """`secret` is what the client's noise is drawn from; raises `ProtocolError` for noise without one."""
        if cut.noise and secret is None:
            raise ProtocolError(
                f"noise of {cut.noise:g} is asked for at a cut, and the settings have none; install the same atlas-fl"
                " on both ends"
            )
        self.cut, self._secret = cut, secret
        self.crossed: Counter[tuple[Kind, Direction]] = Counter()

    def message(self, rows: Tensor, kind: Kind, *, extra: Mapping[str, Tensor] | None = None) -> bytes:
        """What leaves the client, counted: the rows (tokens, width) with its noise, and `extra` beside them."""
        if self.cut.noise and self._secret is not None:
            rows = with_noise(rows, noise=self.cut.noise, secret=self._secret, kind=kind)
        return self._counted(encode_rows(rows, wire=self.cut.wire, extra=extra), kind, "up")

    def up(self, rows: Tensor, kind: Kind, *, extra: Mapping[str, Tensor] | None = None) -> Tensor:
        """The rows (tokens, width) as the server gets them, with the client's noise, in their own dtype."""
        return decode_rows(self.message(rows, kind, extra=extra))[0].to(device=rows.device, dtype=rows.dtype)

    def down(self, rows: Tensor, kind: Kind) -> Tensor:
        """The rows (tokens, width) as the client gets them, in their own dtype."""
        message = self._counted(encode_rows(rows, wire=self.cut.wire), kind, "down")
        return decode_rows(message)[0].to(device=rows.device, dtype=rows.dtype)

    def tell(self, kind: Kind, direction: Direction, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors that travel as they are."""
        self._counted(encode(tensors), kind, direction)

    def share_norms(self, norms: Tensor, below: Sequence[int]) -> None:
        """Each side tells the other the norm of each of its gradients, so that a client is clipped as a whole.

        `norms` are those of the whole model, (tensors,), and `below` the places of the client's among them.
        """
        here = torch.zeros(len(norms), dtype=torch.bool, device=norms.device)
        here[list(below)] = True
        self.tell("control", "up", {NORMS: norms[here]})
        self.tell("control", "down", {NORMS: norms[~here]})

    def _counted(self, message: bytes, kind: Kind, direction: Direction) -> bytes:
        self.crossed[kind, direction] += len(message)
        return message


@dataclass(frozen=True, kw_only=True, eq=False)
class End:
    """A cut client's part of a row."""

    line: Line
    tokens: slice
    """Its tokens in the row."""
    reads: slice
    """Its rows of features."""
    lengths: Tensor
    """(sequences,) int32: the server needs them to keep attention inside each."""
    places: Tensor | None
    """(reads,) int32: the tokens that the head reads, where text is written."""
    labels: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class _Crossing:
    """Rows that cross: there in the forward pass, back in the backward pass."""

    rows: slice
    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


class _Cross(torch.autograd.Function):
    """The rows of some clients as the other side gets them, and their gradients likewise; all others untouched."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, crossings: Sequence[_Crossing]) -> Tensor:
        ctx.crossings = crossings
        out = rows.clone()
        for own in crossings:
            out[own.rows] = own.there(rows[own.rows])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.clone()
        for own in ctx.crossings:
            out[own.rows] = own.back(grad[own.rows])
        return out, None


def features_across(
    backbone: Backbone, ids: Tensor, types: Tensor, layout: Layout, *, ends: Sequence[End], reads: Tensor | None = None
) -> Tensor:
    """What the heads read of the row, (reads, hidden), as `models.backbone.features` gives it, over every cut.

    `ids` and `types` are (tokens,) int64, `reads` (reads,) int64 places in the row; `ends` are the cut clients', at
    least one. A gradient crosses where something below the cut trains.
    """
    pick, done = picked(backbone.family, layout, reads), 0
    hidden = embed(backbone, ids, types, layout)
    for blocks in sorted({end.line.cut.blocks for end in ends}):
        hidden = through(backbone, hidden, layout, range(done, blocks))
        hidden = _cross(hidden, [_activations(end) for end in ends if end.line.cut.blocks == blocks])
        done = blocks
    rest = range(done, len(backbone.blocks))
    found = features_of(backbone, through(backbone, hidden, layout, rest, pick=pick), pick)
    for end in ends:
        if end.line.cut.head == "server":
            end.line.tell("label", "up", {"labels": end.labels})
    home = [_features(end) for end in ends if end.line.cut.head == "client"]
    return _cross(found, home) if home else found


def _activations(end: End) -> _Crossing:
    beside = {"lengths": end.lengths} | ({} if end.places is None else {"places": end.places})
    return _Crossing(
        rows=end.tokens,
        there=lambda rows: end.line.up(rows, "activation", extra=beside),
        back=lambda rows: end.line.down(rows, "gradient"),
    )


def _features(end: End) -> _Crossing:
    return _Crossing(
        rows=end.reads,
        there=lambda rows: end.line.down(rows, "activation"),
        back=lambda rows: end.line.up(rows, "gradient"),
    )


def _cross(rows: Tensor, crossings: Sequence[_Crossing]) -> Tensor:
    found: Tensor = _Cross.apply(rows, crossings)  # type: ignore[no-untyped-call]
    return found
