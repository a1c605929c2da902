"""What every method of the literature must hold as a run: being a row of `METHODS` is being tested."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from atlas_fl.config import Config
from atlas_fl.experiment.run import run_config
from atlas_fl.methods.registry import METHODS
from tests.runs.covering import covering_methods, with_marks
from tests.runs.finished import FinishedRuns
from tests.runs.reading import rows

Make = Callable[..., Config]
SMALL: Mapping[str, Any] = {
    **{"samples": 16, "rounds": 2, "eval_every": 2, "pack_tokens": 1, "audit": False},
    **{"lr": 0.05, "batch_size": 4, "local_epochs": 2, "validation_samples": 4, "test_samples": 4},
}
"""Steps so large that scores tell what a method does. Packs of one, so that sums do not follow the clients' order; they
make every example a pass of its own, so that few are scored."""
OF_CLIENTS = ("trained_parts", "prior_correction", "proximal_mu", "personal_rounds")
"""Settings of a method that say how a client trains by itself."""
NOT_LOCAL_ALONE = {
    **dict.fromkeys(("centralized", "multitask"), "its one client has another name, and so other draws"),
    "fedlease": "clients begin with the adapters of the warm-up that clusters them",
    "fedpac": "features are pulled to the means of the client's own classes",
    **dict.fromkeys(("ditto", "feddpa"), "scores are of a second model, pulled to the first or stacked on it"),
    **dict.fromkeys(("fedalt", "fedalt_fixed"), "the adapter stands beside a frozen one, of nobody else"),
}
"""Methods that are something else than local training where a client is alone, each with its reason."""
EQUAL = 1e-4
"""Relative difference of losses that float32 sums of another order may make."""


def words_of(method: str) -> dict[str, Any]:
    row = METHODS[method]
    personal = {"personal_rounds": 1} if "personal_rounds" in row.suggested else {}
    return {**SMALL, "strategy": method, "ranks": row.settings.get("ranks", "4"), **personal}


def losses(folder: Path) -> dict[tuple[str, str], float]:
    """The loss after the last round, by client and split."""
    return {
        (str(row["client"]), str(row["split"])): float(str(row["loss"]))
        for row in rows(folder)
        if row.get("round") == SMALL["rounds"] and "loss" in row and "client" in row
    }


def same_losses(folder: Path, other: Path) -> bool:
    ours, theirs = losses(folder), losses(other)
    assert ours and ours.keys() == theirs.keys()
    return all(loss == pytest.approx(theirs[key], rel=EQUAL) for key, loss in ours.items())


@pytest.mark.parametrize("method", with_marks(METHODS, {*covering_methods(), *NOT_LOCAL_ALONE}))
def test_one_client_trains_locally(config: Make, finished: FinishedRuns, method: str) -> None:
    row, alone = METHODS[method], {"clients_per_task": 1, "tasks": "movie"}
    words = {**words_of(method), **alone}
    trains = {**row.settings, **row.suggested, **words}
    own = {name: trains[name] for name in OF_CLIENTS if name in trains}
    # factors that do not train are not to be drawn anew by product space
    kept = {name: row.settings[name] for name in ("space", "split", "importance") if name in row.settings}
    local = {**SMALL, **alone, **own, **kept, "ranks": words["ranks"], "strategy": "local", "name": "local"}
    result, reference = run_config(config(**words)), finished(config(**local))
    if method in ("centralized", "multitask"):
        assert {client for client, _ in losses(result.folder)} == {"movie-all"}
        return
    assert same_losses(result.folder, reference.folder) == (method not in NOT_LOCAL_ALONE), "see NOT_LOCAL_ALONE"


@pytest.mark.slow
@pytest.mark.parametrize("method", with_marks(METHODS, covering_methods() - {"centralized", "multitask"}))
def test_permuting_clients_permutes_scores(config: Make, method: str) -> None:
    straight, turned = (
        run_config(
            config(**words_of(method) | {"samples": 8, "local_epochs": 1, "tasks": tasks, "name": "-".join(tasks)})
        )
        for tasks in (("movie", "trec"), ("trec", "movie"))
    )
    first = next(str(row["client"]) for row in rows(turned.folder) if "client" in row)
    assert first.startswith("trec"), "the order of the clients is another one"
    assert same_losses(straight.folder, turned.folder)
