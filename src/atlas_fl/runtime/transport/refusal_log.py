"""What is told of refusals, and of who comes and goes: the first of a name at once, and how many more once a minute."""

from collections.abc import Callable
from dataclasses import dataclass, field

from atlas_fl.errors import one_line

MINUTE = 60.0
MOST_NAMES = 1000
"""Names that are told apart; who comes after them counts as one."""
OTHERS = "others"
SHOWN_SIGNS = 63
"""Most of a name that is told: as long as one may be."""


@dataclass(eq=False)
class _Count:
    since: float
    """When this name was told of last."""
    more: int = 0
    """Refusals since then."""
    reason: str = ""


@dataclass(kw_only=True, eq=False)
class Refusals:
    """Passes refusals on to `tell`, as many of each name as `most` a minute; the rest are counted."""

    tell: Callable[[str, str], None]
    clock: Callable[[], float]
    _told: dict[str, list[float]] = field(default_factory=dict)
    """When each name was told of within the last minute."""
    _counts: dict[str, _Count] = field(default_factory=dict)
    """Names of which more was to be told than may be."""

    def add(self, name: str, reason: str, *, most: int = 1) -> None:
        """This one was refused for this reason."""
        name, now = printable(name), self.clock()
        if name not in self._told and len(self._told) >= MOST_NAMES:
            name = OTHERS
        recent = [at for at in self._told.get(name, ()) if at > now - MINUTE]
        if len(recent) < most and name not in self._counts:
            self._told[name] = [*recent, now]
            self.tell(name, reason)
            return
        count = self._counts.setdefault(name, _Count(since=now))
        count.more, count.reason = count.more + 1, reason

    def look(self) -> None:
        """Tell how many more there were, of names where that is a minute ago."""
        now = self.clock()
        for name, count in list(self._counts.items()):
            if now - count.since >= MINUTE:
                del self._counts[name]
                self._told[name] = [now]
                times = "once more" if count.more == 1 else f"{count.more} times more"
                self.tell(name, f"{count.reason} ({times} within a minute)")
        for name in [name for name, ats in self._told.items() if ats[-1] <= now - MINUTE and name not in self._counts]:
            del self._told[name]


def printable(name: str) -> str:
    """A name from a certificate as a terminal may have it."""
    return one_line(name, limit=SHOWN_SIGNS)
