"""Runs whose clusters are joined by what labels ask: who is averaged with whom, and where a newcomer goes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from atlas_fl.experiment.run import RunResult, run_config
from atlas_fl.planning.place_client import place_client
from atlas_fl.planning.planner import local_engine
from atlas_fl.planning.task_discovery import collect_fingerprints
from atlas_fl.setup.assembly import assemble
from atlas_fl.setup.options import fingerprint_options
from atlas_fl.storage.run_folder import RunFolder
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import passing_audit

TWO_SOURCES = {
    **{"tasks": ("movie", "trec"), "clusters": "auto", "similarity_threshold": "0.5", "fingerprint_batches": 6},
    **{"sketch_dim": 256, "strategy": "fedavg_cluster", "space": "factors", "rounds": 2},
}
ANYTHING = {"merge_similarity": "-0.99"}
"""A random model's features say little of labels: here every cluster is joined with every other."""


def clustering_of(result: RunResult) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RunFolder(result.folder).plan.read_text())["clustering"]
    return found


def adapters_agree(folder: Path) -> bool:
    """Whether a client of either task begins round two with the same adapters."""
    start = load_file(folder / "audit/round-0002/start.safetensors")
    pairs = [(key, key.replace("movie-0", "trec-0")) for key in start if "movie-0" in key and "lora" in key]
    assert pairs
    return all(torch.equal(start[left], start[right]) for left, right in pairs)


@pytest.fixture
def joined(config: Make, finished: FinishedRuns) -> RunResult:
    return finished(config(**TWO_SOURCES, **ANYTHING))


@pytest.mark.slow
def test_clusters_that_are_joined_are_averaged(config: Make, finished: FinishedRuns, joined: RunResult) -> None:
    alone = finished(config(**TWO_SOURCES, name="apart"))
    apart = clustering_of(alone)
    assert apart["labels"] == [0, 0, 1, 1] and apart["before_merging"] == []
    together = clustering_of(joined)
    assert together["labels"] == [0, 0, 0, 0] and together["before_merging"] == [0, 0, 1, 1]
    assert together["similarity"] == apart["similarity"]
    assert adapters_agree(joined.folder) and not adapters_agree(alone.folder)
    passing_audit(joined.folder)
    notes = json.loads(RunFolder(joined.folder).plan.read_text())["notes"]
    assert sum("labels vary alike" in note for note in notes) == 1


@pytest.mark.slow
def test_a_threshold_that_nothing_reaches_leaves_the_run_as_it_is(config: Make, finished: FinishedRuns) -> None:
    apart = finished(config(**TWO_SOURCES, name="apart"))
    strict = finished(config(**TWO_SOURCES, merge_similarity="0.99", name="strict"))
    assert clustering_of(strict)["labels"] == clustering_of(apart)["labels"]
    assert strict.summary["overall"] == apart.summary["overall"]


@pytest.mark.slow
def test_a_newcomer_goes_to_the_cluster_that_its_own_was_joined_into(joined: RunResult) -> None:
    for task in ("movie", "trec"):
        found = place_client(joined.folder, task=task)
        assert found.placement.cluster in (0, -1)
        assert list(found.placement.similarity) == [0] and list(found.members) == [0]


@pytest.mark.slow
def test_a_client_that_joins_later_stands_in_both_lists(config: Make) -> None:
    result = run_config(config(**{**TWO_SOURCES, **ANYTHING}, arrive=("trec-1=2",)))
    later = [json.loads(path.read_text())["clustering"] for path in sorted(result.folder.rglob("plan*.json"))]
    assert any(len(one["labels"]) == len(one["before_merging"]) == 4 for one in later if one["before_merging"])
    passing_audit(result.folder)


def test_sketches_of_labels_come_from_every_client(config: Make) -> None:
    chosen = config(**TWO_SOURCES, **ANYTHING)
    assembly = assemble(chosen)
    updates = collect_fingerprints(assembly, local_engine(assembly, lambda _: None), fingerprint_options(chosen))
    for update in updates:
        assert np.linalg.norm(update.params["sketch.labels"].numpy()) == pytest.approx(1, abs=1e-5)
