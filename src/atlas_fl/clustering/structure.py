"""Is there any structure? A test that every method of clustering must pass before its clusters are used.

A search always returns clusters, of pure noise too. Structure means that some clients are alike and that some differ,
so a method's own statistic must lie above the 95th percentile of what it makes of both worlds without it:

- `unrelated`: every client's two sketches are turned by one random rotation of its own. That keeps each client's
  reliability and destroys every resemblance between clients.
- `alike`: every client points in one common direction and differs by its own noise alone, as large as its
  reliability says. That keeps each client's reliability and destroys every difference that is not noise.

The statistic of the k search is the best silhouette over the range of k, whatever rule chooses k; that of `corrected`
is the silhouette of the proposed clusters on the distance 1 - rho, zero when nothing is joined or everything is.
Clients that are all alike, all unlike, or grouped as chance would group them give "no structure". Noise is taken
to be isotropic in the sketch. With fewer than three clients there is nothing to test.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from atlas_fl.clustering.similarity import cross_similarity, reliability, unit_rows
from atlas_fl.rng import generator

Halves: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Sketches (n, d) of the first and of the second half of every client's examples."""

Statistic: TypeAlias = Callable[[np.ndarray, np.ndarray], float]
"""What a method measures on both halves."""

FEWEST = 3
"""Clients below which no grouping can be told from chance."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of the test."""

    found: bool
    """Whether the clusters may be used."""
    reason: str
    """One line for the plan."""
    statistic: float | None = None
    """The method's statistic on the clients; None where nothing was tested."""
    percentile_95: float | None = None
    """The larger of its 95th percentiles in the two worlds."""
    p_value: float | None = None
    """`(1 + draws that reach it) / (1 + draws)`, in the world where that is larger."""
    world: str | None = None
    """That world: `unrelated` or `alike`."""
    draws: int = 0
    """Draws of each world."""

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data."""
        return asdict(self)


def unrelated(first: np.ndarray, second: np.ndarray, *, rng: np.random.Generator) -> Halves:
    """Both halves (n, d) as unit rows, each client's turned by a random rotation of its own.

    The rotation acts on the plane of the client's two sketches, so a random orthonormal pair of directions stands
    for the whole d x d matrix.
    """
    along, across = _random_pairs(first.shape, rng=rng)
    shared = np.sum(unit_rows(first) * unit_rows(second), axis=1, keepdims=True)
    return along, shared * along + np.sqrt(np.maximum(1.0 - shared**2, 0.0)) * across


def alike(first: np.ndarray, second: np.ndarray, *, rng: np.random.Generator) -> Halves:
    """Both halves (n, d) as unit rows: `sqrt(c_kk)` of one common direction and noise of their own for the rest."""
    own = np.clip(reliability(cross_similarity(first, second)), 0.0, 1.0)[:, None]
    common = unit_rows(rng.standard_normal((1, first.shape[1])))
    noise = (rng.standard_normal(first.shape) for _ in range(2))
    apart = [unit_rows(each - (each @ common.T) * common) for each in noise]
    left, right = (np.sqrt(own) * common + np.sqrt(1.0 - own) * each for each in apart)
    return left, right


WORLDS = {"unrelated": unrelated, "alike": alike}
"""The two worlds without structure."""


def judge(first: np.ndarray, second: np.ndarray, statistic: Statistic, *, draws: int, seed: int) -> Verdict:
    """The verdict on sketches (n, d), (n, d) of decided clients."""
    if len(first) < FEWEST:
        return Verdict(found=False, reason=f"{len(first)} decided clients are too few to test for structure")
    observed = statistic(first, second)
    limits, p_values = {}, {}
    for world, draw_from in WORLDS.items():
        rngs = (generator(seed, "structure", world, draw) for draw in range(draws))
        chance = np.array([statistic(*draw_from(first, second, rng=rng)) for rng in rngs])
        limits[world] = float(np.quantile(chance, 0.95, method="higher"))
        p_values[world] = float(1 + np.sum(chance >= observed)) / (1 + draws)
    world = max(WORLDS, key=lambda name: limits[name])
    found = observed > max(limits[world], 0.0)
    compared = f"{'above' if found else 'not above'} the 95th percentile {limits[world]:.3f} of {world} clients"
    return Verdict(
        found=found,
        reason=f"silhouette {observed:.3f} is {compared}",
        statistic=observed,
        percentile_95=limits[world],
        p_value=max(p_values.values()),
        world=world,
        draws=draws,
    )


def _random_pairs(shape: tuple[int, ...], *, rng: np.random.Generator) -> Halves:
    """Two orthonormal directions for each row."""
    along = unit_rows(rng.standard_normal(shape))
    across = rng.standard_normal(shape)
    return along, unit_rows(across - np.sum(across * along, axis=1, keepdims=True) * along)
