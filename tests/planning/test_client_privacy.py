"""Differential privacy of clients: who pays for which sums, the noise of the budget, and what a client can move."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, norm

from atlas_fl.aggregation.secure_mean import SumGroup, SumSettings, noisy_sum, secure_means, sum_here
from atlas_fl.client.privacy import epsilon_of_all
from atlas_fl.config import Config
from atlas_fl.config.settings import replace_settings
from atlas_fl.errors import ConfigError, DataError
from atlas_fl.methods.update_filters import apply_filter
from atlas_fl.planning.client_privacy import (
    COUNT,
    clip_changes,
    drawn_normals,
    next_clip,
    noise_filter,
    noise_multiplier,
    noise_notes,
    noisy_settings,
    num_sums,
    seeded_normals,
    spending,
)
from atlas_fl.setup.options import sample_clients
from tests.examples import examples

pytest.importorskip("dp_accounting", reason="the extra dp is not installed")

NAMES = tuple(f"c{k}" for k in range(10))
GIVEN = {"dp": "client", "update_filter": ("clip=0.5",), "rounds": 12, "epsilon": 4.0, "delta": 1e-2}


def config_of(**values: object) -> Config:
    return replace_settings({**GIVEN, **values}, base=Config())


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of Gaussian differential privacy mu, by bisection of its closed form (Balle and Wang 2018)."""
    low, high = 0.0, 100.0
    for _ in range(80):
        middle = (low + high) / 2
        spent = norm.cdf(-middle / mu + mu / 2) - math.exp(middle) * norm.cdf(-middle / mu - mu / 2)
        low, high = (middle, high) if spent > delta else (low, middle)
    return high


def test_everybody_pays_for_every_round_and_the_last_ends_the_budget() -> None:
    config = config_of()
    noise = noise_multiplier(config, NAMES)
    spent = [spending(config, NAMES, range(1, number + 1))["c3"] for number in (1, 6, 12)]
    assert [one["paid_steps"] for one in spent] == [1.0, 6.0, 12.0]
    assert {one["noise_multiplier"] for one in spent} == {noise}
    # k Gaussian mechanisms are one with mu = sqrt(k) / z
    wanted = [gaussian_epsilon(math.sqrt(k) / noise, 1e-2) for k in (1, 6, 12)]
    assert [one["epsilon"] for one in spent] == pytest.approx(wanted, abs=1e-3)
    assert 3.98 < spent[-1]["epsilon"] <= 4.0


def test_who_is_drawn_pays_for_its_own_sums_and_the_noise_is_for_who_is_in_most() -> None:
    config = config_of(participation=0.3)
    drawn = [sample_clients(config, NAMES, round=number) for number in range(1, 13)]
    counts = num_sums(config, NAMES, range(1, 13))
    assert counts == {name: sum(name in clients for clients in drawn) for name in {*sum(drawn, ())}}
    assert sum(counts.values()) == 36 and len({*counts.values()}) > 1
    spent = spending(config, NAMES, range(1, 13))
    most = max(counts, key=lambda name: counts[name])
    assert 3.98 < max(one["epsilon"] for one in spent.values()) == spent[most]["epsilon"] <= 4.0
    assert noise_multiplier(config, NAMES) < noise_multiplier(config_of(), NAMES)


def test_a_round_that_was_done_again_is_paid_twice_and_ends_the_budget_early() -> None:
    assert spending(config_of(), NAMES, [1, 2, 2])["c0"]["paid_steps"] == 3
    with pytest.raises(ConfigError, match=r"would spend epsilon 4\.\d+ with this round; allowed: 4: a killed server"):
        spending(config_of(), NAMES, [*range(1, 13), 12])


def test_a_delta_beyond_one_over_the_clients_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--delta is 0\.2.* allowed: below one over that"):
        noise_multiplier(config_of(delta=0.2), NAMES)


def test_the_plan_predicts_noise_over_signal_by_hand() -> None:
    # z sqrt(d) / m of one group: 384 numbers of ten clients
    group = SumGroup(clients=NAMES, keys=("x",), what="the adapters")
    (line,) = noise_notes(config_of(), NAMES, (group,), {"c0": {"x": torch.zeros(384)}})
    ratio = noise_multiplier(config_of(), NAMES) * math.sqrt(384) / 10
    assert f"in the means it is {ratio:.2g} times the largest update, so next to nothing is learned" in line
    (line,) = noise_notes(config_of(), NAMES, (group,), {"c0": {"x": torch.zeros(4)}})
    assert "largest update;" in line


SETTINGS = SumSettings(run="a test", bound=4.0, max_share=1.0, deviation=0.7)
GROUPS = (
    SumGroup(clients=NAMES, keys=("x",), what="the adapters"),
    SumGroup(clients=NAMES[:4], keys=("head",), what="the head of movie"),
    SumGroup(clients=NAMES[4:], keys=("head",), what="the head of trec"),
)


def models_of(seed: int, size: int = 20_000) -> dict[str, dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return {name: {"x": torch.randn(size, generator=draw), "head": torch.randn(size, generator=draw)} for name in NAMES}


def means_of(models: dict[str, dict[str, torch.Tensor]], *, round: int = 1, seed: int = 0) -> dict[str, dict]:
    before = {name: dict.fromkeys(("x", "head"), torch.zeros_like(models["c0"]["x"])) for name in NAMES}
    sum_of = partial(noisy_sum, before, models, partial(seeded_normals, config_of(seed=seed)))
    return secure_means(GROUPS, SETTINGS, before, models, sum_of, round=round).updates


def test_noise_of_the_stated_variance_is_in_every_mean_of_equal_weights() -> None:
    models = models_of(1)
    means = means_of(models)
    noise = {
        "x": means["c0"]["x"] - torch.stack([models[name]["x"] for name in NAMES]).mean(0),
        "movie": means["c0"]["head"] - torch.stack([models[name]["head"] for name in NAMES[:4]]).mean(0),
        "trec": means["c9"]["head"] - torch.stack([models[name]["head"] for name in NAMES[4:]]).mean(0),
    }
    for what, clients in (("x", 10), ("movie", 4), ("trec", 6)):
        squares = float(((noise[what] * clients / 0.7) ** 2).sum())
        assert chi2.ppf(1e-6, 20_000) < squares < chi2.ppf(1 - 1e-6, 20_000), what
    assert abs(np.corrcoef(torch.stack([*noise.values()]).numpy())[np.triu_indices(3, 1)]).max() < 0.04
    assert torch.equal(means["c0"]["x"], means["c9"]["x"])
    assert torch.equal(means_of(models)["c0"]["x"], means["c0"]["x"])
    assert not torch.equal(means_of(models, round=2)["c0"]["x"], means["c0"]["x"])
    drawn = [drawn_normals(GROUPS[0], 1, 1000) for _ in range(2)]
    assert abs(np.corrcoef(drawn)[0, 1]) < 0.2 and 0.8 < np.std(drawn) < 1.2


def test_a_client_moves_all_sums_together_by_its_clip_at_most() -> None:
    models = models_of(2, size=50)
    update = apply_filter("clip=0.5", models["c3"], torch.Generator())
    with_it = means_of({**models, "c3": dict(update)})
    without = means_of({**models, "c3": dict.fromkeys(update, torch.zeros(50))})
    moved = [10 * (with_it["c0"]["x"] - without["c0"]["x"]), 4 * (with_it["c0"]["head"] - without["c0"]["head"])]
    assert float(torch.cat(moved).norm()) == pytest.approx(0.5, abs=1e-4)
    assert torch.equal(with_it["c9"]["head"], without["c9"]["head"])


def test_a_client_whose_own_model_has_gone_far_moves_a_sum_by_its_clip_all_the_same() -> None:
    """Of methods that begin with a client's own model (MR-MTL), what it was trained to in all rounds counts."""
    before = {name: {"q.lora_A": torch.zeros(3, 4), "head.weight": torch.zeros(2)} for name in NAMES}
    far = {name: {"q.lora_A": torch.full((3, 4), 5.0), "head.weight": torch.full((2,), -1.0)} for name in NAMES}
    near = {**far, "c1": {"q.lora_A": torch.full((3, 4), 0.01), "head.weight": torch.zeros(2)}}
    found = clip_changes(before, near, config_of(), 0.5)
    for name in NAMES:
        assert float(torch.cat([tensor.flatten() for tensor in found[name].values()]).norm()) <= 0.5 + 1e-12
    assert torch.equal(found["c1"]["q.lora_A"], near["c1"]["q.lora_A"].double())
    # what stays at the client is no part of the norm
    kept = clip_changes(before, far, config_of(share=("head",)), 0.5)
    assert kept["c0"].keys() == {"head.weight"}
    assert float(kept["c0"]["head.weight"].norm()) == pytest.approx(0.5)
    # one that is not finite is no change, as one that is not there
    odd = clip_changes(before, {"c0": {**far["c0"], "head.weight": torch.full((2,), math.nan)}}, config_of(), 0.5)
    assert all(torch.equal(one, torch.zeros_like(one)) for one in odd["c0"].values())


def test_what_is_told_apart_of_a_clients_absence_is_below_epsilon() -> None:
    """A distinguisher by thresholds on the noisy sum of one round finds no more than epsilon, and nearly that."""
    noise = noise_multiplier(config_of(rounds=1), NAMES)
    draws = 0.5 * noise * np.random.default_rng(0).standard_normal((2, 200_000))
    there, absent = draws[0] + 0.5, draws[1]
    bounds = np.quantile(there, np.linspace(0.01, 0.99, 50))
    found = [((there > bound).mean() - 1e-2) / max(float((absent > bound).mean()), 1e-5) for bound in bounds]
    assert 3.0 < math.log(max(found)) <= 4.0 + 0.1


# noise in shares, under --secure

SHARED = SumSettings(run="a test", bound=4.0, max_share=1.0, deviation=0.7, clip=0.5)


def shared_means(
    before: dict[str, dict[str, torch.Tensor]], changes: dict[str, dict[str, torch.Tensor]], *, round: int = 1
) -> dict[str, dict]:
    sum_of = partial(sum_here, before, dict.fromkeys(NAMES, 7), changes=changes, seed=0)
    return secure_means(GROUPS, SHARED, before, changes, sum_of, round=round).updates


@pytest.mark.parametrize("absent", [(), ("c2", "c5", "c9")])
def test_any_t_less_one_shares_have_the_stated_variance(absent: tuple[str, ...]) -> None:
    """Of n clients s are there: the noise of their sum has s / (t - 1) of it."""
    before = {name: {"x": one["x"].float() / 8, "head": one["head"].float() / 8} for name, one in models_of(3).items()}
    small = {name: {key: one.double() / 1e4 for key, one in params.items()} for name, params in models_of(4).items()}
    changes = {name: params for name, params in small.items() if name not in absent}
    means = shared_means(before, changes)
    there = [name for name in NAMES if name in changes]
    noise = means["c0"]["x"] - torch.stack([before[name]["x"] + changes[name]["x"] for name in there]).mean(0)
    deviation = 0.7 * math.sqrt(len(there) / 6)  # t is 7
    squares = float(((noise * len(there) / deviation) ** 2).sum())
    assert chi2.ppf(1e-6, 20_000) < squares < chi2.ppf(1 - 1e-6, 20_000)
    assert len(there) in (7, 10)
    heads = [name for name in NAMES[:4] if name in changes]
    noise = means["c0"]["head"] - torch.stack([before[name]["head"] + changes[name]["head"] for name in heads]).mean(0)
    squares = float(((noise * len(heads) / 0.7 / math.sqrt(len(heads) / 2)) ** 2).sum())
    assert chi2.ppf(1e-6, 20_000) < squares < chi2.ppf(1 - 1e-6, 20_000)
    assert torch.equal(shared_means(before, changes)["c0"]["x"], means["c0"]["x"])
    assert not torch.equal(shared_means(before, changes, round=2)["c0"]["x"], means["c0"]["x"])


def test_shares_of_two_clients_and_two_sums_are_independent() -> None:
    drawn = [
        SHARED.noise(group, 20_000, bytes([secret]) * 32).astype(np.int32).astype(float)
        for group in GROUPS[:2]
        for secret in (1, 2)
    ]
    assert abs(np.corrcoef(drawn[:2])[0, 1]) < 0.04
    # (0.7 / h)^2 / (t - 1) with h = 2 * 4 / (2^30 // 10) and t = 7, by hand
    assert np.std(drawn[0]) == pytest.approx(0.7 / (8 / 107_374_182) / math.sqrt(6), rel=0.03)


@examples(60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-9, 1e-3, 1.0, 1e3]))
def test_a_client_moves_what_it_sends_by_its_clip_at_most_in_whole_units(seed: int, size: float) -> None:
    """A change is cut toward zero: rounding adds nothing to its norm, and no value wraps."""
    draw = torch.Generator().manual_seed(seed)
    group = SumGroup(clients=NAMES, keys=("x", "head"), what="all")
    before = {"x": torch.randn(30, generator=draw).clamp(-3, 3), "head": torch.randn(3, generator=draw).clamp(-3, 3)}
    trained = {key: one + size * torch.randn(one.shape, generator=draw) for key, one in before.items()}
    change = clip_changes({"c0": before}, {"c0": trained}, config_of(share=("A", "B", "head")), 0.5)["c0"]
    terms = SHARED.terms(group)
    with_it, without = (
        terms.quantise(SHARED.vector(group, "c0", before, one)({})).astype(np.int64) for one in (change, {})
    )
    assert np.linalg.norm((with_it - without) * terms.unit) <= 0.5 + 1e-12
    exact = torch.cat([(before[key].double() + change[key]) for key in group.keys]).numpy()
    assert np.abs(with_it * terms.unit - 4.0 - exact).max() <= 1.5 * terms.unit


def test_everybody_weighs_the_same_and_a_start_near_the_range_is_refused_whatever_the_change() -> None:
    assert SHARED.weights({"a": 5, "b": 500}) == {"a": 1.0, "b": 1.0}
    near = {"x": torch.full((4,), 3.6), "head": torch.zeros(4)}
    for change in ({}, {"x": torch.full((4,), -0.1)}):
        with pytest.raises(DataError, match=r"a value of 4\.1 is beyond the range 4 .*; raise"):
            SHARED.vector(GROUPS[0], "c0", near, change)


def test_noise_without_room_is_refused_with_the_range_that_has_it() -> None:
    # 12 sqrt(10 / 6) 0.7 / h at most 2^29: c of 12 * 0.7 * sqrt(10 / 6) / 10 by hand, 1 % above
    for bound in (1.0, 1e6):
        with pytest.raises(ConfigError, match=r"over 10 clients: 1\.1 to 3\.4e\+05; set it so"):
            replace(SHARED, bound=bound).noise(GROUPS[0], 1, bytes(32))
    for bound in (1.1, 3.4e5):
        replace(SHARED, bound=bound).noise(GROUPS[0], 1, bytes(32))


def test_the_noise_follows_from_the_settings_and_spends_the_budget_with_the_last_round() -> None:
    config = config_of(secure=True)
    settings = noisy_settings(config, NAMES)
    assert settings == noisy_settings(config, ("c7",)), "a site finds it by itself"
    assert settings.clip == 0.5 and settings.deviation == 0.5 * noise_multiplier(config, NAMES)
    spent = [spending(config, NAMES, range(1, number + 1))["c3"]["epsilon"] for number in (1, 6, 12)]
    assert spent == sorted(spent) and 3.99 < spent[-1] <= 4.0
    # more than by Gaussian noise of a trusted server, which is accounted for more closely
    assert 1.0 < noise_multiplier(config, NAMES) / noise_multiplier(config_of(), NAMES) < 1.2
    assert noisy_settings(config_of(dp="none"), NAMES).deviation == 0.0


# a clip that follows the norms, with --clip-quantile

HUNDRED = tuple(f"c{k}" for k in range(100))


def test_one_step_of_the_clip_by_hand() -> None:
    config = config_of(clip_quantile=0.5)
    assert next_clip(config, NAMES, [1.0, 2.0, 3.0, 4.0], 2.5, 0.0) == 2.5  # two of four: as many as there are to be
    assert next_clip(config, NAMES, [1.0, 2.0, 3.0, 4.0], 4.0, 0.0) == pytest.approx(4.0 * math.exp(-0.2 * 0.5))
    assert next_clip(config, NAMES, [1.0, 2.0, 3.0, 4.0], 0.5, 0.0) == pytest.approx(0.5 * math.exp(0.2 * 0.5))
    # ten clients are counted with noise of 0.5: with a draw of 2 it is one client more of four
    assert next_clip(config, NAMES, [1.0, 2.0, 3.0, 4.0], 2.5, 2.0) == pytest.approx(2.5 * math.exp(-0.2 * 0.25))


@pytest.mark.parametrize("quantile", [0.5, 0.8])
@pytest.mark.parametrize("start", [0.01, 50.0])
def test_the_clip_comes_to_the_quantile_of_the_norms(quantile: float, start: float) -> None:
    config, draw = config_of(clip_quantile=quantile), np.random.default_rng(0)
    norms = np.exp(draw.normal(size=100))
    clip, last = start, list[float]()
    for number in range(1, 161):
        clip = next_clip(config, HUNDRED, norms, clip, float(seeded_normals(config, COUNT, number, 1)[0]))
        last.append(clip)
    assert np.exp(np.mean(np.log(last[-60:]))) == pytest.approx(np.quantile(norms, quantile), rel=0.08)


def test_sums_and_count_together_spend_what_the_sums_alone_would() -> None:
    config = config_of(clip_quantile=0.5, epsilon=2.0, delta=1e-3)
    noise = noise_multiplier(config, HUNDRED)
    more = noisy_settings(config, HUNDRED).deviation / 0.5
    assert more == pytest.approx((noise**-2 - 10.0**-2) ** -0.5) and more > noise
    # by composition: a client is worth 1/2 in the count, whose noise is 5
    both = epsilon_of_all(((1.0, more, 12), (1.0, 5.0 / 0.5, 12)), 1e-3)
    assert both == pytest.approx(2.0, abs=0.01)
    # a smaller clip has smaller noise
    assert noisy_settings(config, HUNDRED, 0.1).deviation == pytest.approx(0.1 * more)


def test_too_few_clients_to_count_are_refused() -> None:
    config = config_of(clip_quantile=0.5)
    with pytest.raises(ConfigError, match=r"counts 10 clients a round with noise of 0\.5, .* allowed: 24 clients"):
        noisy_settings(config, NAMES)


# noise that is correlated over rounds, with --noise-bands


def matrix_of(bands: int, rounds: int) -> np.ndarray:
    """C itself, from the series of (1 - x)^(-1/2) (Kalinin and Lampert 2024, definition 1)."""
    root = [math.comb(2 * j, j) / 4**j for j in range(min(bands, rounds))]
    matrix = sum(value * np.eye(rounds, k=-j) for j, value in enumerate(root))
    return np.asarray(matrix) / math.sqrt(sum((math.comb(2 * j, j) / 4**j) ** 2 for j in range(bands)))


@pytest.mark.parametrize(("bands", "rounds"), [(1, 7), (2, 7), (5, 20), (20, 8)])
def test_the_filter_is_the_inverse_of_the_banded_square_root(bands: int, rounds: int) -> None:
    found = noise_filter(bands, rounds)
    assert np.allclose(np.linalg.inv(matrix_of(bands, rounds))[:, 0], found, atol=1e-12)
    # of all bands it is the square root of the sums of prefixes
    if bands >= rounds:
        whole = matrix_of(bands, rounds) * math.sqrt(sum((math.comb(2 * j, j) / 4**j) ** 2 for j in range(bands)))
        assert np.allclose(whole @ whole, np.tri(rounds))


def test_two_bands_by_hand() -> None:
    # c = (1, 1/2) / sqrt(5/4): the noise of a round is taken back by half in the next one
    assert noise_filter(2, 4) == pytest.approx(math.sqrt(1.25) * np.array([1.0, -0.5, 0.25, -0.125]))


@pytest.mark.parametrize("bands", [2, 4])
def test_a_client_moves_what_is_given_away_by_the_root_of_its_rounds(bands: int) -> None:
    """C x of a client's updates of norm one, in the rounds that it is drawn in, whatever they are."""
    config = config_of(noise_bands=bands, participation=0.2)
    drawn = [sample_clients(config, NAMES, round=number) for number in range(1, 13)]
    rounds = {name: [t for t, clients in enumerate(drawn) if name in clients] for name in NAMES}
    draw = np.random.default_rng(1)
    for name, mine in rounds.items():
        assert all(later - earlier >= bands for earlier, later in pairwise(mine)), name
        updates = np.zeros((12, 3))
        updates[mine] = draw.normal(size=(len(mine), 3))
        updates[mine] /= np.linalg.norm(updates[mine], axis=1, keepdims=True)
        moved = float(np.linalg.norm(matrix_of(bands, 12) @ updates))
        assert moved <= math.sqrt(len(mine)) + 1e-9
        assert len(mine) == spending(config, NAMES, range(1, 13)).get(name, {"paid_steps": 0})["paid_steps"]
    assert max(map(len, rounds.values())) <= -(-12 // bands)


def test_noise_in_bands_is_of_the_stated_size_and_adds_up_to_less() -> None:
    config, group, size = config_of(noise_bands=4, participation=0.2), GROUPS[0], 20_000
    rows = []
    for number in range(1, 13):
        unit = seeded_normals(config, group, number, size)
        assert chi2.ppf(1e-6, size) < float(unit @ unit) < chi2.ppf(1 - 1e-6, size), "each is standard normal"
        rows.append(unit * noisy_settings(config, NAMES, round=number).deviation)
    plain = noisy_settings(config, NAMES).deviation
    # through C the noise of all rounds is independent and of one size: what the accountant takes it for
    white = matrix_of(4, 12) @ np.stack(rows) / plain
    assert np.allclose(np.corrcoef(white), np.eye(12), atol=0.04)
    assert white.std(1) == pytest.approx(1.0, abs=0.03)
    added = np.linalg.norm(np.tri(12) @ np.linalg.inv(matrix_of(4, 12)), axis=1)[-1] / math.sqrt(12)
    assert np.stack(rows).sum(0).std() / plain / math.sqrt(12) == pytest.approx(added, rel=0.03)
    assert added < 0.7
    (line,) = noise_notes(config, NAMES, (group,), {"c0": {"x": torch.zeros(384)}})
    assert f"in every sum, which adds up to {added:.2f} of what it would without --noise-bands" in line


def test_the_rounds_of_before_do_not_change_where_a_run_goes_on() -> None:
    config = config_of(noise_bands=3, participation=0.3)
    long = replace_settings({"rounds": 30}, base=config)
    assert np.array_equal(seeded_normals(config, GROUPS[0], 5, 10), seeded_normals(long, GROUPS[0], 5, 10))


@pytest.mark.parametrize(("bands", "participation", "part"), [(4, 0.3, "2 of 10"), (11, 0.1, "0 of 10")])
def test_clients_who_would_come_too_often_are_refused(bands: int, participation: float, part: str) -> None:
    with pytest.raises(ConfigError, match=rf"--noise-bands is {bands}, so {part} clients .* lower one of them"):
        noise_multiplier(config_of(noise_bands=bands, participation=participation), NAMES)
