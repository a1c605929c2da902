"""Mixing rows of very many clients: the same as those of the whole matrix."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from atlas_fl.aggregation import matrices
from atlas_fl.aggregation.matrices import Federation, Rows, average, choose_rows, identity, without_edges
from atlas_fl.aggregation.mixing import components_of, groups_of
from atlas_fl.aggregation.rules import RoundModels, StrategyOptions
from atlas_fl.methods import kriging
from atlas_fl.methods.method import Method
from atlas_fl.methods.registry import RULES
from tests.aggregation.federations import adapters_of, federation_of, server_step


@contextmanager
def at_most(clients: int) -> Iterator[None]:
    """Take whole matrices of so many clients at most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrices, "MOST_DENSE", clients)
        patch.setattr(kriging, "MOST_EXACT", clients)
        patch.setattr(kriging, "MOST_PREDICTED", clients)
        yield


def members(groups: Any) -> set[tuple[Any, ...]]:
    """Groups of rows, in no order."""
    return {
        (group.sources, targets, *np.round(row, 12).tolist())
        for group in groups
        for row, targets in zip(group.rows, group.targets, strict=True)
    }


def test_rows_of_averages_by_hand() -> None:
    weights, present = np.array([1.0, 3.0, 5.0, 2.0]), np.array([True, True, False, False])
    with at_most(3):
        rows = average(weights, np.array([0, 0, 0, 1]), present)
    assert isinstance(rows, Rows)
    assert np.asarray(rows).tolist() == [[0.25, 0.75, 0, 0]] * 3 + [[0, 0, 0, 1]]
    assert members(groups_of(rows)) == {((0, 1), (0, 1, 2), 0.25, 0.75)}
    assert rows[1].tolist() == [0.25, 0.75, 0, 0] and rows[np.array([3])].tolist() == [[0, 0, 0, 1]]


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_the_matrix(seed: int) -> None:
    draw = np.random.default_rng(seed)
    weights, groups, present = draw.random(30) + 0.1, draw.integers(8, size=30), draw.random(30) < 0.5
    others = draw.integers(2, size=30)
    whole = [average(weights, one, present, max_share=0.6) for one in (groups, others)]
    with at_most(29):
        rows = [average(weights, one, present, max_share=0.6) for one in (groups, others)]
        own = identity(30)
    assert isinstance(own, Rows) and np.array_equal(np.asarray(own), np.eye(30)) and not groups_of(own)
    for one, other in zip(whole, rows, strict=True):
        np.testing.assert_allclose(np.asarray(other), one, atol=1e-15)
        assert members(groups_of(other)) == members(groups_of(np.asarray(one)))
        np.testing.assert_allclose(0.5 * np.eye(30) + 0.5 * other, 0.5 * np.eye(30) + 0.5 * np.asarray(one), atol=1e-15)
        assert components_of(other) == components_of(np.asarray(one))
    chosen = draw.random(30) < 0.5
    both = choose_rows(chosen, *rows)
    assert isinstance(both, Rows)
    np.testing.assert_allclose(np.asarray(both), np.where(chosen[:, None], *whole), atol=1e-15)
    np.testing.assert_allclose(choose_rows(chosen, rows[0], whole[1]), np.where(chosen[:, None], *whole), atol=1e-15)


NAMES = [f"c{k}" for k in range(12)]


def clustered(*, sparse: bool = False) -> Federation:
    """Twelve clients of three clusters and two tasks, one of them undecided, with a graph inside clusters."""
    draw, clusters = np.random.default_rng(0), np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, -1])
    edges = np.where((clusters[:, None] == clusters) & (clusters >= 0), draw.random((12, 12)), 0.0)
    edges = np.triu(edges, 1) + np.triu(edges, 1).T
    return federation_of(
        NAMES,
        weights=draw.integers(5, 50, size=12),
        clusters=clusters,
        tasks=["x", "y"] * 6,
        adjacency=csr_array(edges) if sparse else edges,
        importance=np.full((12, 1), 1.0),
        layer_of={"q": 0},
    )


@pytest.mark.parametrize(
    "name", ["local", "fedavg", "fedavg_cluster", "atlas_laplacian", "kriging", "pfedgraph", "cfl"]
)
def test_a_step_of_very_many_clients_is_that_of_the_whole_matrix(name: str) -> None:
    method = RULES[name](StrategyOptions(eta=0.3))
    before, after = adapters_of(NAMES, [3] * 12), adapters_of(NAMES, [3] * 12, seed=1)
    state = method.init(before)
    updates = {client: after[client] for client in NAMES[:9]}
    whole = server_step(method, state, before, updates, clustered(), round=1).client_models
    with at_most(11):
        rows = server_step(method, state, before, updates, clustered(sparse=True), round=1).client_models
    for client in NAMES:
        for key, tensor in whole[client].items():
            torch.testing.assert_close(rows[client][key], tensor, rtol=1e-5, atol=1e-6)


def test_a_refused_client_has_no_edges_in_a_sparse_graph() -> None:
    whole, sparse = (without_edges(clustered(sparse=one), {"c1", "c5"}).adjacency for one in (False, True))
    assert isinstance(whole, np.ndarray) and not isinstance(sparse, np.ndarray)
    np.testing.assert_array_equal(whole, sparse.toarray())
    assert not whole[1].any() and not whole[:, 5].any() and whole[0].any()


def halves_of(clients: int, groups: np.ndarray, *, noise: float, seed: int = 0) -> tuple[dict[str, Any], np.ndarray]:
    """The server state with halves of clients that are after their group's vector, and what each is after."""
    draw = np.random.default_rng(seed)
    centres = draw.standard_normal((groups.max() + 1, 24))
    theta = centres[groups] + 0.3 * draw.standard_normal((clients, 24))
    state: dict[str, Any] = {"initial": {}, "halves": {}}
    for k in range(clients):
        halves = theta[k] + noise * np.sqrt(2) * draw.standard_normal((2, 24))
        state["initial"][f"c{k}"] = {"head.w": torch.zeros(24)}
        state["halves"][f"c{k}"] = {
            part: {"head.w": torch.from_numpy(half)} for part, half in zip(("first", "second"), halves, strict=True)
        }
    return state, theta


def predicted(method: Method, state: dict[str, Any], federation: Federation, present: np.ndarray) -> np.ndarray:
    first = {name: halves["first"] for name, halves in state["halves"].items()}
    models = RoundModels(before=state["initial"], after=first, server_state=state)
    return np.asarray(method.matrices(federation, present.tolist(), round=9, models=models)("head.w"))


@pytest.mark.parametrize("name", ["kriging", "atlas"])
def test_predictions_in_one_block_are_those_of_all(name: str) -> None:
    groups = np.repeat([0, 1, 2], 12)
    state, _ = halves_of(36, groups, noise=0.5)
    clients = federation_of([f"c{k}" for k in range(36)], clusters=groups)
    for present in (np.ones(36, bool), np.arange(36) % 5 > 0):
        whole = predicted(RULES[name](), state, clients, present)
        with at_most(35):
            rows = predicted(RULES[name](), state, clients, present)
        np.testing.assert_allclose(rows, whole, atol=1e-9 if present.all() else 0.02)
        np.testing.assert_array_equal(rows[~present], np.eye(36)[~present])


@pytest.mark.slow
def test_predictions_in_blocks_are_as_near_to_what_clients_are_after_as_those_of_all() -> None:
    groups = np.repeat([0, 1, 2], 60)
    state, theta = halves_of(180, groups, noise=1.0)
    clients = federation_of([f"c{k}" for k in range(180)], clusters=groups)
    own = np.stack([(h["first"]["head.w"] + h["second"]["head.w"]).numpy() / 2 for h in state["halves"].values()])
    whole = predicted(RULES["kriging"](), state, clients, np.ones(180, bool))
    with at_most(128):
        rows = predicted(RULES["kriging"](), state, clients, np.ones(180, bool))
    assert np.abs(rows - whole).max() > 0.001, "the third cluster is a block of its own"
    assert not rows[120:, :120].any() and not rows[:120, 120:].any()
    risks = [float(np.square(one @ own - theta).sum(axis=1).mean()) for one in (np.eye(180), whole, rows)]
    assert risks[2] < 1.05 * risks[1] < 0.4 * risks[0]


def test_who_is_not_measured_of_very_many_is_given_the_average_of_its_cluster() -> None:
    groups = np.repeat([0, 1], 10)
    state, _ = halves_of(20, groups, noise=1.0)
    clients = federation_of([f"c{k}" for k in range(20)], weights=np.arange(1, 21), clusters=groups)
    models = RoundModels(before=state["initial"], after=state["initial"], server_state={"initial": state["initial"]})
    with at_most(15):
        rows = RULES["atlas"]().matrices(clients, [True] * 20, round=1, models=models)("head.w")
    assert isinstance(rows, Rows)
    np.testing.assert_allclose(np.asarray(rows)[0], [*np.arange(1, 11) / 55, *[0] * 10])
    assert RULES["atlas"]().measured({}, state, clients, lambda _: np.eye(20)), "of a few each has a row"
    with at_most(15):
        assert not RULES["atlas"]().measured({}, state, clients, lambda _: np.eye(20))


def test_who_is_not_measured_of_some_hundred_is_given_the_prediction_of_its_cluster(monkeypatch) -> None:
    groups = np.repeat([0, 1], 10)
    state, _ = halves_of(20, groups, noise=1.0)
    clients = federation_of([f"c{k}" for k in range(20)], clusters=groups)
    after = {name: {"head.w": halves["first"]["head.w"] + 3} for name, halves in state["halves"].items()}
    models = RoundModels(before=state["initial"], after=after, server_state={"initial": state["initial"]})
    rows = []
    for most in (20, 15):
        monkeypatch.setattr(kriging, "MOST_PREDICTED", most)
        rows.append(RULES["atlas"]().matrices(clients, [True] * 20, round=1, models=models)("head.w"))
    assert np.abs(rows[0][0, 10:]).max() > 0.001, "clusters predict each other"
    np.testing.assert_allclose(np.asarray(rows[1]), np.asarray(rows[0]))
