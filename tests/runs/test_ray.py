"""A run on a Ray cluster of this machine is the run of one process; an actor that dies ends it in a line."""

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from atlas_fl.config import Config
from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.events import Event, RoundFinished
from atlas_fl.run import run
from tests.runs.workers import SETTINGS, check_same

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'atlas-fl[ray]'")

Make = Callable[..., Config]


def actors() -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if "ray::_Remote" in " ".join(one.cmdline())]


def test_a_run_on_ray_is_that_of_one_process_and_outlives_its_actors(
    config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    whole = run(config(name="whole", **SETTINGS))

    def kill(event: Event) -> None:
        if isinstance(event, RoundFinished) and event.round == 2:
            first, second = actors()
            first.send_signal(signal.SIGKILL)
            assert second.is_running()

    settings = {"name": "ray", "workers": min(2, os.cpu_count() or 1), **SETTINGS}
    with pytest.raises(ProtocolError, match=r"actor \d of 2 has ended \(.*\); start the run again") as caught:
        run(config(engine="ray", **settings), on_event=kill)
    assert "\n" not in str(caught.value)
    assert not ray.is_initialized()
    assert actors() == []
    found = run(config(**{**settings, "workers": 1}), resume=True)
    check_same(whole.folder, found.folder)


def test_a_cluster_that_is_not_there_is_told_in_a_line(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"no Ray cluster at RAY_ADDRESS '127.0.0.1:1' \(.*ray start --head"):
        run(config(engine="ray"))
