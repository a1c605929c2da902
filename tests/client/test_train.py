import dataclasses
import math

import numpy as np
import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from atlas_fl.client.job import Job
from atlas_fl.client.local_training import batches, example_loss, learning_rate, num_steps, train
from atlas_fl.client.optimizer import TERMS
from atlas_fl.client.options import TrainOptions
from atlas_fl.models.tokenization import EncodedExamples

PLAIN = TrainOptions(seed=1, lr=1.0, batch_size=4)


def numbered(count: int) -> EncodedExamples:
    """Examples of one token, whose number is the example's."""
    index = np.arange(count)
    return EncodedExamples(ids=index, types=0 * index, offsets=np.arange(count + 1), labels=index)


def drawn(data: EncodedExamples, *, client: str = "a-0", round: int = 1, **changes: object) -> list[list[int]]:
    job = Job(client=client, params={}, round=round, options=dataclasses.replace(PLAIN, **changes))
    return [batch.labels.tolist() for batch in batches(data, job, secret=None)]


def flat(lists: list[list[int]]) -> list[int]:
    return [number for own in lists for number in own]


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0.0, [1, 1, 1, 1, 1]),
        ("linear", 0.0, [1, 0.8, 0.6, 0.4, 0.2]),
        ("linear", 0.4, [0.5, 1, 1, 2 / 3, 1 / 3]),
        ("constant", 0.6, [1 / 3, 2 / 3, 1, 1, 1]),
        ("step", 0.0, [1, 1, 1, 0.1, 0.01]),
        ("cosine", 0.2, [1, 1, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 + math.cos(3 * math.pi / 4)) / 2]),
    ],
)
def test_schedules_by_hand(schedule, warmup: float, expected: list[float]) -> None:
    options = dataclasses.replace(PLAIN, schedule=schedule, warmup=warmup)
    assert [learning_rate(options, step=step, steps=5) for step in range(5)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedule", "reference"),
    [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)],
)
def test_schedules_after_the_warm_up_are_those_of_transformers(schedule, reference) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    stock = reference(optimizer, num_warmup_steps=4, num_training_steps=20)
    options = dataclasses.replace(PLAIN, schedule=schedule, warmup=0.2)
    for step in range(20):
        if step >= 4:  # theirs begins the warm-up with a step of rate zero, which is a step lost
            assert learning_rate(options, step=step, steps=20) == pytest.approx(stock.get_last_lr()[0])
        optimizer.step()
        stock.step()


@pytest.mark.parametrize(
    ("examples", "epochs", "max_steps", "expected"),
    [(9, 1, None, 3), (8, 2, None, 4), (9, 2, 5, 5), (9, 1, 5, 3), (0, 3, None, 0)],
)
def test_steps_by_hand(examples: int, epochs: int, max_steps: int | None, expected: int) -> None:
    assert num_steps(examples, dataclasses.replace(PLAIN, epochs=epochs, max_steps=max_steps)) == expected


def test_an_epoch_shows_every_example_once_in_an_order_of_its_own() -> None:
    found = drawn(numbered(10), epochs=3)
    assert [len(batch) for batch in found] == [4, 4, 2] * 3
    epochs = [flat(found[start : start + 3]) for start in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_batches_are_a_function_of_seed_client_and_round() -> None:
    data = numbered(12)
    first = drawn(data)
    assert first == drawn(data)
    others = [drawn(data, seed=2), drawn(data, client="a-1"), drawn(data, round=2)]
    assert all(sorted(flat(other)) == list(range(12)) and other != first for other in others)
    assert len({str(other) for other in others}) == 3
    assert drawn(data, max_steps=2) == first[:2]


def test_losses_by_hand() -> None:
    assert float(example_loss(torch.zeros(3, 4), torch.tensor([0, 1, 3]))) == pytest.approx(math.log(4))
    assert float(example_loss(torch.tensor([[1.0], [3.0]]), torch.tensor([2.0, 0.0]))) == pytest.approx((1 + 9) / 2)


def test_the_schedule_runs_over_all_rounds(client_of) -> None:
    """In the last round of a linear schedule over many, the steps are short; the first round's are long."""
    site, params = client_of(examples=8)
    options = TrainOptions(seed=1, rounds=100, lr=1e-2, schedule="linear", batch_size=8)
    moved = []
    for number in (1, 100):
        (update,) = train([Job(client="a-0", params=params, round=number, options=options)], site)
        moved.append(max(float((update.params[key] - params[key]).abs().max()) for key in params))
    # Adam's first step is as long as the rate, whatever the gradient.
    assert moved == pytest.approx([1e-2, 1e-4], rel=1e-2)


def test_frozen_tensors_keep_their_bits_and_the_others_move(tiny, client_of) -> None:
    site, params = client_of(tiny.name)
    options = TrainOptions(seed=1, lr=1e-2, weight_decay=0.5, trained_parts="B")
    (update,) = train([Job(client="a-0", params=params, round=1, options=options)], site)
    for key, value in params.items():
        assert torch.equal(update.params[key], value) == key.endswith(".lora_A"), key


def test_a_client_without_steps_answers_with_what_it_got(client_of) -> None:
    site, params = client_of()
    (update,) = train([Job(client="a-0", params=params, round=1, options=TrainOptions(seed=1, max_steps=0))], site)
    assert all(torch.equal(update.params[key], value) for key, value in params.items())
    assert math.isnan(update.metrics["loss"])


@pytest.mark.parametrize("change", [{"client": "z-0"}, {"round": 2}, {"seed": 2}], ids=str)
def test_every_client_round_and_seed_draws_masks_of_its_own(client_of, change: dict) -> None:
    """On one example nothing but the masks can tell the two apart."""
    site, params = client_of(examples=1)
    site = dataclasses.replace(site, data={**site.data, "z-0": site.data["a-0"]})
    moved = {}
    for dropout in (0.0, 0.3):
        options = TrainOptions(seed=1, rounds=2, lr=1e-2, dropout=dropout)
        job = Job(client="a-0", params=params, round=1, options=options)
        seeded = dataclasses.replace(options, seed=change.get("seed", 1))
        other = dataclasses.replace(job, options=seeded, **{k: v for k, v in change.items() if k != "seed"})
        first, second = (train([own], site)[0].metrics["loss"] for own in (job, other))
        moved[dropout] = abs(first - second)
    assert moved[0.0] == 0
    assert moved[0.3] > 1e-4


def test_a_term_draws_for_every_client_and_round_by_itself_and_the_same_again(client_of, monkeypatch) -> None:
    def noise(options, _start):
        generator = torch.Generator().manual_seed(options.seed)
        return lambda _name, value: torch.randn(value.shape, generator=generator)

    monkeypatch.setitem(TERMS, "noise", noise)
    site, params = client_of(examples=1)
    site = dataclasses.replace(site, data={**site.data, "z-0": site.data["a-0"]})
    job = Job(client="a-0", params=params, round=1, options=TrainOptions(seed=1, rounds=2, optimizer="sgd", lr=1e-3))
    jobs = [job, job, dataclasses.replace(job, client="z-0"), dataclasses.replace(job, round=2)]
    first, again, other, later = (train([own], site)[0].params["head.classifier.weight"] for own in jobs)
    assert first.equal(again) and not first.equal(other) and not first.equal(later)
