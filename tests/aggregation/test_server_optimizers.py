"""Server optimizers against numbers worked out by hand, torch.optim.Adam and FedAvg."""

import pytest
import torch

from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.methods.registry import RULES, find_method
from atlas_fl.methods.server_optimizers import ServerStep
from atlas_fl.params import flatten_state
from tests.aggregation.federations import adapters_of, dense_update, federation_of, server_step

SERVER_OPTIMIZERS = tuple(name for name, rule in RULES.items() if issubclass(rule, ServerStep))


def federation(*, tasks=("t", "t"), clusters=(0, 0), weights=(1.0, 3.0)):
    return federation_of("abcdef"[: len(tasks)], weights=weights, clusters=clusters, tasks=tasks)


def heads(*values):
    return {client: {"head.bias": torch.tensor([value])} for client, value in zip("abcdef", values)}


def steps(name, before, *rounds, fed=None, **words):
    """(server state, models) after server steps on these updates."""
    strategy = find_method(name, **words)
    state, models = strategy.init(before), before
    for number, updates in enumerate(rounds, 1):
        done = server_step(strategy, state, models, updates, fed or federation(), round=number)
        state, models = done.server_state, done.client_models
    return state, models


NUMBERS = {"server_lr": 0.6, "server_beta1": 0.5, "server_beta2": 0.5, "server_tau": 1.0}


@pytest.mark.parametrize(
    ("name", "first", "second", "step"),
    [
        # trained to 4 and 8, of 1 and 3 examples: Delta = 7, m = .5 * 7, v = .5 * 1 + .5 * 49
        ("fedadam", 3.5, 25.0, 0.6 * 3.5 / (5 + 1)),
        ("fedyogi", 3.5, 1 + 0.5 * 49, 0.6 * 3.5 / (25.5**0.5 + 1)),
        ("fedadagrad", 3.5, 50.0, 0.6 * 3.5 / (50**0.5 + 1)),
        ("fedavgm", 7.0, None, 0.6 * 7),
    ],
)
def test_one_step_by_hand(name, first, second, step):
    state, models = steps(name, heads(0.0, 0.0), heads(4.0, 8.0), **NUMBERS)
    flat = flatten_state(state)
    assert float(flat["first/task-t/head.bias"]) == first
    assert [float(models[client]["head.bias"]) for client in "ab"] == pytest.approx([step] * 2)
    if second is None:
        assert flat.keys() == {"first/task-t/head.bias"}
    else:
        assert float(flat["second/task-t/head.bias"]) == second


def test_a_second_step_goes_on_from_the_moments_of_the_first_by_hand():
    state, models = steps("fedadam", heads(0.0, 0.0), heads(4.0, 8.0), heads(1.35, 1.35), **NUMBERS)
    # the model was .35, so Delta = 1: m = .5 * 3.5 + .5, v = .5 * 25 + .5
    assert float(flatten_state(state)["first/task-t/head.bias"]) == pytest.approx(2.25)
    assert float(flatten_state(state)["second/task-t/head.bias"]) == pytest.approx(13.0)
    assert float(models["a"]["head.bias"]) == pytest.approx(0.35 + 0.6 * 2.25 / (13**0.5 + 1))


def test_fedadam_is_torchs_adam_on_the_pseudo_gradient_without_the_correction_of_bias():
    """torch divides m by 1 - beta1^t and sqrt(v) by sqrt(1 - beta2^t); its rate and eps take that back."""
    draw = torch.Generator().manual_seed(0)
    lr, betas, tau = 0.05, (0.9, 0.99), 1e-3
    weight = torch.nn.Parameter(torch.randn(4, 3, generator=draw, dtype=torch.float64))
    adam = torch.optim.Adam([weight], lr=lr, betas=betas)
    adam.state[weight] = {
        "step": torch.tensor(0.0),
        "exp_avg": torch.zeros_like(weight),
        "exp_avg_sq": torch.full_like(weight, tau**2),
    }
    strategy = find_method("fedadam", server_lr=lr, server_tau=tau)
    models = {client: {"w": weight.detach().clone()} for client in "ab"}
    state = strategy.init(models)
    for number in range(1, 7):
        updates = {client: {"w": params["w"] + torch.randn(4, 3, generator=draw)} for client, params in models.items()}
        average = (updates["a"]["w"] + 3 * updates["b"]["w"]) / 4
        correction = (1 - betas[1] ** number) ** 0.5
        adam.param_groups[0].update(lr=lr * (1 - betas[0] ** number) / correction, eps=tau / correction)
        weight.grad = models["a"]["w"] - average
        adam.step()
        done = server_step(strategy, state, models, updates, federation(), round=number)
        state, models = done.server_state, done.client_models
        torch.testing.assert_close(models["a"]["w"], weight.detach(), rtol=1e-5, atol=1e-7)


def adapters(seed, ranks):
    return adapters_of("abcdef", ranks, seed=seed)


@pytest.mark.parametrize("within", ["all", "clusters"])
@pytest.mark.parametrize(("space", "ranks"), [("product", (2, 5, 3, 4)), ("factors", (3, 3, 3, 3))])
def test_momentum_of_nothing_at_rate_one_is_fedavg(space, ranks, within):
    fed = federation(tasks=("t", "t", "u", "u"), clusters=(0, 0, 1, 1), weights=(1.0, 3.0, 2.0, 5.0))
    before, updates = adapters(0, ranks), adapters(1, ranks)
    del updates["b"]
    words = {"space": space, "within": within}
    _, models = steps("fedavgm", before, updates, fed=fed, server_beta1=0.0, server_lr=1.0, **words)
    _, average = steps("fedavg" if within == "all" else "fedavg_cluster", before, updates, fed=fed, **words)
    for client in fed.clients:
        torch.testing.assert_close(dense_update(models[client]), dense_update(average[client]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(models[client]["head.weight"], average[client]["head.weight"])


@pytest.mark.parametrize(
    ("name", "rate"),
    # the second moment begins at tau^2, which Adam's share of what stays takes to .99 tau^2
    [("fedadam", 1 + 0.99**0.5), ("fedyogi", 2.0), ("fedadagrad", 2.0)],
)
def test_adaptive_rules_of_large_tau_are_fedavg(name, rate):
    """Reddi et al. 2021: the larger tau, the less a step adapts; at a rate in proportion it is the average."""
    before, updates = adapters(0, (3, 3)), adapters(1, (3, 3))
    words = {"server_lr": rate * 1e4, "server_tau": 1e4, "space": "factors"}
    beta = {} if name == "fedadagrad" else {"server_beta1": 0.0}
    _, models = steps(name, before, updates, **words, **beta)
    _, average = steps("fedavg", before, updates, space="factors")
    for key, tensor in average["a"].items():
        torch.testing.assert_close(models["a"][key], tensor, rtol=1e-4, atol=1e-5)


def test_in_product_space_moments_are_those_of_the_dense_update_and_each_rank_gets_its_best_part():
    before, updates = adapters(0, (2, 5)), adapters(1, (2, 5))
    state, models = steps("fedadam", before, updates, server_lr=0.5, server_tau=1.0)
    flat = flatten_state(state)
    p = {"a": 0.25, "b": 0.75}
    change = sum(p[client] * (dense_update(updates[client]) - dense_update(before[client])) for client in "ab")
    current = sum(p[client] * dense_update(before[client]) for client in "ab")
    torch.testing.assert_close(flat["first/all/q"].double(), 0.1 * change, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(flat["second/all/q"].double(), 0.99 + 0.01 * change**2, rtol=1e-5, atol=1e-6)
    left, values, right = torch.linalg.svd(current + 0.5 * 0.1 * change / ((0.99 + 0.01 * change**2).sqrt() + 1.0))
    for client, rank in (("a", 2), ("b", 5)):
        best = (left[:, :rank] * values[:rank]) @ right[:rank]
        torch.testing.assert_close(dense_update(models[client]), best, rtol=1e-4, atol=1e-4)


def test_every_cluster_and_task_has_moments_of_its_own_and_who_is_alone_has_none():
    fed = federation(tasks=("t", "t", "u", "u", "t"), clusters=(0, 0, 0, 1, -1), weights=(1.0,) * 5)
    state, _ = steps("fedadam", adapters(0, (3,) * 5), adapters(1, (3,) * 5), fed=fed, within="clusters")
    assert {path.split("/")[1] for path in flatten_state(state)} == {"cluster-0", "cluster-0-task-t"}
    state, _ = steps("fedadam", adapters(0, (3,) * 5), adapters(1, (3,) * 5), fed=fed)
    assert {path.split("/")[1] for path in flatten_state(state)} == {"all", "task-t", "task-u"}


def test_a_cohort_of_which_nobody_took_part_keeps_its_moments():
    fed = federation(tasks=("t", "t", "u", "u"), clusters=(0, 0, 1, 1), weights=(1.0,) * 4)
    first, second = adapters(1, (3,) * 4), adapters(2, (3,) * 4)
    del second["c"], second["d"]
    one, _ = steps("fedadam", adapters(0, (3,) * 4), first, fed=fed, within="clusters")
    two, _ = steps("fedadam", adapters(0, (3,) * 4), first, second, fed=fed, within="clusters")
    one, two = flatten_state(one), flatten_state(two)
    assert torch.equal(one["first/cluster-1/q"], two["first/cluster-1/q"])
    assert not torch.equal(one["first/cluster-0/q"], two["first/cluster-0/q"])


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS)
def test_different_ranks_in_factor_space_are_refused_in_one_line(name):
    strategy = find_method(name, space="factors")
    with pytest.raises(ConfigError, match=f"^--strategy {name} needs one rank, and .* of a and b differ; take"):
        strategy.check(adapters(0, (2, 3)), federation())
    strategy.check(adapters(0, (3, 3)), federation())
    clusters = find_method(name, space="factors", within="clusters")
    clusters.check(adapters(0, (2, 3)), federation(clusters=(0, 1)))
    find_method(name).check(adapters(0, (2, 3)), federation())


def test_heads_of_several_shapes_in_one_task_are_refused():
    updates = adapters(1, (3, 3))
    updates["b"]["head.weight"] = torch.zeros(7, 12)
    with pytest.raises(ProtocolError, match=r"head\.weight of b and a has several shapes"):
        steps("fedadam", adapters(0, (3, 3)), updates)
