"""Split halves: training on every second example alone, which changes nothing in the training of the round."""

import dataclasses

import torch

from atlas_fl.client.job import Job
from atlas_fl.client.local_training import num_steps, positions
from atlas_fl.client.options import TrainOptions
from atlas_fl.client.reports import train_and_report as train
from atlas_fl.methods.kriging import PASSES

OPTIONS = TrainOptions(seed=3, rounds=4, batch_size=4, lr=1e-2, epochs=2, report="halves")


def test_halves_are_of_disjoint_examples_with_as_many_steps_as_the_round() -> None:
    first, second = (dataclasses.replace(OPTIONS, half=half, epochs=PASSES * OPTIONS.epochs) for half in (0, 1))
    assert [positions(7, "a-0", one, secret=None).tolist() for one in (first, second)] == [[0, 2, 4, 6], [1, 3, 5]]
    assert num_steps(4, first) == num_steps(8, OPTIONS) == 4


def test_what_is_reported_is_what_each_half_alone_would_have_trained(client_of) -> None:
    site, params = client_of(examples=10)
    job = Job(client="a-0", params=params, round=2, options=OPTIONS)
    (update,) = train([job], site)
    halves = update.reported["halves"]
    assert halves.keys() == {f"{half}/{key}" for half in ("first", "second") for key in params}
    for half, name in enumerate(("first", "second")):
        options = dataclasses.replace(OPTIONS, report="none", half=half, epochs=4)
        (alone,) = train([dataclasses.replace(job, options=options)], site)
        assert alone.examples == 5
        assert all(torch.equal(halves[f"{name}/{key}"], tensor) for key, tensor in alone.params.items())
    assert not all(torch.equal(halves[f"first/{key}"], halves[f"second/{key}"]) for key in params)
