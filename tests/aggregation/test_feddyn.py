"""FedDyn: by hand, against the paper's algorithm on a quadratic, and who is alone."""

import numpy as np
import pytest
import torch

from atlas_fl.client.optimizer import LossScale, gradient_chain, make_optimizer
from atlas_fl.client.options import TrainOptions
from atlas_fl.methods.feddyn import dynamic_corrections
from atlas_fl.methods.registry import find_method
from atlas_fl.params import flatten_state
from tests.aggregation.federations import federation_of, server_step

DYNAMIC = find_method("fedavg_dynamic")


def test_two_rounds_by_hand() -> None:
    """c is absent in round one: the average of a and b is (2 + 6) / 2 = 4, the mean change (2 + 6 + 2 * 0) / 4 = 2, so
    all get 6. Round two: only c, from 6 to 8: 8 + (2 + 6 + 2 * 2) / 4 = 11.
    """
    fed = federation_of("abc", weights=[1, 1, 2])
    start = {name: {"w": torch.tensor([0.0])} for name in "abc"}
    updates = {"a": {"w": torch.tensor([2.0])}, "b": {"w": torch.tensor([6.0])}}
    first = server_step(DYNAMIC, {}, start, updates, fed, round=1)
    assert [float(first.client_models[name]["w"]) for name in "abc"] == [6, 6, 6]
    update = {"c": {"w": torch.tensor([8.0])}}
    second = server_step(DYNAMIC, first.server_state, first.client_models, update, fed, round=2)
    assert [float(second.client_models[name]["w"]) for name in "abc"] == [11, 11, 11]
    state = {path: float(value) for path, value in flatten_state(second.server_state).items()}
    assert state == {"changes/a/w": 2, "changes/b/w": 6, "changes/c/w": 2}
    corrections = dynamic_corrections(second.server_state, ["a", "c"], alpha=0.5)
    assert {name: float(one["w"]) for name, one in corrections.items()} == {"a": 1, "c": 1}


def test_who_is_alone_with_its_head_is_neither_moved_on_nor_corrected() -> None:
    fed = federation_of("ab", tasks=("movie", "trec"))
    start = {name: {"w": torch.tensor([0.0]), "head.w": torch.tensor([0.0])} for name in "ab"}
    updates = {
        name: {"w": torch.tensor([value]), "head.w": torch.tensor([value])} for name, value in (("a", 1.0), ("b", 3.0))
    }
    done = server_step(DYNAMIC, {}, start, updates, fed, round=1)
    assert {name: float(one["head.w"]) for name, one in done.client_models.items()} == {"a": 1, "b": 3}
    corrections = dynamic_corrections(done.server_state, "ab", alpha=1.0)
    assert {name: set(one) for name, one in corrections.items()} == {"a": {"w"}, "b": {"w"}}
    alone = federation_of("a")
    done = server_step(DYNAMIC, {}, {"a": start["a"]}, {"a": updates["a"]}, alone, round=1)
    assert done.server_state == {} and torch.equal(done.client_models["a"]["w"], updates["a"]["w"])


TARGETS = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([-3.0, 0.5]), "c": torch.tensor([4.0, 4.0])}
CURVES = {"a": 1.0, "b": 3.0, "c": 0.5}


def train(
    start: torch.Tensor, name: str, correction: dict[str, torch.Tensor], *, alpha: float, steps: int
) -> torch.Tensor:
    """What a client with the loss curve / 2 || w - target ||^2 ends with, by the chain of every client."""
    options = TrainOptions(seed=0, lr=0.1, optimizer="sgd", clip=0.0, proximal_mu=alpha)
    leaves = {"w": start.clone().requires_grad_()}
    transform = gradient_chain(leaves, options, LossScale(enabled=False), correction=correction)
    optimizer = make_optimizer(leaves, options)
    for _ in range(steps):
        leaves["w"].grad = (CURVES[name] * (leaves["w"] - TARGETS[name])).detach()
        transform(leaves, None)
        optimizer.step()
    return leaves["w"].detach()


def paper_client(x: np.ndarray, name: str, gradient: np.ndarray, *, alpha: float, steps: int) -> np.ndarray:
    """argmin L_k(w) - <gradient, w> + alpha / 2 || w - x ||^2, by as many steps."""
    w = x.copy()
    for _ in range(steps):
        w -= 0.1 * (CURVES[name] * (w - TARGETS[name].numpy()) - gradient + alpha * (w - x))
    return w


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_rounds_equal_algorithm_1_of_the_paper_with_clients_that_are_absent(alpha: float) -> None:
    fed, m, steps = federation_of("abc"), 3, 5
    state, models = {}, {name: {"w": torch.zeros(2)} for name in TARGETS}
    x, h, gradients = np.zeros(2), np.zeros(2), {name: np.zeros(2) for name in TARGETS}
    for round in range(1, 8):
        present = [name for k, name in enumerate(TARGETS) if (k + round) % 3]
        sent = dynamic_corrections(state, present, alpha=alpha)
        updates = {
            name: {"w": train(models[name]["w"], name, sent.get(name, {}), alpha=alpha, steps=steps)}
            for name in present
        }
        done = server_step(DYNAMIC, state, models, updates, fed, round=round)
        state, models = done.server_state, done.client_models

        trained = {name: paper_client(x, name, gradients[name], alpha=alpha, steps=steps) for name in present}
        for name, w in trained.items():
            gradients[name] = gradients[name] - alpha * (w - x)
        h = h - alpha / m * sum(w - x for w in trained.values())
        x = np.mean(list(trained.values()), axis=0) - h / alpha
    assert models["a"]["w"].numpy() == pytest.approx(x, rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_it_ends_at_the_optimum_of_all_where_fedprox_does_not() -> None:
    """The least of the sum is at sum c_k t_k / sum c_k: ((1 - 9 + 2) / 4.5, (-2 + 1.5 + 2) / 4.5) = (-4/3, 1/3)."""
    ends, fed = {}, federation_of("abc")
    for name in ("fedavg_dynamic", "fedavg"):
        strategy = find_method(name, space="factors")
        state, models = {}, {one: {"w": torch.zeros(2)} for one in TARGETS}
        for round in range(1, 90):
            sent = dynamic_corrections(state, list(TARGETS), alpha=1.0)
            updates = {
                one: {"w": train(models[one]["w"], one, sent.get(one, {}), alpha=1.0, steps=20)} for one in TARGETS
            }
            done = server_step(strategy, state, models, updates, fed, round=round)
            state, models = done.server_state, done.client_models
        ends[name] = models["a"]["w"]
    assert ends["fedavg_dynamic"].tolist() == pytest.approx([-4 / 3, 1 / 3], abs=1e-3)
    assert float((ends["fedavg"] - ends["fedavg_dynamic"]).norm()) > 0.1
