"""Image clients in this process: one trains after another, those with one model are scored together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from atlas_fl.clients.base import Job, Update
from atlas_fl.clients.ridge import ridge_sums, scale_losses
from atlas_fl.clients.sensitivity import sensitivity
from atlas_fl.clients.whole import ImageSite, evaluate_whole, train_whole
from atlas_fl.engines.spill import bounded

WholeAction: TypeAlias = Callable[[Sequence[Job], ImageSite], list[Update]]

WHOLE_ACTIONS: Mapping[str, WholeAction] = {
    "ridge": ridge_sums,
    "scale": scale_losses,
    "sensitivity": sensitivity,
    "train": train_whole,
    "evaluate": evaluate_whole,
}


@dataclass(frozen=True, kw_only=True)
class WholeEngine:
    """One site that holds every client's images; an `Engine`."""

    site: ImageSite
    on_progress: Callable[[str, int, int], None] | None = None
    """Told (action, jobs done, jobs)."""

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order."""
        act, updates = WHOLE_ACTIONS[action], list[Update]()
        if action == "evaluate":
            return act(jobs, self.site)
        for job in jobs:
            updates += [bounded(update, updates) for update in act([job], self.site)]
            if self.on_progress is not None:
                self.on_progress(action, len(updates), len(jobs))
        return updates
