"""pFedGraph against numbers worked out by hand, a general solver and dense changes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from atlas_fl.aggregation.distances import cosines
from atlas_fl.aggregation.rules import RoundModels
from atlas_fl.errors import ConfigError
from atlas_fl.methods.pfedgraph import project_onto_simplex
from atlas_fl.methods.registry import find_method
from tests.aggregation.federations import federation_of, server_step


def federation(*, weights=(1.0, 3.0), tasks=(), layers=()):
    layer_of = {module: layer for layer, module in enumerate(layers)}
    return federation_of("abcdef"[: len(weights)], weights=weights, tasks=tasks, layer_of=layer_of)


def vectors(*points):
    return {client: {"w": torch.tensor(point)} for client, point in zip("abcdef", points)}


def rows(before, after, fed, key, **words):
    strategy = find_method("pfedgraph", **words)
    models = RoundModels(before=before, after=after, server_state=strategy.init(before))
    return strategy.matrices(fed, [True] * len(fed.clients), round=1, models=models)(key)


@pytest.mark.parametrize(
    ("point", "expected"),
    [
        # p = (1/4, 3/4) and alpha = 1, so a's row is the projection of (1/4 + 1/2, 3/4 + cos / 2), b's of the same
        # with 1/2 at its own place: for cos = 0 of (3/4, 3/4), a quarter too much each, and of (1/4, 5/4)
        ([0.0, 5.0], [[0.5, 0.5], [0.0, 1.0]]),
        ([-2.0, 0.0], [[0.75, 0.25], [0.0, 1.0]]),
        ([9.0, 0.0], [[0.25, 0.75], [0.25, 0.75]]),
    ],
    ids=["orthogonal", "opposite", "same direction"],
)
def test_rows_by_hand(point, expected):
    before, after = vectors([1.0, 1.0], [1.0, 1.0]), vectors([2.0, 1.0], [1.0 + point[0], 1.0 + point[1]])
    assert rows(before, after, federation(), "w", gram_alpha=1.0) == pytest.approx(np.array(expected), abs=1e-12)


def test_directions_are_since_the_beginning_of_the_run_and_not_of_the_round():
    strategy = find_method("pfedgraph", gram_alpha=1.0)
    begun = vectors([0.0, 0.0], [0.0, 0.0])
    state = strategy.init(begun)
    # in this round both go up; since the beginning one has gone right and one up
    later, trained = vectors([8.0, 0.0], [0.0, 8.0]), vectors([8.0, 0.0], [0.0, 9.0])
    done = server_step(strategy, state, later, trained, federation(), round=2)
    assert done.server_state is state
    assert done.client_models["a"]["w"].tolist() == pytest.approx([4.0, 4.5])
    assert done.client_models["b"]["w"].tolist() == pytest.approx([0.0, 9.0])


@given(st.integers(2, 6), st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_a_row_solves_the_papers_program(n, seed):
    draws = np.random.default_rng(seed)
    p, alpha = draws.dirichlet(np.ones(n)), float(draws.uniform(0.2, 3))
    distances = -cosines(np.cov(draws.normal(size=(n, 8))))[0]
    row = project_onto_simplex(p - distances / (2 * alpha))
    assert row.sum() == pytest.approx(1) and (row >= 0).all()

    def cost(m):
        return m @ distances + alpha * ((m - p) ** 2).sum()

    best = minimize(
        cost,
        p,
        bounds=[(0, 1)] * n,
        constraints=[{"type": "eq", "fun": lambda m: m.sum() - 1}],
        options={"ftol": 1e-12},
    )
    assert cost(row) <= best.fun + 1e-8


def test_a_change_of_length_zero_is_like_nobody_elses():
    assert cosines(np.array([[4.0, 0.0], [0.0, 0.0]])).tolist() == [[1, 0], [0, 1]]


LAYERS = ("layer.0.q", "layer.1.q")


def adapters(seed, ranks=(2, 4, 3)):
    draw = torch.Generator().manual_seed(seed)
    return {
        client: {
            key: tensor
            for module in LAYERS
            for key, tensor in (
                (f"{module}.lora_A", torch.randn(rank, 7, generator=draw)),
                (f"{module}.lora_B", torch.randn(5, rank, generator=draw)),
            )
        }
        | {"head.weight": torch.randn(2, 7, generator=draw)}
        for client, rank in zip("abc", ranks)
    }


def changes(before, after, *keys):
    """Every client's dense change in these tensors, or modules, as one vector."""

    def value(params, key):
        if key in LAYERS:
            return 2 * (params[f"{key}.lora_B"].double() @ params[f"{key}.lora_A"].double())
        return params[key].double()

    return [
        torch.cat([(value(after[c], key) - value(before[c], key)).flatten() for key in keys]).numpy() for c in "abc"
    ]


def expected_rows(vectors, p, alpha=0.8):
    unit = np.stack([vector / np.linalg.norm(vector) for vector in vectors])
    return np.stack([project_onto_simplex(p + row / (2 * alpha)) for row in unit @ unit.T])


P = np.array([1, 3, 2]) / 6


@pytest.mark.parametrize(
    ("by", "key", "keys"),
    [
        ("all", "layer.0.q.lora_A", (*LAYERS, "head.weight")),
        ("all", "head.weight", (*LAYERS, "head.weight")),
        ("layer", "layer.1.q.lora_B", ("layer.1.q",)),
        ("layer", "head.weight", ("head.weight",)),
    ],
)
def test_in_product_space_a_matrix_follows_from_the_dense_changes_of_its_parameters(by, key, keys):
    before, after = adapters(0), adapters(1)
    matrix = rows(before, after, federation(weights=(1.0, 3.0, 2.0), layers=LAYERS), key, gram_by=by)
    assert matrix == pytest.approx(expected_rows(changes(before, after, *keys), P), abs=1e-9)


def test_heads_of_other_tasks_add_nothing_to_the_similarity_of_bodies():
    before, after = adapters(0, (3, 3, 3)), adapters(1, (3, 3, 3))
    fed = federation(weights=(1.0, 3.0, 2.0), tasks=("t", "t", "u"), layers=LAYERS)
    bodies = changes(before, after, *LAYERS)
    heads = changes(before, after, "head.weight")
    gram = np.stack(bodies) @ np.stack(bodies).T
    gram[:2, :2] += np.stack(heads[:2]) @ np.stack(heads[:2]).T
    gram[2, 2] += heads[2] @ heads[2]
    expected = np.stack([project_onto_simplex(P + row / 1.6) for row in cosines(gram)])
    assert rows(before, after, fed, "layer.0.q.lora_A") == pytest.approx(expected, abs=1e-9)
    assert rows(before, after, fed, "head.weight")[2].tolist() == [0, 0, 1]


def test_a_newcomer_begins_with_the_average_and_with_that_as_its_first_model():
    strategy = find_method("pfedgraph")
    models, fresh = vectors([4.0], [8.0]), {"c": {"w": torch.tensor([1.0])}}
    fed = federation(weights=(1.0, 3.0, 5.0))
    state = strategy.init(models)
    joined = strategy.initial_models(state, models, fresh, fed)
    assert joined["c"]["w"].tolist() == [7.0]
    state = strategy.extend_state(state, joined)
    assert {client: params["w"].item() for client, params in state["initial"].items()} == {"a": 4, "b": 8, "c": 7}


def test_layers_are_refused_in_one_line_where_there_are_none():
    strategy = find_method("pfedgraph", gram_by="layer")
    with pytest.raises(ConfigError, match=r"^w is in no layer, and .*; take another --strategy, --gram-by all"):
        strategy.check(vectors([1.0], [1.0]), federation())
    find_method("pfedgraph").check(vectors([1.0], [1.0]), federation())
