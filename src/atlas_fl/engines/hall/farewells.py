"""How the clients of a hall are told that it is over, and when they have heard it."""

import asyncio
from collections.abc import Collection, Mapping

from atlas_fl.engines.hall.hall import Hall
from atlas_fl.engines.hall.seats import Seat
from atlas_fl.engines.stream.frames import Head
from atlas_fl.engines.stream.sessions import NO_TENSORS
from atlas_fl.types import Params


async def dismiss(
    hall: Hall,
    models: Mapping[str, Params],
    *,
    seconds: float,
    reason: str | None = None,
    awaited: Collection[str] = (),
) -> frozenset[str]:
    """Who has heard that it is over and gone: everyone is told, each with its model, or the reason why there is none.

    Waits so long for those who are here to hear it, and for the `awaited` to come and hear it. Gone is who has read it:
    a stream that the server ends could take the last message with it.
    """
    for name, seat in hall.seats.items():
        seat.farewell = _farewell(seat, models.get(name), reason=reason)
        seat.woken.set()
    until = asyncio.get_running_loop().time() + seconds
    while not _over(hall.seats, awaited) and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0.02)
    return frozenset(name for name, seat in hall.seats.items() if seat.dismissed and not seat.here)


def _over(seats: Mapping[str, Seat], awaited: Collection[str]) -> bool:
    here = any(seat.here and seat.census is not None for seat in seats.values())
    return not here and all(seats[name].dismissed or seats[name].lost for name in awaited)


def _farewell(seat: Seat, model: Params | None, *, reason: str | None) -> tuple[Head, Params]:
    """What a client is told at the end: its model, or why there is none."""
    if reason is not None:
        return {"kind": "ended", "reason": reason}, NO_TENSORS
    return ({"kind": "done", "model": False}, NO_TENSORS) if model is None else seat.sender.farewell(model)
