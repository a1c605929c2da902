"""Hundreds of answers with something altered go through whole runs: no exception but ours, and honest sites end."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from atlas_fl.config import Config
from tests.hostile.federation import Change, federate
from tests.runtime.coordinator.test_hostile_messages import altered, odd_tensor

pytestmark = pytest.mark.slow

HONEST = ("movie-0", "movie-1")
ATTACKERS = tuple(f"movie-{k}" for k in range(2, 8))


def altering(draw: random.Random, counts: Counter[str]) -> Change:
    """Something of most answers is another: of its head, or a tensor that is missing, more, or anything."""

    def change(head: dict[str, Any], tensors: dict[str, Any], action: str) -> Any:
        least = 0.8 if action in ("fingerprint", "importance") else 0.2  # who is not planned with says no more
        if head["kind"] not in ("result", "cut") or draw.random() < least:
            return head, tensors
        counts[head["kind"]] += 1
        if draw.random() < 0.5 and tensors:
            key = draw.choice([*tensors, "x", "param/x", "cut/0/activation"])
            if draw.random() < 0.3:
                return head, {name: tensor for name, tensor in tensors.items() if name != key}
            if draw.random() < 0.5 and key in tensors and tensors[key].numel():
                own = tensors[key].clone().reshape(-1)
                own[draw.randrange(len(own))] = draw.choice([0, 1, 7, 120])
                return head, {**tensors, key: own.reshape(tensors[key].shape)}
            return head, {**tensors, key: odd_tensor(draw)}
        # of a number or kind that nobody knows a deadline is the outcome, which is tested apart
        words = {name: value for name, value in head.items() if name not in ("kind", "number")}
        found = altered(words, draw)
        found = found if isinstance(found, dict) else {}
        return {**found, **{name: own for name, own in head.items() if name in ("kind", "number")}}, tensors

    return change


CUTS = "movie-1=1,movie-2=1,movie-3=2,movie-4=1,movie-5=2"
SETTINGS: dict[str, tuple[int, dict[str, object]]] = {
    "adapters": (50, {"rounds": 5}),
    "cuts": (30, {"split": CUTS, "head": "client", "rounds": 2}),
    "server head": (30, {"split": CUTS, "rounds": 2}),
}
"""How many answers are altered at least, and in which federation."""


@pytest.mark.parametrize("kind", SETTINGS)
def test_hundreds_of_altered_answers_end_no_run(config: Callable[..., Config], kind: str, monkeypatch) -> None:
    monkeypatch.setattr("atlas_fl.runtime.coordinator.client_registry.MAX_REFUSALS", 10**9)  # they go on
    monkeypatch.setattr("atlas_fl.runtime.coordinator.coordinator.MAX_REFUSALS", 10**9)
    counts = Counter[str]()
    draws = {name: random.Random(f"{name} {kind}") for name in ATTACKERS}
    changes = {name: altering(draw, counts) for name, draw in draws.items()}
    settings = {"clients_per_task": 8, "samples": 8, "validation_samples": 6, "test_samples": 6}
    least, own = SETTINGS[kind]
    values = {**settings, **own}
    found = federate(config(**values), changes, names=(*HONEST, *ATTACKERS), least=1, deadline=8.0, lives=30)
    assert found.error is None
    assert found.faults == [], found.faults[0]
    for name in HONEST:
        assert all(bool(tensor.isfinite().all()) for tensor in found.models[name].values())
    blamed = [note for note in found.notes if any(f" of {name} " in note for name in HONEST)]
    assert blamed == []
    assert counts.total() >= least
