"""Laws of every way to cluster, over the registry."""

from functools import lru_cache

import numpy as np
import pytest

from atlas_fl.clustering.cluster import cluster_clients
from atlas_fl.clustering.labels import ClusteringSettings
from atlas_fl.clustering.result import agreement, assign_client


def unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def noisy(clean, rng, *, signal=0.5):
    """Unit sketches of two halves whose expected reliability is `signal`."""
    noise = [unit(rng.normal(size=clean.shape)) for _ in range(2)]
    return tuple(unit(np.sqrt(signal) * clean + np.sqrt(1 - signal) * each) for each in noise)


@lru_cache
def world(name, *, dim=512, seed=3):
    """Both halves (n, dim) and the true task of each client; the structureless ones have no truth to find."""
    rng = np.random.default_rng([seed, *name.encode()])
    directions = unit(rng.normal(size=(12, dim)))
    if name in PLANTED:
        tasks = np.repeat(np.arange(len(PLANTED[name])), PLANTED[name])
        return *noisy(directions[tasks], rng), tuple(f"task{task}" for task in tasks)
    clean = {
        # every client's examples are dealt from all tasks: all do the same
        "shuffled tasks": np.repeat(unit(directions[:3].sum(axis=0, keepdims=True)), 9, axis=0),
        "a task for each": directions[:9],
        # what a client learned from one half says nothing about the other
        "shuffled labels": np.zeros((9, dim)),
    }[name]
    return *noisy(clean, rng, signal=0.5 if clean.any() else 0.0), ("none",) * 9


WAYS = ("corrected", "silhouette")
"""Both ways to cluster; `atlas` searches k as `silhouette` does, by another score."""
PLANTED = {"3 x 3": (3, 3, 3), "uneven": (5, 2, 4), "two": (4, 3)}
STRUCTURELESS = ("shuffled tasks", "a task for each", "shuffled labels")


def settings(method):
    return ClusteringSettings(seed=1, cluster_by=method, k_range=(2, 4), draws=19)


@lru_cache
def clustered(method, name):
    first, second, _ = world(name)
    return cluster_clients(first, second, settings=settings(method))


def same_partition(left, right):
    return agreement(left, [str(label) for label in right])["ari"] == 1


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_tasks_are_found(method, name):
    found = clustered(method, name)
    assert agreement(found.labels, world(name)[2]) == pytest.approx({"purity": 1, "ari": 1, "nmi": 1})
    assert found.structure["found"] and not any("no structure" in line for line in found.warnings)


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("name", STRUCTURELESS)
def test_shuffled_clients_have_no_structure(method, name):
    found = clustered(method, name)
    assert not found.structure["found"] and any(line.startswith("no structure: ") for line in found.warnings)
    if name == "shuffled labels":
        assert set(found.labels) == {-1}
    elif method == "corrected" and name == "a task for each":
        assert found.labels == tuple(range(9))
    else:
        assert set(found.labels) == {0}


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("name", ["uneven", "a task for each"])
def test_permuting_clients_permutes_results_to_the_last_bit(method, name):
    first, second, _ = world(name)
    order = np.random.default_rng(0).permutation(len(first))
    whole, permuted = clustered(method, name), cluster_clients(first[order], second[order], settings=settings(method))
    assert same_partition(np.array(whole.labels)[order].tolist(), permuted.labels)
    assert (permuted.similarity == whole.similarity[np.ix_(order, order)]).all()
    assert (permuted.reliability == whole.reliability[order]).all() and (permuted.points == whole.points[order]).all()
    assert permuted.k_table == whole.k_table and permuted.structure == whole.structure


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize(
    ("taken", "labels"), [([0] * 5, (0,) * 5), ([0, 0, 0, 3, 3, 3, 6, 6, 6], (0, 0, 0, 1, 1, 1, 2, 2, 2))]
)
def test_copies_of_a_client_share_its_cluster(method, taken, labels):
    first, second, _ = world("3 x 3")
    found = cluster_clients(first[taken], second[taken], settings=settings(method))
    assert same_partition(found.labels, labels) and found.structure["found"] == (len(set(taken)) > 1)
    assert min(found.labels) == 0


@pytest.mark.parametrize("method", WAYS)
def test_the_same_input_gives_the_same_result_and_stays_as_it_was(method):
    first, second, _ = world("two")
    before = first.copy(), second.copy()
    assert cluster_clients(first, second, settings=settings(method)).to_json() == clustered(method, "two").to_json()
    assert (first == before[0]).all() and (second == before[1]).all()


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("name", ["3 x 3", "uneven"])
def test_members_are_predicted_into_their_own_cluster(method, name):
    first, second, _ = world(name)
    found = clustered(method, name)
    assert [assign_client(found, *pair).cluster for pair in zip(first, second, strict=True)] == list(found.labels)


@pytest.mark.parametrize("method", WAYS)
def test_labels_survive_clustering_again(method):
    first, second, _ = world("two")
    again = cluster_clients(first, second, settings=settings(method), previous=clustered(method, "two"))
    assert again.labels == clustered(method, "two").labels
