"""Differential privacy of whole clients (`--dp client`): noise in the sums of their clipped updates.

    sum = sum_k u_k + z S xi,   ||u_k|| <= S,   xi ~ N(0, I)        mean = sum / m of m clients, each of weight one

McMahan, Ramage, Talwar and Zhang 2018, "Learning differentially private recurrent language models" (ICLR). S is the
norm of `--update-filter clip=S`, over all that a client sends; each of its numbers is in one sum. u_k is the change
from the model that the server gave out last, so that what a client's own model has become in earlier rounds counts too.
What is hidden is whether a client's updates are in the sums or zeros in their place. Which clients a round draws
follows from `--seed`, which all know: so a client that is in k sums spends what k Gaussian mechanisms spend, and no
chance of being drawn makes it less.

With `--clip-quantile` gamma S follows the norms (Andrew, Thakkar, McMahan and Ramaswamy 2021, arXiv:1905.03871,
algorithm 1): with m clients a round

    beta = 1/2 + (sum_k (1[||u_k|| <= S] - 1/2) + s_b xi) / m,   S <- S exp(-eta (beta - gamma)),   eta = 0.2
    z_Delta = (z^-2 - (2 s_b)^-2)^(-1/2),   s_b = m / 20

z_Delta is the noise multiplier of the sums: with the count, in which a client is worth 1/2, they spend what z spends.

With `--noise-bands` b a client is in one of b rounds, and the noise of round t is row t of C^-1 xi, for the lower
triangular Toeplitz matrix C with the column c of b coefficients of the square root of the prefix sums (Kalinin and
Lampert 2024, "Banded square root matrix factorization", arXiv:2405.13763; Choquette-Choo et al. 2023, arXiv:2306.08153)

    c_0 = 1,   c_j = c_(j - 1) (1 - 1 / 2j),   c <- c / ||c||

C x + z S xi gives it all away, for sums x of the rounds. The columns of a client's rounds have no row in common, so k
of its updates are worth sqrt(k) S, as without, and spend what k sums do; models add up rows, whose noise is less.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import exp, floor, sqrt

import numpy as np

from atlas_fl.aggregation.secure_mean import SumGroup, SumSettings, clipped_change
from atlas_fl.client.privacy import delta_of, epsilon_of_sums, noise_of, skellam_noise
from atlas_fl.config import Config
from atlas_fl.config.methods import last_aggregation
from atlas_fl.errors import ConfigError
from atlas_fl.params import ByClient, Params, shared_params
from atlas_fl.rng import generator, secret_normals
from atlas_fl.secure_sums import MOST
from atlas_fl.setup.options import sample_clients, sum_settings

CLIP_RATE = 0.2
"""eta, how fast the clip follows the norms."""
COUNT = SumGroup(clients=(), keys=(), what="the count of small updates")


def num_sums(config: Config, names: Sequence[str], rounds: Iterable[int]) -> Counter[str]:
    """By client how many sums of these rounds it is in."""
    last = last_aggregation(config)
    drawn = (sample_clients(config, names, round=round) for round in rounds if round <= last)
    return Counter(name for clients in drawn for name in clients)


def noise_multiplier(config: Config, names: Sequence[str]) -> float:
    """The z of which the client that is in most sums spends `--epsilon` over all rounds."""
    most = max(num_sums(config, names, range(1, config.training.rounds + 1)).values())
    delta = delta_of(len(names), config.training.delta)
    if config.mixing.secure:
        return skellam_noise(most, config.training.epsilon, delta, unit=_unit(config))
    return noise_of(((1.0, most),), config.training.epsilon, delta)


def _unit(config: Config) -> float:
    """The unit of a secure sum of most clients, over S, so that z follows from the settings alone; else 0."""
    return 2 * config.mixing.secure_range / (2**30 // MOST) / clip_of(config) if config.mixing.secure else 0.0


def cost_of_run(config: Config) -> tuple[float, float, int]:
    """(noise multiplier, unit, sums) of a client that is in every sum, as epsilon is counted over runs."""
    return noise_multiplier(config, ("one",)), _unit(config), last_aggregation(config)


def clip_of(config: Config) -> float:
    """S, the largest norm of what a client sends."""
    return float(config.training.update_filter[-1].removeprefix("clip="))


def clip_changes(before: ByClient, models: ByClient, config: Config, most: float) -> dict[str, Params]:
    """Changes of S at most from what the server gave out last, float64, whatever clients began with and sent."""
    shared = {client: shared_params(params, config.mixing.share) for client, params in models.items()}
    return {client: clipped_change(before[client], params, most) for client, params in shared.items()}


def noisy_settings(config: Config, names: Sequence[str], clip: float = 0.0, *, round: int = 0) -> SumSettings:
    """The settings of sums, with the noise of the budget where there is one, which under `--secure` clients add.

    `clip` is that of the round where it follows the norms, and `round` that of noise in bands. Raises
    ConfigError where the count alone spends the budget.
    """
    if config.training.dp != "client":
        return sum_settings(config)
    clip, noise, counted = clip or clip_of(config), noise_multiplier(config, names), 2 * _count_noise(config, names)
    if config.training.clip_quantile is not None:
        if noise >= counted:
            raise ConfigError(
                f"--clip-quantile counts {10 * counted:g} clients a round with noise of {counted / 2:g}, and spends"
                f" more than --epsilon {config.training.epsilon:g}; allowed: {floor(10 * noise) + 1} clients or more;"
                " bring them, leave it out, or give a larger --epsilon"
            )
        noise = (noise**-2 - counted**-2) ** -0.5
    grown = float(np.linalg.norm(noise_filter(config.training.noise_bands, round))) if round else 1.0
    return replace(sum_settings(config), deviation=noise * clip * grown, clip=clip * config.mixing.secure)


def _count_noise(config: Config, names: Sequence[str]) -> float:
    """s_b, the standard deviation of the noise in a round's count of clients."""
    return len(sample_clients(config, names, round=1)) / 20


def next_clip(config: Config, names: Sequence[str], norms: Sequence[float], clip: float, normal: float) -> float:
    """The clip of the next round after one with these norms, given a standard normal number."""
    assert config.training.clip_quantile is not None, "the clip follows the norms"
    within = sum(norm <= clip for norm in norms) + _count_noise(config, names) * normal
    return clip * exp(-CLIP_RATE * (within / len(norms) - config.training.clip_quantile))


def spending(config: Config, names: Sequence[str], rounds: Sequence[int]) -> dict[str, dict[str, float]]:
    """By client metrics of what it has spent in the sums of these rounds, in which one that was done again is twice.

    Raises ConfigError where that is more than the budget.
    """
    noise, delta = noise_multiplier(config, names), delta_of(len(names), config.training.delta)
    sums, unit = num_sums(config, names, rounds), _unit(config)
    spent = {name: epsilon_of_sums([(noise, unit, count)], delta) for name, count in sums.items()}
    if (most := max(spent.values())) > config.training.epsilon:
        raise ConfigError(
            f"a client would spend epsilon {most:.4g} with this round; allowed: {config.training.epsilon:g}: a killed"
            " server did rounds again; take the models of the last round, or begin another run"
        )
    return {
        name: {"epsilon": epsilon, "noise_multiplier": noise, "paid_steps": float(sums[name])}
        for name, epsilon in spent.items()
    }


def noise_filter(bands: int, rounds: int) -> np.ndarray:
    """The first column of C^-1, (rounds,) float64: what the noise of a round adds to those after it."""
    from scipy.signal import lfilter

    root = np.cumprod([1.0, *(1 - 1 / (2 * j) for j in range(1, bands))])
    return np.asarray(lfilter([1.0], root / np.linalg.norm(root), np.eye(1, rounds)[0]))


def seeded_normals(config: Config, group: SumGroup, round: int, size: int) -> np.ndarray:
    """Standard normal numbers of a simulation, (size,) float64, which `--noise-bands` correlates over rounds."""
    total, factors = np.zeros(size), noise_filter(config.training.noise_bands, round)
    for before, factor in enumerate((factors / np.linalg.norm(factors)).tolist()):
        if factor:
            draw = generator(config.run.seed, "client noise", round - before, group.what, *group.clients)
            total += factor * draw.standard_normal(size)
    return total


def drawn_normals(_: SumGroup, __: int, size: int) -> np.ndarray:
    """The same of a server, from the operating system's generator."""
    return secret_normals(os.urandom(32), size)


def noise_notes(config: Config, names: Sequence[str], groups: Sequence[SumGroup], models: ByClient) -> tuple[str, ...]:
    """One line with the budget, and with the noise in the means over the largest update, z sqrt(sum_g d_g / m_g^2)."""
    settings, training, squares = noisy_settings(config, names), config.training, 0.0
    for group in groups:
        size = sum(models[group.clients[0]][key].numel() for key in group.keys)
        clients = max(1.0, training.participation * len(group.clients))
        if config.mixing.secure:
            settings.noise(group, 0, b"")  # it has room, or the plan ends here
        squares += size * (settings.deviation_of(group, clients) / clip_of(config) / clients) ** 2
    added = np.cumsum(noise_filter(training.noise_bands, training.rounds))  # in the last model, from each round
    share = float(np.linalg.norm(added)) / sqrt(training.rounds)
    ratio = sqrt(squares) * share
    multiple = settings.deviation / clip_of(config)
    bands = f", which adds up to {share:.2f} of what it would without --noise-bands" if training.noise_bands > 1 else ""
    hopeless = ", so next to nothing is learned: bring more clients, or send fewer numbers (--strategy ffa, --ranks)"
    return (
        f"each client has epsilon {training.epsilon:g} at delta {delta_of(len(names), training.delta):.2g} over"
        f" {training.rounds} rounds, by noise of {multiple:.2f} times the clip {clip_of(config):g} in every sum{bands}:"
        f" in the means it is {ratio:.2g} times the largest update{hopeless if ratio > 1 else ''}; counts of examples"
        f" and labels, {'and scores' if config.mixing.secure else 'scores, and what the server sees'} are not covered",
    )
