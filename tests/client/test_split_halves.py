"""Split halves: training on every second example alone, which changes nothing in the training of the round."""

import dataclasses

import pytest
import torch

from atlas_fl.client.job import Job
from atlas_fl.client.local_training import LocalTrainer, num_steps, positions
from atlas_fl.client.options import TrainOptions
from atlas_fl.client.reports import train_and_report as train
from atlas_fl.methods.method import RoundStart
from atlas_fl.methods.registry import find_method

OPTIONS = TrainOptions(seed=3, rounds=4, batch_size=4, lr=1e-2, epochs=2, report="halves")


def test_halves_are_of_disjoint_examples() -> None:
    halves = [positions(7, "a-0", dataclasses.replace(OPTIONS, half=half), secret=None).tolist() for half in (0, 1)]
    assert halves == [[0, 2, 4, 6], [1, 3, 5]]


@pytest.mark.parametrize(("examples", "steps"), [(1, 2), (3, 2), (9, 6), (50, 26)])
@pytest.mark.parametrize("parts", ["all", "head_then_rest"])
def test_both_halves_take_the_steps_of_the_round_and_are_counted(client_of, examples, steps, parts) -> None:
    """At most a batch, one example more than two batches, and thirteen batches a pass."""
    site, params = client_of(examples=examples)
    head = {"head_epochs": 1} if parts == "head_then_rest" else {}
    options = dataclasses.replace(OPTIONS, trained_parts=parts, **head)
    steps += steps // 2 if head else 0
    job = Job(client="a-0", params=params, round=2, options=options)
    (update,) = train([job], site)
    assert update.metrics["steps"] == num_steps(examples, options) == steps
    # of one example the second half is empty, and takes none
    assert update.metrics["extra_steps"] == (2 * steps if examples > 1 else steps)
    assert update.metrics.get("head_steps", 0) == (steps // 3 if head else 0)


def test_halves_draw_dropout_apart_and_a_round_without_halves_as_ever(client_of) -> None:
    site, params = client_of(examples=10)
    masks = []
    for half in (None, 0, 1):
        options = dataclasses.replace(OPTIONS, half=half, dropout=0.5)
        dropout = LocalTrainer(Job(client="a-0", params=params, round=2, options=options), site).dropout(1)
        masks.append(dropout.path)
    assert masks[0] == (2, 1) and len(set(masks)) == 3


def test_who_has_one_example_is_not_measured() -> None:
    start = RoundStart(
        round=4,
        clients=("a", "b"),
        tasks={"a": "t", "b": "t"},
        client_models={},
        server_models={},
        server_state={},
        examples={"a": 1, "b": 2},
    )
    assert list(find_method("kriging").ask(start)) == ["b"]


def test_what_is_reported_is_what_each_half_alone_would_have_trained(client_of) -> None:
    site, params = client_of(examples=10)
    job = Job(client="a-0", params=params, round=2, options=OPTIONS)
    (update,) = train([job], site)
    halves = update.reported["halves"]
    assert halves.keys() == {f"{half}/{key}" for half in ("first", "second") for key in params}
    for half, name in enumerate(("first", "second")):
        options = dataclasses.replace(OPTIONS, report="none", half=half)
        (alone,) = train([dataclasses.replace(job, options=options)], site)
        assert alone.examples == 5
        assert all(torch.equal(halves[f"{name}/{key}"], tensor) for key, tensor in alone.params.items())
    assert not all(torch.equal(halves[f"first/{key}"], halves[f"second/{key}"]) for key in params)
