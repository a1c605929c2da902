"""Very many clients: clusters by a sample, similarities and graph in blocks, as those of all pairs are."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from sklearn.metrics import adjusted_rand_score

from atlas_fl.aggregation.rules import StrategyOptions
from atlas_fl.clustering import cluster, sketch
from atlas_fl.clustering.blocks import (
    blocks_of,
    by_blocks,
    dense,
    from_blocks,
    from_plain,
    grow,
    pairs_inside,
    to_plain,
)
from atlas_fl.clustering.cluster import cluster_clients, oracle_clustering
from atlas_fl.clustering.labels import ClusteringSettings
from atlas_fl.clustering.result import Clustering, append_client, summarise_clusters
from atlas_fl.config import with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.methods.registry import RULES
from atlas_fl.planning.task_discovery import TaskDiscovery, make_client_graph
from tests.aggregation.federations import federation_of, server_step
from tests.clustering.conftest import make_planted

SETTINGS = ClusteringSettings(seed=0, draws=19)


@contextmanager
def at_most(clients: int) -> Iterator[None]:
    """Compare all pairs of so many clients at most."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (cluster, sketch):
            patch.setattr(module, "MOST_EXACT", clients)
        yield


def by_sample(first: np.ndarray, second: np.ndarray, *, most: int, **settings: Any) -> Clustering:
    with at_most(most):
        return cluster_clients(first, second, settings=replace(SETTINGS, **settings))


def test_blocks_by_hand() -> None:
    labels = np.array([1, 0, -1, 1, 0, 1, 2, 1, 1])
    assert [block.tolist() for block in blocks_of(labels, most=3)] == [[1, 4], [0, 3, 5], [7, 8, 6]]
    assert [block.tolist() for block in blocks_of(labels, most=9)] == [[1, 4, 0, 3, 5, 7, 8, 6]]
    assert not np.concatenate(blocks_of(np.full(3, -1), most=2)).size


@pytest.mark.parametrize("seed", range(3))
def test_every_decided_client_is_in_one_block_and_none_is_too_large(seed: int) -> None:
    labels = np.random.default_rng(seed).integers(-1, 40, size=700) ** 2 // 60 - 1
    blocks = blocks_of(labels)
    assert sorted(np.concatenate(blocks).tolist()) == np.flatnonzero(labels >= 0).tolist()
    assert max(map(len, blocks)) <= 128
    whole = [label for label in set(labels[labels >= 0].tolist()) if (labels == label).sum() <= 128]
    assert all(sum(label in labels[block] for block in blocks) == 1 for label in whole), "small clusters are not cut"


def test_a_sparse_matrix_holds_what_is_inside_blocks_and_is_the_same_from_json() -> None:
    blocks, draw = [np.array([0, 3]), np.array([2, 1])], np.random.default_rng(0)
    parts = [draw.random((2, 2)) for _ in blocks]
    matrix = from_blocks(blocks, parts, 5)
    full = np.zeros((5, 5))
    for block, part in zip(blocks, parts, strict=True):
        full[np.ix_(block, block)] = part
    np.testing.assert_array_equal(dense(matrix, np.arange(5)), full)
    seen: list[list[int]] = []

    def look(part: np.ndarray, places: np.ndarray) -> np.ndarray:
        seen.append(places.tolist())
        return part * places

    np.testing.assert_array_equal(dense(by_blocks(matrix, look), np.arange(5)), full * np.arange(5))
    assert sorted(seen) == [[0, 3], [1, 2], [4]]
    np.testing.assert_array_equal(by_blocks(full, look), full * np.arange(5))
    for one in (matrix, full):
        again = from_plain(to_plain(one))
        assert type(again) is type(one)
        np.testing.assert_array_equal(dense(again, np.arange(5)), full)
        np.testing.assert_array_equal(pairs_inside(one, np.array([0, 3])), full[[0], [3]])
        np.testing.assert_array_equal(dense(grow(one, np.arange(6.0)), np.arange(6))[-1], np.arange(6))
        np.testing.assert_array_equal(dense(grow(one, np.arange(6.0)), np.arange(5)), full)


def test_a_sample_finds_the_clusters_of_all_pairs() -> None:
    first, second, tasks = make_planted([90, 70, 50, 2])
    exact, sampled = cluster_clients(first, second, settings=SETTINGS), by_sample(first, second, most=60)
    assert adjusted_rand_score(tasks, exact.labels) == adjusted_rand_score(exact.labels, sampled.labels) == 1.0
    assert sampled.structure["found"] and sampled.k_table and sampled.method == exact.method
    np.testing.assert_allclose(sampled.reliability, exact.reliability)
    np.testing.assert_allclose(np.abs(sampled.points), np.abs(exact.points), atol=1e-9)
    np.testing.assert_allclose(sampled.centroids, exact.centroids, atol=1e-6)
    assert isinstance(sampled.similarity, csr_array)
    rows, columns = sampled.similarity.nonzero()
    np.testing.assert_allclose(sampled.similarity[rows, columns], exact.similarity[rows, columns], atol=1e-12)
    told = [
        summarise_clusters(one, clients=[str(k) for k in range(212)], tasks=tasks, losses={})
        for one in (exact, sampled)
    ]
    for one, other in zip(*told, strict=True):
        assert one["clients"] == other["clients"]
        assert one["cohesion"] == pytest.approx(other["cohesion"], abs=1e-12)
    assert sampled.warnings[0].startswith("212 clients: 60 drawn at random were clustered, the others assigned; ")
    assert not isinstance(exact.similarity, csr_array) and not exact.warnings


@pytest.mark.slow
def test_a_thousand_clients_have_the_clusters_of_all_pairs() -> None:
    first, second, tasks = make_planted([100] * 10)
    exact, sampled = cluster_clients(first, second, settings=SETTINGS), by_sample(first, second, most=300)
    assert adjusted_rand_score(tasks, exact.labels) == adjusted_rand_score(exact.labels, sampled.labels) == 1.0


def test_permuting_very_many_clients_permutes_their_clusters() -> None:
    first, second, _ = make_planted([40, 30, 20])
    order = np.random.default_rng(1).permutation(90)
    found, permuted = by_sample(first, second, most=30), by_sample(first[order], second[order], most=30)
    assert adjusted_rand_score(np.array(found.labels)[order], permuted.labels) == 1.0
    np.testing.assert_array_equal(found.reliability[order], permuted.reliability)
    pairs = permuted.similarity.toarray()
    np.testing.assert_allclose(pairs, found.similarity.toarray()[np.ix_(order, order)], atol=1e-12)


def test_clients_that_no_cluster_of_the_sample_is_like_are_clustered_among_themselves() -> None:
    for rare in ([6, 6], [6]):
        first, second, tasks = make_planted([200, *rare], signal=0.7)
        sampled = by_sample(first, second, most=20)
        assert adjusted_rand_score(tasks, sampled.labels) == 1.0 and sampled.structure["found"]


def test_without_structure_very_many_clients_are_one_cluster_or_each_alone() -> None:
    first, second, _ = make_planted([90])
    one = by_sample(first, second, most=30)
    assert set(one.labels) == {0} and not one.structure["found"]
    first, second, _ = make_planted([1] * 90)
    alone = by_sample(first, second, most=30)
    assert len(set(alone.labels)) == 90 and not alone.structure["found"]


def test_very_many_undecided_clients_are_told() -> None:
    first, second, _ = make_planted([50, 40])
    noise = np.random.default_rng(3).normal(size=(2, 5, 256))
    found = by_sample(np.concatenate([first, noise[0]]), np.concatenate([second, noise[1]]), most=30)
    assert found.labels[-5:] == (-1,) * 5 and -1 not in found.labels[:-5]
    assert found.warnings[0].startswith("5 undecided (clients 90, 91, 92, 93, 94): ")
    assert not found.similarity[range(90, 95)].nnz and not found.similarity[:, range(90, 95)].nnz


def test_clusters_below_the_smallest_size_join_the_most_similar_one_of_very_many() -> None:
    draw = np.random.default_rng(0)
    first, second, _ = make_planted([50, 40], signal=0.9)
    # two clients between the groups, nearer to the second
    between = [0.4 * half[0] + 0.6 * half[60] + draw.normal(size=(2, 256)) * 0.02 for half in (first, second)]
    halves = [np.concatenate([half, more]) for half, more in zip((first, second), between, strict=True)]
    own = by_sample(*halves, most=30, threshold=0.9)
    joined = by_sample(*halves, most=30, threshold=0.9, min_cluster_size=5)
    assert own.labels[-1] not in own.labels[:90]
    assert joined.labels[-2:] == (joined.labels[60],) * 2
    assert "2 clients of clusters below min_cluster_size joined the most similar others" in joined.warnings


@pytest.mark.parametrize("clusters", ["auto", "3"])
@pytest.mark.parametrize("method", ["silhouette", "cosine"])
def test_other_methods_assign_by_the_nearest_centroid(method: str, clusters: str) -> None:
    first, second, tasks = make_planted([60, 50, 40])
    found = by_sample(first, second, most=40, cluster_by=method, clusters=clusters)
    assert adjusted_rand_score(tasks, found.labels) == 1.0 and len(found.centroids) == 1


def test_very_many_clients_that_are_alike_behind_a_common_part_are_one_cluster() -> None:
    draw = np.random.default_rng(2)
    halves = [10 + draw.normal(size=(90, 256)) for _ in range(2)]
    exact, sampled = cluster_clients(*halves, settings=replace(SETTINGS, centre=True)), None
    sampled = by_sample(*halves, most=30, centre=True)
    assert exact.alike == sampled.alike == 0 and set(exact.labels) == set(sampled.labels) == {0}
    assert set(sampled.similarity.data.tolist()) == {1.0}


def test_very_many_clients_are_clustered_again_with_the_labels_of_before() -> None:
    first, second, tasks = make_planted([40, 30, 20])
    with at_most(30):
        before = cluster_clients(first, second, settings=SETTINGS)
        moved = replace(before, labels=tuple(2 - label for label in before.labels))
        again = cluster_clients(first, second, settings=SETTINGS, previous=moved)
        true = oracle_clustering(first, second, tasks=tasks, settings=replace(SETTINGS, clusters="oracle"))
    assert again.labels == moved.labels
    assert adjusted_rand_score(tasks, true.labels) == 1.0 and isinstance(true.similarity, csr_array)


def test_a_newcomer_of_very_many_is_beside_the_block_of_its_cluster() -> None:
    first, second, _ = make_planted([160, 30])
    newcomer = [half[[5]] for half in make_planted([160, 30], seed=0)[:2]]
    found = by_sample(first, second, most=60)
    halves = np.stack([np.concatenate([half, new]) for half, new in zip((first, second), newcomer, strict=True)])
    label = found.labels[5]
    grown = append_client(found, halves, label=label)
    last = [k for k, one in enumerate(found.labels) if one == label][-1]
    beside = [*found.similarity[[last]].indices.tolist(), 190]
    assert sorted(grown.similarity[[190]].indices.tolist()) == sorted(beside)
    exact = append_client(cluster_clients(first, second, settings=SETTINGS), halves, label=label)
    np.testing.assert_allclose(grown.similarity[[190]].toarray()[0, beside], exact.similarity[190, beside], atol=1e-12)
    np.testing.assert_array_equal(dense(grown.similarity, np.arange(190)), dense(found.similarity, np.arange(190)))


def graph_of(found: Clustering, sketches: np.ndarray, **settings: str) -> Any:
    """The graph of a clustering of clients of one task."""
    size = len(found.labels)
    names, task = tuple(f"c{k}" for k in range(size)), SimpleNamespace(task=SimpleNamespace(name="one"))
    config = with_values(find_preset("null", dial=0), {"strategy": "atlas_laplacian", **settings})
    assembly: Any = SimpleNamespace(config=config, names=names, clients=(task,) * size)
    discovery = TaskDiscovery(
        labels=found.labels, clustering=found, report={}, warmed_models={}, sketches=sketches, notes=()
    )
    engine: Any = None
    return make_client_graph(assembly, engine, discovery).adjacency


@pytest.mark.parametrize("neighbours", ["0", "3"])
def test_the_graph_in_blocks_is_that_of_all_pairs_where_clusters_are_not_cut(neighbours: str) -> None:
    first, second, _ = make_planted([60, 50, 40, 1])
    found = cluster_clients(first, second, settings=SETTINGS), by_sample(first, second, most=50)
    exact, blocks = (graph_of(one, np.stack([first, second]), neighbours=neighbours) for one in found)
    assert isinstance(blocks, csr_array)
    difference = np.abs(blocks.toarray() - exact)
    assert difference[:150, :150].max() < 0.05, "alpha is one over 2, and by all pairs one over their median"
    assert ((blocks.toarray() > 0) == (exact > 0))[:150, :150].mean() > 0.99


def test_twelve_hundred_clients_in_seconds() -> None:
    """Clusters, graph, the plan's JSON and a server step of more clients than are compared with each other."""
    first, second, tasks = make_planted([400, 350, 300, 150], dim=64, signal=0.8)
    found = cluster_clients(first, second, settings=SETTINGS)
    assert adjusted_rand_score(tasks, found.labels) == 1.0
    again = Clustering.from_json(json.loads(json.dumps(found.to_json())))
    np.testing.assert_array_equal(again.similarity.toarray(), found.similarity.toarray())
    edges = graph_of(found, np.stack([first, second]))
    assert edges.nnz < 1200 * 128 and not (edges != edges.T).nnz
    names = [f"c{k}" for k in range(1200)]
    models = {name: {"head.weight": torch.from_numpy(row)} for name, row in zip(names, first, strict=True)}
    federation = federation_of(names, clusters=found.labels, adjacency=edges)
    for strategy, centre in (("fedavg_cluster", 0.0), ("atlas_laplacian", 0.9)):
        mixed = server_step(RULES[strategy](StrategyOptions(eta=0.1)), {}, models, models, federation, round=1)
        after = np.stack([mixed.client_models[name]["head.weight"].numpy() for name in names])
        means = np.stack([first[np.array(tasks) == task].mean(axis=0) for task in tasks])
        expected = means + centre * (first - means)
        assert np.linalg.norm(after - expected) < 0.03 * np.linalg.norm(first - means), strategy
