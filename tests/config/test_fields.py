import dataclasses
import re

import pytest

from atlas_fl.config import Config, settings, value_of, with_values
from atlas_fl.config.settings import group_classes, replace_settings
from atlas_fl.config.values import to_words
from atlas_fl.errors import ConfigError
from atlas_fl.methods.registry import METHODS, RULES, SECOND_MODELS


def test_every_setting_has_a_help_that_is_a_noun_phrase_or_an_imperative() -> None:
    for setting in settings().values():
        assert re.fullmatch(r"[A-Z`].+\.", setting.help), setting.name
        assert not re.match(r"(What|Whether|Which|Where|Who|Whose|How|Of|Those|Nothing)\b", setting.help), setting.name


def test_every_group_says_what_it_is() -> None:
    assert all(cls.__doc__ and cls.__doc__.endswith(".") for cls in group_classes().values())


def test_the_table_holds_every_field_once() -> None:
    from_groups = [name for cls in group_classes().values() for name in cls.__dataclass_fields__]
    assert list(settings()) == from_groups
    assert settings()["eta"].group == "mixing"
    assert settings()["clients_per_task"].flag == "--clients-per-task"


def test_values_change_their_own_group_alone() -> None:
    base = Config()
    changed = replace_settings({"eta": 0.25, "seed": 7}, base=base)
    assert (value_of(changed, "eta"), value_of(changed, "seed")) == (0.25, 7)
    assert [name for name in settings() if value_of(changed, name) != value_of(base, name)] == ["eta", "seed"]
    assert changed.data is base.data


def test_a_knob_of_a_method_is_a_setting_with_its_default_and_help() -> None:
    parts = [*RULES.values(), *SECOND_MODELS.values()]
    declared = {one.name: one.default for part in parts for one in dataclasses.fields(part) if one.name != "options"}
    knobs = {name: setting for name, setting in settings().items() if setting.group == "server"}
    assert declared == {name: value_of(Config(), name) for name in knobs}
    assert all(setting.help for setting in knobs.values())


def test_values_that_tuning_tries_are_of_strategies_that_there_are_and_in_range() -> None:
    for setting in settings().values():
        assert setting.tried.keys() <= {*RULES, *METHODS}, setting.name
        numbers = [value for values in setting.tried.values() for value in values if not isinstance(value, str)]
        assert setting.range is None or all(map(setting.range.fits, numbers)), setting.name


def test_values_are_given_as_text_under_either_spelling() -> None:
    changed = with_values(Config(), {"eta": "0.5", "clients-per-task": "2", "--max_length": "none", "share": "A+head"})
    assert (changed.mixing.eta, changed.data.clients_per_task, changed.data.max_length) == (0.5, 2, None)
    assert changed.mixing.share == ("A", "head")


def test_the_text_of_every_default_gives_the_default() -> None:
    texts = {name: "+".join(to_words(value_of(Config(), name))) for name in settings()}
    assert with_values(Config(), texts) == Config()


def test_a_text_that_spells_no_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--eta is 'much'; allowed: a number; set it to that, or leave it out"):
        with_values(Config(), {"eta": "much"})
