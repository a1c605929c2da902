"""Cut clients at their sites that share what is above their cuts: bits of a simulation, whoever comes when."""

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest

from atlas_fl.client.job import Job, Site, Update
from atlas_fl.errors import ProtocolError
from atlas_fl.runtime.coordinator.split_server import SplitServer
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.split.channel import Cut
from tests.client.test_shared import equal, upper
from tests.client.test_shared import federation as clients_of
from tests.laws.test_packs import HARD
from tests.runtime.coordinator.test_split_server import Federation, federation, home_of, left, scored

CUTS = {"c-0": Cut(blocks=1, shared=0), "a-0": Cut(blocks=2, shared=0), "b-0": Cut(blocks=1, shared=0)}


@pytest.fixture
def head() -> str:
    return "server"


@pytest.fixture
def clients(head, tiny_of, site_of, spec_of) -> tuple[Site, str, list[Job]]:
    tiny = tiny_of("bert")
    cuts = [dataclasses.replace(cut, head=head) for cut in CUTS.values()]
    site, jobs = clients_of(tiny, site_of, spec_of, cuts, HARD, max_tokens=1)
    return site, str(tiny.path), jobs


def join(fed: Federation, job: Job, **how):
    return fed.join(job.client, home=home_of(fed.site, fed.path, job.cut), **how)


def assert_simulated(found: list[Update], jobs: list[Job], site: Site) -> None:
    expected = LocalEngine(site=site).run("train", jobs)
    assert [update.client for update in found] == [update.client for update in expected]
    for update, other in zip(found, expected, strict=True):
        assert equal(update.params, other.params), update.client
        assert {**update.metrics, "seconds": 0} == {**other.metrics, "seconds": 0}
        assert dict(update.crossed) == dict(other.crossed)


@pytest.mark.parametrize("head", ["server", "client"])
def test_those_who_share_wait_for_each_other_and_end_in_the_bits_of_a_simulation(clients) -> None:
    site, path, jobs = clients
    with federation(site, path, list(CUTS)) as fed:
        for job in reversed(jobs):
            join(fed, job)
        for _ in range(2):
            found = fed.engine.run("train", jobs)
            assert_simulated(found, jobs, site)
            assert equal(upper(found[0].params, 1), upper(found[2].params, 1))
            assert len(fed.engine.run("evaluate", scored(jobs))) == 3


def test_who_is_held_while_the_last_one_ends_is_not_forgotten(clients, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step of one is taken while it is worked out that another has to wait for it."""
    site, path, jobs = clients
    computed, over = SplitServer._compute, SplitServer.finish_job

    async def later(self: SplitServer, *args: Any) -> Any:
        await asyncio.sleep(0.05)
        return await over(self, *args)

    async def late(self: SplitServer, work: Callable[[], Any]) -> Any:
        found = await computed(self, work)
        if isinstance(found, list):
            await asyncio.sleep(0.2)
        return found

    monkeypatch.setattr(SplitServer, "finish_job", later)
    monkeypatch.setattr(SplitServer, "_compute", late)
    with federation(site, path, list(CUTS)) as fed:
        for job in jobs:
            join(fed, job)
        assert_simulated(fed.engine.run("train", jobs), jobs, site)


@pytest.mark.parametrize(("head", "dies_at"), [("server", 1), ("server", 6), ("client", 6)])
def test_when_one_dies_and_comes_back_all_begin_again_and_no_bit_differs(clients, dies_at: int) -> None:
    """At its first question, and at its sixth, when with the head at the server the others wait for it at their end."""
    site, path, jobs = clients
    with federation(site, path, list(CUTS)) as fed:
        links = [join(fed, job, **({"dies_at": dies_at} if job is jobs[0] else {})) for job in jobs]

        def comes_back() -> None:
            fed.running[0].join(60)
            fed.threads.call(left(fed.sessions, fed.sessions.by_name[jobs[0].client]))
            join(fed, jobs[0])

        back = threading.Thread(target=comes_back)
        back.start()
        assert_simulated(fed.engine.run("train", jobs), jobs, site)
        back.join(60)
    assert len(links[0].frames) == dies_at - 1


def test_one_that_is_refused_leaves_the_others_with_what_they_train_without_it(clients) -> None:
    site, path, jobs = clients
    wrong = dataclasses.replace(site, data={**site.data, "b-0": site.data["c-0"]})
    with federation(site, path, list(CUTS)) as fed:
        for job in jobs[:2]:
            join(fed, job)
        fed.join("b-0", home=home_of(wrong, path, jobs[2].cut))
        found = dataclasses.replace(fed.engine, min_clients=2).run("train", jobs)
        assert_simulated(found, jobs[:2], site)


def test_a_cluster_whose_client_does_not_come_loses_its_round_and_trains_the_next(clients) -> None:
    site, path, jobs = clients
    with federation(site, path, list(CUTS)) as fed:
        for job in jobs[:2]:
            join(fed, job)
        late = dataclasses.replace(fed.engine, deadline_seconds=0.2)
        with pytest.raises(ProtocolError, match="0 of 3 clients answered train"):
            late.run("train", jobs)
        join(fed, jobs[2])
        assert_simulated(fed.engine.run("train", jobs), jobs, site)
