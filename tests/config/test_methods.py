import re
from dataclasses import replace
from typing import Any

import pytest

from atlas_fl.cli.arguments import parse, split
from atlas_fl.cli.options import RunOptions
from atlas_fl.client.local_training import num_head_steps, num_steps
from atlas_fl.client.options import TrainOptions
from atlas_fl.config import Config, validate, with_values
from atlas_fl.config.methods import rule_of, with_method_settings, without_method_settings
from atlas_fl.config.presets import find_preset
from atlas_fl.config.settings import value_of
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.sweep import grid
from atlas_fl.methods.registry import METHODS
from atlas_fl.setup.options import method_values, train_options


def config_of(method: str, **values: Any) -> Config:
    ranks = METHODS[method].settings.get("ranks", "8")
    return with_values(Config(), {"strategy": method, "ranks": ranks, **values})


def typed(line: str) -> Config:
    """The config that these words of a command line give."""
    return validate(parse(RunOptions, split(line.split()), command="atlas run").settings)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_writes_its_settings_into_the_config_and_no_second_time(method: str) -> None:
    config = validate(config_of(method))
    for name, value in {**METHODS[method].settings, **METHODS[method].suggested}.items():
        assert value_of(config, name) == value
    assert validate(config) is config
    assert rule_of(config) == METHODS[method].rule


REMEDY = re.compile(r"; (set|take|leave|raise) ")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("preset", ["smoke", "vision-lora", "null", "images-nc", "sources", "instructions"])
def test_a_method_fits_a_preset_or_refuses_it_in_a_line_with_a_remedy(preset: str, method: str) -> None:
    base = find_preset(preset)
    try:
        config = validate(with_values(base, {"strategy": method}))
    except ConfigError as error:
        assert "\n" not in str(error) and REMEDY.search(str(error)), error
        # its two rounds are no more than the last ones that these fine-tune in
        its_own = {*METHODS[method].settings, *METHODS[method].suggested}
        assert preset != "smoke" or its_own & {"ranks", "personal_rounds"}
        return
    assert rule_of(config) == METHODS[method].rule and validate(config) is config


def test_a_typed_default_that_contradicts_the_method_is_refused_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match="--space is product, and --strategy fedit is --space factors"):
        typed("--strategy fedit --ranks 8 --space product")


@pytest.mark.parametrize(
    ("others", "wrong", "right"),
    [
        ("--preset label-skew --strategy hsplitlora --adapted-blocks none", "", "--ranks budget"),
        ("--strategy fedsa --ranks 8", "--share A B head", "--share A"),
        ("--strategy scaffold --ranks 8", "--no-control-variates", "--control-variates"),
    ],
)
def test_the_remedy_of_a_contradiction_works(others: str, wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=f"; set {right}, or take another strategy$"):
        typed(f"{others} {wrong}")
    assert typed(f"{others} {right}").mixing.strategy in METHODS


def test_a_cut_that_the_method_makes_is_not_to_be_left_out() -> None:
    config = with_values(find_preset("images-nc"), {"strategy": "hsplitlora", "ranks": "budget"})
    message = "--split cuts models of texts, and .*; leave .* out, or take another strategy than hsplitlora"
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_a_knob_of_the_user_goes_before_the_suggested_one() -> None:
    assert validate(config_of("fedprox", proximal_mu=0.5)).training.proximal_mu == 0.5
    assert validate(config_of("fedprox")).training.proximal_mu == 0.01


def test_a_knob_that_switches_the_method_off_is_refused_and_not_replaced() -> None:
    message = "--proximal-mu 0 switches off what --strategy fedprox adds to fedavg; take --strategy fedavg, or another"
    with pytest.raises(ConfigError, match=message):
        typed("--strategy fedprox --proximal-mu 0")
    base = with_values(Config(), {"strategy": "fedprox"})
    with pytest.raises(ConfigError, match=message):
        grid(base, over={"proximal_mu": ("0", "0.1")}, seeds=(1,))
    points = grid(base, over={"proximal_mu": ("0.1", "1")}, seeds=(1,))
    assert [point.config.training.proximal_mu for point in points] == [0.1, 1.0]


def test_a_proximal_weight_of_zero_trains_as_fedavg_does() -> None:
    fedavg, fedprox = (validate(with_values(Config(), {"strategy": method})) for method in ("fedavg", "fedprox"))
    options = [train_options(config, with_images=False) for config in (fedavg, fedprox)]
    assert replace(options[1], proximal_mu=0.0) == options[0] != options[1]
    assert rule_of(fedprox) == rule_of(fedavg)
    server = [{**method_values(config), "scale": float, "proximal_mu": 0.0} for config in (fedavg, fedprox)]
    assert server[0] == server[1]


def test_a_comparison_that_begins_from_a_run_of_a_method_does_not_carry_its_settings_over() -> None:
    base = validate(config_of("ffa"))
    points = grid(base, over={"strategy": ("fedavg", "fedit")}, seeds=(1,))
    assert [value_of(point.config, "share") for point in points] == [("A", "B", "head")] * 2
    assert [value_of(point.config, "trained_parts") for point in points] == ["all", "all"]
    assert without_method_settings(Config()) == with_method_settings(Config()) == Config()


def test_ratings_that_clients_cut_into_classes_have_class_features() -> None:
    config = with_values(find_preset("concept-shift"), {"strategy": "fedpac"})
    assert validate(config).mixing.strategy == "fedpac"
    with pytest.raises(ConfigError, match=r"there is movie_ratings \(regression\); leave the others out"):
        validate(with_values(config, {"rating_cuts": "none"}))


NAMES = ("q.lora_A", "q.lora_B", "head.weight")


@pytest.mark.parametrize(
    ("parts", "round", "trained"),
    [
        ("all", 1, NAMES),
        ("B", 3, ("q.lora_B", "head.weight")),
        ("alternate", 1, ("q.lora_B", "head.weight")),
        ("alternate", 2, ("q.lora_A", "head.weight")),
        ("head_then_rest", 1, NAMES),
        ("head", 1, ("head.weight",)),
        ("without_head", 4, ("q.lora_A", "q.lora_B")),
        ("without_head", 5, NAMES),
        ("B", 5, NAMES),
    ],
)
def test_what_trains_in_a_round_of_six_with_two_personal_ones(parts: Any, round: int, trained: tuple[str, ...]) -> None:
    options = TrainOptions(seed=0, rounds=6, trained_parts=parts, personal_rounds=2)
    assert tuple(name for name in NAMES if options.trains(name, round=round)) == trained


HEADS = ("q.lora_B", "head.pre_classifier.weight", "head.classifier.weight")


@pytest.mark.parametrize(
    ("strategy", "words", "head", "body"),
    [
        ("fedpac", "", 13, 26),
        ("fedrep", "", 130, 26),
        ("fedrep", "--head-epochs 3", 39, 26),
        ("kriging", "--trained-parts head_then_rest", 13, 13),
        ("kriging", "--trained-parts head_then_rest --head-epochs 1", 13, 26),
        ("fedper", "", 0, 26),
        ("fedbabu", "", 0, 26),
        ("kriging", "", 0, 26),
    ],
)
def test_a_round_has_the_steps_of_head_and_body_that_its_paper_says(
    strategy: str, words: str, head: int, body: int
) -> None:
    """Of 200 examples in batches of 16 and two local epochs: FedPAC one pass over the head first, FedRep ten (algorithm
    1 of either); the order of ATLAS's own rules takes no step more.
    """
    config = typed(f"--preset smoke --rounds 8 --strategy {strategy} --local-epochs 2 --batch-size 16 {words}")
    options = train_options(config, with_images=False)
    first, steps = num_head_steps(200, options), num_steps(200, options)
    assert (first, steps - first) == (head, body)
    if head:
        moves = [{name for name in HEADS if options.moves(name, round=1, is_head_step=one)} for one in (True, False)]
        of_head = {"head.classifier.weight"} if strategy == "fedpac" else set(HEADS[1:])
        assert moves == [of_head, set(HEADS) - of_head]
    assert num_steps(200, replace(options, personal_rounds=1), round=options.rounds) == 26, "all train in the last"


def test_the_last_layer_moves_first_under_fedpac() -> None:
    config = validate(with_values(find_preset("smoke"), {"strategy": "fedpac"}))
    assert config.training.trained_parts == "head_then_rest"
    assert train_options(config, with_images=False).trained_parts == "last_layer_then_rest"
