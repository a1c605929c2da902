"""What of a model trains in a round, and when: FFA-LoRA, RoLoRA, FedRep, FedBABU."""

import dataclasses
from typing import Any

import pytest
import torch

from atlas_fl.client.batching import collate_packed, forward
from atlas_fl.client.job import Job
from atlas_fl.client.local_training import batches, example_loss, train
from atlas_fl.client.options import TrainOptions
from atlas_fl.params import head_keys

OPTIONS = TrainOptions(seed=3, rounds=6, batch_size=4, lr=1e-2, clip=0.0, epochs=2)


def moving(name: str, parts: str, *, round: int, is_head_step: bool) -> bool:
    """Said a second time, from the papers."""
    head, a = name.startswith("head."), name.endswith(".lora_A")
    return {
        "all": True,
        "B": not a,
        "alternate": head or a == (round % 2 == 0),
        "head_then_rest": head == is_head_step,
        "without_head": not head,
        "head": head,
    }[parts]


@pytest.mark.parametrize("round", [1, 2])
@pytest.mark.parametrize(
    ("parts", "head_epochs"),
    [
        *((parts, 0) for parts in ("all", "B", "head", "alternate", "head_then_rest", "without_head")),
        *(("head_then_rest", epochs) for epochs in (1, 2)),
    ],
)
def test_a_round_equals_plain_torch_on_the_parts_that_move(client_of, parts: Any, head_epochs: int, round: int) -> None:
    site, params = client_of(examples=10)
    options = dataclasses.replace(OPTIONS, trained_parts=parts, head_epochs=head_epochs, head_rate=2.0)
    job = Job(client="a-0", params=params, round=round, options=options)
    (update,) = train([job], site)

    model = {key: tensor.detach().clone().requires_grad_() for key, tensor in params.items()}
    each = {key: torch.optim.AdamW([tensor], lr=OPTIONS.lr, weight_decay=0.0) for key, tensor in model.items()}
    head_steps = 3 * (head_epochs or 1) if parts == "head_then_rest" else 0
    assert update.metrics["steps"] == 6 + (head_steps if head_epochs else 0)
    for done, batch in enumerate(batches(site.data["a-0"].splits["train"], job, secret=None)):
        row = collate_packed([batch], device=site.backbone.device)
        with forward(row, [model], site) as (logits,):
            gradients = torch.autograd.grad(example_loss(logits, row.labels[0]), list(model.values()))
        for (key, tensor), gradient in zip(model.items(), gradients, strict=True):
            if moving(key, parts, round=round, is_head_step=done < head_steps):
                tensor.grad = gradient
                each[key].param_groups[0]["lr"] = OPTIONS.lr * (2 if done < head_steps else 1)
                each[key].step()
    torch.testing.assert_close(update.params, model, atol=2e-5, rtol=1e-4)
    still = {key for key in params if torch.equal(update.params[key], params[key])}
    ever = {key for key in params if any(moving(key, parts, round=round, is_head_step=half) for half in (True, False))}
    assert still == params.keys() - ever


def test_behind_passes_over_the_head_come_the_batches_of_a_round_without(client_of) -> None:
    site, params = client_of(examples=10)
    data = site.data["a-0"].splits["train"]
    first = dataclasses.replace(OPTIONS, trained_parts="head_then_rest", head_epochs=1)
    jobs = [Job(client="a-0", params=params, round=1, options=options) for options in (OPTIONS, first)]
    plain, behind = ([batch.ids.tolist() for batch in batches(data, job, secret=None)] for job in jobs)
    assert behind[3:] == plain and behind[:3] != plain[:3]


def test_in_the_last_rounds_everything_trains(client_of) -> None:
    site, params = client_of(examples=10)
    options = dataclasses.replace(OPTIONS, trained_parts="without_head", personal_rounds=2)
    for round, trains in ((4, False), (5, True)):
        (update,) = train([Job(client="a-0", params=params, round=round, options=options)], site)
        assert all(torch.equal(update.params[key], params[key]) != trains for key in head_keys(params))
    assert head_keys(params)
