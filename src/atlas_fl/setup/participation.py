"""Sampling of the clients that take part in a round (`--participation`)."""

from collections.abc import Sequence

from atlas_fl.rng import generator


def num_participants(clients: int, participation: float) -> int:
    """Number of clients that train in a round: the nearest whole number, halves up, and at least one."""
    # Python's own rounding goes to the even one.
    return max(1, int(participation * clients + 0.5))


def sample(names: Sequence[str], *, participation: float, seed: int, round: int) -> tuple[str, ...]:
    """The clients that train in this round, at least one, in the clients' order: a function of seed and round."""
    count = num_participants(len(names), participation)
    chosen = generator(seed, "sample", round).choice(len(names), size=count, replace=False)
    return tuple(names[index] for index in sorted(chosen))
