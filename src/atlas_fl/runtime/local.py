"""All clients in this process.

What a round holds of whole models: updates up to a bound in memory, those beyond it in files that are mapped.

A federation in which all of a hundred clients take part would hold a hundred copies of the model until they are
averaged. The pages of a mapped file are the system's to take back when memory is short. The files have no name: they
are gone when nothing reads them any more, however the process ends.

All clients in this process, in packs that fit the memory.

Image clients in this process: one trains after another, those with one model are scored together.
"""

import mmap
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from atlas_fl.client.batching import packs
from atlas_fl.client.calibration import ridge_sums, scale_losses, sensitivity
from atlas_fl.client.full_training import ImageSite, evaluate_whole, images_of, same_models, train_whole
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.registry import ACTIONS
from atlas_fl.errors import DataError
from atlas_fl.models.shared_memory import buffer_entries, tensor_views
from atlas_fl.params import Params, num_bytes

HELD_BYTES = 2**30
"""Most bytes of a round's updates in memory: twelve models of the size of ViT-S."""


def bounded(update: Update, held: Sequence[Update]) -> Update:
    """The update, in memory where it fits beside those that are held already, else in a file."""
    if sum(num_bytes(one.params) for one in (*held, update)) <= HELD_BYTES:
        return update
    return replace(update, params=on_disk(update.params))


def on_disk(params: Params) -> Params:
    """The same tensors in a mapped file of the directory for temporary files (TMPDIR).

    Raises `DataError` where there is no room for it.
    """
    places, size = buffer_entries(params)
    try:
        with tempfile.TemporaryFile() as file:
            for place in places:
                file.seek(place["offset"])
                file.write(params[place["name"]].contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.truncate(size)
            file.flush()
            return tensor_views(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), places)
    except OSError as error:
        raise DataError(
            f"no room for a client's update of {size / 1e6:.0f} MB in {tempfile.gettempdir()} ({error.strerror}); free"
            " some, set TMPDIR to a larger place, or lower --participation"
        ) from error


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
