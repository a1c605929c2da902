"""A flood of refusals is a line and a number."""

import pytest

from atlas_fl.errors import ProtocolError
from atlas_fl.runtime.transport.sessions import MOST_NAMES, OTHERS, Penalties, RefusalLog


class Clock:
    def __init__(self) -> None:
        self.told, self.now = list[tuple[str, str]](), 0.0
        self.refusals = RefusalLog(tell=lambda *what: self.told.append(what), clock=lambda: self.now)

    def at(self, now: float) -> RefusalLog:
        self.now = now
        return self.refusals


def test_the_first_is_told_at_once_and_how_many_more_a_minute_later() -> None:
    clock = Clock()
    for number in range(300):
        clock.at(number / 10).add("x", "no")
    assert clock.told == [("x", "no")]
    clock.at(59).look()
    assert len(clock.told) == 1
    clock.at(61).look()
    assert clock.told[1:] == [("x", "no (299 times more within a minute)")]
    clock.at(62).add("x", "no")
    assert len(clock.told) == 2, "a line a minute, not more"
    clock.at(130).look()
    assert clock.told[2:] == [("x", "no (once more within a minute)")]
    clock.at(300).look()
    clock.at(301).add("x", "no")
    assert clock.told[3:] == [("x", "no")]


def test_names_do_not_hide_each_other_and_as_many_as_are_asked_for_are_told() -> None:
    clock = Clock()
    for name in "abab":
        clock.at(1).add(name, "no")
    assert clock.told == [("a", "no"), ("b", "no")]
    for number in range(5):
        clock.at(1).add("listed", str(number), most=3)
    assert clock.told[2:] == [("listed", "0"), ("listed", "1"), ("listed", "2")]


def test_names_without_end_are_not_all_remembered_and_terminal_codes_are_shown() -> None:
    clock = Clock()
    for number in range(2 * MOST_NAMES):
        clock.at(1).add(f"\x1b{number}", "no")
    assert clock.told[:2] == [("?0", "no"), ("?1", "no")]
    assert clock.told[-1] == (OTHERS, "no")
    assert len(clock.told) == MOST_NAMES + 1
    clock.at(100).look()
    clock.at(200).look()
    assert not clock.refusals._minutes


def test_a_name_is_refused_for_twice_as_long_each_time_up_to_a_bound_and_begins_anew_after_it() -> None:
    now = 0.0
    penalties = Penalties(clock=lambda: now, first_seconds=1, most_seconds=5)
    for seconds in (1, 2, 4, 5, 5):
        penalties.check("x")
        penalties.add("x")
        message = rf"client 'x' sent a message .* refused for {seconds} seconds, {seconds} of"
        with pytest.raises(ProtocolError, match=message):
            penalties.check("x")
        penalties.check("y")
        now += seconds
    now += 6
    penalties.add("x")
    with pytest.raises(ProtocolError, match="refused for 1 seconds"):
        penalties.check("x")
