import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.decomposition import PCA

from atlas_fl.report.figure_rows import EVERY_CLIENT, convergence_rows, principal_components, sketch_rows
from atlas_fl.report.record import read_record


def test_the_mean_over_a_task_by_hand(make_run) -> None:
    run = make_run(tasks=1, clients_per_task=2, rounds=1)
    rows = convergence_rows(read_record(run))
    of_round = {row["client"]: row["value"] for row in rows if (row["series"], row["round"]) == ("validation score", 1)}
    assert of_round[EVERY_CLIENT] == pytest.approx((of_round["movie-0"] + of_round["movie-1"]) / 2)
    stored = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    assert of_round["movie-1"] in [row["primary"] for row in stored if row["client"] == "movie-1" and "primary" in row]


def test_principal_components_agree_with_scikit_learn() -> None:
    sketches = np.random.default_rng(0).normal(size=(2, 12, 30))
    mean, (one, two, shares) = sketches.mean(axis=0), principal_components(sketches)
    model = PCA(n_components=2, svd_solver="full").fit(mean)
    np.testing.assert_allclose(np.abs((one + two) / 2), np.abs(model.transform(mean)), atol=1e-10)
    np.testing.assert_allclose(np.abs(one), np.abs(model.transform(sketches[0])), atol=1e-10)
    np.testing.assert_allclose(shares, model.explained_variance_ratio_)


def test_two_clients_have_no_picture_of_their_sketches(make_run) -> None:
    assert sketch_rows(read_record(make_run(tasks=1, clients_per_task=2))) == []
    assert len(sketch_rows(read_record(make_run("three", tasks=1, clients_per_task=3)))) == 3
