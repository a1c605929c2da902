"""Accounting of differential privacy: noise multipliers and epsilon of Gaussian noise, and of Skellam noise in shares.

The noise multiplier z of `--dp example` is the least that keeps `--epsilon` at `--delta` over all steps of the run, by
privacy loss distributions (dp-accounting; add or remove one example) of Gaussian noise on Poisson batches.
`client.private_training` takes the steps.

Halves (`methods.kriging`) are paid for once. An example is in one of them, so both cost what the smaller one does.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache, partial, reduce
from typing import Any

from scipy.optimize import brentq

from atlas_fl.client.local_training import num_steps
from atlas_fl.client.options import TrainOptions
from atlas_fl.errors import ConfigError
from atlas_fl.storage.extras import import_extra

LEAST_EXAMPLES = 100
"""Training examples of a client below which little can be learned with noise on each; 400 were few (privacy.md)."""
ORDERS = range(2, 513)
"""Orders alpha of Rényi's divergence."""


def _accounting() -> Any:
    return import_extra("dp_accounting", extra="dp", asked="--dp needs")


def delta_of(examples: int, delta: float | None) -> float:
    """The delta of a client; by default n^-1.1.

    Raises ConfigError unless it is below one over its examples: with that, one example as it is may be given away.
    """
    if delta is not None and delta * examples >= 1:
        raise ConfigError(
            f"--delta is {delta:g}, and a client has {examples} examples; allowed: below one over that,"
            f" {1 / examples:.2g}; leave it out for {examples**-1.1:.2g}"
        )
    return examples**-1.1 if delta is None else delta


def _event(q: float, noise: float, steps: int) -> Any:
    """So many steps at this rate q and noise multiplier."""
    library = _accounting()
    return library.SelfComposedDpEvent(library.PoissonSampledDpEvent(q, library.GaussianDpEvent(noise)), steps)


@lru_cache(maxsize=256)
def _loss_of_step(q: float, noise: float, interval: float) -> Any:
    """The privacy loss distribution of one step: slow to compute, and the same in every round."""
    losses = _accounting().pld.privacy_loss_distribution
    return losses.from_gaussian_mechanism(noise, value_discretization_interval=interval, sampling_prob=q)


@lru_cache(maxsize=1024)
def epsilon_of_all(costs: tuple[tuple[float, float, int], ...], delta: float) -> float:
    """The epsilon of (rate q, noise multiplier, steps) together."""
    interval = 1e-4 if min(noise for _, noise, _ in costs) > 0.5 else 1e-3  # for speed
    losses = [_loss_of_step(q, noise, interval).self_compose(steps) for q, noise, steps in costs]
    return float(reduce(lambda first, other: first.compose(other), losses).get_epsilon_for_delta(delta))


@lru_cache(maxsize=1024)
def noise_of(costs: tuple[tuple[float, int], ...], epsilon: float, delta: float) -> float:
    """The least noise multiplier of which (steps at rate q) together spend no more than epsilon."""
    library = _accounting()

    def event(noise: float) -> Any:
        return library.ComposedDpEvent([_event(q, noise, steps) for q, steps in costs])

    # a coarser grid rounds epsilon up by less than a hundredth, in a fifth of the time
    rough = partial(library.pld.PLDAccountant, value_discretization_interval=1e-3)
    return float(library.calibrate_dp_mechanism(rough, event, epsilon, delta, tol=1e-3))


def epsilon_of_sums(costs: Sequence[Sequence[float]], delta: float) -> float:
    """The epsilon of (noise multiplier z, unit h / S, number of sums), of Gaussian noise where all are 0, together.

        D_alpha <= alpha / 2 z^2 + (2 alpha + 5) (h / S)^2 / 4 z^4,     alpha = 2, 3, ...

    It is the bound of Agarwal, Kairouz and Liu 2021 (arXiv:2110.04995; `_skellam_rdp` of their code) for changes of
    whole units, whose L1 norm is at most the square of their L2 norm.
    """
    if not any(unit for _, unit, _ in costs):
        return epsilon_of_all(tuple((1.0, noise, int(sums)) for noise, _, sums in costs), delta)
    divergences = [
        sum(sums * (a / (2 * noise**2) + (2 * a + 5) * unit**2 / (4 * noise**4)) for noise, unit, sums in costs)
        for a in ORDERS
    ]
    return float(_accounting().rdp.rdp_privacy_accountant.compute_epsilon(ORDERS, divergences, delta)[0])


def skellam_noise(steps: int, epsilon: float, delta: float, *, unit: float) -> float:
    """The least z of which so many sums with Skellam noise, in units of `unit` S, spend no more than epsilon."""
    found = brentq(lambda noise: epsilon_of_sums([(noise, unit, steps)], delta) - epsilon, 1e-3, 1e9, xtol=1e-6)
    return float(found) + 2e-6  # on the side of less epsilon


def rate_of(examples: int, options: TrainOptions) -> float:
    """The chance q of an example to be in a batch, in the smaller half where these options are of one."""
    return min(1.0, options.batch_size / max(1, examples if options.half is None else examples // 2))


def costs_of(examples: int, options: TrainOptions, steps: int) -> tuple[tuple[float, int], ...]:
    """(rate q, steps) of so many steps of rounds, and of those on halves."""
    of_rounds = rate_of(examples, replace(options, half=None)), steps
    of_halves = rate_of(examples, replace(options, half=0)), num_steps(examples, options)
    return (of_rounds, of_halves) if options.pays_halves else (of_rounds,)


def noise_multiplier(examples: int, options: TrainOptions) -> float:
    """The z of a client with so many examples, which spends `epsilon` over the rounds of the run.

    >>> options = TrainOptions(seed=0, rounds=45, epochs=1, batch_size=16, epsilon=8.834, delta=1e-3)
    >>> round(noise_multiplier(160, options), 2)
    1.16
    """
    costs = costs_of(examples, options, options.rounds * num_steps(examples, options))
    return noise_of(costs, options.epsilon, delta_of(examples, options.delta))


def spending(examples: int, options: TrainOptions, *, paid_steps: int) -> dict[str, float]:
    """Metrics `epsilon`, `noise_multiplier` and `paid_steps` of a client with so many steps, and with its halves."""
    noise = noise_multiplier(examples, options)
    costs = tuple((q, noise, steps) for q, steps in costs_of(examples, options, paid_steps))
    epsilon = epsilon_of_all(costs, delta_of(examples, options.delta))
    return {"epsilon": epsilon, "noise_multiplier": noise, "paid_steps": float(paid_steps)}


def _ends(words: Sequence[str]) -> str:
    return words[0] if words[0] == words[-1] else f"{words[0]} to {words[-1]}"


def privacy_note(examples: Collection[int], options: TrainOptions) -> tuple[str, ...]:
    """Lines on the budget, the noise, and too few of so many examples; none without differential privacy."""
    if options.dp == "none":
        return ()
    noise = [f"{one:.2f}" for one in sorted(noise_multiplier(count, options) for count in examples)]
    delta = [f"{one:.2g}" for one in sorted(delta_of(count, options.delta) for count in examples)]
    budget = (
        f"each training example has epsilon {options.epsilon:g} at delta {_ends(delta)} over {options.rounds} rounds,"
        f" by noise of {_ends(noise)} times --clip; validation and test examples are not covered"
    )
    few = f"{min(examples)} training examples are too few for --dp example (delta {delta[-1]}): noise hides what"
    few += " they have in common too; bring some hundreds, or expect the score of always saying the majority class"
    return (budget, few) if min(examples) < LEAST_EXAMPLES else (budget,)
