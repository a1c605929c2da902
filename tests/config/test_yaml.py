"""YAML beside TOML: the same settings, and the same errors in one line."""

from pathlib import Path

import pytest
import tomlkit
import yaml

from atlas_fl.config import Config, load_config, to_toml
from atlas_fl.config.files import read_yaml
from atlas_fl.config.presets import find_preset, presets
from atlas_fl.errors import ConfigError


def written(folder: Path, text: str, name: str = "own.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["own.yaml", "own.yml", "OWN.YAML"])
@pytest.mark.parametrize("preset", presets())
def test_a_config_in_yaml_is_the_one_in_toml(preset: str, name: str, tmp_path: Path) -> None:
    config = find_preset(preset)
    plain = tomlkit.parse(to_toml(config)).unwrap()
    assert load_config(written(tmp_path, yaml.safe_dump(plain), name)) == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-.5", -0.5),
        ("3.", 3.0),
        ("-07", -7),
        ("010", 10),
        ("12", 12),
        ("-0", 0),
        ("yes", "yes"),
        ("off", "off"),
        ("TRUE", True),
        ("'true'", "true"),
        ("~", None),
        ("", None),
        ('""', ""),
        ("1:30", "1:30"),
        ("2026-11-22", "2026-11-22"),
        ("[1, two]", [1, "two"]),
    ],
)
def test_scalars_are_those_of_the_core_schema(text: str, value: object) -> None:
    (found,) = read_yaml(f"a: {text}").values()
    assert (type(found), found) == (type(value), value)


def test_a_partial_file_changes_what_it_names(tmp_path: Path) -> None:
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
    config = load_config(written(tmp_path, text))
    assert (config.training.lr, config.training.rounds) == (0.001, 3)
    assert (config.data.tasks, config.data.max_length, config.ranks.ranks) == (("movie", "trec"), None, "8")
    assert config.mixing == Config().mixing
    assert load_config(written(tmp_path, "# nothing yet\n")) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mixing:\n  etta: 1\n", r"unknown setting 'etta' in .*own.yaml; did you mean 'eta'\?"),
        ("mixin:\n  eta: 1\n", r"unknown table in .*own.yaml: 'mixin'; did you mean 'mixing'\?"),
        ("3: 1\n", r"unknown table in .*own.yaml: '3';"),
        ("data:\n  eta: 1\n", r"eta stands in \[data\]; it belongs to \[mixing\]; move it there"),
        ("mixing: 3\n", r"mixing is no table; write mixing: on a line of its own, its settings below"),
        ("mixing:\n  eta: '1'\n", r"eta is '1'; allowed: a number;"),
        ("training:\n  rounds: 1e1\n", r"rounds is 10.0; allowed: a whole number;"),
        ("training:\n  rounds: null\n", r"rounds is None; allowed: a whole number;"),
        ("run:\n  audit: yes\n", r"audit is 'yes'; allowed: true or false;"),
        ("training: {rounds: {a: 1}}\n", r"rounds is \{'a': 1\}; allowed: a whole number;"),
        ("- mixing\n", r"own.yaml holds no tables; write training: on a line of its own"),
        ("plain words", r"own.yaml holds no tables;"),
        ("mixing:\n  eta: 1\n  eta: 2\n", r"own.yaml is no YAML \(line 3: 'eta' stands there twice\); mend that line"),
        ("mixing:\n\teta: 1\n", r"own.yaml is no YAML \(.*line 2.*\)"),
        ("run:\n  seed: " + "9" * 5000, r"own.yaml is no YAML \(line 2: a number of 5,000 digits is more"),
        ("mixing: [1\n", r"own.yaml is no YAML \("),
        ("a: 1\n---\nb: 1\n", r"own.yaml is no YAML \("),
        (
            "run: !!python/object/apply:os.system [true]\n",
            r"own.yaml is no YAML \(line 1: the tag .* means nothing here\)",
        ),
        ("? [a]\n: 1\n", r"own.yaml is no YAML \(line 1: a key is no word\)"),
        ("a: &a [*a]\n", r"own.yaml is no YAML \("),
        ("a: *b\n", r"own.yaml is no YAML \(.*undefined alias"),
        ("run: {seed: " + "9" * 5000 + "}", r"own.yaml is no YAML \("),
        ("a: " + "[" * 3000, r"own.yaml is no YAML \("),
        ("a: \x00", r"own.yaml is no YAML \("),
    ],
)
def test_a_wrong_file_is_one_clear_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.yaml \(No such file or directory\); .* TOML or YAML"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match=r"bytes.yaml is no YAML \(.*codec"):
        load_config(tmp_path / "bytes.yaml")


def test_aliases_of_aliases_are_read_once() -> None:
    lines = ["a0: &a0 [1, 1]", *(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]" for k in range(1, 60))]
    found = read_yaml("\n".join(lines))
    assert found["a59"][0] is found["a59"][1], "not two to the sixtieth numbers"
