"""Split halves of a client's examples: its training of a round, repeated on each.

Both begin with the model that the client begins the round with, and make two passes over their half, so as many steps
as the round has. What they have in common is the client's, what tells them apart is noise: `aggregation.kriging`
measures both. Halves are the examples at even and at odd places, of an order that a secret draws where the client has
one (`client.local_training.positions`).
"""

from dataclasses import replace

from atlas_fl.client.job import Job
from atlas_fl.client.options import TrainOptions
from atlas_fl.params import Params

FIRST, SECOND = "first/", "second/"
"""What the names of the tensors of each half begin with."""
PASSES = 2
"""Passes over a half for each one over all examples."""


def half_jobs(job: Job) -> tuple[Job, Job]:
    """The same training on each half of the examples, of which nothing but the model is told."""
    options: TrainOptions = job.options
    first, second = (
        replace(options, half=half, epochs=PASSES * options.epochs, report="none", hash_loaded=False) for half in (0, 1)
    )
    return replace(job, options=first), replace(job, options=second)


def join_halves(first: Params, second: Params) -> Params:
    """What is reported of two trained halves, each tensor under the name of its half."""
    named = ((FIRST, first), (SECOND, second))
    return {f"{half}{key}": tensor for half, params in named for key, tensor in params.items()}
