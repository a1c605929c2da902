"""Filters of updates: what each makes of a change, and words that name none."""

import pytest
import torch

from atlas_fl.config import Config, validate, with_values
from atlas_fl.errors import ConfigError
from atlas_fl.methods.update_filters import UPDATE_FILTERS, apply_filter, make_filter

CHANGE = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[-4.0]])}


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_clip_scales_the_whole_change_to_the_norm_and_leaves_a_smaller_one_alone() -> None:
    clipped = make_filter("clip=2.5")(CHANGE, draws())
    assert clipped["a"].tolist() == [1.5, 0.0]
    assert clipped["b"].tolist() == [[-2.0]]
    assert make_filter("clip=5")(CHANGE, draws()) is CHANGE


def test_noise_has_the_standard_deviation_that_is_asked_for() -> None:
    zeros = {"a": torch.zeros(10000)}
    noisy = make_filter("noise=0.5")(zeros, draws())["a"]
    assert float(noisy.std()) == pytest.approx(0.5, rel=0.03)
    assert float(noisy.mean()) == pytest.approx(0.0, abs=0.02)


def test_quantise_keeps_the_mean_and_leaves_few_values() -> None:
    change = {"a": torch.cat([torch.full((10000,), 0.1), torch.full((100,), -0.7)]), "zeros": torch.zeros(3)}
    rounded = make_filter("quantise=2")(change, draws())
    assert set(rounded["a"].unique().tolist()) == {-1.0, 0.0, 1.0}, "a step is the next power of two"
    assert float(rounded["a"][:10000].mean()) == pytest.approx(0.1, abs=0.01)
    assert rounded["zeros"].tolist() == [0.0, 0.0, 0.0]


def test_topk_keeps_the_largest_values_of_the_whole_change() -> None:
    change = {"a": torch.tensor([1.0, -5.0, 0.5]), "b": torch.tensor([[3.0, -0.1]])}
    kept = make_filter("topk=0.4")(change, draws())
    assert kept["a"].tolist() == [0.0, -5.0, 0.0]
    assert kept["b"].tolist() == [[3.0, 0.0]]
    assert sum(int(one.count_nonzero()) for one in make_filter("topk=0.0001")(change, draws()).values()) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"update_filter": ["clop=1"]}, "unknown filter in --update-filter 'clop'; did you mean 'clip'"),
        ({"update_filter": ["clip"]}, "--update-filter is clip; allowed: clip=NUMBER above 0; give one"),
        ({"update_filter": ["clip=1", "noise=-1"]}, "--update-filter is noise=-1; allowed: noise=NUMBER above 0"),
        (
            {"update_filter": ["quantise=1"]},
            "--update-filter is quantise=1; allowed: quantise=NUMBER above 1, 32 at most",
        ),
        (
            {"update_filter": ["quantise=2000"]},
            "--update-filter is quantise=2000; allowed: quantise=NUMBER above 1, 32",
        ),
        ({"update_filter": ["topk=1.5"]}, "--update-filter is topk=1.5; allowed: topk=NUMBER above 0, 1 at most; give"),
        ({"error_feedback": True}, "--error-feedback keeps what a filter takes from an update, and there is none"),
        ({"update_filter": ["clip=much"]}, "--update-filter is 'clip=much'; allowed: name, or name=number"),
        ({"update_filter": ["clip=nan"]}, "--update-filter is 'clip=nan'; allowed: name, or name=number"),
        ({"update_filter": ["clip=1"], "split": "2"}, "--update-filter clip=1 is for models that a client trains by"),
        ({"update_filter": ["clip=1"], "strategy": "fedpac"}, "asks clients for reports beside them; leave it"),
    ],
)
def test_a_filter_that_cannot_act_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate(with_values(Config(), settings))
    assert message in str(raised.value)


def test_a_filter_that_gives_back_other_tensors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UPDATE_FILTERS, "first", lambda _: lambda change, _: {"a": change["a"]})
    with pytest.raises(ConfigError, match="--update-filter first gives back other names or shapes"):
        apply_filter("first", CHANGE, draws())
