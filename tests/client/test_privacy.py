"""Example-level differential privacy: accounting, batches by chance, clipped gradients of examples, noise."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.special import ive, logsumexp
from torch.nn.utils.rnn import pad_sequence

from atlas_fl.client import private_training
from atlas_fl.client.job import Job
from atlas_fl.client.local_training import LocalTrainer, batches, train
from atlas_fl.client.options import TrainOptions
from atlas_fl.client.privacy import (
    costs_of,
    epsilon_of_all,
    epsilon_of_sums,
    noise_multiplier,
    noise_of,
    privacy_note,
    rate_of,
    skellam_noise,
    spending,
)
from atlas_fl.client.private_training import train_privately

pytest.importorskip("dp_accounting", reason="the extra dp is not installed")

OPTIONS = TrainOptions(
    seed=3, batch_size=4, lr=0.05, clip=0.3, optimizer="sgd", epochs=2, dp="example", epsilon=1.0, delta=1e-3
)

ORACLES = [  # q, noise multiplier, steps, delta, epsilon by privacy loss distributions
    (0.01, 4.0, 10_000, 1e-5, 0.9470),
    (256 / 60_000, 1.12, 14_063, 1e-5, 2.3103),
    (250 / 60_000, 1.3, 3_600, 1e-5, 0.8530),
    (250 / 60_000, 0.7, 10_800, 1e-5, 5.5622),
    (0.2, 0.5, 3, 0.15594, 1.0),
    (1.0, math.sqrt(3), 3, 0.126936, 1.0),  # Gaussian differential privacy with mu 1
    (1.0, 1.0, 12, 1e-2, 13.300),
    (0.1, 1.0, 50, 1e-3, 3.314),
    (0.05, 1.0, 100, 1e-4, 2.870),
    (0.08, 1.0, 450, 1e-3, 8.834),
]


def dense_loss(model, params, batch, scale) -> torch.Tensor:
    ids = pad_sequence([torch.from_numpy(text) for text in np.split(batch.ids, batch.offsets[1:-1])], batch_first=True)
    mask = (torch.arange(ids.shape[1]) < torch.from_numpy(batch.lengths)[:, None]).long()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    for key, a in params.items():
        if key.endswith(".lora_A"):
            module = key.removesuffix(".lora_A")
            update = scale(len(a)) * params[module + ".lora_B"] @ a
            weights[f"bert.{module}.weight"] = weights[f"bert.{module}.weight"] + update
        elif key.startswith("head."):
            weights[key.removeprefix("head.")] = a
    out = torch.func.functional_call(model, weights, (ids,), {"attention_mask": mask})
    return torch.nn.functional.cross_entropy(out.logits, torch.from_numpy(batch.labels))


@pytest.mark.parametrize(("q", "noise", "steps", "delta", "epsilon"), ORACLES)
def test_epsilon_is_that_of_published_settings(
    q: float, noise: float, steps: int, delta: float, epsilon: float
) -> None:
    assert epsilon_of_all(((q, noise, steps),), delta) == pytest.approx(epsilon, abs=1e-3)


def test_one_full_batch_without_sampling_is_the_gaussian_mechanism() -> None:
    """By hand: sigma 3.7306 is what (1, 1e-5) needs (Balle and Wang 2018, the analytic Gaussian mechanism)."""
    assert noise_of(((1.0, 1),), 1.0, 1e-5) == pytest.approx(3.7306, abs=5e-3)


def test_halves_cost_one_more_round_at_the_rate_of_the_smaller_half() -> None:
    """By hand: of full batches, two steps of a round and two on halves are four, of twice the noise of one."""
    options = dataclasses.replace(OPTIONS, rounds=1, epochs=2, batch_size=41, epsilon=1.0, delta=1e-5)
    halves = dataclasses.replace(options, pays_halves=True)
    assert noise_multiplier(41, halves) == pytest.approx(2 * 3.7306, abs=1e-2)
    small = dataclasses.replace(halves, batch_size=4)
    assert costs_of(41, small, 100) == ((4 / 41, 100), (4 / 20, 22))
    assert spending(41, small, paid_steps=22)["epsilon"] == pytest.approx(small.epsilon, rel=0.01)
    assert rate_of(41, dataclasses.replace(small, half=1)) == 4 / 20 and rate_of(1, small) == 1.0


@pytest.mark.parametrize("secret", [None, b"s" * 32])
def test_halves_are_disjoint_their_noise_differs_and_both_are_one_question(
    tiny_of, site_of, spec_of, monkeypatch: pytest.MonkeyPatch, secret: bytes | None
) -> None:
    tiny, spec = tiny_of("bert"), spec_of(name="a-0", labels=3, examples=13)
    site, asked, seen = site_of(tiny, spec), list[str](), dict[int, set[int]]()
    options = dataclasses.replace(OPTIONS, epochs=20, half=0, pays_halves=True, lr=1e4, clip=1e-6)
    secrets = {} if secret is None else {"a-0": secret}
    site = dataclasses.replace(site, secrets=secrets, pay=lambda question, *_: asked.append(question) or 0)
    used, trained, noise = dict[str, bytes](), [], []
    draw = LocalTrainer.noise

    def noted(jobs: list[Job], given, **others):
        used.update(given.secrets)
        return train(jobs, given, **others)

    def noisy(member: LocalTrainer, done: int, *, deviation: float) -> dict[str, torch.Tensor]:
        noise.append(draw(member, done, deviation=deviation))
        return noise[-1]

    monkeypatch.setattr(private_training, "train", noted)
    monkeypatch.setattr(LocalTrainer, "noise", noisy)
    for half in (0, 1):
        job = Job(client="a-0", params=tiny.params(spec), round=1, options=dataclasses.replace(options, half=half))
        (update,) = train_privately([job], site)
        trained.append(update.params)
        drawn = batches(site.data["a-0"].splits["train"], job, secret=used.get("a-0"))
        seen[half] = {int(one) for batch in drawn for one in batch.taken_from[1]}
    assert len({*asked}) == 1 and len(asked) == 2
    assert not seen[0] & seen[1] and len(seen[0] | seen[1]) == 13
    steps = len(noise) // 2
    pairs = zip(noise[:steps], noise[steps:], strict=True)
    assert steps and not any(torch.allclose(one[key], other[key]) for one, other in pairs for key in one)
    assert not any(torch.allclose(trained[0][key], trained[1][key]) for key in trained[0])


def test_the_budget_is_spent_when_the_last_round_ends_and_not_before() -> None:
    options = dataclasses.replace(OPTIONS, rounds=5)
    spent = [spending(40, options, paid_steps=20 * number)["epsilon"] for number in (1, 4, 5)]
    assert spent == sorted(spent) and spent[0] < 0.8 * spent[-1]
    assert 0.99 < spent[-1] <= 1.0
    assert noise_multiplier(40, options) > noise_multiplier(400, options)
    assert noise_multiplier(40, dataclasses.replace(options, delta=None)) < noise_multiplier(40, options)


def test_the_note_has_the_deltas_and_says_once_where_there_are_too_few_examples() -> None:
    options = dataclasses.replace(OPTIONS, batch_size=16, rounds=2, epochs=1, delta=None)
    enough, few = privacy_note([100, 400], options), privacy_note([39, 56, 400], options)
    assert [len(enough), len(few)] == [1, 2]
    # 100^-1.1 = .0063, 400^-1.1 = .0014, 39^-1.1 = .018
    assert "at delta 0.0014 to 0.0063 over 2 rounds" in enough[0]
    same = dataclasses.replace(options, delta=1e-3)
    assert "at delta 0.001 over 2 rounds, by noise of" in privacy_note([100, 100], same)[0]
    assert " to " not in privacy_note([100, 100], same)[0].partition(" times ")[0]
    assert few[1].startswith("39 training examples are too few for --dp example (delta 0.018): noise hides what")
    assert "simulation" not in few[0], "a served run is none"


def test_examples_are_in_a_batch_by_chance(tiny_of, site_of, spec_of) -> None:
    tiny = tiny_of("bert")
    spec = spec_of(name="a-0", labels=3, examples=50)
    data = site_of(tiny, spec).data["a-0"].splits["train"]
    options = dataclasses.replace(OPTIONS, epochs=40)
    drawn = list(batches(data, Job(client="a-0", params={}, round=1, options=options), secret=None))
    assert len(drawn) == 40 * math.ceil(50 / 4)
    first = dataclasses.replace(options, trained_parts="head_then_rest", head_epochs=3, epochs=1)
    of_head = [len(batch) for batch in batches(data, Job(client="a-0", params={}, round=1, options=first), secret=None)]
    assert len(of_head) == 4 * math.ceil(50 / 4) and len({*of_head[:39]}) > 2, "those of the head are by chance, too"
    sizes = np.array([len(batch) for batch in drawn])
    assert sizes.mean() == pytest.approx(4, abs=0.3)
    assert sizes.var() == pytest.approx(50 * 0.08 * 0.92, rel=0.2)  # of a binomial
    counts = np.bincount(np.concatenate([batch.taken_from[1] for batch in drawn]), minlength=50)
    assert counts.min() > 15 and counts.max() < 75


def test_steps_are_those_of_plain_torch_with_one_example_at_a_time(
    tiny_of, site_of, spec_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the stock model with whole weights W + s B A, without noise; two clients are in the pack."""
    monkeypatch.setattr(private_training, "noise_multiplier", lambda *_: 0.0)
    monkeypatch.setattr(private_training, "spending", lambda *_, **__: {})
    tiny = tiny_of("bert")
    specs = [
        spec_of(name=f"{name}-0", labels=labels, examples=count) for name, labels, count in zip("ab", (3, 2), (11, 6))
    ]
    site = site_of(tiny, *specs)
    jobs = [Job(client=spec.name, params=tiny.params(spec), round=1, options=OPTIONS) for spec in specs]
    updates = train_privately(jobs, site)
    for job, update, labels in zip(jobs, updates, (3, 2), strict=True):
        stock = tiny.stock(labels)
        leaves = {key: value.clone().requires_grad_() for key, value in job.params.items()}
        clipped = 0
        for batch in batches(site.data[job.client].splits["train"], job, secret=None):
            total = {key: torch.zeros_like(leaf) for key, leaf in leaves.items()}
            for place in range(len(batch)):
                loss = dense_loss(stock, leaves, batch.take(np.array([place])), site.scale)
                gradients = torch.autograd.grad(loss, list(leaves.values()))
                norm = float(torch.cat([one.flatten() for one in gradients]).norm())
                clipped += norm > OPTIONS.clip
                for key, gradient in zip(leaves, gradients, strict=True):
                    total[key] += gradient * min(1.0, OPTIONS.clip / norm)
            with torch.no_grad():
                for key, leaf in leaves.items():
                    leaf -= OPTIONS.lr * total[key] / OPTIONS.batch_size
        assert clipped > 0
        for key, leaf in leaves.items():
            assert torch.allclose(update.params[key], leaf, atol=1e-5), key


def test_noise_has_its_deviation_in_every_tensor_and_is_drawn_apart(tiny_of, site_of, spec_of) -> None:
    tiny = tiny_of("bert")
    spec = spec_of(name="a-0", labels=3, examples=12)
    options = dataclasses.replace(OPTIONS, epochs=1, max_steps=1, lr=1e5, clip=1e-6)
    moved = []
    for number in (1, 2):
        (update,) = train_privately(
            [Job(client="a-0", params=tiny.params(spec), round=number, options=options)], site_of(tiny, spec)
        )
        moved.append({key: update.params[key] - start for key, start in tiny.params(spec).items()})
        assert math.isnan(update.metrics["loss"]), "a loss would tell of examples"
    deviation = options.lr * noise_multiplier(12, options) * options.clip / options.batch_size
    whole = torch.cat([tensor.flatten() for tensor in moved[0].values()])
    assert len(whole) > 500 and float(whole.std()) == pytest.approx(deviation, rel=0.1)
    large = [key for key, tensor in moved[0].items() if tensor.numel() > 50]
    assert large
    for key in large:
        assert float(moved[0][key].std()) == pytest.approx(deviation, rel=0.4)
        assert not torch.equal(moved[0][key], moved[1][key])


# Skellam noise


def divergence(alpha: int, shift: int, variance: float) -> float:
    """The divergence of order alpha of Skellam noise and itself with this shift, by its chances exp(-v) I_k(v)."""
    reach = 40 * math.ceil(math.sqrt(variance)) + 40 * shift
    k = np.arange(-reach, reach)
    chances = ive(np.abs(k), variance), ive(np.abs(k - shift), variance)
    seen = (chances[0] > 0) & (chances[1] > 0)
    here, there = (np.log(one[seen]) for one in chances)
    return float(logsumexp(alpha * there + (1 - alpha) * here)) / (alpha - 1)


def bound(alpha: int, noise: float, unit: float) -> float:
    return alpha / (2 * noise**2) + (2 * alpha + 5) * unit**2 / (4 * noise**4)


@pytest.mark.parametrize("alpha", [2, 3, 8, 16])
@pytest.mark.parametrize("variance", [4.0, 25.0, 900.0])
def test_the_divergence_of_skellam_noise_is_below_its_bound(alpha: int, variance: float) -> None:
    for shift in (1, 2, 5):
        exact = divergence(alpha, shift, variance)
        assert exact <= bound(alpha, math.sqrt(variance) / shift, 1 / shift) * (1 + 1e-9)
    # a change of 1 in each of 9 numbers, whose L1 norm is the square of its L2 norm
    exact = 9 * divergence(alpha, 1, variance)
    assert exact <= bound(alpha, math.sqrt(variance / 9), 1 / 3) * (1 + 1e-9)
    if variance == 900.0:
        assert exact == pytest.approx(bound(alpha, 10.0, 1 / 3), rel=0.02)


def test_epsilon_of_skellam_noise_is_that_of_a_published_setting_and_of_orders_by_hand() -> None:
    # in fine units it is Gaussian: dp-accounting's test of its divergences
    assert epsilon_of_sums([(4.530877117, 1e-9, 1)], 1e-6) == pytest.approx(1.0, abs=1e-3)
    # order 2 alone, z = 1, unit 1: D = 2 / 2 + 9 / 4, epsilon = D + log(1 / 2) - log(0.5 * 2) = 2.5569
    assert epsilon_of_sums([(1.0, 1.0, 1)], 0.5) == pytest.approx(3.25 + math.log(0.5) - math.log(1.0), abs=1e-12)


@pytest.mark.parametrize(("steps", "epsilon", "delta"), [(1, 0.5, 1e-5), (12, 4.0, 1e-2), (100, 8.0, 1e-5)])
def test_skellam_noise_spends_its_budget_and_no_less_than_gaussian_noise(
    steps: int, epsilon: float, delta: float
) -> None:
    noise = skellam_noise(steps, epsilon, delta, unit=1e-6)
    assert epsilon - 1e-3 < epsilon_of_sums([(noise, 1e-6, steps)], delta) <= epsilon
    assert noise_of(((1.0, steps),), epsilon, delta) < noise < 1.2 * noise_of(((1.0, steps),), epsilon, delta)
    assert skellam_noise(steps, epsilon, delta, unit=0.1) > noise
