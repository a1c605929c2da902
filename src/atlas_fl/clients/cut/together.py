"""Server's halves that share their adapters and so step together (`clients.shared`), whenever their clients ask.

A step is taken when everybody whose turn it is has told the norms of its own side, and not before: the order in which
clients ask changes nothing.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from atlas_fl.clients.base import Job, Site
from atlas_fl.clients.cut.side import Side
from atlas_fl.clients.member import Member
from atlas_fl.clients.shared import shared_sets


def upper_member(job: Job, site: Site) -> Member:
    """The server's half of a cut client while it trains, as of the job's start."""
    return Member(replace(job, params=Side(job, site).above, cut=None), site, above=job.cut)


class Together:
    """The clients of one cluster that train in one round, from its start."""

    def __init__(self, jobs: Sequence[Job], site: Site) -> None:
        self.jobs = tuple(jobs)
        self.members = {job.client: upper_member(job, site) for job in jobs}
        self.begun = set[str]()
        """Clients that have asked something."""
        self.done = 0
        """Steps that all whose turn it was have taken."""
        self.is_void = False
        """Whether nothing more comes of this: it begins again, or without somebody."""
        self._sets = shared_sets(list(self.members.values()))
        self._told: dict[Member, int] = {}
        self._moving: dict[Member, int] = {}

    @property
    def is_over(self) -> bool:
        """Whether all have taken all their steps."""
        return all(member.steps <= self.done for member in self.members.values())

    def tell(self, member: Member, count: int, *, norms: Tensor | None) -> None:
        """This client can step, over so many examples; the last one who says so makes all step."""
        self._told[member] = count
        if member.clip(norms=norms):
            self._moving[member] = count
        if len(self._told) < sum(member.steps > self.done for member in self.members.values()):
            return
        for shared in self._sets:
            shared.step(self.done, self._moving)
        for one in self._moving:
            one.move(self.done)
        self.done += 1
        self._told, self._moving = {}, {}
