"""Placing a newcomer: its sketches are those that the run would have taken, its rows are nobody else's."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from atlas_fl.client.fingerprint import FIRST, SECOND
from atlas_fl.clustering.result import Clustering, assign_client
from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.events import ignore
from atlas_fl.experiment.run import run_config
from atlas_fl.planning.place_client import _make_client, place_client
from atlas_fl.planning.planner import local_engine, make_plan
from atlas_fl.planning.task_discovery import collect_fingerprints
from atlas_fl.setup.assembly import assemble, load_clients
from atlas_fl.setup.options import fingerprint_options
from tests.runs.finished import FinishedRuns, Make

EASY = {
    **{"tasks": ("sms", "trec"), "fingerprint": "gradient", "min_reliability": "-0.99"},
    **{"similarity_threshold": "-0.99", "rounds": 1},
}
"""Nobody is undecided, so that the nearest cluster is always named."""


@pytest.fixture
def folder(config: Make, finished: FinishedRuns) -> Path:
    """A run of two clusters, of messages and of questions."""
    return finished(config(**EASY)).folder


@pytest.mark.parametrize("task", ["sms", "trec"])
def test_a_newcomer_of_a_task_belongs_to_its_cluster(folder: Path, task: str) -> None:
    found = place_client(folder, task=task)
    assert (found.name, found.examples) == (f"{task}-2", 24)
    label = found.placement.cluster
    assert found.members[label] == (f"{task}-0", f"{task}-1")
    assert found.placement.similarity.keys() == found.members.keys() == {0, 1}
    assert found.placement.similarity[label] == max(found.placement.similarity.values())


def test_a_client_of_the_run_that_is_asked_again_has_the_sketches_of_the_run(folder: Path, config: Make) -> None:
    chosen = config(**EASY)
    client = load_clients(chosen)[0]
    assembly = assemble(chosen, clients=(client,))
    (update,) = collect_fingerprints(assembly, local_engine(assembly, ignore), fingerprint_options(chosen))
    stored = load_file(folder / "plan.safetensors")
    for half, key in ((FIRST, "sketch/first"), (SECOND, "sketch/second")):
        np.testing.assert_allclose(update.params[half].numpy(), stored[key][0], atol=1e-3)
    clustering = Clustering.from_json(json.loads((folder / "plan.json").read_text())["clustering"])
    place = assign_client(clustering, update.params[FIRST].numpy(), update.params[SECOND].numpy())
    assert place.cluster == clustering.labels[0]
    assert place.reliability == pytest.approx(clustering.reliability[0], abs=1e-3)


def test_your_own_data(folder: Path, tmp_path: Path) -> None:
    lines = ["text,label", *(f"what is {word}?,{index % 2}" for index, word in enumerate("abcdefghijklmnopqrstuvw"))]
    (tmp_path / "own.csv").write_text("\n".join(lines))
    found = place_client(folder, task=f"own={tmp_path / 'own.csv'}", samples=10)
    assert (found.name, found.examples) == ("own-0", 10)
    # the run's clients have 24, and here are 12
    assert place_client(folder, task=f"own={tmp_path / 'own.csv'}").examples == 12


def test_no_row_of_a_client_of_the_run_is_used(config: Make) -> None:
    chosen = config(rounds=1, samples=200)
    held = {text for client in load_clients(chosen) for text in client.train.text}
    newcomer = _make_client(chosen, make_plan(config(rounds=1)), "movie", None)
    assert len(newcomer.train) == 200
    assert not held & set(newcomer.train.text)


def test_a_newcomer_goes_on_with_the_cuts_of_its_task(config: Make) -> None:
    chosen = config(tasks=("movie_ratings",), clients_per_task=3, rating_cuts=(-1.0, 1.0), rounds=1)
    newcomer = _make_client(chosen, make_plan(chosen), "movie_ratings", None)
    assert (newcomer.name, newcomer.task.num_labels) == ("movie_ratings-3", 2)
    assert newcomer.given is not None
    assert newcomer.train.label.tolist() == (newcomer.given > 1).tolist()
    with pytest.raises(ConfigError, match="the run has sources of one task, and a newcomer's rows would be of one"):
        _make_client(config(one_task=True), make_plan(chosen), "movie", None)


def test_a_run_without_clusters_is_refused_on_one_line(config: Make) -> None:
    local = run_config(config(strategy="local", rounds=1))
    with pytest.raises(ConfigError, match=r"has no clusters: strategy 'local' uses none, and a newcomer takes"):
        place_client(local.folder, task="movie")


def test_an_altered_config_is_refused(folder: Path) -> None:
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("sketch_dim = 64", "sketch_dim = 32"))
    with pytest.raises(CheckpointError, match=r"damaged file .*config\.toml"):
        place_client(folder, task="movie")
