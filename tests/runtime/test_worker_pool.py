"""Packs handed out: the updates of one process, in the order of the jobs, whoever is done first."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from atlas_fl.client.job import Job, Site
from atlas_fl.client.options import TrainOptions
from atlas_fl.errors import ModelError, ProtocolError
from atlas_fl.models.loading import load_backbone
from atlas_fl.params import digest
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.runtime.protocol.model_sync import Receiver
from atlas_fl.runtime.worker_pool import PoolEngine, WorkerLoop, init_workers

TRAIN = TrainOptions(seed=0, batch_size=4, max_steps=2)


class Ordered:
    """Answers when it may, and tells that it has answered."""

    def __init__(self, inner: WorkerLoop, may: threading.Event, done: threading.Event) -> None:
        self.inner, self.may, self.done = inner, may, done

    def ask(self, frames: list[bytes]) -> list[bytes]:
        assert self.may.wait(60)
        found = self.inner.ask(frames)
        self.done.set()
        return found


def resident(site: Site) -> WorkerLoop:
    """A worker with this site's data and a model of its own, as in a process of its own."""
    own = replace(site, backbone=load_backbone(str(site.backbone.source)))
    found = WorkerLoop(lambda _head, _memory: (own, Receiver()), lambda: None)
    with ThreadPoolExecutor(1) as threads:
        init_workers([found], [{}], threads)
    return found


def pool_of(
    site: Site, workers: list[Any], threads: ThreadPoolExecutor, on_progress: Callable[..., None] = lambda *_: None
) -> PoolEngine:
    return PoolEngine(site=site, workers=workers, threads=threads, on_progress=on_progress)


@pytest.fixture
def site(tiny_of: Callable[[str], Any], site_of: Callable[..., Site], spec_of: type[Any]) -> Site:
    """Three clients, each a pack of its own."""
    return site_of(tiny_of("bert"), *(spec_of(name=f"a-{i}") for i in range(3)), max_tokens=1)


def jobs_of(site: Site, tiny: Any, spec_of: type[Any]) -> list[Job]:
    return [
        Job(client=name, params=tiny.params(spec_of(name=name), seed=place), round=1, options=TRAIN)
        for place, name in enumerate(site.data)
    ]


def test_updates_come_in_the_order_of_the_jobs_whoever_is_done_first(site: Site, tiny_of: Any, spec_of: Any) -> None:
    jobs = jobs_of(site, tiny_of("bert"), spec_of)
    always, second, first, told = threading.Event(), threading.Event(), threading.Event(), list[tuple[str, int, int]]()
    always.set()
    # the first pack goes to the first worker, which is the last to answer
    workers = [Ordered(resident(site), second, first), Ordered(resident(site), always, second)]
    with ThreadPoolExecutor(2) as threads:
        found = pool_of(site, workers, threads, lambda *step: told.append(step)).run("train", jobs)
    expected = LocalEngine(site=site).run("train", jobs)
    assert [update.client for update in found] == [job.client for job in jobs]
    assert [digest(update.params) for update in found] == [digest(update.params) for update in expected]
    assert told == [("train", done, 3) for done in (1, 2, 3)]
    assert pool_of(site, [], threads).run("train", []) == []


def test_what_a_worker_meets_is_raised_as_what_it_is(site: Site, tiny_of: Any, spec_of: Any) -> None:
    def missing(*_: Any) -> Any:
        raise ModelError("no such model")

    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(ModelError, match="no such model"):
            init_workers([WorkerLoop(missing, lambda: None)], [{}], threads)
        jobs = jobs_of(site, tiny_of("bert"), spec_of)
        pool = pool_of(site, [resident(site)], threads)
        with pytest.raises(ProtocolError, match="action is 'rm'; allowed: "):
            pool.run("rm", jobs)
        assert len(pool.run("train", jobs)) == 3, "and it goes on"
