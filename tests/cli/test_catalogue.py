from collections.abc import Callable
from typing import Any

import pytest

from atlas_fl.aggregation.registry import STRATEGIES
from atlas_fl.config.methods import METHODS
from atlas_fl.config.presets import PRESETS
from atlas_fl.data.registry import TASKS
from atlas_fl.models.registry import MODELS
from atlas_fl.ranks.devices import DEVICES, parse_device

Atlas = Callable[..., Any]
REGISTRIES = {
    **{"tasks": TASKS, "models": MODELS, "devices": DEVICES, "presets": PRESETS},
    "strategies": [*STRATEGIES, *METHODS],
}


@pytest.mark.parametrize("what", REGISTRIES)
def test_the_list_holds_every_entry_once(what: str, atlas: Atlas) -> None:
    said = atlas("list", what)
    first = [line.split()[0] for line in said.out.splitlines() if line and not line.startswith(" ")]
    assert said.code == 0
    assert first[1:] == list(REGISTRIES[what])


@pytest.mark.parametrize("what", REGISTRIES)
def test_in_eighty_columns_no_word_is_broken(what: str, atlas: Atlas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    words = sorted(atlas("list", what).out.split())
    monkeypatch.setenv("COLUMNS", "80")
    said = atlas("list", what).out
    assert max(map(len, said.splitlines())) <= 80
    assert sorted(said.split()) == words
    assert len(said.splitlines()) < 4 * len(REGISTRIES[what])


def test_a_line_of_the_devices_makes_a_profile(atlas: Atlas) -> None:
    header, *lines = (line.split() for line in atlas("list", "devices").out.splitlines() if line)
    for name, *numbers in lines:
        words = ",".join(f"{key}={value}" for key, value in zip(header[1:7], numbers))
        mine = parse_device(f"mine={words}")
        assert mine.memory_bytes == DEVICES[name].memory_bytes
        assert mine.up_bytes_per_second == DEVICES[name].up_bytes_per_second
        assert mine.max_rank == DEVICES[name].max_rank


def test_old_names_of_strategies_are_told(atlas: Atlas) -> None:
    assert "local_only" in atlas("list", "strategies").out


@pytest.mark.parametrize("words", [("list",), ("list", "taks"), ("list", "tasks", "models")])
def test_what_cannot_be_listed_is_one_line(words: tuple[str, ...], atlas: Atlas) -> None:
    said = atlas(*words)
    assert (said.code, said.out) == (2, "")
    assert said.err.count("\n") == 1
    assert said.err.endswith("see `atlas list --help`\n")


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("feddyn", "feddyn 1.5 "),
        ("fedavg_dynamic", "fedavg_dynamic 1.5 "),
        ("ifca", "ifca (1+k)/2 "),
        ("flora", "flora (1+n)/2 "),
    ],
)
def test_bytes_are_said_relative_to_fedavg(atlas: Atlas, strategy: str, words: str) -> None:
    lines = [" ".join(line.split()) for line in atlas("list", "strategies").out.splitlines()]
    assert any(line.startswith(words) for line in lines), strategy


def test_passes_beside_training_are_said_of_rules_and_methods(atlas: Atlas) -> None:
    said = " ".join(atlas("list", "strategies").out.split())
    assert said.count("passes over the training examples: one more") == 2
    assert said.count("passes over the training examples: k more") == 1
