import pytest

from atlas_fl.config import Config, settings, value_of, with_values
from atlas_fl.config.values import to_words
from atlas_fl.errors import ConfigError


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
