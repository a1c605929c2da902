"""Where rounds of methods that average end: at the least value of the objective by examples, in closed form."""

import pytest
import torch

from atlas_fl.client.optimizer import GradientMean, LossScale, gradient_chain, make_optimizer
from atlas_fl.client.options import TrainOptions
from atlas_fl.methods.method import RoundStart
from atlas_fl.methods.registry import METHODS, RULES, find_method, parts_of
from atlas_fl.methods.scaffold import ControlVariates
from atlas_fl.params import Params
from tests.aggregation.federations import federation_of, server_step

EXAMPLES = {"a": 900, "b": 100}
TARGETS, CURVES, STEPS = {"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 2.0}, {"a": 2, "b": 5}
WEIGHTED = 100 * 2 * 1.0 / (900 * 1 + 100 * 2)
"""argmin of 900 / 2 w^2 + 100 (w - 1)^2; with clients that count alike it is 2/3."""
NOT_BY_EXAMPLES = {
    **dict.fromkeys(("local", "centralized", "linear_probe", "local_prior"), "nothing is sent"),
    **dict.fromkeys(("atlas_laplacian", "atlas_pad", "atlas_truncate"), "neighbours of a graph"),
    **dict.fromkeys(("pfedgraph", "fedavg_by_distance", "fedamp"), "rows of one's own"),
    **dict.fromkeys(("median", "trimmed_mean", "krum", "multi_krum", "geometric_median"), "clients count alike"),
    **dict.fromkeys(("ties", "dare"), "parts of updates"),
    "fedadagrad": "it is on its way for thousands of rounds",
    **dict.fromkeys(("fedtreelora", "fedtreelora_outside", "fedavg_in_tree_and_outside"), "it needs layers"),
    **dict.fromkeys(("hilora", "fedavg_in_levels"), "its levels are of adapters"),
    "fedavg_dynamic": "it is FedDyn, which is below",
}
"""Methods that do not end there, each with its reason."""


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


@pytest.mark.parametrize("max_share", [1.0, 0.5])
@pytest.mark.parametrize("name", [name for name in (*RULES, *METHODS) if name not in NOT_BY_EXAMPLES])
def test_rounds_end_at_the_optimum_by_examples(name: str, max_share: float) -> None:
    """With one step a client, SCAFFOLD and FedDyn with as many as their sizes give; of two, none is bounded."""
    row = METHODS.get(name)
    own = {**row.settings, **row.suggested} if row else {}
    mu = 0.5 if name == "feddyn" else 0.0
    values = {**own, "space": "factors", "share": ("A", "B", "head"), "max_share": max_share, "proximal_mu": mu}
    method = find_method(row.rule if row else name, **values)
    parts = parts_of(method, values)
    corrects = name == "feddyn" or any(isinstance(part, ControlVariates) for part in parts)
    assert corrects is (name in ("scaffold", "ilora", "feddyn"))
    fed, controls = federation_of("ab", weights=list(EXAMPLES.values())), {}
    models = {name: {"w": torch.zeros(1)} for name in "ab"}
    state = method.init(models)
    for number in range(1, 401 if corrects else 101):
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
                steps=STEPS[name] if corrects else 1,
            )
            for name in "ab"
        }
        controls = {name: control for name, (_, control) in done.items()}
        step = server_step(method, state, models, {name: model for name, (model, _) in done.items()}, fed, round=number)
        state, models = step.server_state, step.client_models
    assert [float(models[name]["w"]) for name in "ab"] == pytest.approx([WEIGHTED] * 2, abs=1e-3)
