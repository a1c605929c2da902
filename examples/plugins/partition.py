"""A partition of one's own: the clients of a task see its classes from the first to the last, with some overlap.

atlas run --plugin examples/plugins/partition.py --partition staircase
"""

import numpy as np

from atlas_fl.plugins import register


@register("partition", "staircase")
def staircase(prior, num_clients, samples, alpha, rng):
    """The class mix of every client, (clients, classes), and how many rows it gets, (clients,).

    Client k of n prefers the classes at k / n of the way; the smaller alpha (--dirichlet-alpha), the steeper.
    """
    del rng  # nothing is drawn: which rows of a class a client gets is dealt afterwards, from the seed
    classes = np.linspace(0, 1, len(prior))
    clients = np.linspace(0, 1, num_clients)
    distance = np.abs(clients[:, None] - classes[None, :])
    mixes = prior * np.exp(-distance / alpha)
    return mixes / mixes.sum(axis=1, keepdims=True), np.full(num_clients, samples)
