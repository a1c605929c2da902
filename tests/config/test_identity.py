from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from atlas_fl.config import Config, config_hash, differences, pinned_config, run_folder, settings, validate, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.config.schema import DataConfig, RunConfig
from atlas_fl.config.values import Mark
from atlas_fl.errors import ConfigError
from atlas_fl.methods.registry import METHODS

SESSION = {one.name for one in settings().values() if Mark.SESSION in one.marks}
CHANGED = {"runs_dir": "elsewhere", "name": "mine", "audit": "true", "engine": "ray", "secrets": "of-sites"}
CHANGED |= {"max_rounds": "1", "keep_checkpoints": "9", "keep_best": "3", "checkpoint_every": "3"}
CHANGED |= {"alone": "all", "workers": "2", "prefix_cache_gb": "0"}


def test_the_hash_is_the_same_in_every_process() -> None:
    assert config_hash(with_values(Config(), {"eta": "0.25"})) == "1c9f77d5295bbe72"


@pytest.mark.parametrize("name", sorted(SESSION))
def test_settings_of_the_session_change_no_hash(name: str) -> None:
    changed = with_values(Config(), {name: CHANGED[name]})
    assert changed != Config()
    assert config_hash(changed) == config_hash(Config())
    assert differences(changed, Config()) == {}


def test_every_other_setting_changes_the_hash() -> None:
    texts = {bool: lambda old: str(not old), int: lambda old: str(old + 1), float: lambda old: str(old + 0.125)}
    hashes = {config_hash(Config())}
    others = [name for name in settings() if name not in SESSION]
    for name in others:
        old = getattr(getattr(Config(), settings()[name].group), name)
        text = texts[type(old)](old) if type(old) in texts else other_text(name, old)
        hashes.add(config_hash(with_values(Config(), {name: text})))
    assert len(hashes) == len(others) + 1


def other_text(name: str, old: object) -> str:
    kind = settings()[name].kind
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != old)
    return {"share": "A", "k_range": "3+4"}.get(name, "7")


def test_equal_configs_have_equal_hashes() -> None:
    whole, real = Config(data=DataConfig(dirichlet_alpha=1)), Config(data=DataConfig(dirichlet_alpha=1.0))
    assert whole == real
    assert config_hash(whole) == config_hash(real)
    first, second = (with_values(Config(), {"rating_cuts": values}) for values in ([-1, 0, 1], [-1.0, -0.0, 1.0]))
    assert first == second
    assert config_hash(first) == config_hash(second)
    assert config_hash(with_values(Config(), {"eta": "-0.0"})) == config_hash(with_values(Config(), {"eta": "0"}))


def test_differences_name_both_values() -> None:
    found = differences(Config(), with_values(Config(), {"eta": "0.25", "seed": "7", "name": "x"}))
    assert found == {"eta": (0.5, 0.25), "seed": (42, 7)}


def test_the_folder_is_the_own_name_or_one_of_the_settings() -> None:
    assert run_folder(Config(run=RunConfig(name="mine", runs_dir="there"))).path == Path("there/mine")
    derived = run_folder(Config()).path
    assert derived == Path("runs") / f"quick-atlas-minilm-s42-{config_hash(Config())[:8]}"


HASHES = {
    "smoke": "d4a76915562a5a33",
    "quick": "44136fa355b3678a",
    "full": "e254b646e0076d62",
    "publication": "1cfdade1eda3e105",
    "vision-quick": "00ff8c366d87f0b7",
    "vision-fedavg": "f2e39bed3992aba1",
    "vision-sparse": "182ae154ff3f3b1b",
    "vision-central": "cee07b0a594a7147",
    "vision-lora": "661f3ef5328000ac",
}


def test_the_hashes_of_the_presets_stay() -> None:
    """Rows of published results name a run by its preset, its flags and its hash."""
    assert {name: config_hash(find_preset(name)) for name in HASHES} == HASHES


def test_a_setting_at_its_default_is_no_part_of_the_hash() -> None:
    assert {name: value for name, value in HASHES.items() if find_preset(name) == Config()} == {
        "quick": config_hash(Config())
    }


def test_a_site_works_out_the_hash_that_the_server_has_for_every_method() -> None:
    """The server's config has the settings of its method written into it; a site's file names the method alone."""
    compared = 0
    for name in METHODS:
        file = with_values(find_preset("smoke"), {"strategy": name, "ranks": "8"})
        try:
            served = validate(file, at_sites=True)
        except ConfigError:
            continue  # a method that this preset does not suit
        assert config_hash(pinned_config(file)) == config_hash(served), name
        compared += 1
    assert compared > 20
