"""Laws of the Laplacian, every average and both spaces, on random graphs and models."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atlas_fl.aggregation.distances import gram_distances, update_gram
from atlas_fl.aggregation.matrices import average, drop_edges, laplacian, laplacian_step
from atlas_fl.aggregation.rules import StrategyOptions, mix
from tests.aggregation.federations import adapters_of, dense_update
from tests.examples import examples


def dirichlet_energy(gram, adjacency):
    """1/4 sum_kl a_kl ||Delta_k - Delta_l||^2, whose gradient is the Laplacian step."""
    return float((adjacency * gram_distances(gram)).sum()) / 4


@st.composite
def graphs(draw):
    """A random symmetric graph, some edges absent, and the labels of two blocks."""
    size = draw(st.integers(2, 7))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = rng.random((size, size)) * (rng.random((size, size)) < draw(st.sampled_from([0.3, 0.7, 1.0])))
    weights = np.triu(weights, 1)
    return weights + weights.T, rng.integers(0, 2, size), rng


def everyone(graph):
    return np.ones(len(graph), bool)


@given(case=graphs(), eta=st.floats(0, 1.5))
@examples(60)
def test_laplacian_steps(case, eta):
    graph, blocks, rng = case
    step = laplacian_step(graph, eta=eta, present=everyone(graph))
    assert step.sum(axis=1) == pytest.approx(np.ones(len(graph)))
    values = rng.normal(size=(len(graph), 3))
    mixed = step @ values
    degree = graph.sum(axis=1)
    assert degree @ mixed == pytest.approx(degree @ values)
    if eta <= 1:
        assert (step >= -1e-12).all(), "one minus weights that add up to one may round below zero"
    inside = laplacian_step(drop_edges(graph, blocks), eta=eta, present=everyone(graph))
    assert not inside[blocks[:, None] != blocks[None, :]].any(), "no flow across blocks"
    assert (laplacian_step(graph, eta=0.0, present=everyone(graph)) == np.eye(len(graph))).all()


@given(case=graphs(), part=st.floats(0.05, 0.95))
@examples(60)
def test_a_step_inside_the_bound_lowers_the_dirichlet_energy(case, part):
    graph, _, rng = case
    bound = eta_bound(graph)
    if not np.isfinite(bound):
        return
    step = laplacian_step(graph, eta=part * bound, present=everyone(graph))
    values = rng.normal(size=(len(graph), 3))
    before, after = (dirichlet_energy(one @ one.T, graph) for one in (values, step @ values))
    assert after < before


def eta_bound(adjacency):
    """2 / lambda_max(L): differences between clients shrink for 0 < eta below it; infinity without edges."""
    root = np.sqrt(adjacency.sum(axis=1))
    matrix = root[:, None] * laplacian(adjacency) / np.where(root > 0, root, 1.0)[None, :]
    largest = float(np.linalg.eigvalsh((matrix + matrix.T) / 2)[-1]) if len(matrix) else 0.0
    return 2.0 / largest if largest > 1e-12 else float("inf")


@given(case=graphs(), absent=st.integers(0, 2**7))
@examples(60)
def test_averages(case, absent):
    _, blocks, rng = case
    present = np.array([not absent >> k & 1 for k in range(len(blocks))])
    weights = rng.integers(1, 100, len(blocks)).astype(float)
    matrix = average(weights, blocks, present)
    assert matrix.sum(axis=1) == pytest.approx(np.ones(len(blocks)))
    assert (matrix >= 0).all()
    assert not matrix[blocks[:, None] != blocks[None, :]].any()
    for label in set(blocks.tolist()):
        inside = np.flatnonzero(blocks == label)
        if present[inside].any():
            assert (matrix[inside] == matrix[inside[0]]).all(), "everyone in a group gets the same"
            assert not matrix[:, ~present][inside].any(), "nobody absent counts"
        else:
            assert (matrix[inside] == np.eye(len(blocks))[inside]).all()


def models(ranks, seed=0):
    return adapters_of([f"c{k}" for k in range(len(ranks))], ranks, seed=seed)


def run(held, matrix, space, align="pad"):
    return mix(held, lambda _: matrix, tuple(held), StrategyOptions(space=space, align=align)).by_client


@pytest.mark.parametrize("space", ["factors", "product"])
@pytest.mark.parametrize("align", ["pad", "truncate"])
def test_a_low_rank_client_moves(space, align):
    held = models((1, 12, 5))
    graph = np.ones((3, 3)) - np.eye(3)
    mixed = run(held, laplacian_step(graph, eta=0.1, present=everyone(graph)), space, align)
    for client, params in held.items():
        shift = (dense_update(mixed[client]) - dense_update(params)).norm() / dense_update(params).norm()
        assert shift > 1e-3, client
        assert mixed[client]["q.lora_A"].shape == params["q.lora_A"].shape


@pytest.mark.parametrize("space", ["factors", "product"])
def test_models_come_closer(space):
    held = models((10, 10, 10))  # full rank: nothing is cut off
    graph = np.array([[0, 1, 0], [1, 0, 3], [0, 3, 0]], float)
    mixed = run(held, laplacian_step(graph, eta=0.3, present=everyone(graph)), space)
    energies = [dirichlet_energy(update_gram(one, tuple(held), lambda _: 2.0), graph) for one in (held, mixed)]
    assert energies[1] < energies[0]


@given(ranks=st.lists(st.integers(1, 14), min_size=2, max_size=4), seed=st.integers(0, 2**32))
@examples(40)
def test_product_space_equals_the_dense_reference_for_any_ranks(ranks, seed):
    held = models(ranks, seed % 2**31)
    rng = np.random.default_rng(seed)
    matrix = rng.random((len(ranks), len(ranks)))
    matrix /= matrix.sum(axis=1, keepdims=True)
    mixed = run(held, matrix, "product")
    updates = [dense_update(params).numpy() for params in held.values()]
    for k, params in enumerate(mixed.values()):
        exact = sum(weight * one for weight, one in zip(matrix[k], updates))
        left, values, right = np.linalg.svd(exact)
        rank = min(ranks[k], 10)
        least = np.linalg.norm(values[rank:])  # no approximation of this rank is nearer (Eckart and Young)
        distance = np.linalg.norm(dense_update(params).numpy() - exact)
        assert distance <= least + 1e-5 * np.linalg.norm(exact)
        gap = values[rank - 1] - values[rank] if rank < 10 else values[rank - 1]
        if gap > 1e-2 * values[0]:
            best = (left[:, :rank] * values[:rank]) @ right[:rank]
            assert np.linalg.norm(dense_update(params).numpy() - best) <= 1e-4 * np.linalg.norm(exact)


@pytest.mark.parametrize("space", ["factors", "product"])
def test_mixing_leaves_its_inputs_untouched(space):
    held = models((2, 4, 3))
    copies = {client: {key: tensor.clone() for key, tensor in one.items()} for client, one in held.items()}
    matrix = np.full((3, 3), 1 / 3)
    run(held, matrix, space)
    assert all(torch.equal(held[client][key], copies[client][key]) for client in held for key in held[client])
    assert (matrix == 1 / 3).all()


@pytest.mark.parametrize("space", ["factors", "product"])
def test_mixing_twice_gives_the_same_bits(space):
    matrix = np.array([[0.6, 0.2, 0.2], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])
    first, second = (run(models((2, 4, 3)), matrix, space) for _ in range(2))
    assert all(torch.equal(first[client][key], second[client][key]) for client in first for key in first[client])
