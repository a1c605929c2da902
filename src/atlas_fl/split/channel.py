"""A cut of a client's model, and the way of its rows to the server.

    client forward -> encode -> server forward, loss, backward -> encode -> client backward

Both halves compute in two programs or, in a simulation, in one, on one frozen backbone; between them are bytes alone.
What is computed is the function of the whole model wherever the wire changes no number (`fp32` without noise): to the
last bit.

With `head="server"` the labels go up. With `head="client"` the features come down, and their gradient goes up.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from torch import Tensor

from atlas_fl.frozen import Frozen
from atlas_fl.split.codec import WireName, add_noise, encode_rows
from atlas_fl.storage.ledger import Direction, Kind

CutTraffic: TypeAlias = Mapping[tuple[Kind, Direction], int]
"""Bytes through one client's cut by kind and direction."""


NORMS = "norms"
"""The name under which one side's norms travel."""


class Cut(Frozen):
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


def encode_up(
    rows: Tensor, kind: Kind, *, cut: Cut, secret: bytes | None, extra: Mapping[str, Tensor] | None = None
) -> bytes:
    """A client's message through its cut: the rows (tokens, width) with its noise, and `extra` beside them.

    `secret` is what the noise is drawn from.
    """
    if cut.noise:
        assert secret is not None, "a site has a secret, and so has a client of a simulation"
        rows = add_noise(rows, noise=cut.noise, secret=secret, kind=kind)
    return encode_rows(rows, wire=cut.wire, extra=extra)
