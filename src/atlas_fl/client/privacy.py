"""Accounting of example-level differential privacy: noise multiplier and epsilon of a client (`--dp example`).

The noise multiplier z is the least that keeps `--epsilon` at `--delta` over all steps of the run, by privacy loss
distributions (dp-accounting; add or remove one example) of Gaussian noise on Poisson batches. `client.private_training`
takes the steps.
"""

from collections.abc import Collection
from functools import lru_cache, partial
from typing import Any

from atlas_fl.client.local_training import num_steps
from atlas_fl.client.options import TrainOptions
from atlas_fl.storage.extras import import_extra


def _accounting() -> Any:
    return import_extra("dp_accounting", extra="dp", asked="--dp example needs")


def _delta(examples: int, options: TrainOptions) -> float:
    """The delta of a client; by default n^-1.1, below one over its examples."""
    return examples**-1.1 if options.delta is None else options.delta


def _event(q: float, noise: float, steps: int) -> Any:
    """So many steps at this rate q and noise multiplier."""
    library = _accounting()
    return library.SelfComposedDpEvent(library.PoissonSampledDpEvent(q, library.GaussianDpEvent(noise)), steps)


@lru_cache(maxsize=1024)
def epsilon_of(q: float, noise: float, steps: int, delta: float) -> float:
    """The epsilon of so many steps at this rate q and noise multiplier."""
    interval = 1e-4 if noise > 0.5 else 1e-3  # for speed
    accountant = _accounting().pld.PLDAccountant(value_discretization_interval=interval)
    return float(accountant.compose(_event(q, noise, steps)).get_epsilon(delta))


@lru_cache(maxsize=1024)
def noise_of(q: float, steps: int, epsilon: float, delta: float) -> float:
    """The least noise multiplier of which so many steps at this rate q spend no more than epsilon."""
    library = _accounting()
    # a coarser grid rounds epsilon up by less than a hundredth, in a fifth of the time
    rough = partial(library.pld.PLDAccountant, value_discretization_interval=1e-3)
    return float(library.calibrate_dp_mechanism(rough, lambda noise: _event(q, noise, steps), epsilon, delta, tol=1e-3))


def _rate(examples: int, options: TrainOptions) -> float:
    return min(1.0, options.batch_size / examples)


def noise_multiplier(examples: int, options: TrainOptions) -> float:
    """The z of a client with so many examples, which spends `epsilon` over the rounds of the run.

    >>> options = TrainOptions(seed=0, rounds=45, epochs=1, batch_size=16, epsilon=8.834, delta=1e-3)
    >>> round(noise_multiplier(160, options), 2)
    1.16
    """
    steps = options.rounds * num_steps(examples, options)
    return noise_of(_rate(examples, options), steps, options.epsilon, _delta(examples, options))


def spending(examples: int, options: TrainOptions, *, paid_steps: int) -> dict[str, float]:
    """Metrics of what a client has spent with so many steps: `epsilon`, `noise_multiplier`, `paid_steps`."""
    noise = noise_multiplier(examples, options)
    epsilon = epsilon_of(_rate(examples, options), noise, paid_steps, _delta(examples, options))
    return {"epsilon": epsilon, "noise_multiplier": noise, "paid_steps": float(paid_steps)}


def privacy_note(examples: Collection[int], options: TrainOptions) -> tuple[str, ...]:
    """One line with the budget and the noise of clients with so many examples; none without differential privacy."""
    if options.dp == "none":
        return ()
    noise = [noise_multiplier(count, options) for count in examples]
    chance = "n^-1.1 for n examples" if options.delta is None else f"{options.delta:g}"
    return (
        f"each training example has epsilon {options.epsilon:g} at delta {chance} over {options.rounds} rounds, by"
        f" noise of {min(noise):.2f} to {max(noise):.2f} times --clip; validation and test examples are not covered,"
        " and a simulation draws its noise from --seed",
    )
