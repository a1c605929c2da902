"""Guests and hosts at their sites, in threads, and a server between them that hands on: the bits of a simulation."""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from atlas_fl.client.job import Job, Site
from atlas_fl.runtime.protocol.client_metadata import read_metadata, redacted_metadata
from atlas_fl.split.channel import Cut
from atlas_fl.split.host_matching import GuestRequirement, HostCapacity, HostingCost, HostMatch
from tests.runtime.coordinator.test_coordinator import CENSUS
from tests.runtime.coordinator.test_split_server import CUTS, alone, assert_same, federation, home_of, scored
from tests.runtime.coordinator.test_split_server import clients as clients


def seated(jobs: Sequence[Job]) -> list[Job]:
    """The jobs with their places: whoever has a whole model hosts, the first of them best."""
    hosts = {job.client: k for k, job in enumerate(jobs) if job.cut is None}
    costs = {name: HostingCost(compute_seconds=0.0, link_seconds=1.0 + k) for name, k in hosts.items()}
    return [
        dataclasses.replace(
            job,
            hosting=HostCapacity(name=job.client, cluster=0, free_bytes=1000)
            if job.cut is None
            else GuestRequirement(name=job.client, cluster=0, bytes=10, device_seconds=1.0, costs=costs),
        )
        for job in jobs
    ]


@pytest.mark.slow
def test_guests_at_a_host_end_in_the_bits_of_a_simulation(clients) -> None:
    site, path, jobs = clients
    with federation(site, path, list(CUTS)) as fed:
        fed.join_all()
        for action, asked in (("train", jobs), ("evaluate", scored(jobs)), ("train", jobs)):
            found = fed.engine.run(action, seated(asked))
            assert_same(found, alone(action, asked, site))
            hosts = {update.client: update.hosted and update.hosted.host for update in found}
            assert hosts == {"a-0": "c-0", "b-0": "c-0", "c-0": None, "d-0": "c-0"}


def three(jobs: Sequence[Job]) -> list[Job]:
    """A guest, and two hosts."""
    return [jobs[0], jobs[2], dataclasses.replace(jobs[3], cut=None)]


@pytest.mark.parametrize("dies_at", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_guests_of_a_host_that_dies_begin_again_elsewhere_and_no_bit_changes(clients, dies_at) -> None:
    """Its first answer is to the beginning; the server takes over, and the next job has a host again."""
    site, path, jobs = clients
    jobs = three(jobs)
    with federation(site, path, [job.client for job in jobs]) as fed:
        fed.join("c-0", kind="hosted", dies_at=dies_at)
        back = fed.come_back("c-0")
        fed.join("a-0")
        fed.join("d-0", home=home_of(site, path, None))
        found = fed.engine.run("train", seated(jobs))
        back.join(60)
        assert_same(found, alone("train", jobs, site))
        assert found[0].hosted is not None
        assert (found[0].hosted.host, found[0].hosted.reason) == (None, "c-0 was left: it is gone")
        # in the next one it hosts again
        (again, *_) = fed.engine.run("evaluate", seated(scored(jobs)))
        assert again.hosted is not None
        assert again.hosted.host == "c-0"


def test_a_guest_that_dies_begins_again_at_its_host(clients) -> None:
    site, path, jobs = clients
    jobs = three(jobs)[:2]
    with federation(site, path, [job.client for job in jobs]) as fed:
        fed.join("a-0", dies_at=3)
        back = fed.come_back("a-0")
        fed.join("c-0")
        found = fed.engine.run("train", seated(jobs))
        back.join(60)
    assert_same(found, alone("train", jobs, site))
    assert found[0].hosted == HostMatch(host="c-0", reason="the quickest of 1 with room, in cluster 0")


@pytest.mark.slow
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
