"""How the clients of a hall are told that it is over, and when their models lie on their disks."""

import asyncio
from collections.abc import Collection, Iterable, Mapping

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
    writing_seconds: float = 0.0,
    reason: str | None = None,
    awaited: Collection[str] = (),
) -> None:
    """Tell everyone that it is over, each with its model, or the reason why there is none.

    Waits so long for those who are here to hear it and to go, and for the `awaited` to come and to have their models on
    their disks; for those who are writing them at least `writing_seconds`. `hall.on_kept` is told who has: before it
    says so a client may be killed, and a stream that the server ends could take the last message with it.
    """
    for name, seat in hall.seats.items():
        seat.farewell = _farewell(seat, models.get(name), reason=reason)
        seat.woken.set()
    began = asyncio.get_running_loop().time()
    while not _over(hall.seats, awaited):
        waited = asyncio.get_running_loop().time() - began
        if waited >= seconds and not (waited < writing_seconds and _writing(hall.seats.values())):
            return
        await asyncio.sleep(0.02)


def _over(seats: Mapping[str, Seat], awaited: Collection[str]) -> bool:
    present = (seat for seat in seats.values() if seat.here and not seat.given_up)
    here = any(seat.census is not None or seat.kept for seat in present)
    return not here and all(seats[name].kept or seats[name].lost for name in awaited)


def _writing(seats: Iterable[Seat]) -> bool:
    """Whether somebody has been given its model and has not said that it is written."""
    return any(seat.here and seat.dismissed and not seat.kept and _has_model(seat) for seat in seats)


def _has_model(seat: Seat) -> bool:
    return seat.farewell is not None and seat.farewell[0].get("model") is True


def _farewell(seat: Seat, model: Params | None, *, reason: str | None) -> tuple[Head, Params]:
    """What a client is told at the end: its model, or why there is none."""
    if reason is not None:
        return {"kind": "ended", "reason": reason}, NO_TENSORS
    return ({"kind": "done", "model": False}, NO_TENSORS) if model is None else seat.sender.farewell(model)
