import pytest

from atlas_fl.config import config_hash
from atlas_fl.config.presets import find_preset, presets, with_own_data
from atlas_fl.errors import ConfigError


@pytest.mark.parametrize("name", presets())
def test_a_preset_knows_its_name_and_says_what_it_is(name: str) -> None:
    assert find_preset(name).run.preset == name
    assert presets()[name].about.endswith(".")


def test_no_two_presets_are_the_same_run() -> None:
    assert len({config_hash(find_preset(name)) for name in presets()}) == len(presets())


def test_quick_is_the_demonstration_that_was_promised() -> None:
    data = find_preset("quick").data
    assert (data.tasks, data.clients_per_task, len(data.devices)) == (("movie", "trec", "pairs"), 3, 4)
    assert find_preset("quick").training.rounds == 12


def test_smoke_is_small_and_uniform() -> None:
    config = find_preset("smoke")
    assert config.ranks.ranks == "4"
    assert len(config.data.tasks) * config.data.clients_per_task == 4
    assert config.training.rounds * config.data.samples <= 50


@pytest.mark.parametrize(
    "row",
    [
        "triage=all.csv,client=hospital",
        "triage,labels=routine|urgent",  # its sites bring their files
        "triage=all.csv",
        "triage=all.csv,labels=routine|urgent",
    ],
)
def test_who_brings_rows_of_its_own_trains_on_all_of_them(row: str) -> None:
    config = with_own_data(find_preset("quick"), [row], tasks=None, said=())
    assert (config.data.samples, config.data.validation_samples, config.data.test_samples) == (None, None, None)
    assert with_own_data(find_preset("null"), [row], tasks=None, said=()).data.samples is not None, "a preset's own"
    assert with_own_data(find_preset("quick"), [row], tasks=None, said={"samples"}).data.samples == 200
    # whole models have no ranks, so none is set for who trains them
    assert with_own_data(find_preset("quick"), [row], tasks=None, said={"trainable"}).ranks.ranks == "budget"


def test_an_unknown_preset_has_its_nearest() -> None:
    known = "known: chat, clothes, concept-shift, contradiction,"
    with pytest.raises(ConfigError, match=rf"unknown preset 'quik'; did you mean 'quick'\? {known}"):
        find_preset("quik")
