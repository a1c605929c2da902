"""Settings of single methods: the methods that read each, and the message for one that the strategy does not read."""

from dataclasses import fields

import pytest

from atlas_fl.config import Config
from atlas_fl.config.conflicts import check_read
from atlas_fl.config.methods import settings_read
from atlas_fl.config.settings import replace_settings, settings
from atlas_fl.errors import ConfigError
from atlas_fl.methods.knobs import knobs_class
from atlas_fl.methods.registry import METHODS, RULES

TUNED = [
    (strategy, setting.name)
    for setting in settings().values()
    for strategy in setting.tried
    if setting.name in {one.name for one in fields(knobs_class())}
]


def of(strategy: str, **values: object) -> Config:
    return replace_settings({"strategy": strategy, **values}, base=Config())


@pytest.mark.parametrize("strategy, name", TUNED)
def test_what_is_tuned_for_a_method_is_read_by_it(strategy: str, name: str) -> None:
    assert name in settings_read(of(strategy))
    check_read([name], configs=[of(strategy)])


@pytest.mark.parametrize("strategy", [*RULES, *METHODS])
def test_a_setting_of_an_average_is_read_by_every_method_and_one_of_another_method_is_refused(strategy: str) -> None:
    check_read(["lr", "rounds", "share"], configs=[of(strategy)])
    name = "stb_zeta" if strategy != "stb" else "ifca_clusters"
    with pytest.raises(ConfigError, match=f"does nothing with --strategy {strategy}; leave it out"):
        check_read(["lr", name], configs=[of(strategy)])


def test_scope_is_read_by_those_that_can_act_inside_clusters() -> None:
    scoped = {name for name in [*RULES, *METHODS] if "within" in settings_read(of(name))}
    assert {"kriging", "median", "krum", "fedadam", "pfedgraph"} <= scoped
    assert not scoped & {"fedavg", "atlas", "fedavg_cluster", "fedrot", "fedsvd", "flora"}


def test_a_second_model_makes_its_settings_read() -> None:
    assert "second_weight" not in settings_read(of("fedavg"))
    assert "second_weight" in settings_read(of("fedavg", second_model="proximal"))


def test_one_reader_among_several_is_enough() -> None:
    check_read(["stb_zeta"], configs=[of("fedavg"), of("stb")])
    with pytest.raises(ConfigError, match="--stb-zeta does nothing with --strategy fedavg, median"):
        check_read(["stb_zeta"], configs=[of("fedavg"), of("median")])


def test_a_sweep_over_what_gives_a_setting_its_effect_is_one() -> None:
    dealt = [of("fedavg", partition=rule, dirichlet_alpha=0.3) for rule in ("iid", "dirichlet")]
    check_read(["dirichlet_alpha"], configs=dealt)
    with pytest.raises(ConfigError, match=r"--dirichlet-alpha 0\.3 is of --partition dirichlet and quantity"):
        check_read(["dirichlet_alpha"], configs=dealt[:1])
    with pytest.raises(ConfigError, match="--epsilon 8 is the budget of --dp, which is none"):
        check_read(["epsilon"], configs=[of("fedavg")])
    check_read(["epsilon"], configs=[of("fedavg", dp="example")])
