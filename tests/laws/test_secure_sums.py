"""Every method is an average that secure sums compute, to their quantisation, or is refused in one line."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch

from atlas_fl.aggregation.matrices import Federation
from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.aggregation.secure_mean import (
    SecureMeans,
    SumGroup,
    SumSettings,
    secure_means,
    secure_notes,
    sum_here,
)
from atlas_fl.config import Config, validate
from atlas_fl.config.settings import replace_settings
from atlas_fl.errors import ConfigError
from atlas_fl.methods.averages import FedAvg
from atlas_fl.methods.method import Method, StepInputs
from atlas_fl.methods.registry import METHODS, RULES
from atlas_fl.params import REPORT

CLIENTS = ("a", "b", "c", "d", "e", "f", "g")
TASKS = ("movie", "trec", "movie", "movie", "trec", "trec", "movie")
BOUND = 4.0
SECURE = {"secure": True, "space": "factors", "ranks": "4"}
USUAL = {
    *("fedavg", "fedavg_cluster", "fedavgm", "fedadagrad", "fedyogi", "fedadam"),
    *("fedit", "ffa", "rolora", "fedsa", "fedper", "fedrep", "fedbabu", "fedprox", "fedavg_ft", "fedavg_prior"),
    *("ditto", "apfl", "feddpa", "mr_mtl", "fedalt", "fedalt_fixed", "shrinkage"),
}
"""What a user would look for."""


def model_of(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"layer.0.q.lora_A": (4, 6), "layer.0.q.lora_B": (5, 4), "head.weight": (3, 6)}
    return {key: torch.randn(*shape, generator=draw).clamp(-BOUND, BOUND) for key, shape in shapes.items()}


FEDERATION = Federation(
    clients=CLIENTS,
    weights=np.array([200.0, 100.0, 300.0, 50.0, 150.0, 90.0, 110.0]),
    clusters=np.array([0 if task == "movie" else 1 for task in TASKS]),
    adjacency=np.zeros((7, 7)),
    head_groups=TASKS,
)


SETTINGS = SumSettings(run="a test", bound=BOUND, max_share=1.0)
EXAMPLES = dict(zip(CLIENTS, FEDERATION.weights.astype(int).tolist(), strict=True))


def means_of(groups: Sequence[SumGroup], before: dict[str, dict], updates: dict[str, dict]) -> SecureMeans:
    return secure_means(groups, SETTINGS, before, updates, partial(sum_here, updates, EXAMPLES), round=1)


def step_of(method: Method, updates: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    before = {name: model_of(0) for name in CLIENTS}
    inputs = StepInputs(
        server_state=method.init(before), client_models=before, updates=updates, federation=FEDERATION, round=1
    )
    return {name: dict(params) for name, params in method.aggregate(inputs).client_models.items()}


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if not rule.not_a_sum])
@pytest.mark.parametrize("missing", [(), ("g",)])
def test_a_rule_that_needs_sums_alone_makes_the_same_of_them(name: str, missing: tuple[str, ...]) -> None:
    method = RULES[name](StrategyOptions(space="factors"))
    updates = {client: model_of(k + 1) for k, client in enumerate(CLIENTS) if client not in missing}
    before = {client: model_of(0) for client in CLIENTS}
    groups = method.sum_groups(FEDERATION, before, round=1)
    assert all(len(group.clients) >= 3 for group in groups)
    reported = [key for group in groups for key in group.keys if key.startswith(REPORT)]
    draw = torch.Generator().manual_seed(7)
    said = {client: {key: torch.rand((), generator=draw) for key in reported} for client in updates}
    secure = means_of(groups, before, {client: {**params, **said[client]} for client, params in updates.items()})
    total = sum(EXAMPLES[client] for client in updates)
    for key in reported:
        mean = sum(EXAMPLES[client] * float(one[key]) for client, one in said.items()) / total
        assert [float(one[key]) for one in secure.reports.values()] == pytest.approx([mean] * len(updates), abs=1e-6)
    # with one client gone three of four of its task are there, and t = 3; of seven six, and t = 5
    assert secure.lost == ()
    # nobody's own model is in what the server uses
    assert not any(torch.equal(secure.updates[one][key], updates[one][key]) for one in updates for key in updates[one])
    plain, summed = step_of(method, updates), step_of(method, secure.updates)
    # a server optimizer makes ten times as much of a change: its rate over tau
    error = (10 if name != "fedavg" else 1) * BOUND * 7 / (2**30 // 7) + 1e-6
    for client, params in plain.items():
        for key, tensor in params.items():
            assert (tensor - summed[client][key]).abs().max() <= error, (client, key)


def test_what_is_lost_stays_and_is_said() -> None:
    method = FedAvg(StrategyOptions(space="factors"))
    before = {client: model_of(0) for client in CLIENTS}
    updates = {client: model_of(k + 1) for k, client in enumerate(CLIENTS) if client not in ("b",)}
    groups = method.sum_groups(FEDERATION, before, round=1)
    secure = means_of(groups, before, updates)
    (line,) = secure.lost
    assert line.startswith("the sum of the head of trec is lost: ")
    assert torch.equal(secure.updates["e"]["head.weight"], before["e"]["head.weight"])
    assert not torch.equal(secure.updates["a"]["head.weight"], before["a"]["head.weight"])


def test_clients_of_equal_models_keep_them_to_the_quantisation_and_notes_say_what_is_seen() -> None:
    method = FedAvg(StrategyOptions(space="factors", share=("A", "B")))
    before = {client: model_of(0) for client in CLIENTS}
    (group,) = method.sum_groups(FEDERATION, before, round=1)
    assert group.clients == CLIENTS
    assert [*SETTINGS.weights(EXAMPLES).values()] == pytest.approx(np.array([200, 100, 300, 50, 150, 90, 110]) / 300)
    (line,) = secure_notes((group,))
    assert "the mean of the adapters over 7 clients, and nothing of a single client" in line
    secure = means_of((group,), before, before)
    # 4 * 7 / (2^30 // 7) / (1000 / 300)
    assert secure.sums == ("the adapters of 7 of 7 clients, right to 5e-08",)
    for key, tensor in before["a"].items():
        assert (secure.updates["a"][key] - tensor).abs().max() <= 5.5e-8 + 2.5e-7
    assert min(min(sizes) for sizes in secure.sent_bytes.values()) > 7 * 96


def test_a_group_of_two_is_refused_with_who_they_are() -> None:
    federation = dataclasses.replace(FEDERATION, head_groups=("movie", "trec", "movie", "movie", "trec", "x", "y"))
    before = {client: model_of(0) for client in CLIENTS}
    with pytest.raises(ConfigError, match="the head of trec would be of b and e; bring more of them"):
        FedAvg(StrategyOptions(space="factors")).sum_groups(federation, before, round=1)
    assert FedAvg(StrategyOptions(space="factors", share=("A", "B"))).sum_groups(federation, before, round=1)


# settings


def refusals() -> Iterator[tuple[str, str]]:
    """(strategy, why it is refused, or nothing) of every method."""
    for name in (*RULES, *METHODS):
        given = {"strategy": name, **SECURE}
        forced = METHODS[name].settings if name in METHODS else {}
        try:
            validate(replace_settings({**given, **forced}, base=Config()))
        except ConfigError as error:
            yield name, str(error)
        else:
            yield name, ""


def test_every_method_is_taken_or_refused_in_one_line_with_what_to_take() -> None:
    found = dict(refusals())
    assert {name for name, reason in found.items() if not reason} >= USUAL
    for name, reason in found.items():
        rule = RULES[METHODS[name].rule if name in METHODS else name]
        if reason:
            assert "\n" not in reason and ("take --strategy" in reason or "leave " in reason), name
        if rule.not_a_sum:
            assert rule.not_a_sum in reason and f"--strategy {name} " in reason, name
    for name in ("atlas", "stb", "kriging", "pfedgraph", "fedamp", "fedpac", "ifca", "atlas_laplacian", "median"):
        assert found[name]
    assert "can be inverted" in found["atlas_laplacian"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"space": "product"}, "--secure sums A and B, and --space product mixes the products of each client's; set"),
        ({"ranks": "budget"}, "--ranks budget may give clients several; set --ranks to one of 4, 8"),
        ({"participation": 0.5}, "draws others, whose sums can be taken apart; leave --participation out"),
        ({"norm_bound": "clip"}, "leave --norm-bound out"),
        ({"secure": False, "secure_range": 2.0}, "set --secure, or leave --secure-range out"),
    ],
)
def test_what_does_not_go_with_secure_sums_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        validate(replace_settings({"strategy": "fedavg", **SECURE, **given}, base=Config()))


def test_a_rule_that_says_wrongly_that_it_needs_sums_alone_is_refused() -> None:
    before = {client: model_of(0) for client in CLIENTS}
    method = RULES["atlas_laplacian"](StrategyOptions(space="factors"))
    federation = dataclasses.replace(FEDERATION, adjacency=1.0 - np.eye(len(CLIENTS)))
    with pytest.raises(ConfigError, match="this strategy's rule is none for "):
        method.sum_groups(federation, before, round=1)
