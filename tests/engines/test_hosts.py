"""Guests and hosts at their sites, in threads, and a server between them that hands on: the bits of a simulation."""

import dataclasses
from collections.abc import Mapping, Sequence

import pytest

from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.models.loading import load_backbone
from atlas_fl.split.pairing import Cost, Guest, Host
from atlas_fl.split.step import Cut
from tests.engines.test_suffixes import (
    CUTS,
    alone,
    assert_same,
    clients as clients,
    federation,
    home_of,
    scored,
)
from tests.laws.test_packs import HARD

NEAR = {name: Cost(compute_seconds=1.0, link_seconds=seconds) for name, seconds in (("c-0", 1.0), ("e-0", 2.0))}


def seated(jobs: Sequence[Job]) -> list[Job]:
    return [
        dataclasses.replace(
            job,
            seat=Host(name=job.client, cluster=0, free_bytes=1000)
            if job.cut is None
            else Guest(name=job.client, cluster=0, bytes=10, own_seconds=1.0, costs=NEAR),
        )
        for job in jobs
    ]


def told(site: Site) -> dict[str, Mapping[str, object]]:
    """What each client registers with: numbers of its examples and tokens."""
    return {
        name: {
            "num_labels": own.task.num_labels,
            "metric": own.task.metric,
            "label_names": [],
            "max_length": own.task.max_length,
            "examples": {split: len(data) for split, data in own.splits.items()},
            "labels": {split: spread(own.task.num_labels, len(data)) for split, data in own.splits.items()},
            "lengths": {split: [[int(n), 0, 1] for n in data.lengths] for split, data in own.splits.items()},
        }
        for name, own in site.data.items()
    }


def spread(classes: int, examples: int) -> list[float]:
    return [examples, *[0] * (classes - 1)] if classes > 1 else [0.0, 1.0]


def test_guests_at_a_host_end_in_the_bits_of_a_simulation(clients) -> None:
    site, path, jobs = clients
    with federation(site, path, list(CUTS)) as fed:
        fed.told = told(site)
        for name in CUTS:
            fed.join(name)
        for action, asked in (("train", jobs), ("evaluate", scored(jobs)), ("train", jobs)):
            found = fed.engine.run(action, seated(asked))
            assert_same(found, alone(action, asked, site))
            hosts = {update.client: update.hosted and update.hosted.host for update in found}
            assert hosts == {"a-0": "c-0", "b-0": "c-0", "c-0": None, "d-0": "c-0"}
