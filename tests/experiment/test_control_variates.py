"""SCAFFOLD's corrections: by hand, and against a plain program of the paper's option II."""

import numpy as np
import pytest
import torch

from atlas_fl.client.optimizer import GradientMean, LossScale, gradient_chain, make_optimizer
from atlas_fl.client.options import TrainOptions
from atlas_fl.methods.scaffold import corrections, shares_by_group

TASKS = {"a": "movie", "b": "movie", "c": "trec"}


def test_corrections_by_hand():
    """c of A is (3 + 0 + 2 * 9) / 4 = 5.25, c's head has no other; a and b share a head, whose c is (2 + 0) / 2 = 1."""
    controls = {
        "a": {"q.lora_A": torch.tensor([3.0]), "head.w": torch.tensor([2.0])},
        "c": {"q.lora_A": torch.tensor([9.0]), "head.w": torch.tensor([5.0])},
    }
    models = dict.fromkeys("abc", controls["a"])
    made = corrections(controls, TASKS, models, shares_by_group(TASKS, {"a": 10, "b": 10, "c": 20}))
    assert {name: {key: value.item() for key, value in one.items()} for name, one in made.items()} == {
        "a": {"q.lora_A": 2.25, "head.w": -1.0},
        "b": {"q.lora_A": 5.25, "head.w": 1.0},
        "c": {"q.lora_A": -3.75, "head.w": 0.0},
    }
    assert all(value.dtype == torch.float32 for one in made.values() for value in one.values())


def test_nobody_is_corrected_before_there_are_controls():
    assert corrections({}, TASKS, {"a": {}}, {}) == {}


def test_corrections_of_mixed_ranks_by_hand():
    """c of A is (2 + 3 * 6) / 4 = 5 in the first row, and 3 * 8 / 4 = 6 in the second, which a has not."""
    controls = {"a": {"q.lora_A": torch.tensor([[2.0]])}, "c": {"q.lora_A": torch.tensor([[6.0], [8.0]])}}
    controls["a"]["q.lora_B"], controls["c"]["q.lora_B"] = torch.tensor([[4.0]]), torch.tensor([[0.0, 4.0]])
    models = {**controls, "b": {"q.lora_A": torch.zeros(3, 1), "q.lora_B": torch.zeros(1, 3)}}
    made = corrections(controls, TASKS, models, {"": {"a": 0.25, "b": 0.0, "c": 0.75}})
    assert {name: [one[key].flatten().tolist() for key in ("q.lora_A", "q.lora_B")] for name, one in made.items()} == {
        "a": [[3.0], [-3.0]],
        "b": [[5.0, 6.0, 0.0], [1.0, 3.0, 0.0]],
        "c": [[-1.0, -2.0], [1.0, -1.0]],
    }


def test_who_is_alone_is_not_corrected():
    controls = {"a": {"w": torch.tensor([0.1, 1e-7])}}
    made = corrections(controls, {"a": "movie"}, controls, {"": {"a": 1.0}})
    assert made["a"]["w"].tolist() == [0.0, 0.0]


def test_a_parameter_without_a_control_has_a_correction_of_zero():
    """A client whose task nobody has trained yet is sent corrections of adapters alone."""
    leaves = {name: torch.zeros(2).requires_grad_() for name in ("q.lora_A", "head.w")}
    correction = {"q.lora_A": torch.tensor([1.0, 2.0])}
    transform = gradient_chain(leaves, PLAIN, LossScale(enabled=False), correction=correction)
    for leaf in leaves.values():
        leaf.grad = torch.tensor([0.5, 0.5])
    assert transform(leaves, None)
    assert {name: leaf.grad.tolist() for name, leaf in leaves.items()} == {"q.lora_A": [1.5, 2.5], "head.w": [0.5, 0.5]}


PLAIN = TrainOptions(seed=0, lr=0.1, optimizer="sgd", clip=0.0)
TARGETS = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([-3.0, 0.5])}
STEPS = {"a": 3, "b": 8}


def train(start, target, correction, *, steps):
    """(w, control) of a client with the loss 1/2 || w - target ||^2 through the chain and optimizer of every client."""
    leaves = {"w": start.clone().requires_grad_()}
    mean = GradientMean()
    transform = gradient_chain(leaves, PLAIN, LossScale(enabled=False), correction=correction, mean=mean)
    optimizer = make_optimizer(leaves, PLAIN)
    for _ in range(steps):
        leaves["w"].grad = (leaves["w"] - target).detach()
        transform(leaves, None)
        optimizer.step()
    return leaves["w"].detach(), mean.mean()


def one_round(x, controls, *, corrected=True):
    """The mean of the models, and the controls, after both clients have trained."""
    shares = {"": dict.fromkeys(TARGETS, 1 / len(TARGETS))}
    models = {name: {"w": x} for name in TARGETS}
    sent = corrections(controls, dict.fromkeys(TARGETS, "t"), models, shares) if corrected else {}
    done = {name: train(x, own, sent.get(name, {}), steps=STEPS[name]) for name, own in TARGETS.items()}
    mean = torch.stack([model for model, _ in done.values()]).mean(0)
    return mean, {name: control for name, (_, control) in done.items()}


def test_rounds_equal_option_ii_of_the_paper():
    """Two clients with other optima and numbers of steps, five rounds, against the equations of algorithm 1."""
    x, controls = torch.zeros(2), {}
    paper_x, paper_c, paper_own = np.zeros(2), np.zeros(2), {name: np.zeros(2) for name in TARGETS}
    for _ in range(5):
        x, controls = one_round(x, controls)
        moved, changed = [], []
        for name, target in TARGETS.items():
            y = paper_x.copy()
            for _ in range(STEPS[name]):
                y -= PLAIN.lr * ((y - target.numpy()) - paper_own[name] + paper_c)
            new = paper_own[name] - paper_c + (paper_x - y) / (STEPS[name] * PLAIN.lr)
            moved.append(y - paper_x)
            changed.append(new - paper_own[name])
            paper_own[name] = new
        paper_x, paper_c = paper_x + np.mean(moved, axis=0), paper_c + np.mean(changed, axis=0)
    assert x.numpy() == pytest.approx(paper_x, abs=1e-5)
    assert controls["b"]["w"].numpy() == pytest.approx(paper_own["b"], abs=1e-5)


def test_it_ends_at_the_optimum_of_all_where_fedavg_does_not():
    """The mean loss has its least value at (-1, -.75); averages of 3 and 8 steps lean to the client with more."""
    ends = {}
    for corrected in (True, False):
        x, controls = torch.zeros(2), {}
        for _ in range(60):
            x, controls = one_round(x, controls, corrected=corrected)
        ends[corrected] = x
    assert ends[True].tolist() == pytest.approx([-1.0, -0.75], abs=1e-3)
    assert float((ends[False] - ends[True]).norm()) > 0.3
