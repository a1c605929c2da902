"""A run on a Ray cluster of this machine is the run of one process; an actor that dies ends it in a line.

One cluster serves all runs: it takes seconds to start, and so do the actors of each.
"""

import contextlib
import importlib.util
import signal
from collections.abc import Iterator

import psutil
import pytest

from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.events import Event, Note, RoundFinished
from atlas_fl.experiment.run import run_config
from atlas_fl.runtime.ray import ray_cluster
from tests.runs.workers import SETTINGS, check_same

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'ray>=2.40'", allow_module_level=True)

# not `importorskip`: a Ray that is there and cannot be imported has to fail
import ray

from tests.runs.finished import Make

SECONDS = 60
"""Longest wait for the end of an actor; a quiet machine needs a fraction of one."""


def is_actor(one: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # nor has one a command that has ended a moment ago
        return "ray::_Remote" in " ".join(one.cmdline())
    return False


def actors() -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if is_actor(one)]


def all_have_ended() -> bool:
    return not psutil.wait_procs(actors(), timeout=SECONDS)[1]


def test_a_cluster_that_is_not_there_is_told_in_a_line(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"no Ray cluster at RAY_ADDRESS '127.0.0.1:1' \(.*\); start one with"):
        run_config(config(engine="ray"))
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_worker_niceness", "0")  # Ray's 15 waits minutes beside other tests
        with ray_cluster():
            yield
    assert not ray.is_initialized()
    assert actors() == []


@pytest.mark.slow
@pytest.mark.usefixtures("_cluster")
def test_a_run_on_ray_is_that_of_one_process_and_outlives_its_actors(config: Make) -> None:
    """With cuts: `--split` is among the settings."""
    settings = {**SETTINGS, "rounds": 2, "recluster_every": 1}
    whole = run_config(config(name="whole", **settings))

    def kill(event: Event) -> None:
        if isinstance(event, RoundFinished) and event.round == 1:
            first, second = actors()
            first.send_signal(signal.SIGKILL)
            assert second.is_running()

    with pytest.raises(ProtocolError, match=r"actor \d of 2 has ended \(.*\); start the run again") as caught:
        run_config(config(name="ray", engine="ray", workers=2, **settings), on_event=kill)
    assert "\n" not in str(caught.value)
    assert all_have_ended()
    assert ray.is_initialized(), "a cluster that a run has found is left"
    found = run_config(config(name="ray", **settings), resume=True)
    check_same(whole.folder, found.folder)


@pytest.mark.product
@pytest.mark.usefixtures("_cluster")
def test_what_a_rule_asks_for_comes_back_from_actors(config: Make) -> None:
    """Class features go up and means down, which is more than other rules ask for."""
    settings = {"strategy": "fedpac", "rounds": 2, "pack_tokens": 200}
    whole = run_config(config(name="whole", **settings))
    told: list[Event] = []
    found = run_config(config(name="ray", engine="ray", workers=1, **settings), on_event=told.append)
    check_same(whole.folder, found.folder)
    assert any("1 actors of" in event.text for event in told if isinstance(event, Note))
    assert all_have_ended()
