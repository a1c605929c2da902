import re

from atlas_fl.config import Config, settings, value_of
from atlas_fl.config.settings import group_classes, replace_settings


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
