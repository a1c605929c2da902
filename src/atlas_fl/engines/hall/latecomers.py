"""Clients that come to a hall whose plan was made without them."""

from atlas_fl.engines.hall.hall import Hall
from atlas_fl.engines.hall.seats import Seat


async def newcomers(hall: Hall) -> tuple[Seat, ...]:
    """Who is here and in no plan, in the order in which the names were listed."""
    known = hall.planned or set()
    return tuple(
        seat for name, seat in hall.seats.items() if seat.here and seat.census and not seat.lost and name not in known
    )


async def let_in(hall: Hall, name: str) -> None:
    """This client is in the plan from now on."""
    hall.planned = {*(hall.planned or ()), name}


async def leave_out(hall: Hall, name: str) -> None:
    """The plan is made without this client, which may join later as any other that comes late."""
    hall.planned = (hall.planned or set()) - {name}


async def turn_away(hall: Hall, name: str, reason: str) -> None:
    """Tell a newcomer why it cannot join; it may come again, with other data or another device."""
    await hall.lose(name, f"{name} cannot join: {reason}")
    hall.seats[name].census = None
