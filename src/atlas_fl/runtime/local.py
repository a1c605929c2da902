"""The local engine: all clients in this process; large updates are memory-mapped files.

A round in which a hundred clients train whole models would hold a hundred copies of the model until they are averaged.
Updates beyond a bound are therefore written to files and mapped: the operating system can take their pages back when
memory is short. The files are unlinked, so they are gone when nothing reads them, however the process ends.
"""

import mmap
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from atlas_fl.client.batching import packs
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.registry import ACTIONS
from atlas_fl.errors import DataError
from atlas_fl.models.backbone import buffer_entries, tensor_views
from atlas_fl.params import Params, is_full_model, num_bytes

MAX_BYTES_IN_MEMORY = 2**30
"""Maximum size of a round's updates in memory: twelve models of the size of ViT-S."""


def spill_to_disk(action: str, updates: Sequence[Update], earlier: Sequence[Update]) -> list[Update]:
    """The updates, with whole models in memory as far as they fit beside the earlier ones, the others memory-mapped.

    Adapters always fit, and evaluations return no new model.
    """
    if action == "evaluate" or not any(is_full_model(update.params) for update in updates):
        return list(updates)
    results = list[Update]()
    for update in updates:
        results.append(spill_if_large(update, [*earlier, *results]))
    return results


def spill_if_large(update: Update, earlier: Sequence[Update]) -> Update:
    """The update, in memory where it fits beside the earlier ones, else memory-mapped."""
    if sum(num_bytes(other.params) for other in (*earlier, update)) <= MAX_BYTES_IN_MEMORY:
        return update
    return replace(update, params=memory_mapped(update.params))


def memory_mapped(params: Params) -> Params:
    """The same tensors in a memory-mapped temporary file (TMPDIR); raises `DataError` where the disk is full."""
    entries, size = buffer_entries(params)
    try:
        with tempfile.TemporaryFile() as file:
            for entry in entries:
                file.seek(entry["offset"])
                file.write(params[entry["name"]].contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.truncate(size)
            file.flush()
            return tensor_views(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), entries)
    except OSError as error:
        raise DataError(
            f"no room for a client's update of {size / 1e6:.0f} MB in {tempfile.gettempdir()} ({error.strerror}); free"
            " some, set TMPDIR to a larger place, or lower --participation"
        ) from error


@dataclass(frozen=True, kw_only=True)
class LocalEngine:
    """All clients in this process."""

    site: Site
    on_progress: Callable[[str, int, int], None] | None = None
    """Callback with (action, jobs done, jobs) after each pack."""

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order."""
        update_by_job: dict[int, Update] = {}
        for pack in packs(jobs, self.site):
            updates = spill_to_disk(action, ACTIONS[action](pack, self.site), list(update_by_job.values()))
            update_by_job |= zip(map(id, pack), updates, strict=True)
            if self.on_progress is not None:
                self.on_progress(action, len(update_by_job), len(jobs))
        return [update_by_job[id(job)] for job in jobs]
