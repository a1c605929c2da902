"""Where rounds of FedAvg, SCAFFOLD and FedDyn end: at the least value of the objective by examples, in closed form."""

import pytest
import torch

from atlas_fl.client.optimizer import GradientMean, LossScale, gradient_chain, make_optimizer
from atlas_fl.client.options import TrainOptions
from atlas_fl.methods.method import RoundStart
from atlas_fl.methods.registry import find_method, parts_of
from atlas_fl.methods.scaffold import ControlVariates
from atlas_fl.params import Params
from tests.aggregation.federations import federation_of

EXAMPLES = {"a": 900, "b": 100}
TARGETS, CURVES, STEPS = {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 2.0}, {"a": 2, "b": 5}
WEIGHTED = 100 * 2 * 1.0 / (900 * 1 + 100 * 2)
"""argmin of 900 / 2 w^2 + 100 (w - 1)^2."""


def train(start: Params, name: str, sent: Params, *, mu: float, steps: int) -> tuple[Params, Params]:
    """(model, mean gradient) of a client with the loss curve / 2 (w - target)^2 under SGD."""
    options = TrainOptions(seed=0, lr=0.05, optimizer="sgd", clip=0.0, proximal_mu=mu)
    leaves, mean = {"w": start["w"].clone().requires_grad_()}, GradientMean()
    transform = gradient_chain(leaves, options, LossScale(enabled=False), correction=sent, mean=mean)
    optimizer = make_optimizer(leaves, options)
    for _ in range(steps):
        leaves["w"].grad = (CURVES[name] * (leaves["w"] - TARGETS[name])).detach()
        transform(leaves, None)
        optimizer.step()
    return {"w": leaves["w"].detach()}, mean.mean()


@pytest.mark.parametrize(
    ("rule", "control_variates", "mu", "steps"),
    [
        ("fedavg", False, 0.0, {"a": 1, "b": 1}),
        ("fedavg", True, 0.0, STEPS),
        ("fedavg_dynamic", False, 0.5, STEPS),
    ],
    ids=["fedavg", "scaffold", "feddyn"],
)
@pytest.mark.parametrize("max_share", [1.0, 0.5])
def test_rounds_end_at_the_optimum_by_examples(rule, control_variates, mu, steps, max_share) -> None:
    """FedAvg with one step a client, SCAFFOLD and FedDyn with as many as their sizes give; of two, none is bounded."""
    values = {"control_variates": control_variates, "proximal_mu": mu, "space": "factors", "max_share": max_share}
    method = find_method(rule, **values)
    parts = parts_of(method, values)
    assert any(isinstance(part, ControlVariates) for part in parts) is control_variates
    fed, state, controls = federation_of("ab", weights=list(EXAMPLES.values())), {}, {}
    models = {name: {"w": torch.zeros(1)} for name in "ab"}
    for number in range(1, 401):
        start = RoundStart(
            round=number,
            clients=("a", "b"),
            tasks=dict.fromkeys("ab", "t"),
            examples=EXAMPLES,
            client_models=models,
            server_models=models,
            server_state=state,
            by_client={"control": controls},
        )
        sent = [part.send(start).get("correction", {}) for part in parts]
        done = {
            name: train(
                models[name],
                name,
                {k: v for one in sent for k, v in one.get(name, {}).items()},
                mu=mu,
                steps=steps[name],
            )
            for name in "ab"
        }
        controls = {name: control for name, (_, control) in done.items()}
        step = method.aggregate(state, models, {name: model for name, (model, _) in done.items()}, fed, round=number)
        state, models = step.server_state, step.client_models
    assert float(models["a"]["w"]) == pytest.approx(WEIGHTED, abs=1e-3)
