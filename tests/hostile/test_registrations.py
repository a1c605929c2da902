"""What sites say of themselves when they register: any numbers at all, against the server's real checks."""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from atlas_fl.config import Config
from atlas_fl.deployment.service import client_manager_of
from atlas_fl.errors import ProtocolError
from atlas_fl.ranks.devices import BOUNDS as DEVICE_BOUNDS
from atlas_fl.runtime.coordinator.coordinator import ClientManager
from tests.runtime.coordinator.test_coordinator import CENSUS

NAMES = ("site-1", "site-2")
PROFILE = {"memory_gb": 3, "gflops": 50, "up_mbps": 5, "down_mbps": 20, "latency_ms": 60, "max_rank": 8}
NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 1e-324, 5e-324, 1e-300, 1e-9, 1e-3, 0.5, 2, 2**20, 1e15, 1e30, 1e300, 2**63, 10**400),
    *(True, None, "7"),
)


def device_of(**changes: Any) -> str:
    return "d=" + ",".join(f"{key}={value}" for key, value in {**PROFILE, **changes}.items())


def registration(**changes: Any) -> dict[str, Any]:
    return {**CENSUS, "task": "mine", "device": device_of(), **changes}


@dataclass(kw_only=True, eq=False)
class Door:
    """Where clients register, with the server's real checks of the small settings."""

    manager: ClientManager
    runner: asyncio.Runner

    def outcome_of(self, said: Mapping[str, Any], *, name: str = "site-1") -> str:
        """Why this registration is refused; empty where it is taken. A client that is in waits for work."""

        async def register() -> str:
            self.manager.on_presence(name, True)
            asked = asyncio.create_task(self.manager.answer(name, json.loads(json.dumps(said)), {}))
            while not asked.done() and self.manager.clients[name].metadata is None:
                await asyncio.sleep(0.001)
            if not asked.done():
                asked.cancel()
                return ""
            error = asked.exception()
            assert isinstance(error, ProtocolError), error
            return str(error)

        return self.runner.run(register())

    def forget(self, name: str) -> None:
        """As if it had never registered."""
        self.manager.clients[name].metadata = None


@pytest.fixture
def door(config: Callable[..., Config]) -> Iterator[Door]:
    with asyncio.Runner() as runner:
        desk: Any = SimpleNamespace(note=lambda _: None)
        yield Door(manager=client_manager_of(config(), NAMES, desk, late=True), runner=runner)


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"device": device_of(memory_gb="1e-9")}, "memory_gb='1e-9' is not allowed; give a number, at least 0.0001"),
    ({"device": device_of(memory_gb="0.01")}, "site-1 cannot take part: d has 10.7 MB of memory and training takes"),
    (
        {"device": device_of(max_rank="1e15")},
        "max_rank='1e15' is not allowed; give a whole number, at least 1, at most 16384",
    ),
    (
        {"device": device_of(gflops="5e-324")},
        "gflops='5e-324' is not allowed; give a number, at least 0.001, at most 1e+09",
    ),
    ({"device": device_of(gflops="1e-300")}, "gflops='1e-300' is not allowed"),
    ({"device": device_of(up_mbps="5e-324")}, "up_mbps='5e-324' is not allowed"),
    ({"device": device_of(latency_ms="1e15")}, "latency_ms='1e15' is not allowed"),
    ({"device": device_of(adapter_bytes="1")}, "site-1 cannot take part: "),
    ({"lengths": {**CENSUS["lengths"], "train": [[2**20, 0, 4]]}}, "site-1 has an example of 1048576 tokens, and"),
    (
        {"num_labels": 0, "label_names": [], "labels": {split: [0, 0] for split in CENSUS["labels"]}},
        "task 'mine' of site-1 is to write text, and no task of the settings does",
    ),
    ({"left_out": 2_000_001}, "left_out is 2000001; allowed: at least 0, at most 2000000"),
    (
        {"num_labels": 1, "label_names": [], "labels": {split: [1e30, 1] for split in CENSUS["labels"]}},
        "labels.train[0] is 1e+30; allowed: at least -1e+12, at most 1e+12",
    ),
    ({"num_labels": 10**4 + 1}, "num_labels is 10001; allowed: at least 0, at most 10000"),
    ({"task": "movie", "label_names": ["x", "y"]}, "site-1 has labels (x, y) judged by accuracy for task 'movie'"),
)


def test_a_number_that_no_client_has_is_refused_by_name_and_others_register(door: Door) -> None:
    for changes, message in REFUSED:
        refused = door.outcome_of(registration(**changes))
        assert message in refused
        assert "\n" not in refused
        assert door.manager.clients["site-1"].metadata is None
    assert door.outcome_of(registration(), name="site-2") == ""
    # whoever comes late is held to the same
    door.manager.planned = {"site-2"}
    assert "gflops='1e-300' is not allowed" in door.outcome_of(registration(device=device_of(gflops="1e-300")))
    assert door.outcome_of(registration()) == ""


def altered(draw: random.Random) -> dict[str, Any]:
    """A registration with up to three of its numbers drawn anew, in range or out of it."""
    device, said = dict(PROFILE), registration()
    for _ in range(draw.randint(1, 3)):
        place = draw.choice(
            ["device", "device", "max_length", "left_out", "num_labels", "examples", "lengths", "labels"]
        )
        value = draw.choice([*NUMBERS, 10 ** draw.uniform(-3, 6), draw.randint(1, 20)])
        if place == "device":
            key = draw.choice(list(DEVICE_BOUNDS))
            inside = DEVICE_BOUNDS[key].least * 10 ** draw.uniform(0, 8)
            device[key] = draw.choice([value, int(inside) if key in ("max_rank", "adapter_bytes") else inside])
        elif place in ("examples", "labels", "lengths"):
            split = draw.choice(["train", "validation", "test"])
            said[place] = {**said[place], split: draw.choice([value, [value], [[value, 0, 4]], [[16, 0, value]]])}
        else:
            said[place] = value
    said["device"] = device_of(**device)
    return said


@pytest.mark.parametrize("count", [200, pytest.param(2_000, marks=pytest.mark.slow)])
def test_random_registrations_are_taken_or_refused_in_a_line_and_change_nothing_else(door: Door, count: int) -> None:
    draw, found = random.Random(0), Counter[bool]()
    before = set(door.manager.clients)
    for _ in range(count):
        said = door.outcome_of(altered(draw))
        found[said == ""] += 1
        assert re.search(r"[\x00-\x1f]", said) is None
        assert (door.manager.clients["site-1"].metadata is None) == bool(said)
        door.forget("site-1")
    assert set(door.manager.clients) == before
    assert door.manager.planned is None
    assert min(found.values()) > count // 20, found
    assert door.outcome_of(registration(), name="site-2") == ""
