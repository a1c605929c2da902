"""All clients in this process, in packs that fit the memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atlas_fl.clients import ACTIONS
from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.clients.packs import packs


@dataclass(frozen=True, kw_only=True)
class LocalEngine:
    """One site that holds every client."""

    site: Site
    on_progress: Callable[[str, int, int], None] | None = None
    """Told (action, jobs done, jobs) after each pack."""

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order."""
        found: dict[int, Update] = {}
        for pack in packs(jobs, self.site):
            found |= zip(map(id, pack), ACTIONS[action](pack, self.site), strict=True)
            if self.on_progress is not None:
                self.on_progress(action, len(found), len(jobs))
        return [found[id(job)] for job in jobs]
