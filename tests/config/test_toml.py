import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atlas_fl.config import Config, load_config, settings, to_toml
from atlas_fl.config.files import MOST_BYTES
from atlas_fl.config.presets import find_preset, presets
from atlas_fl.config.schema import DataConfig, RunConfig, TrainingConfig
from atlas_fl.errors import ConfigError


def written(folder: Path, text: str, name: str = "own.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("preset", presets())
def test_what_is_written_is_read_back_equal(preset: str, tmp_path) -> None:
    config = find_preset(preset)
    assert load_config(written(tmp_path, to_toml(config))) == config


def test_a_written_file_needs_no_base(tmp_path) -> None:
    """A setting without a value is in the file too, so it wins over a base in which it has one."""
    config = Config(run=RunConfig(preset="full"))
    base = replace(find_preset("full"), data=replace(find_preset("full").data, max_length=64, data_dir="elsewhere"))
    assert load_config(written(tmp_path, to_toml(config)), base=base) == config


@pytest.mark.slow
@given(
    lr=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    name=st.text(st.characters(codec="utf-8")).filter(lambda text: text != "none"),
    tasks=st.lists(st.text(st.characters(codec="utf-8"))),
    seed=st.integers(-(2**62), 2**62),
)
def test_any_value_survives_the_file(
    tmp_path_factory, lr: float | None, name: str, tasks: list[str], seed: int
) -> None:
    config = Config(
        training=TrainingConfig(lr=lr), run=RunConfig(name=name, seed=seed), data=DataConfig(tasks=tuple(tasks))
    )
    assert load_config(written(tmp_path_factory.getbasetemp(), to_toml(config))) == config


def test_the_file_is_grouped_and_every_setting_is_explained() -> None:
    text = to_toml(Config())
    assert tomllib.loads(text)["mixing"]["eta"] == 0.5
    assert "# Phase 4: the server's rule.\n[mixing]\n" in text
    assert "(one of similarity, uniform, adaptive)\ngraph = " in text
    lines = text.splitlines()
    for setting in settings().values():
        (at,) = (at for at, line in enumerate(lines) if line.startswith(f"{setting.name} = "))
        assert lines[at - 1].startswith(f"# {setting.help}")


def test_a_partial_file_changes_what_it_names(tmp_path) -> None:
    path = written(tmp_path, '[ranks]\nranks = 8\n\n[training]\nlr = 1\nrounds = 3\n[data]\nmax_length = "none"\n')
    config = load_config(path)
    assert (config.ranks.ranks, config.training.lr, config.training.rounds) == ("8", 1.0, 3)
    assert type(config.training.lr) is float
    assert config.mixing == Config().mixing
    assert load_config(path, base=find_preset("full")).data.tasks == find_preset("full").data.tasks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[mixing]\netta = 1\n", r"unknown setting 'etta' in .*own.toml; did you mean 'eta'\?"),
        ("[mixin]\neta = 1\n", r"unknown table in .*own.toml: 'mixin'; did you mean 'mixing'\?"),
        ("eta = 1\n", r"own.toml: eta stands outside of all tables; it belongs below \[mixing\]; move it there"),
        ("[data]\neta = 1\n", r"eta stands in \[data\]; it belongs to \[mixing\]; move it there"),
        ("mixing = 3\n", r"mixing is no table; write \[mixing\]"),
        ("[mixing]\neta = '1'\n", r"eta is '1'; allowed: a number;"),
        ("[mixing]\nshare = 'A'\n", r"share is 'A'; allowed: a list, each one of A, B, head;"),
        ("[mixing]\nspace = 'both'\n", r"space is 'both'; allowed: one of factors, product; set it to that"),
        ("[mixing]\nspace = 'factor'\n", r"allowed: one of factors, product; did you mean 'factors'\?$"),
        ("[training]\nrounds = 2.5\n", r"rounds is 2.5; allowed: a whole number;"),
        ("[training]\nrounds = true\n", r"rounds is True; allowed: a whole number;"),
        ("[run]\naudit = 1\n", r"audit is 1; allowed: true or false;"),
        ("[clustering]\nk_range = [2]\n", r"k_range is \[2\]; allowed: 2 times a whole number;"),
        ("[training]\nrounds = 1979-05-27\n", r"rounds is .*; allowed: a whole number;"),
        ("[mixing\n", r"own.toml is no TOML \(.*line 1.*\)"),
        ("[run]\nseed = " + "9" * 5000, r"own.toml is no TOML \(a number of thousands of digits is more than"),
        ("a = " + "[" * 3000, r"own.toml is no TOML \("),
    ],
)
def test_a_wrong_file_is_one_clear_line(text: str, message: str, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_recorded_setting_that_has_moved_is_not_to_be_moved_by_hand(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"to \[mixing\]; another version of ATLAS wrote this run; run it again"):
        load_config(written(tmp_path, "[data]\neta = 1\n"), within=tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "[" + ".".join("a" * 125_000) + "]\n",
        ".".join("a" * 125_000) + " = 1\n",
        '"a".' * 9 + "b = 1\n",
        "a" * 250_000 + " = 1\n",
        "# " + "x" * MOST_BYTES + "\n",
    ],
)
def test_long_keys_and_files_are_refused_at_once(text: str, tmp_path) -> None:
    with pytest.raises(ConfigError, match="allowed: 262,144 bytes, keys of 100 characters and 8 parts"):
        load_config(written(tmp_path, text))


def test_texts_and_comments_are_no_keys(tmp_path) -> None:
    name = "a.b.c.d.e.f.g.h.i.j.k" * 20
    text = to_toml(Config()).replace('runs_dir = "runs"', f"runs_dir = '{name}'  # {name}")
    assert load_config(written(tmp_path, text)).run.runs_dir == name


def test_a_file_that_cannot_be_read_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.toml \(No such file or directory\)"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"cannot read .* \(Is a directory\)"):
        load_config(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"bytes.toml is no TOML \(.*codec"):
        load_config(tmp_path / "bytes.toml")
