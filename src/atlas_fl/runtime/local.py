"""The local engine: all clients in this process; large updates are memory-mapped files.

A round in which a hundred clients train whole models would hold a hundred copies of the model until they are averaged.
Updates beyond a bound are therefore written to files and mapped: the operating system can take their pages back when
memory is short. The files are unlinked, so they are gone when nothing reads them, however the process ends.
"""

import mmap
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from atlas_fl.client.batching import packs
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.registry import ACTIONS
from atlas_fl.errors import DataError
from atlas_fl.frozen import Frozen
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
    size = sum(num_bytes(update.params) for update in earlier)
    results = list[Update]()
    for update in updates:
        size += num_bytes(update.params)
        is_held = size <= MAX_BYTES_IN_MEMORY
        results.append(update if is_held else replace(update, params=memory_mapped(update.params)))
    return results


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


def collect_updates(
    action: str,
    jobs: Sequence[Job],
    results: Iterable[tuple[Sequence[Job], Sequence[Update]]],
    on_progress: Callable[[str, int, int], None],
) -> list[Update]:
    """The updates of these jobs, in their order, from those of packs as they come."""
    update_by_job: dict[int, Update] = {}
    for pack, updates in results:
        spilled = spill_to_disk(action, updates, list(update_by_job.values()))
        update_by_job |= zip(map(id, pack), spilled, strict=True)
        on_progress(action, len(update_by_job), len(jobs))
    return [update_by_job[id(job)] for job in jobs]


class LocalEngine(Frozen):
    """All clients in this process."""

    site: Site
    on_progress: Callable[[str, int, int], None] = lambda _action, _done, _jobs: None
    """Callback with (action, jobs done, jobs) after each pack."""

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order."""
        results = ((pack, ACTIONS[action](pack, self.site)) for pack in packs(jobs, self.site))
        return collect_updates(action, jobs, results, self.on_progress)
