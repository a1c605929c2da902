"""Presets with a dial: five settings each, on the command line, in a file, and in a sweep."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from atlas_fl.cli.arguments import base_config, split
from atlas_fl.config import Config, to_toml, validate, with_values
from atlas_fl.config.federations import DIALS, dial_note, turn_dial
from atlas_fl.config.identity import config_hash
from atlas_fl.config.presets import PRESETS, find_preset
from atlas_fl.config.settings import settings, value_of
from atlas_fl.data.clients import ClientData, label_statistics
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.sweep import grid
from atlas_fl.setup.assembly import load_clients


@pytest.mark.parametrize("preset", DIALS)
def test_every_dial_has_five_settings_that_make_other_runs(preset: str) -> None:
    dial = DIALS[preset]
    assert len(dial.settings) == len(dial.words) == 5
    assert {name for values in dial.settings for name in values} <= settings().keys()
    configs = [validate(find_preset(preset, dial=turn)) for turn in range(5)]
    assert len({config_hash(config) for config in configs}) == 5
    for config, values in zip(configs, dial.settings, strict=True):
        assert all(value_of(config, name) == value for name, value in values.items())
    assert find_preset(preset) == configs[2]
    assert [turn_dial(configs[0], turn) for turn in (1, 4)] == [configs[1], configs[4]] or preset == "label-skew"


@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize("preset", [name for name in DIALS if name not in ("images-nc", "instructions")])
def test_every_federation_of_texts_can_be_dealt_out(preset: str, turn: int) -> None:
    config = validate(find_preset(preset, dial=turn))
    clients = load_clients(config)
    assert 6 <= len(clients) <= 9
    assert all(len(client.test) == 120 for client in clients)


def label_distance(clients: Sequence[ClientData]) -> float:
    return sum(row["distance"] for row in label_statistics(clients))


def spread_of_positives(clients: Sequence[ClientData]) -> float:
    counts = [int(client.train.label.sum()) for client in clients]
    return max(counts) - min(counts)


def ratio_of_sizes(clients: Sequence[ClientData]) -> float:
    sizes = [len(client.train) for client in clients]
    return max(sizes) / min(sizes) - 1


MEASURES = {"label-skew": label_distance, "concept-shift": spread_of_positives, "sizes": ratio_of_sizes}


@pytest.mark.parametrize("preset", MEASURES)
def test_the_further_the_dial_the_more_clients_differ(preset: str) -> None:
    measured = [MEASURES[preset](load_clients(find_preset(preset, dial=turn))) for turn in range(5)]
    assert measured == sorted(measured) and measured[-1] > 2 * measured[1] > 0


def base(*words: str) -> Config:
    return base_config(split(words))


def test_the_dial_is_a_flag_a_key_and_can_be_swept(tmp_path: Path) -> None:
    typed = base("--preset", "sources", "--dial", "3")
    assert (typed.run.dial, typed.data.own_share) == (3, 0.8125)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(typed))
    assert base("--config", str(file)) == typed
    assert base("--config", str(file), "--dial", "0").data.own_share == 0.25
    points = grid(typed, over={"dial": ("0", "4")}, seeds=(1,))
    assert [point.config.data.own_share for point in points] == [0.25, 1.0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dial", "3"), "--dial is 3, and --preset quick has no dial; those with one: null, label-skew"),
        (("--preset", "null", "--dial", "5"), "--dial is 5; allowed: 0 to 4"),
    ],
)
def test_a_dial_that_there_is_not_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        base(*words)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"own_share": 0.5}, "--own-share 0.5 mixes the sources of one task; set --one-task"),
        ({"client_sizes": (50,), "partition": "quantity"}, "--client-sizes and --partition quantity both say how much"),
        ({"client_sizes": (50,), "arrive": ("movie-1=3",)}, "--arrive movie-1=3 comes later, and --client-sizes is of"),
        ({"flipped_clients": 1.5}, "--flipped-clients is 1.5; allowed: at least 0, at most 1"),
        ({"client_sizes": (1,)}, "--client-sizes is .1,.; allowed: at least 2"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(with_values(Config(), values))


def test_the_plan_says_where_the_dial_stands() -> None:
    (line,) = dial_note(find_preset("concept-shift", dial=3))
    assert line.startswith("federation concept-shift, dial 3 of 0 to 4: ratings from which a review is positive")
    assert line.endswith(": -1, 0, 1")
    assert dial_note(Config()) == ()
    assert set(DIALS) <= PRESETS.keys()
