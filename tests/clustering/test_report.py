from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from atlas_fl.clustering.cluster import oracle_clustering
from atlas_fl.clustering.labels import ClusteringSettings
from atlas_fl.clustering.result import agreement, purity_warnings, summarise_clusters


def test_purity_by_hand():
    # majorities 2 of 3 and 2 of 2
    scores = agreement([0, 0, 0, 1, 1], ["a", "a", "b", "b", "b"])
    assert scores["purity"] == pytest.approx(4 / 5)
    # contingency [[2, 1], [0, 2]]: pairs 2; rows 3 + 1, columns 1 + 3, all 10: (2 - 1.6) / (4 - 1.6)
    assert scores["ari"] == pytest.approx(1 / 6)
    assert scores["nmi"] == pytest.approx(normalized_mutual_info_score([0, 0, 0, 1, 1], [0, 0, 1, 1, 1]))


def test_an_undecided_client_is_a_cluster_of_its_own_but_not_pure():
    labels, truth = [0, 0, -1, -1], ["a", "b", "b", "b"]
    scores = agreement(labels, truth)
    assert scores["purity"] == 0.5
    assert scores["ari"] == pytest.approx(adjusted_rand_score(truth, [0, 0, 1, 2]))
    assert agreement([-1, -1], ["a", "a"]) == pytest.approx({"purity": 0, "ari": 0, "nmi": 0})


def test_agreement_does_not_depend_on_names():
    assert agreement([5, 5, 2], ["x", "x", "y"]) == pytest.approx({"purity": 1, "ari": 1, "nmi": 1})


SKETCHES = np.eye(2)[[0, 0, 1]]


def found(*tasks):
    settings = ClusteringSettings(seed=0, clusters="oracle")
    return oracle_clustering(SKETCHES, SKETCHES, tasks=tasks, settings=settings)


def test_summary_of_each_cluster():
    names = ["a-0", "a-1", "b-0"]
    pair, single = summarise_clusters(
        found("a", "a", "b"), clients=names, tasks=["a", "z", "b"], losses={"a-0": 0.5, "a-1": 0.7}
    )
    assert pair == {
        "cluster": 0, "size": 2, "clients": ["a-0", "a-1"], "tasks": {"a": 1, "z": 1}, "purity": 0.5,
        "reliability": 1.0, "cohesion": 1.0, "difficulty": pytest.approx(0.6),
    }  # fmt: skip
    assert single["clients"] == ["b-0"] and "cohesion" not in single and "difficulty" not in single


def test_undecided_clients_are_summarised_last():
    clustering = replace(found("a", "a", "b"), labels=(-1, 0, 0))
    rows = summarise_clusters(clustering, clients=["x", "y", "z"], tasks=["a", "a", "b"], losses={})
    assert [(row["cluster"], row["size"]) for row in rows] == [(0, 2), (-1, 1)]


def test_low_purity_is_named():
    rows = [
        {"cluster": 0, "size": 3, "purity": 1 / 3, "tasks": {"a": 1, "b": 1, "c": 1}},
        {"cluster": 1, "size": 2, "purity": 1.0, "tasks": {"d": 2}},
        {"cluster": -1, "size": 2, "purity": 0.5, "tasks": {"a": 1, "b": 1}},
    ]
    (line,) = purity_warnings(rows)
    assert line == "cluster 0 mixes tasks: 1 of 3 clients on a, a purity of 0.33 below 0.7"
