"""Audit of what differential privacy has spent: the epsilon of every client and round by a second accountant.

The distribution of the privacy loss of one step is laid on a grid here and composed by its Fourier transform (Koskela,
Jälkö and Honkela 2020, "Computing tight differential privacy guarantees using FFT", arXiv:1906.03049):

    P = (1 - q) N(0, z^2) + q N(1, z^2),   Q = N(0, z^2),   L = log dP/dQ at x ~ P,   or -L at x ~ Q
    delta(epsilon) = E[(1 - exp(epsilon - L_1 - ... - L_T))+],   the larger one of the two directions

Where clients add Skellam noise in secure sums, the epsilon is what Rényi's divergences D of the settings leave to delta
(Canonne, Kamath and Steinke 2020, arXiv:2004.00010, proposition 12), and no less than that of Gaussian noise:

    delta(epsilon) = min_alpha exp((alpha - 1) (D_alpha - epsilon)) (1 - 1 / alpha)^alpha / (alpha - 1)
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from math import ceil, log
from typing import Any, TypeAlias

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

from atlas_fl.audit.kriging import FromHalves
from atlas_fl.audit.report import AuditRow
from atlas_fl.audit.rules import RULES
from atlas_fl.audit.run_files import Run, reading
from atlas_fl.storage.jsonl import read_rows

TOLERANCE = 0.02, 0.01
"""Share and difference by which two accountants may differ: the one that ran works on coarser grids."""
GRID, POINTS = 2e-3, 2**17
"""Smallest distance of the grid's points, and their number: losses of up to 131 either way."""


def check_privacy(run: Run) -> Iterator[AuditRow]:
    """A row for each round and client that trained under differential privacy; none of runs without.

    Under `--dp client` a step is a sum that the client is in.
    """
    training = run.settings.training
    if training.dp == "none":
        return
    file = run.path / "metrics.jsonl"
    with reading(file, "file of a run's rows"):
        trained = {(row["round"], row["client"]): row for row in read_rows(file) if row.get("split") == "train"}
        steps, last = Counter[str](), dict[str, int]()
        for round in run.rounds:
            record = run.record(round)
            plan = run.plan(record.plan)
            for client, examples in zip(plan.clients, plan.examples, strict=True):
                if client in record.accepted_clients and (training.dp == "example" or not run.is_personal(round)):
                    row = trained.get((round, client), {})
                    steps[client] += int(row.get("steps", 0)) if training.dp == "example" else 1
                    units = int(examples) if training.dp == "example" else len(plan.clients)
                    fault = _fault(run, row, units, steps[client])
                    if training.noise_bands > round - last.get(client, -training.noise_bands):
                        fault = f"it was in round {last[client]} too, and noise has {training.noise_bands} bands"
                    last[client] = round
                    yield AuditRow("epsilon", client, fault, round=round)


def _fault(run: Run, row: dict[str, Any], units: int, steps: int) -> str:
    """The fault of a client's row; `units` are its examples, or all clients, `steps` those that it has taken."""
    training = run.settings.training
    if missing := {"epsilon", "noise_multiplier", "paid_steps", "steps"} - row.keys():
        return f"metrics.jsonl does not say {min(missing)}"
    noise, q, whole = float(row["noise_multiplier"]), 1.0, float(row["epsilon"])
    delta = units**-1.1 if training.delta is None else training.delta
    halves: Costs = ()
    if row["paid_steps"] < steps:
        return f"it paid for {row['paid_steps']:g} steps of the {steps} that it took"
    if noise <= 0:
        return f"the noise multiplier is {noise:g}"
    if training.dp == "example":
        is_head_first = training.trained_parts == "head_then_rest" and not run.is_personal(row["round"])
        passes = training.local_epochs + training.head_epochs * is_head_first
        planned, q = passes * ceil(units / training.batch_size), min(1.0, training.batch_size / units)
        if row["examples"] != units or row["steps"] != planned:
            return f"it took {row['steps']:g} steps on {row['examples']} examples, not {planned} on {units} as planned"
        if isinstance(RULES.get(run.mixing.strategy), FromHalves):
            halves = ((min(1.0, training.batch_size / max(1, units // 2)), planned),)
        whole = spent(((q, training.rounds * planned), *halves), noise, delta)
    if whole > training.epsilon * (1 + TOLERANCE[0]) + TOLERANCE[1]:
        return f"noise of {noise:.4g} spends epsilon {whole:.4g} in {training.rounds} rounds, not {training.epsilon:g}"
    actual = spent(((q, int(row["paid_steps"])), *halves), noise, delta)
    if training.dp == "client" and run.settings.mixing.secure:
        actual = max(actual, spent_in_shares(noise, int(row["paid_steps"]), delta, unit=_unit(run)))
    if abs(row["epsilon"] - actual) > actual * TOLERANCE[0] + TOLERANCE[1]:
        return f"it says epsilon {row['epsilon']:.4g}, and {row['paid_steps']:g} steps at this noise spend {actual:.4g}"
    return ""


Costs: TypeAlias = tuple[tuple[float, int], ...]
"""(rate q, steps)."""


@lru_cache(maxsize=4096)
def spent(costs: Costs, noise: float, delta: float) -> float:
    """The epsilon of so many Poisson batches at these rates with this noise multiplier.

    >>> round(spent(((1.0, 3),), 3**0.5, 0.126936), 3)
    1.0
    """
    grid = GRID
    while sum(_reach(q, noise, steps) for q, steps in costs) > grid * POINTS / 2:
        grid *= 2
    values = np.fft.fftfreq(POINTS, 1 / POINTS) * grid
    steps = [[one**count for one in _transforms(q, noise, grid)] for q, count in costs]
    composed = [np.fft.irfft(np.prod(ways, axis=0), POINTS) for ways in zip(*steps, strict=True)]

    def excess(epsilon: float) -> float:
        above = values > epsilon
        weights = -np.expm1(epsilon - values[above])
        return max(float(weights @ chances[above]) for chances in composed) - delta

    return float(brentq(excess, 0.0, values.max(), xtol=1e-6)) if excess(0.0) > 0 else 0.0


def _unit(run: Run) -> float:
    """2 c / R over S, the coarsest unit of a secure sum, which is of 1,024 clients, over the clip."""
    return run.settings.mixing.secure_range / 2**19 / float(run.settings.training.update_filter[-1].partition("=")[2])


def spent_in_shares(noise: float, steps: int, delta: float, *, unit: float) -> float:
    """The epsilon of so many sums with Skellam noise of this multiplier, in units of this share of the clip.

    >>> round(spent_in_shares(2.0, 12, 0.01, unit=1e-6), 3)
    5.848
    """
    alpha = np.arange(2.0, 513.0)
    # a whole number is at most its square: so the L1 norm of a change, in units, is at most its squared L2 norm
    square, variance = unit**-2, (noise / unit) ** 2
    first, second = alpha * square / (2 * variance), ((2 * alpha - 1) * square + 6 * square) / (4 * variance**2)
    divergence = steps * (first + second)
    rest = alpha * np.log1p(-1 / alpha) - np.log(alpha - 1)

    def excess(epsilon: float) -> float:
        return float(np.min((alpha - 1) * (divergence - epsilon) + rest)) - log(delta)

    return float(brentq(excess, 0.0, divergence[0] - log(delta) + 1.0)) if excess(0.0) > 0 else 0.0


@lru_cache(maxsize=256)
def _losses(q: float, noise: float) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """(values, chances) of a step's privacy loss where the example is there, and where it is not."""
    edges = np.linspace(-12 * noise, 12 * noise + 1, 2**16)
    middles = (edges[1:] + edges[:-1]) / 2
    ratio = np.minimum((2 * middles - 1) / (2 * noise**2), 700.0)  # of the logarithms of the two densities
    loss = ratio if q == 1 else np.log1p(q * np.expm1(ratio))
    without, given = np.diff(norm.cdf(edges / noise)), np.diff(norm.cdf((edges - 1) / noise))
    return (loss, (1 - q) * without + q * given), (-loss, without)


def _reach(q: float, noise: float, steps: int) -> float:
    """The largest loss of so many steps that matters: twelve standard deviations above the mean."""
    reaches = list[float]()
    for values, chances in _losses(q, noise):
        mean = float(values @ chances)
        deviation = float((values - mean) ** 2 @ chances) ** 0.5
        reaches.append(abs(mean) * steps + 12 * deviation * max(steps, 12) ** 0.5)
    return float(max(reaches))


@lru_cache(maxsize=256)
def _transforms(q: float, noise: float, grid: float) -> tuple[np.ndarray, ...]:
    """Fourier transforms of the two distributions on the grid, whose first point is a loss of 0."""
    return tuple(np.fft.rfft(_on_grid(values / grid, chances)) for values, chances in _losses(q, noise))


def _on_grid(places: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """Chances at the grid's points, shared by three neighbours so that the mean and the variance stay."""
    middles = np.rint(places)
    offsets = places - middles
    total = np.zeros(POINTS)
    shares = ((-1, (offsets**2 - offsets) / 2), (0, 1 - offsets**2), (1, (offsets**2 + offsets) / 2))
    for neighbour, share in shares:
        points = (middles + neighbour).astype(int).clip(-POINTS // 2, POINTS // 2 - 1)
        np.add.at(total, points % POINTS, chances * share)
    return np.asarray(total / total.sum())
