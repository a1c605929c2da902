"""YAML beside TOML: the same settings, and the same errors in one line."""

from functools import partial

import pytest
import tomlkit
import yaml

from atlas_fl.config import Config, load_config, to_toml, value_of
from atlas_fl.config.presets import find_preset
from atlas_fl.errors import ConfigError
from tests.config.test_toml import written

in_yaml = partial(written, name="own.yaml")


@pytest.mark.parametrize("name", ["own.yaml", "own.yml", "OWN.YAML"])
@pytest.mark.parametrize("preset", ["quick", "vision-sparse", "sources"])
def test_a_config_in_yaml_is_the_one_in_toml(preset: str, name: str, tmp_path) -> None:
    config = find_preset(preset)
    plain = tomlkit.parse(to_toml(config)).unwrap()
    assert load_config(written(tmp_path, yaml.safe_dump(plain), name)) == config


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("training: {lr: 1e-3}", "lr", 1e-3),
        ("run: {seed: 010}", "seed", 10),
        ("run: {name: yes}", "name", "yes"),
        ("run: {audit: TRUE}", "audit", True),
        ("training: {pack_tokens: ~}", "pack_tokens", None),
        ("training: {pack_tokens: }", "pack_tokens", None),
        ("run: {name: 2026-11-22}", "name", "2026-11-22"),
        ("data: {tasks: [movie]}", "tasks", ("movie",)),
    ],
)
def test_a_scalar_is_read_as_the_setting_declares_it(text: str, name: str, value: object, tmp_path) -> None:
    found = value_of(load_config(in_yaml(tmp_path, text)), name)
    assert (type(found), found) == (type(value), value)


def test_a_partial_file_changes_what_it_names(tmp_path) -> None:
    text = """
training:            # a table with comments
  lr: 1e-3
  rounds: 3
data:
  tasks: [movie, trec]
  max_length: null
ranks: {ranks: 8}
mixing:
"""
    config = load_config(in_yaml(tmp_path, text))
    assert (config.training.lr, config.training.rounds) == (0.001, 3)
    assert (config.data.tasks, config.data.max_length, config.ranks.ranks) == (("movie", "trec"), None, "8")
    assert config.mixing == Config().mixing
    assert load_config(in_yaml(tmp_path, "# nothing yet\n")) == Config()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mixing:\n  etta: 1\n", r"unknown setting 'etta' in .*own.yaml; did you mean 'eta'\?"),
        ("mixin:\n  eta: 1\n", r"unknown table in .*own.yaml: 'mixin'; did you mean 'mixing'\?"),
        ("data:\n  eta: 1\n", r"eta stands in \[data\]; it belongs to \[mixing\]; move it there"),
        ("mixing: 3\n", r"mixing is no table; write mixing: on a line of its own, its settings below"),
        ("run: !!python/object/apply:os.system [true]\n", r"run is no table; write run: on a line of its own"),
        ("run: {seed: " + "9" * 5000 + "}", r"seed is a number of 5,000 digits; allowed: a whole number"),
        ("training:\n  rounds: 1e1\n", r"rounds is '1e1'; allowed: a whole number;"),
        ("training: {rounds: {a: 1}}\n", r"rounds is \{'a': '1'\}; allowed: a whole number;"),
        ("- mixing\n", r"own.yaml holds no tables; write training: on a line of its own"),
        ("mixing:\n  eta: 1\n  eta: 2\n", r"no YAML \(line 2: a key stands twice in one mapping, or is no word\); m"),
        ("mixing:\n\teta: 1\n", r"own.yaml is no YAML \(.*line 2.*\)"),
        ("a: 1\n---\nb: 1\n", r"own.yaml is no YAML \("),
        ("a: *b\n", r"own.yaml is no YAML \(it has aliases"),
        ("a: " + "[" * 1200, r"own.yaml is no YAML \("),
        ("a: \x00", r"own.yaml is no YAML \("),
    ],
)
def test_a_wrong_file_is_one_clear_line(text: str, message: str, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(in_yaml(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.yaml \(No such file or directory\); .* TOML or YAML"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match=r"bytes.yaml is no YAML \(.*codec"):
        load_config(tmp_path / "bytes.yaml")
