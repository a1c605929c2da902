"""Whoever is killed or has a full disk at the end of a run gets its model when the same commands are started again."""

import os
import shutil
import signal
import time

import pytest

from atlas_fl.storage.jsonl import read_sealed
from tests.runs.federation import Federation, Federations, adapters

pytestmark = pytest.mark.slow

APART = {"share": ("A",), "space": "factors", "rounds": 1}
"""B and heads are at the sites alone."""


def heard(fed: Federation) -> list[str]:
    return read_sealed(fed.served.deliveries)["heard"]


def all_have_their_models(fed: Federation) -> None:
    """The simulation's to the last bit, and nothing beside them but what the user put there."""
    assert fed.own_adapters == adapters(fed.simulated)
    for name in fed.sites:
        assert not (fed.folder / f".{name}-adapter.writing").exists()
        assert not (fed.folder / f"{name}-private").exists()
    assert heard(fed) == sorted(fed.sites)


def test_a_site_that_is_killed_before_or_after_it_writes_gets_its_model(federation: Federations) -> None:
    fed = federation(**APART)
    server, port = fed.serve()
    faults = ["dies while it writes its model", "dies before it says so"]
    for site in [fed.join(name, port, fault=fault) for name, fault in zip(fed.sites, faults, strict=True)]:
        site.end(-signal.SIGKILL)
    said = server.end()
    assert "movie-0, movie-1 did not get the model at the end of the run; start the same command again" in said
    assert heard(fed) == []
    assert not (fed.folder / "movie-0-adapter").exists()
    assert (fed.folder / "movie-1-adapter").exists()
    again, port = fed.serve()
    first, second = fed.join("movie-0", port), fed.join("movie-1", port)
    assert "the run is complete for movie-0; its model is in movie-0-adapter" in first.end()
    assert "the model of movie-1 is in movie-1-adapter already; telling localhost" in second.end()
    again.end()
    all_have_their_models(fed)


def test_a_site_or_a_server_that_is_killed_after_that_was_said_leaves_the_model_there(federation: Federations) -> None:
    fed = federation(**APART)
    server, port = fed.serve()
    first = fed.join("movie-0", port, fault="dies before it removes its private part")
    second = fed.join("movie-1", port, fault="dies before it ends")
    for site in (first, second):
        site.end(-signal.SIGKILL)
    assert "did not get the model" not in server.end()
    assert heard(fed) == sorted(fed.sites)
    assert (fed.folder / "movie-0-private").exists()
    assert not (fed.folder / "movie-1-private").exists()
    # the server is complete and ends at once: it is started for another reason
    again, port = fed.serve("--again", "movie-1")
    for name in fed.sites:
        assert "already; telling localhost" in fed.join(name, port).end()
    again.end()
    all_have_their_models(fed)


def test_a_server_that_is_killed_before_it_answers_is_told_again(federation: Federations) -> None:
    fed = federation(**APART)
    server, port = fed.serve(fault="dies before it answers who has its model")
    sites = {name: fed.join(name, port) for name in fed.sites}
    server.end(-signal.SIGKILL)
    (confirmed,) = heard(fed)
    (other,) = set(fed.sites) - {confirmed}
    os.kill(sites[confirmed].pid, signal.SIGSTOP)  # it comes back once the other one has gone
    again, _ = fed.serve(port=port)
    again.wait_for(f"is complete; listening on .* for {other}, without a model yet; .* for {confirmed}, recorded")
    sites[other].end()
    time.sleep(0.5)
    assert not again.ended
    os.kill(sites[confirmed].pid, signal.SIGCONT)
    sites[confirmed].end()
    again.end()
    all_have_their_models(fed)


def test_a_server_that_is_killed_before_its_last_answer_listens_once_more(federation: Federations) -> None:
    fed = federation(**APART)
    server, port = fed.serve(fault="dies before it answers the last one")
    sites = [fed.join(name, port) for name in fed.sites]
    server.end(-signal.SIGKILL)
    assert heard(fed) == sorted(fed.sites)
    again, _ = fed.serve(port=port)
    for site in sites:
        site.end()
    again.kill()  # it waits a while for the one that has had its answer
    all_have_their_models(fed)


def test_a_full_disk_at_a_site_is_one_line_and_the_model_comes_again(federation: Federations) -> None:
    fed = federation(rounds=1)
    server, port = fed.serve()
    full = fed.join("movie-0", port, fault="has a full disk")
    fed.join("movie-1", port).end()
    (line,) = [line for line in full.end(2).splitlines() if line.startswith("atlas: ")]
    assert line.startswith(
        "atlas: the model cannot be written to movie-0-adapter (File too large); make room and start"
    )
    assert not list(fed.folder.glob("*movie-0-adapter*"))
    assert "movie-0 did not get the model" in server.end()
    assert heard(fed) == ["movie-1"]
    again, port = fed.serve()
    fed.join("movie-0", port).end()
    again.end()
    all_have_their_models(fed)


def test_a_site_whose_files_are_lost_gets_its_model_once_more_or_is_told_what_is_lost(federation: Federations) -> None:
    shared = federation(rounds=1)
    shared.complete()
    shutil.rmtree(shared.folder / "movie-1-adapter")
    again, port = shared.serve("--again", "movie-1")
    shared.join("movie-1", port).end()
    again.end()
    all_have_their_models(shared)
    refused = shared.programs.start(*again.words, "--again", "movie-7", folder=shared.folder)
    assert "unknown client in --again 'movie-7'; did you mean" in refused.end(2)


def test_a_private_part_that_is_lost_is_told_in_a_line(federation: Federations) -> None:
    fed = federation(**APART)
    fed.complete()
    shutil.rmtree(fed.folder / "movie-1-adapter")
    again, port = fed.serve("--again", "movie-1")
    (line,) = [line for line in fed.join("movie-1", port).end(2).splitlines() if line.startswith("atlas: ")]
    assert "what this site has not shared, and the server cannot know, is not here" in line
    again.kill()
    assert heard(fed) == ["movie-0"]
