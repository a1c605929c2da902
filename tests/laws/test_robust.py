"""Robust rules: what the papers define, and that a few hostile clients cannot move the result as far as they like."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import trim_mean

from atlas_fl.aggregation.distances import squared_distances
from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.methods.registry import RULES, find_method
from atlas_fl.methods.robust import (
    Robust,
    krum_scores,
    krum_weights,
    num_trimmed,
    weiszfeld_weights,
)
from tests.aggregation.federations import adapters_of, dense_update, federation_of, server_step
from tests.examples import examples

ROBUST = tuple(name for name, rule in RULES.items() if issubclass(rule, Robust))
SIZES = [(5, 1), (9, 2), (9, 3)]
"""(clients, hostile ones among them) that all rules withstand when told so."""


def federation(n, *, tasks=(), clusters=None):
    names = [f"c{k}" for k in range(n)]
    return federation_of(names, weights=range(1, n + 1), clusters=clusters, tasks=tasks, layer_of={"q": 0})


def vectors(points):
    """Models that are nothing but these points."""
    return {f"c{k}": {"w": torch.tensor(point, dtype=torch.float64)} for k, point in enumerate(points)}


def aggregate(name, models, *, fed=None, **words):
    strategy = find_method(name, **words)
    return server_step(strategy, {}, dict(models), models, fed or federation(len(models)), round=1).client_models


def aggregated(name, points, **words):
    return aggregate(name, vectors(points), **words)["c0"]["w"].numpy()


def adapters(n, *, ranks=(2, 3, 4)):
    return adapters_of([f"c{k}" for k in range(n)], [ranks[k % len(ranks)] for k in range(n)])


def dense(params):
    return dense_update(params).numpy()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("median", [1.5, 1]),
        ("trimmed_mean", [(1 + 1.5 + 3) / 3, (0 + 1 + 1) / 3]),
        ("krum", [1, 1]),  # its two nearest are at .25 and 2; those of the second at .25 and 3.25
        ("multi_krum", [(1 + 1.5 + 0 + 3) / 4, (1 + 1 + 0 + 2) / 4]),
    ],
)
def test_every_rule_by_hand(name, expected):
    points = [[1.0, 1.0], [1.5, 1.0], [0.0, 0.0], [3.0, 2.0], [100.0, -50.0]]
    assert aggregated(name, points, trim=0.2, byzantine=1) == pytest.approx(np.array(expected, float))


def test_the_geometric_median_of_a_square_and_its_middle_is_the_middle():
    points = [[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0]]
    assert aggregated("geometric_median", points) == pytest.approx(np.array([1.0, 1.0]))
    # three points on a line: the one in the middle, which is the median
    assert aggregated("geometric_median", [[0.0], [1.0], [50.0]]) == pytest.approx(np.array([1.0]), abs=1e-3)


@given(st.integers(1, 12), st.floats(0, 0.49), st.integers(0, 2**32))
@examples(60)
def test_median_and_trimmed_mean_are_those_of_numpy_and_scipy(n, trim, seed):
    values = np.random.default_rng(seed).normal(size=(n, 7))
    assert find_method("median").middle(torch.from_numpy(values)).numpy() == pytest.approx(np.median(values, axis=0))
    cut = num_trimmed(n, trim)
    assert trim * n - 1e-6 <= cut < trim * n + 1 or cut == (n - 1) // 2
    wanted = trim_mean(values, (cut + 0.5) / n, axis=0) if cut else values.mean(axis=0)
    trimmed = find_method("trimmed_mean", trim=trim)
    assert trimmed.middle(torch.from_numpy(values)).numpy() == pytest.approx(wanted)


@given(st.integers(5, 12), st.integers(0, 2**32))
@examples(60)
def test_krum_is_the_papers_formula(n, seed):
    points = np.random.default_rng(seed).normal(size=(n, 4))
    f = (n - 3) // 2
    squares = ((points[:, None] - points[None]) ** 2).sum(-1)
    scores = []
    for i in range(n):  # s(i) = sum over the n - f - 2 closest V_j of || V_i - V_j ||^2
        closest = sorted((j for j in range(n) if j != i), key=lambda j: squares[i, j])[: n - f - 2]
        scores.append(sum(squares[i, j] for j in closest))
    assert krum_scores(squares, f) == pytest.approx(np.array(scores))
    assert krum_weights(squares, byzantine=f, selected=1).argmax() == int(np.argmin(scores))
    chosen = set(np.argsort(scores)[: n - f].tolist())
    assert set(np.flatnonzero(krum_weights(squares, byzantine=f, selected=n - f)).tolist()) == chosen


@given(st.integers(3, 9), st.integers(1, 5), st.integers(0, 2**32))
@examples(40)
def test_the_geometric_median_has_the_least_sum_of_distances(n, dim, seed):
    points = np.random.default_rng(seed).normal(size=(n, dim))
    squares = ((points[:, None] - points[None]) ** 2).sum(-1)

    def cost(z):
        return np.linalg.norm(points - z, axis=1).sum()

    found = weiszfeld_weights(squares) @ points
    best = min(minimize(cost, start, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12, "maxiter": 4000}).fun
               for start in (points.mean(axis=0), points[int(np.argmin([cost(p) for p in points]))]))  # fmt: skip
    assert cost(found) <= best + 1e-4 * n


@pytest.mark.parametrize("far", [1e3, 1e6, 1e9])
@pytest.mark.parametrize(("n", "hostile"), SIZES)
@pytest.mark.parametrize("name", ROBUST)
def test_hostile_clients_cannot_move_the_result_out_of_what_the_honest_ones_say(name, n, hostile, far):
    """At any size; an average goes wherever one of them likes."""
    draw = np.random.default_rng(n)
    honest = draw.normal(size=(n - hostile, 6))
    attack = far * draw.normal(size=(hostile, 6))
    points = np.concatenate([honest, attack])
    middle, spread = honest.mean(axis=0), np.linalg.norm(honest - honest.mean(axis=0), axis=1).max()
    words = {"byzantine": hostile, "trim": hostile / n}
    found = aggregated(name, points, **words)
    assert np.linalg.norm(found - middle) <= 2.5 * spread
    if name in ("median", "trimmed_mean"):
        assert (honest.min(axis=0) - 1e-9 <= found).all() and (found <= honest.max(axis=0) + 1e-9).all()
    assert np.linalg.norm(aggregated("fedavg", points) - middle) > 50 * spread, "the attack is one"


@pytest.mark.parametrize("space", ["product", "factors"])
@pytest.mark.parametrize("name", ROBUST)
def test_one_of_five_adapters_far_away_leaves_the_others_what_they_are_together(name, space):
    models = adapters(5, ranks=(3,))
    far = {**models, "c4": {key: 1e4 * tensor for key, tensor in models["c4"].items()}}
    found = aggregate(name, far, space=space)
    largest = max(np.linalg.norm(dense(models[f"c{k}"])) for k in range(4))
    for k in range(4):
        assert np.linalg.norm(dense(found[f"c{k}"])) <= (3 if space == "factors" else 1.5) * largest
        assert float(found[f"c{k}"]["head.weight"].norm()) <= 20
    assert np.linalg.norm(dense(aggregate("fedavg", far, space=space)["c0"])) > 100 * largest


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
def test_a_rule_of_values_is_that_of_dense_updates_cut_to_each_rank(name):
    models = adapters(5)
    found = aggregate(name, models)
    stack = np.stack([dense(params) for params in models.values()])
    wanted = np.median(stack, axis=0) if name == "median" else trim_mean(stack, 0.21, axis=0)
    left, values, right = np.linalg.svd(wanted)
    for client, params in models.items():
        rank = params["q.lora_A"].shape[0]
        best = (left[:, :rank] * values[:rank]) @ right[:rank]
        assert np.linalg.norm(dense(found[client]) - best) < 1e-5 * np.linalg.norm(wanted)
        assert {key: tensor.shape for key, tensor in found[client].items()} == {k: t.shape for k, t in params.items()}


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
def test_who_joins_later_begins_with_the_middle_of_the_others_and_not_with_their_mean(name):
    held = vectors([[1.0, 1.0], [1.5, 1.0], [0.0, 0.0], [3.0, 2.0], [1e6, -1e6]])
    fresh = {"c5": {"w": torch.zeros(2, dtype=torch.float64)}}
    begun = find_method(name, trim=0.2).initial_models({}, held, fresh, federation(6))
    wanted = [1.5, 1.0] if name == "median" else [(1 + 1.5 + 3) / 3, (0 + 1 + 1) / 3]
    assert begun.keys() == {"c5"} and begun["c5"]["w"].numpy() == pytest.approx(np.array(wanted))


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
def test_factors_of_other_ranks_have_no_middle(name):
    with pytest.raises(ConfigError, match=f"--strategy {name} needs one rank, .* such as --ranks 8"):
        find_method(name, space="factors").check(adapters(5), federation(5))


@pytest.mark.parametrize("name", ROBUST)
def test_a_claim_of_examples_has_no_effect(name):
    models, fed = adapters(5), federation(5)
    claimed = replace(fed, weights=np.array([1.0, 1, 1, 1, 1e9]))
    first, second = (aggregate(name, models, fed=one) for one in (fed, claimed))
    assert all(torch.equal(first[c][key], second[c][key]) for c in first for key in first[c])


@pytest.mark.parametrize("name", [*ROBUST, "atlas_laplacian", "fedavg_cluster"])
def test_an_attacker_alone_in_its_cluster_harms_nobody(name):
    fed = federation(5, tasks=["t"] * 4 + ["u"], clusters=[0, 0, 0, 0, 1])
    models = adapters(5)
    graph = np.ones((5, 5)) - np.eye(5)
    graph[4], graph[:, 4] = 0, 0
    fed = replace(fed, adjacency=graph)
    far = {**models, "c4": {key: 1e6 * tensor for key, tensor in models["c4"].items()}}
    near = {**models, "c4": models["c1"]}  # Krum takes whom another one stands beside

    def are_the_same(fed):
        first, *others = (aggregate(name, one, fed=fed, within="clusters") for one in (models, far, near))
        pairs = [(first[f"c{k}"], other[f"c{k}"]) for k in range(4) for other in others]
        return all(torch.equal(one[key], other[key]) for one, other in pairs for key in one)

    assert are_the_same(fed)
    assert not are_the_same(replace(fed, clusters=np.zeros(5, int), adjacency=np.ones((5, 5)) - np.eye(5)))


def test_distances_are_those_of_dense_updates_whatever_the_factors():
    models = adapters(4)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)))[0]
    models["c1"] = models["c1"] | {
        "q.lora_A": turn @ models["c1"]["q.lora_A"],
        "q.lora_B": models["c1"]["q.lora_B"] @ turn.T,
    }
    names = list(models)
    found = squared_distances(models, names, StrategyOptions(), head=False)
    wanted = [[np.square(dense(models[k]) - dense(models[other])).sum() for other in names] for k in names]
    assert found == pytest.approx(np.array(wanted), rel=1e-5, abs=1e-6)
    heads = squared_distances(models, names, StrategyOptions(), head=True)
    assert heads[0, 1] == pytest.approx(
        float((models["c0"]["head.weight"] - models["c1"]["head.weight"]).square().sum())
    )


def test_factors_alone_are_compared_padded_to_the_longest_rank():
    models = {"c0": {"q.lora_A": torch.ones(1, 2)}, "c1": {"q.lora_A": torch.tensor([[1.0, 2], [3, 4]])}}
    found = squared_distances(models, ["c0", "c1"], StrategyOptions(share=("A",)), head=False)
    assert found.tolist() == [[0, 1 + 9 + 16], [26, 0]]


def test_models_that_hold_other_tensors_cannot_be_compared():
    models = {"c0": {"w": torch.ones(2)}, "c1": {}}
    with pytest.raises(ProtocolError, match="c1 has no w, but clients that it is compared with do"):
        squared_distances(models, ["c0", "c1"], StrategyOptions(share=("A", "B")), head=False)
    with pytest.raises(ProtocolError, match="w has several shapes"):
        squared_distances(
            {**models, "c1": {"w": torch.ones(3)}}, ["c0", "c1"], StrategyOptions(share=("A",)), head=False
        )


def test_groups_that_are_too_small_for_a_rule_are_named():
    fed = federation(5, tasks=("x", "x", "x", "y", "y"), clusters=(0, 0, 0, 1, -1))
    assert find_method("krum").warnings(fed) == (
        "krum: task-x: 3 clients withstand 0 hostile ones, and --byzantine is 1",
        "krum: task-y: 2 clients withstand 0 hostile ones, and --byzantine is 1",
    )
    assert find_method("median").warnings(fed) == (
        "median: task-y: 2 clients withstand 0 hostile ones, and --byzantine is 1",
    )
    inside = find_method("krum", within="clusters").warnings(fed)
    assert inside[0] == "krum: cluster-0: 3 clients withstand 0 hostile ones, and --byzantine is 1"
    assert not find_method("fedavg").warnings(fed)
    assert not find_method("geometric_median", byzantine=2).warnings(federation(5))
