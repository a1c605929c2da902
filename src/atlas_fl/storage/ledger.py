"""The ledger of what crosses the network: one row for each message, with the bytes of the encoded payload.

Of what crosses the cut of a model, one row for all messages of one kind and direction in a round.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, get_args

from atlas_fl.frozen import Frozen

Direction: TypeAlias = Literal["up", "down"]
Kind: TypeAlias = Literal[
    "fingerprint",
    "importance",
    "adapter",
    "head",
    "weights",
    "activation",
    "gradient",
    "label",
    "mask",
    "control",
    "correction",
    "features",
    "halves",
    "report",
    "frozen",
]
KINDS: tuple[Kind, ...] = get_args(Kind)


class LedgerRow(Frozen):
    """Message between a client and the server, or its `peer`; round 0 is what happens before training."""

    round: int
    client: str
    direction: Direction
    kind: Kind
    bytes: int
    peer: str = ""
    """The client at the other end, who hosts this one's upper part; empty: the server."""
    guest: str = ""
    """Client whose upper part a host gets and returns; empty: what is sent is the client's own."""
    phase: str = ""
    """Phase of planning that crossed a cut: `fingerprint`, `importance` or `evaluate`; empty: a round, or no cut."""

    def to_json(self) -> dict[str, Any]:
        """The row as `ledger.jsonl` holds it; without `peer`, `guest` and `phase` where there is none."""
        # `asdict` copies deeply, which costs more than the whole message's accounting.
        return {key: value for key, value in vars(self).items() if value != ""}


class Totals(Frozen):
    """Sums of bytes; every mapping holds only what was sent."""

    up: int
    """From clients to the server, or to the host of their upper part."""
    down: int
    by_kind: dict[str, dict[str, int]]
    """Bytes by kind, then by direction."""
    by_client: dict[str, dict[str, int]]
    """Bytes by client, then by direction; what goes between two clients goes over the links of both."""
    by_round: dict[int, dict[str, int]]
    """Bytes by round, then by direction."""
    between_clients: int = 0
    """Bytes that do not touch the server."""

    @property
    def total(self) -> int:
        """Bytes in both directions."""
        return self.up + self.down


def totals(rows: Iterable[LedgerRow]) -> Totals:
    """The sums of a ledger by direction, kind, client and round."""
    by_kind: dict[str, dict[str, int]] = defaultdict(_no_bytes)
    by_client: dict[str, dict[str, int]] = defaultdict(_no_bytes)
    by_round: dict[int, dict[str, int]] = defaultdict(_no_bytes)
    overall = _no_bytes()
    between_clients = 0
    for row in rows:
        for sums in (overall, by_kind[row.kind], by_client[row.client], by_round[row.round]):
            sums[row.direction] += row.bytes
        if row.peer:
            by_client[row.peer]["down" if row.direction == "up" else "up"] += row.bytes
            between_clients += row.bytes
    return Totals(
        **overall,
        by_kind=dict(by_kind),
        by_client=dict(by_client),
        by_round=dict(by_round),
        between_clients=between_clients,
    )


def _no_bytes() -> dict[str, int]:
    return {"up": 0, "down": 0}
