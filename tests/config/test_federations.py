"""Presets with a dial: five settings each, on the command line, in a file, and in a sweep."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from atlas_fl.cli.arguments import base_config, split
from atlas_fl.config import Config, to_toml, validate, with_values
from atlas_fl.config.identity import config_hash
from atlas_fl.config.presets import dial_note, dial_of, find_preset, presets, turn_dial
from atlas_fl.config.settings import settings
from atlas_fl.data.clients import ClientData, label_statistics
from atlas_fl.data.heterogeneity import disagreement
from atlas_fl.data.registry import TASKS
from atlas_fl.data.task import load_task
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.sweep import grid
from atlas_fl.setup.assembly import load_clients, source_of

DIALS = [name for name, preset in presets().items() if preset.dial]


@pytest.mark.parametrize("preset", DIALS)
def test_every_dial_has_five_settings_that_make_other_runs(preset: str) -> None:
    dial = dial_of(preset, 0)
    assert len(dial.settings) == len(dial.words) == 5
    assert {name for values in dial.settings for name in values} <= settings().keys()
    configs = [validate(find_preset(preset, dial=turn)) for turn in range(5)]
    assert len({config_hash(config) for config in configs}) == 5
    for config, values in zip(configs, dial.settings, strict=True):
        assert config == with_values(config, values)
    assert find_preset(preset) == configs[2]
    assert [[turn_dial(config, turn) for turn in range(5)] for config in configs] == [configs] * 5


@pytest.mark.parametrize("turn", (0, 4))
@pytest.mark.parametrize("preset", [name for name in DIALS if name not in ("images-nc", "instructions")])
def test_every_federation_of_texts_can_be_dealt_out(preset: str, turn: int) -> None:
    config = validate(find_preset(preset, dial=turn))
    clients = load_clients(config)
    assert 6 <= len(clients) <= 16
    assert all(len(client.test) == config.data.test_samples >= 24 for client in clients)


@pytest.mark.parametrize(("turn", "classes"), [(0, 10), (4, 1)])
def test_the_federation_of_images_can_be_dealt_out(turn: int, classes: int) -> None:
    clients = load_clients(validate(find_preset("images-nc", dial=turn)))
    assert {(len(set(client.train.label.tolist())), len(client.train)) for client in clients} == {(classes, 60)}


@pytest.mark.parametrize("turn", (0, 4))
def test_the_federation_of_instructions_can_be_dealt_out(turn: int, tmp_path) -> None:
    columns = {
        "squad": ("question", "answers", "context"),
        "e2e": ("meaning_representation", "human_reference"),
        "xsum": ("document", "summary"),
    }
    for name, words in columns.items():
        (tmp_path / name).mkdir()
        for part, count in (("train", 3000), ("validation", 600)):
            rows = ({word: f"{part} {word} {row}" for word in words} for row in range(count))
            (tmp_path / name / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = with_values(find_preset("instructions", dial=turn), {"data_dir": str(tmp_path), "samples": "100"})
    clients = load_clients(config)
    assert len(clients) == 3 * (5 - turn) and {len(client.train) for client in clients} == {100}


@pytest.mark.parametrize(("turn", "own"), [(0, 30), (3, 98)])
def test_clients_of_sources_have_so_much_of_their_own_and_no_text_twice(turn: int, own: int) -> None:
    config = find_preset("sources", dial=turn)
    sources = {name: texts_of(name, config) for name in config.data.tasks}
    clients = load_clients(config)
    held = [text for client in clients for rows in (client.train, client.validation, client.test) for text in rows.text]
    assert len({" ".join(text.casefold().split()) for text in held}) == len(held) == 8 * 300
    for client in clients:
        counts = {name: sum(text in texts for text in client.train.text) for name, texts in sources.items()}
        assert counts.pop(client.name.rpartition("-")[0]) == client.own_rows == own
        assert max(counts.values()) - min(counts.values()) <= 1


def texts_of(name: str, config: Config) -> set[str]:
    data = load_task(TASKS[name], source_of(config))
    return {text for rows in (data.train, data.validation, data.test) for text in rows.text}


def label_distance(clients: Sequence[ClientData]) -> float:
    return sum(row["distance"] for row in label_statistics(clients))


def ratio_of_sizes(clients: Sequence[ClientData]) -> float:
    sizes = [len(client.train) for client in clients]
    return max(sizes) / min(sizes) - 1


def contradictions(clients: Sequence[ClientData]) -> float:
    return disagreement(clients) or 0.0


MEASURES = {"label-skew": label_distance, "sizes": ratio_of_sizes}
MEASURES |= dict.fromkeys(("concept-shift", "contradiction"), contradictions)


@pytest.mark.parametrize("preset", MEASURES)
def test_the_further_the_dial_the_more_clients_differ(preset: str) -> None:
    measured = [MEASURES[preset](load_clients(find_preset(preset, dial=turn))) for turn in range(5)]
    assert measured == sorted(measured) and measured[-1] > 2 * measured[1] > 0


def base(*words: str) -> Config:
    return base_config(split(words))


def test_the_dial_is_a_flag_a_key_and_can_be_swept(tmp_path) -> None:
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


def test_the_plan_says_where_the_dial_stands() -> None:
    (line,) = dial_note(find_preset("concept-shift", dial=3))
    assert line.startswith("federation concept-shift, dial 3 of 0 to 4: ratings from which a review is positive")
    assert line.endswith(": -1.75, 0, 1.75")
    assert dial_note(Config()) == ()


def test_the_plan_says_what_was_changed_by_hand() -> None:
    config = validate(with_values(find_preset("concept-shift", dial=3), {"rating_cuts": [-3, 0, 3]}))
    assert dial_note(config)[0].endswith(": -1.75, 0, 1.75; but here --rating-cuts -3 0 3")


@pytest.mark.parametrize("values", [{"dial": "4"}, {"own_share": 1.0}])
def test_settings_of_another_dial_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--own-share is that of dial [24] of sources; turn the dial with the"):
        validate(with_values(find_preset("sources"), values))


def test_cuts_of_a_task_of_sources_go_by_its_own_name() -> None:
    values = {"split": "movie+amazon+nyt_sentiment+tweets=2", "adapted_blocks": "none"}
    joint = with_values(find_preset("sources"), values)
    assert validate(joint) == joint
    with pytest.raises(ConfigError, match="unknown name in --split 'movie'"):
        validate(with_values(joint, {"split": "movie=2"}))


def test_one_client_a_task_has_the_rows_of_all() -> None:
    config = find_preset("label-skew", dial=3)
    (one,) = load_clients(validate(with_values(config, {"strategy": "centralized"})))
    clients = load_clients(validate(config))
    assert len(one.test) == sum(len(client.test) for client in clients) > len(clients[0].test)
    assert one.train.label.tolist() == [label for client in clients for label in client.train.label.tolist()]
