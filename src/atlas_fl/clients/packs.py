"""Which clients' mini-batches go through the backbone together."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from atlas_fl.clients.base import Job, Site

PartT = TypeVar("PartT")


def packs(jobs: Sequence[Job], site: Site) -> Iterator[list[Job]]:
    """The jobs in groups whose mini-batches hold on average at most `site.max_tokens` tokens together.

    A job that is larger than that alone makes a pack of one. Clients that share adapters above their cuts step at once,
    so they are in one pack however large it is; its rows are then formed by `rows`.
    """
    units: dict[Hashable, list[Job]] = {}
    for place, job in enumerate(jobs):
        together = job.cut is not None and job.cut.shared is not None
        units.setdefault(("shared", job.cut.shared) if together and job.cut else place, []).append(job)
    sized = [(unit, sum(tokens_of(job, site) for job in unit)) for unit in units.values()]
    for pack in _greedy(sized, site.max_tokens):
        yield [job for unit in pack for job in unit]


def rows(jobs: Sequence[Job], site: Site) -> list[list[int]]:
    """The places of a pack's jobs, by the rows that they go through the backbone in: one, but for a pack too large."""
    return list(_greedy([(place, tokens_of(job, site)) for place, job in enumerate(jobs)], site.max_tokens))


def tokens_of(job: Job, site: Site) -> float:
    """Tokens of a mini-batch on average; 0 for an action without mini-batches, which bounds its own rows."""
    data = site.data[job.client].splits["train"]
    return getattr(job.options, "batch_size", 0) * float(data.offsets[-1]) / max(1, len(data))


def _greedy(parts: Iterable[tuple[PartT, float]], most: float) -> Iterator[list[PartT]]:
    pack: list[PartT] = []
    tokens = 0.0
    for part, size in parts:
        if pack and tokens + size > most:
            yield pack
            pack, tokens = [], 0.0
        pack.append(part)
        tokens += size
    if pack:
        yield pack
