from typing import get_args

import pandas as pd
import pytest

from atlas_fl.rng import generator
from atlas_fl.storage.ledger import KINDS, Direction, LedgerRow, totals

DIRECTIONS = get_args(Direction)


def some_rows(count: int = 200) -> list[LedgerRow]:
    draw = generator(0, "ledger")
    return [
        LedgerRow(
            round=int(draw.integers(0, 5)),
            client=f"movie-{draw.integers(0, 4)}",
            direction=DIRECTIONS[draw.integers(0, 2)],
            kind=KINDS[draw.integers(0, len(KINDS))],
            bytes=int(draw.integers(0, 10**9)),
        )
        for _ in range(count)
    ]


def test_totals_by_hand() -> None:
    rows = [
        LedgerRow(round=0, client="a-0", direction="up", kind="fingerprint", bytes=4096),
        LedgerRow(round=1, client="a-0", direction="up", kind="adapter", bytes=10),
        LedgerRow(round=1, client="b-0", direction="down", kind="adapter", bytes=7),
    ]
    found = totals(rows)
    assert (found.up, found.down, found.total) == (4106, 7, 4113)
    assert found.by_kind == {"fingerprint": {"up": 4096, "down": 0}, "adapter": {"up": 10, "down": 7}}
    assert found.by_client == {"a-0": {"up": 4106, "down": 0}, "b-0": {"up": 0, "down": 7}}
    assert found.by_round == {0: {"up": 4096, "down": 0}, 1: {"up": 10, "down": 7}}


def test_what_goes_between_clients_is_on_both_their_links_by_hand() -> None:
    rows = [
        LedgerRow(round=1, client="a-0", direction="up", kind="activation", bytes=100, peer="b-0"),
        LedgerRow(round=1, client="a-0", direction="down", kind="gradient", bytes=90, peer="b-0"),
        LedgerRow(round=1, client="b-0", direction="up", kind="adapter", bytes=7, guest="a-0"),
    ]
    found = totals(rows)
    assert (found.up, found.down, found.between_clients) == (107, 90, 190)
    assert found.by_client == {"a-0": {"up": 100, "down": 90}, "b-0": {"up": 97, "down": 100}}


def test_rows_without_a_peer_are_written_and_read_as_ever() -> None:
    old = {"round": 1, "client": "a-0", "direction": "up", "kind": "head", "bytes": 1}
    assert LedgerRow(**old).to_json() == old
    new = old | {"kind": "activation", "peer": "b-0"}
    assert LedgerRow(**new).to_json() == new


@pytest.mark.parametrize("column", ["kind", "client", "round"])
def test_totals_agree_with_pandas(column: str) -> None:
    rows = some_rows()
    frame = pd.DataFrame([row.to_json() for row in rows])
    sums = frame.pivot_table(index=column, columns="direction", values="bytes", aggfunc="sum", fill_value=0)
    expected = {key: {name: int(sums.loc[key, name]) for name in DIRECTIONS} for key in sums.index}
    assert getattr(totals(rows), f"by_{column}") == expected


def test_a_run_that_sends_nothing_has_no_entries() -> None:
    found = totals([])
    assert (found.total, found.by_kind, found.by_client, found.by_round) == (0, {}, {}, {})


def test_a_row_reads_back() -> None:
    for row in some_rows(20):
        assert LedgerRow(**row.to_json()) == row
