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
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from atlas_fl.errors import ProtocolError
from atlas_fl.models.attention import PackedLayout
from atlas_fl.models.backbone import Backbone, embed_tokens, norm_and_pool, read_positions, run_blocks
from atlas_fl.split.codec import WireName, add_noise, decode_rows, encode_rows
from atlas_fl.storage.ledger import Direction, Kind
from atlas_fl.storage.tensors import encode_tensors

CutTraffic: TypeAlias = Mapping[tuple[Kind, Direction], int]
"""Bytes through one client's cut by kind and direction."""


NORMS = "norms"
"""The name under which one side's norms travel."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Cut of one client's model."""

    blocks: int
    """Blocks on the client, from the bottom; at least one stays on the server."""
    wire: WireName = "fp32"
    """Encoding of rows in both directions."""
    noise: float = 0.0
    """Standard deviation of the noise on what leaves the client, in root mean squares of each row."""
    head: Literal["client", "server"] = "server"
    """Side that holds the head, and so needs the labels."""


NO_CUTS: Mapping[str, Cut] = MappingProxyType({})
"""The cuts of clients that are all whole."""


class CutChannel:
    """One client's connection through its cut: encodes, decodes and counts every message."""

    def __init__(self, cut: Cut, *, secret: bytes | None = None) -> None:
        """`secret` is what the client's noise is drawn from; raises `ProtocolError` for noise without one."""
        if cut.noise and secret is None:
            raise ProtocolError(
                f"noise of {cut.noise:g} is asked for at a cut, and the settings have none; install the same atlas-fl"
                " on both ends"
            )
        self.cut, self._secret = cut, secret
        self.traffic: Counter[tuple[Kind, Direction]] = Counter()

    def encode_up(self, rows: Tensor, kind: Kind, *, extra: Mapping[str, Tensor] | None = None) -> bytes:
        """Encode and count a client's message: the rows (tokens, width) with its noise, and `extra` beside them."""
        if self.cut.noise and self._secret is not None:
            rows = add_noise(rows, noise=self.cut.noise, secret=self._secret, kind=kind)
        return self._count(encode_rows(rows, wire=self.cut.wire, extra=extra), kind, "up")

    def send_up(self, rows: Tensor, kind: Kind, *, extra: Mapping[str, Tensor] | None = None) -> Tensor:
        """The rows (tokens, width) as the server gets them, with the client's noise, in their own dtype."""
        return decode_rows(self.encode_up(rows, kind, extra=extra))[0].to(device=rows.device, dtype=rows.dtype)

    def send_down(self, rows: Tensor, kind: Kind) -> Tensor:
        """The rows (tokens, width) as the client gets them, in their own dtype."""
        message = self._count(encode_rows(rows, wire=self.cut.wire), kind, "down")
        return decode_rows(message)[0].to(device=rows.device, dtype=rows.dtype)

    def send(self, kind: Kind, direction: Direction, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors that travel as they are."""
        self._count(encode_tensors(tensors), kind, direction)

    def share_norms(self, norms: Tensor, client_side: Sequence[int]) -> None:
        """Each side tells the other the norm of each of its gradients, so that a client is clipped as a whole.

        `norms` are those of the whole model, (tensors,), and `client_side` the places of the client's among them.
        """
        is_client_side = torch.zeros(len(norms), dtype=torch.bool, device=norms.device)
        is_client_side[list(client_side)] = True
        self.send("control", "up", {NORMS: norms[is_client_side]})
        self.send("control", "down", {NORMS: norms[~is_client_side]})

    def _count(self, message: bytes, kind: Kind, direction: Direction) -> bytes:
        self.traffic[kind, direction] += len(message)
        return message


@dataclass(frozen=True, kw_only=True, eq=False)
class CutSegment:
    """A cut client's part of a row."""

    channel: CutChannel
    tokens: slice
    """Its tokens in the row."""
    feature_rows: slice
    """Its rows of features."""
    lengths: Tensor
    """(sequences,) int32: the server needs them to keep attention inside each."""
    output_positions: Tensor | None
    """(reads,) int32: the tokens that the head reads, where text is written."""
    labels: Tensor


_Crossing: TypeAlias = tuple[slice, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""(rows that cross, their way in the forward pass, their gradients' way in the backward pass)."""


class _CrossCut(torch.autograd.Function):
    """The rows of some clients as the other side gets them, and their gradients likewise; all others untouched."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, crossings: Sequence[_Crossing]) -> Tensor:
        ctx.crossings = crossings
        out = rows.clone()
        for place, send, _ in crossings:
            out[place] = send(rows[place])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.clone()
        for place, _, send in ctx.crossings:
            out[place] = send(grad[place])
        return out, None


def backbone_features_across_cuts(
    backbone: Backbone,
    ids: Tensor,
    types: Tensor,
    layout: PackedLayout,
    *,
    segments: Sequence[CutSegment],
    output_positions: Tensor | None = None,
) -> Tensor:
    """The features of the row, (outputs, hidden), as `models.backbone.backbone_features` computes them, over every cut.

    `ids` and `types` are (tokens,) int64, `output_positions` (outputs,) int64 positions in the row. `segments` are
    those of the cut clients, at least one. A gradient crosses a cut where something below it trains.
    """
    positions, done = read_positions(backbone.family, layout, output_positions), 0
    hidden = embed_tokens(backbone, ids, types, layout)
    for blocks in sorted({segment.channel.cut.blocks for segment in segments}):
        hidden = run_blocks(backbone, hidden, layout, range(done, blocks))
        hidden = _cross(
            hidden, [_activation_crossing(segment) for segment in segments if segment.channel.cut.blocks == blocks]
        )
        done = blocks
    rest = range(done, len(backbone.blocks))
    features = norm_and_pool(backbone, run_blocks(backbone, hidden, layout, rest, positions=positions), positions)
    for segment in segments:
        if segment.channel.cut.head == "server":
            segment.channel.send("label", "up", {"labels": segment.labels})
    feature_crossings = [_feature_crossing(segment) for segment in segments if segment.channel.cut.head == "client"]
    return _cross(features, feature_crossings) if feature_crossings else features


def _activation_crossing(segment: CutSegment) -> _Crossing:
    extra = {"lengths": segment.lengths}
    if segment.output_positions is not None:
        extra["places"] = segment.output_positions
    up = partial(segment.channel.send_up, kind="activation", extra=extra)
    return segment.tokens, up, partial(segment.channel.send_down, kind="gradient")


def _feature_crossing(segment: CutSegment) -> _Crossing:
    down = partial(segment.channel.send_down, kind="activation")
    return segment.feature_rows, down, partial(segment.channel.send_up, kind="gradient")


def _cross(rows: Tensor, crossings: Sequence[_Crossing]) -> Tensor:
    out: Tensor = _CrossCut.apply(rows, crossings)  # type: ignore[no-untyped-call]
    return out
