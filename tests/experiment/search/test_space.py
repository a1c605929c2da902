import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from atlas_fl.config import Config
from atlas_fl.errors import AtlasError, ConfigError
from atlas_fl.experiment.search import check_space, format_value, parse_space


def test_ranges_and_values_are_read() -> None:
    ranges = {
        "lr=1e-4..1e-2:log": FloatDistribution(1e-4, 1e-2, log=True),
        "weight-decay=0,1e-4": CategoricalDistribution(("0", "1e-4")),
        "local-epochs=1..4": IntDistribution(1, 4),
        "ranks=4..16": IntDistribution(4, 16),
        "nc=1..10": IntDistribution(1, 10),
        "graph=uniform": CategoricalDistribution(("uniform",)),
        "task=own=../a.csv": CategoricalDistribution(("own=../a.csv",)),
    }
    names = [text.partition("=")[0].replace("-", "_") for text in ranges]
    assert parse_space(list(ranges)) == dict(zip(names, ranges.values()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr=1e-2..1e-4", "--over lr=1e-2..1e-4 is no range; allowed: one range .* write lr=LOW..HIGH, or lr=LOW"),
        ("lr=1e-2..1e-2", "is no range"),
        ("weight-decay=0..1e-2:log", "is no range"),
        ("lr=1e-4..1e-2:lg", "is no range"),
        ("lr=1e-4..x", "--lr is 'x'; allowed: a number"),
        ("lr=..1e-2", "--lr is ''; allowed: a number"),
        ("lr=none..1", "is no range"),
        ("local-epochs=1.5..4", "--local-epochs is '1.5'; allowed: a whole number"),
        ("nc=1..x", "is no range"),
        ("lr=1e-4..1e-2,0.5", "is no range"),
        ("etta=0..1", r"unknown setting 'etta'; did you mean 'eta'\?"),
        ("rounds", "allowed: a setting and its values"),
        ("keep-best=1..3", "changes no number of a run"),
    ],
)
def test_a_wrong_range_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_space([text])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["eta=0..3"], "--eta is 3.0; allowed: at least 0, below 2"),
        (["dropout=-0.5..0.5"], "--dropout is -0.5"),
        (["graph=1..2"], "--graph is '1..2'; allowed: one of similarity"),
        (["strategy=atlas,fedavgg"], "unknown strategy 'fedavgg'"),
        (["patience=0,2", "min-delta=0..0.1"], "--min-delta 0.1 says what is better for --patience, which is 0"),
    ],
)
def test_every_end_and_value_must_be_a_run_that_can_be_also_together(texts: list[str], message: str) -> None:
    with pytest.raises(AtlasError, match=message):
        check_space(Config(), parse_space(texts))


def test_values_are_spelled_to_the_last_digit() -> None:
    assert [format_value(value) for value in (0.1 + 0.2, 3, "1e-4")] == ["0.30000000000000004", "3", "1e-4"]
