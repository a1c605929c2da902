"""Reused results: what several runs of one process would compute alike is computed once, with the same bits.

An action is a pure function of its jobs and of the site: equal jobs at equal sites have equal updates. Strategies of
one seed share fingerprints, importance, the first round's training and the scores of equal models; what they share is
found by content, so nobody has to say it. A key is the SHA-256 of the action, of all jobs that ran together (the last
bits follow the packs), and of the site: data, frozen weights, precision, limits and threads.

Models with cuts, masks, momentum or control variates, and whole models, are always computed.

States of the frozen blocks are shared too, by runs that follow one another on the same data (`models.prefix_cache`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256

import torch

from atlas_fl.client.job import ClientTokens, Job, Site, Update
from atlas_fl.frozen import Frozen
from atlas_fl.models.prefix_cache import PrefixCache
from atlas_fl.params import digest, num_bytes
from atlas_fl.plugins import active_plugins
from atlas_fl.runtime.engine import Engine
from atlas_fl.storage.files import secret_digest

MAX_BYTES = 512 << 20
"""Most bytes of tensors in remembered updates: hundreds of rounds of small adapters."""


@dataclass(kw_only=True, eq=False)
class ReusedResults:
    """Updates by the key of what they were computed from, the least recently used of them dropped beyond a size."""

    max_bytes: int = 0
    """Bound on their size; 0 remembers nothing."""
    _results: dict[str, tuple[list[Update], int]] = field(default_factory=dict)
    """By key (updates, bytes), the least recently used first."""
    _prefix: tuple[str, PrefixCache] | None = None
    """The states of the last run's data, with the key of what they follow from."""

    @contextmanager
    def remember(self, max_bytes: int = MAX_BYTES) -> Iterator["ReusedResults"]:
        """Remember results until the context ends."""
        self.max_bytes = max_bytes
        try:
            yield self
        finally:
            self.max_bytes = 0
            self._results.clear()
            self._prefix = None

    def with_prefix_cache(self, site: Site) -> Site:
        """The site with the states of the frozen blocks that the run before it computed from the same data."""
        if not self.max_bytes or not site.first_adapted:
            return site
        key = prefix_key(site)
        if self._prefix is None or self._prefix[0] != key:
            self._prefix = key, site.prefix_cache
        return replace(site, prefix_cache=self._prefix[1])

    def run(self, key: str, compute: Callable[[], list[Update]]) -> list[Update]:
        """The updates of this key, computed now or before."""
        result = self._results.pop(key, None)
        if result is None:
            updates = compute()
            result = updates, sum(num_bytes(update.params) + num_bytes(update.beside_model()) for update in updates)
        self._results[key] = result
        while sum(size for _, size in self._results.values()) > self.max_bytes:
            del self._results[next(iter(self._results))]
        return list(result[0])


REUSED_RESULTS = ReusedResults()
"""The results of this process; nothing is remembered outside of `remember`."""


class ReusingEngine(Frozen):
    """An engine that asks another one only for what is not remembered."""

    engine: Engine
    site: Site
    results: ReusedResults = REUSED_RESULTS

    @cached_property
    def _site_key(self) -> str:
        return site_key(self.site)

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        """The updates of these jobs, in their order."""
        if not self.results.max_bytes or not all(_is_reusable(job, self.site) for job in jobs):
            return self.engine.run(action, jobs)
        parts = [f"{job.client} {job.round} {job.options!r}" for job in jobs]
        trees = [{"model": job.params, **job.sent, **job.kept} for job in jobs]
        digests = [{kind: digest(tree[kind]) for kind in sorted(tree)} for tree in trees]
        key = sha256("\n".join([self._site_key, action, *parts, repr(digests)]).encode()).hexdigest()
        return self.results.run(key, lambda: self.engine.run(action, jobs))


def _is_reusable(job: Job, site: Site) -> bool:
    keeps = "momentum" in job.kept or "correction" in job.sent or getattr(job.options, "control_variates", False)
    return site.trainable == "lora" and job.cut is None and job.mask is None and not keeps


def site_key(site: Site) -> str:
    """SHA-256 of all that updates follow from besides their jobs."""
    settings = (
        *(site.targets, site.scale(1), site.scale(2), site.max_tokens, site.trainable, site.first_adapted),
        *(site.bf16, site.fp16, site.prefix_cache.chunk_tokens, str(site.backbone.device), torch.get_num_threads()),
        *active_plugins(),
    )
    clients = [
        f"{name} {_tokens_key(data)} {secret_digest(site.secrets.get(name))}"
        for name, data in sorted(site.data.items())
    ]
    return sha256("\n".join([repr(settings), digest(site.backbone.frozen), *clients]).encode()).hexdigest()


def prefix_key(site: Site) -> str:
    """SHA-256 of all that the states of the frozen blocks follow from, and of how many are kept."""
    cache, device = site.prefix_cache, str(site.backbone.device)
    settings = (site.first_adapted, site.bf16, site.fp16, device, torch.get_num_threads(), cache.budget_bytes)
    splits = sorted(
        f"{name} {split} {rows.digest}" for name, data in site.data.items() for split, rows in data.splits.items()
    )
    parts = [repr((*settings, cache.chunk_tokens)), digest(site.backbone.frozen), *splits]
    return sha256("\n".join(parts).encode()).hexdigest()


def _tokens_key(data: ClientTokens) -> str:
    task = (data.task.name, data.task.num_labels, data.task.metric, data.task.label_names, data.task.positive)
    splits = [f"{split} {rows.digest}" for split, rows in sorted(data.splits.items())]
    prompts = [
        f"{split} {own.encoded.digest} {own.encoded.ends} {own.references!r}"
        for split, own in sorted(data.prompts.items())
    ]
    return repr((task, splits, prompts))
