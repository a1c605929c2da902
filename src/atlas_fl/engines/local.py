"""All clients in this process, in packs that fit the memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from atlas_fl.clients import ACTIONS
from atlas_fl.clients.base import Job, Site, Update


@dataclass(frozen=True, kw_only=True)
class LocalEngine:
    """One site that holds every client."""

    site: Site
    on_progress: Callable[[str, int, int], None] | None = None
    """Told (action, jobs done, jobs) after each pack."""

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order."""
        updates: list[Update] = []
        for pack in packs(jobs, self.site):
            updates += ACTIONS[action](pack, self.site)
            if self.on_progress is not None:
                self.on_progress(action, len(updates), len(jobs))
        return updates


def packs(jobs: Sequence[Job], site: Site) -> Iterator[list[Job]]:
    """The jobs in groups whose mini-batches hold on average at most `site.max_tokens` tokens together.

    A job that is larger than that alone makes a pack of one.
    """
    pack: list[Job] = []
    tokens = 0.0
    for job in jobs:
        # An action without mini-batches (evaluation) bounds its own rows.
        size = getattr(job.options, "batch_size", 0) * _mean_length(site, job.client)
        if pack and tokens + size > site.max_tokens:
            yield pack
            pack, tokens = [], 0.0
        pack.append(job)
        tokens += size
    if pack:
        yield pack


def _mean_length(site: Site, client: str) -> float:
    data = site.data[client].splits["train"]
    return float(data.offsets[-1]) / max(1, len(data))
