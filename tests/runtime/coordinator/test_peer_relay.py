"""Guests and hosts at their sites, in threads, and a server between them that hands on: the bits of a simulation."""

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from atlas_fl.client.job import Job, Site
from atlas_fl.runtime.coordinator.client_registry import ClientProxy
from atlas_fl.runtime.coordinator.peer_relay import GUEST_INFO, PeerRelay
from atlas_fl.runtime.coordinator.split_server import SplitServer
from atlas_fl.runtime.protocol.client_metadata import read_metadata, redacted_metadata
from atlas_fl.split.channel import Cut
from atlas_fl.split.host_matching import GuestRequirement, HostCapacity, HostingCost, HostMatch
from tests.runtime.coordinator.test_coordinator import CENSUS
from tests.runtime.coordinator.test_split_server import (
    CUTS,
    Federation,
    alone,
    assert_same,
    federation,
    home_of,
    left,
    scored,
    told,
)
from tests.runtime.coordinator.test_split_server import (
    clients as clients,
)


def seated(jobs: Sequence[Job], *, far: int = 1000) -> list[Job]:
    """The jobs with their places: whoever has a whole model hosts, the first of them best; `far` bytes are d-0's."""
    hosts = {job.client: k for k, job in enumerate(jobs) if job.cut is None}
    costs = {name: HostingCost(compute_seconds=0.0, link_seconds=1.0 + k) for name, k in hosts.items()}
    return [
        dataclasses.replace(
            job,
            hosting=HostCapacity(name=job.client, cluster=0, free_bytes=far if job.client == "d-0" else 1000)
            if job.cut is None
            else GuestRequirement(name=job.client, cluster=0, bytes=10, device_seconds=1.0, costs=costs),
        )
        for job in jobs
    ]


def test_guests_at_a_host_end_in_the_bits_of_a_simulation(clients) -> None:
    site, path, jobs = clients
    with federation(site, path, list(CUTS)) as fed:
        for name in CUTS:
            fed.join(name)
        for action, asked in (("train", jobs), ("evaluate", scored(jobs)), ("train", jobs)):
            found = fed.engine.run(action, seated(asked))
            assert_same(found, alone(action, asked, site))
            hosts = {update.client: update.hosted and update.hosted.host for update in found}
            assert hosts == {"a-0": "c-0", "b-0": "c-0", "c-0": None, "d-0": "c-0"}


def three(jobs: Sequence[Job]) -> list[Job]:
    """A guest, and two hosts."""
    return [jobs[0], jobs[2], dataclasses.replace(jobs[3], cut=None)]


def returns(fed: Federation, name: str, thread: threading.Thread, **how: Any) -> threading.Thread:
    """Notices that this client has died, and starts it again."""

    def comes_back() -> None:
        thread.join(60)
        fed.threads.call(left(fed.sessions, fed.sessions.by_name[name]))
        fed.join(name, **how)

    back = threading.Thread(target=comes_back)
    back.start()
    return back


@pytest.mark.parametrize(("dies_at", "far", "host"), [(1, 1000, "d-0"), (3, 1000, "d-0"), (3, 9, None), (5, 9, None)])
def test_guests_of_a_host_that_dies_begin_again_elsewhere_and_no_bit_changes(clients, dies_at, far, host) -> None:
    """Its first answer is to the beginning; another host takes over where it has room, and else the server."""
    site, path, jobs = clients
    jobs = three(jobs)
    with federation(site, path, [job.client for job in jobs]) as fed:
        fed.join("c-0", kind="hosted", dies_at=dies_at)
        back = returns(fed, "c-0", fed.running[0])
        fed.join("a-0")
        fed.join("d-0", home=home_of(site, path, None))
        found = fed.engine.run("train", seated(jobs, far=far))
        back.join(60)
        assert_same(found, alone("train", jobs, site))
        assert found[0].hosted is not None
        assert found[0].hosted.host == host
        assert found[0].hosted.reason.startswith("c-0 dropped; ")
        # in the next one it hosts again
        (again, *_) = fed.engine.run("evaluate", seated(scored(jobs), far=far))
        assert again.hosted is not None
        assert again.hosted.host == "c-0"


@pytest.mark.parametrize("dies_at", [1, 3])
def test_a_guest_that_dies_begins_again_at_its_host(clients, dies_at: int) -> None:
    site, path, jobs = clients
    jobs = three(jobs)[:2]
    with federation(site, path, [job.client for job in jobs]) as fed:
        fed.join("a-0", dies_at=dies_at)
        back = returns(fed, "a-0", fed.running[0])
        fed.join("c-0")
        found = fed.engine.run("train", seated(jobs))
        back.join(60)
    assert_same(found, alone("train", jobs, site))
    assert found[0].hosted == HostMatch(host="c-0", reason="the only one of cluster 0 with room")


def test_a_host_whose_guest_says_nothing_does_its_own_job(clients, monkeypatch) -> None:
    site, path, jobs = clients
    jobs, let, plain = three(jobs)[:2], threading.Event(), home_of(site, path, CUTS["a-0"])
    monkeypatch.setattr("atlas_fl.runtime.coordinator.peer_relay.HOST_WAIT_FRACTION", 0.0)

    def slow(cut: Cut | None, known: Any) -> Site:
        assert let.wait(60)
        return plain(cut, known)

    with federation(site, path, [job.client for job in jobs]) as fed:
        fed.join("a-0", home=slow)
        fed.join("c-0")
        late = dataclasses.replace(fed.engine, deadline_seconds=20, min_clients=1)
        monkeypatch.setattr(type(late.bridge), "progress", lambda *_: let.set())
        found = late.run("train", seated(jobs))
    assert_same(found, alone("train", jobs, site))


def test_a_host_is_told_numbers_of_examples_and_no_labels() -> None:
    census = read_metadata({**CENSUS, "labels": {"train": [3, 1], "validation": [0, 2], "test": [1, 1]}})
    known = redacted_metadata(census)
    assert known.labels == {"train": (4.0, 0.0), "validation": (2.0, 0.0), "test": (2.0, 0.0)}
    assert (known.examples, known.lengths, known.label_names) == (census.examples, census.lengths, ())
    assert read_metadata(dataclasses.asdict(known)) == known


def test_a_host_is_sent_a_guests_adapters_once_for_the_same_model(clients) -> None:
    site, _, jobs = clients
    jobs = seated(scored(three(jobs)[:2]))
    known = {name: read_metadata({**CENSUS, **own}) for name, own in told(site).items()}
    proxies = {job.client: ClientProxy(job.client, metadata=known[job.client], connected=True) for job in jobs}

    async def script(split_server: SplitServer) -> None:
        async def sent(number: int, relay: PeerRelay) -> set[str]:
            relay.begin_job(number, "evaluate", jobs[0])
            found = await relay.next_message(proxies["c-0"])
            assert found is not None
            return {key.partition(":")[2] for key in found[1]} - {f"cut/{GUEST_INFO}"}

        first, second, third = (PeerRelay(jobs, proxies, split_server, seconds=0, on_note=print) for _ in range(3))
        above = {key for key in jobs[0].params if ".layer.0." not in key}
        assert await sent(1, first) == above
        assert await sent(2, second) == set()
        # what was never sent is not counted upon
        proxies["c-0"].hosted_digests.clear()
        second.begin_job(3, "evaluate", jobs[0])
        second.close()
        assert await sent(4, third) == above

    with SplitServer(site) as split_server:
        asyncio.run(script(split_server))
