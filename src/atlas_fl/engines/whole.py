"""Image clients in this process: one trains after another, those with one model are scored together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from atlas_fl.clients.base import Job, Update
from atlas_fl.clients.images.ridge import ridge_sums, scale_losses
from atlas_fl.clients.images.sensitivity import sensitivity
from atlas_fl.clients.images.whole import ImageSite, evaluate_whole, images_of, same_models, train_whole
from atlas_fl.engines.spill import bounded

WholeAction: TypeAlias = Callable[[Sequence[Job], ImageSite], list[Update]]

WHOLE_ACTIONS: Mapping[str, WholeAction] = {
    "ridge": ridge_sums,
    "scale": scale_losses,
    "sensitivity": sensitivity,
    "train": train_whole,
    "evaluate": evaluate_whole,
}


def whole_packs(action: str, jobs: Sequence[Job], site: ImageSite) -> Iterator[list[Job]]:
    """The jobs one by one; where they are to be scored, those with one model together, up to `site.pack_images` images.

    Formed by the settings alone, so that who works changes no bit of the scores.
    """
    if action != "evaluate":
        yield from ([job] for job in jobs)
        return
    for places in same_models(jobs):
        pack, images = list[Job](), 0
        for job in (jobs[place] for place in places):
            own = len(images_of(site, job.client, job.options.split))
            if pack and images + own > site.pack_images:
                yield pack
                pack, images = [], 0
            pack.append(job)
            images += own
        yield pack


def within_memory(action: str, updates: Sequence[Update], held: Sequence[Update]) -> list[Update]:
    """The updates, in memory as far as they fit there beside those that are held; scores hold no model of their own."""
    if action == "evaluate":
        return list(updates)
    found = list[Update]()
    for update in updates:
        found.append(bounded(update, [*held, *found]))
    return found


@dataclass(frozen=True, kw_only=True)
class WholeEngine:
    """One site that holds every client's images; an `Engine`."""

    site: ImageSite
    on_progress: Callable[[str, int, int], None] | None = None
    """Told (action, jobs done, jobs) after each pack."""

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order."""
        found: dict[int, Update] = {}
        for pack in whole_packs(action, jobs, self.site):
            updates = within_memory(action, WHOLE_ACTIONS[action](pack, self.site), list(found.values()))
            found |= zip(map(id, pack), updates, strict=True)
            if self.on_progress is not None:
                self.on_progress(action, len(found), len(jobs))
        return [found[id(job)] for job in jobs]
