import os
from pathlib import Path

import pytest

from atlas_fl.cli.arguments import base_config, check_target, holds_json, split
from atlas_fl.config import Config, to_toml
from atlas_fl.config.presets import find_preset
from atlas_fl.errors import ConfigError


def base(*words: str) -> Config:
    return base_config(split(words))


def test_a_file_stands_on_the_preset_that_it_names_or_on_that_of_the_flag(tmp_path) -> None:
    assert base() == Config()
    assert base("--preset", "full", "--eta", "1") == find_preset("full")
    path = tmp_path / "own.toml"
    path.write_text('[run]\npreset = "full"\n[mixing]\neta = 0.5\n', encoding="utf-8")
    config = base("--config", str(path))
    assert (config.mixing.eta, config.training.rounds, config.run.preset) == (0.5, 15, "full")
    assert base(f"--config={path}", "--preset", "full") == config
    path.write_text("[mixing]\neta = 0.5\n", encoding="utf-8")
    assert base("--config", str(path), "--preset", "smoke").training == find_preset("smoke").training
    path.write_text(to_toml(find_preset("smoke")), encoding="utf-8")
    assert base("--config", str(path)) == find_preset("smoke")
    with pytest.raises(ConfigError, match=r"--preset full contradicts .*own.toml, which is made from preset smoke"):
        base("--config", str(path), "--preset", "full")


def test_a_file_that_a_command_has_not_written_is_not_written_over(tmp_path) -> None:
    def is_plan(path: Path) -> bool:
        return holds_json(path, keys=("clients", "data"))

    file, link, pipe = tmp_path / "plan.json", tmp_path / "link.json", tmp_path / "pipe.json"
    check_target(None, example="plan.json", is_own=is_plan)
    check_target(str(file), example="plan.json", is_own=is_plan)
    for own in ('{"clients": [], "data": [], "more": 1}', '[{"clients": 1, "data": 2}]'):
        file.write_text(own)
        check_target(str(file), example="plan.json", is_own=is_plan)
    link.symlink_to(file)
    os.mkfifo(pipe)
    strange = [link, pipe, Path("/dev/null")]
    for text in ("years of work", "{}", "[]", '[{"clients": 1}]', '{"clients": []}', "[1]", "[" * 10**5):
        file.write_text(text)
        with pytest.raises(ConfigError, match="what lies there was not written by this command; name a new file such"):
            check_target(str(file), example="plan.json", is_own=is_plan)
        assert file.read_text() == text
    for path in strange:
        with pytest.raises(ConfigError, match="what lies there was not written by this command"):
            check_target(str(path), example="plan.json", is_own=lambda _: True)
    for path in (tmp_path, tmp_path / "no" / "such" / "folder"):
        with pytest.raises(ConfigError, match="allowed: a file in a folder that exists; name one such as"):
            check_target(str(path), example="plan.json", is_own=is_plan)
