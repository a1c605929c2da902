"""What every method of the literature must hold as a run: being a row of `METHODS` is being tested."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atlas_fl.experiment.run import run_config
from atlas_fl.methods.registry import METHODS
from tests.runs.covering import covering_methods, first_of_each_rule, with_marks
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import audited, rows, same_tensors

SMALL: Mapping[str, Any] = {
    **{"samples": 16, "rounds": 2, "eval_every": 2, "pack_tokens": 1, "audit": False},
    **{"lr": 0.05, "batch_size": 4, "local_epochs": 2, "validation_samples": 4, "test_samples": 4},
}
"""Steps so large that scores tell what a method does. Packs of one, so that sums do not follow the clients' order; they
make every example a pass of its own, so that few are scored."""
OF_CLIENTS = ("trained_parts", "head_epochs", "rate_factor", "prior_correction", "proximal_mu", "personal_rounds")
"""Settings of a method that say how a client trains by itself."""
NOT_LOCAL_ALONE = {
    "centralized": "its one client has another name, and so other draws",
    **dict.fromkeys(
        ("fedlease", "fedlease_router"), "clients begin with the adapters of the warm-up that clusters them"
    ),
    "fedpac": "features are pulled to the means of the client's own classes",
    **dict.fromkeys(("apfl", "ditto", "feddpa"), "scores are of a second model, beside the one that is mixed"),
    **dict.fromkeys(("fedsb", "ravan"), "what trains stands between factors that local training does not have"),
    **dict.fromkeys(("fedalt", "fedalt_fixed"), "the adapter stands beside a frozen one, of nobody else"),
    "ilora": "the adapter begins in the frozen weights, and a round turns it",
    "hilora": "the client trains another adapter from level to level",
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
    own = {name: trains[name] for name in OF_CLIENTS if trains.get(name, "core") != "core"}
    # factors that do not train are not to be drawn anew by product space
    kept = {name: row.settings[name] for name in ("space", "split", "importance") if name in row.settings}
    local = {**SMALL, **alone, **own, **kept, "ranks": words["ranks"], "strategy": "local", "name": "local"}
    result, reference = run_config(config(**words)), finished(config(**local))
    if method == "centralized":
        assert {client for client, _ in losses(result.folder)} == {"movie-all"}
        return
    assert same_losses(result.folder, reference.folder) == (method not in NOT_LOCAL_ALONE), "see NOT_LOCAL_ALONE"


Settings = Mapping[str, Any]
FACTORS: Settings = {"space": "factors", "ranks": "4"}
FEDAVG: Settings = {**FACTORS, "strategy": "fedavg"}
FEDIT: Settings = {"strategy": "fedit", "ranks": "4"}
BEGIN_ALIKE: Mapping[str, tuple[Settings, Settings]] = {
    "scaffold": ({"strategy": "scaffold", "ranks": "4"}, FEDAVG),
    "feddyn": (
        {"strategy": "feddyn", "ranks": "4", "proximal_mu": 0.1},
        {**FACTORS, "strategy": "fedprox", "proximal_mu": 0.1},
    ),
    "flora": ({**FEDIT, "strategy": "flora"}, FEDIT),
    "fedex": ({**FEDIT, "strategy": "fedex"}, FEDIT),
    "fedsvd": ({**FEDIT, "strategy": "fedsvd"}, {**FEDAVG, "trained_parts": "B", "rate_factor": 4.0}),
    "fedmomentum": ({**FEDIT, "strategy": "fedmomentum"}, {**FEDIT, "strategy": "flexlora"}),
}
"""Methods that have nothing to correct in round one, each with the one that it then is."""
ALONE: Settings = {**FACTORS, "clients_per_task": 1, "tasks": "movie"}
PAIR: Settings = {**FACTORS, "tasks": "movie"}
END_ALIKE: Mapping[str, tuple[Settings, Settings]] = {
    "scaffold of one client": ({**ALONE, "strategy": "scaffold"}, {**ALONE, "strategy": "fedavg"}),
    "ifca of one client": ({**ALONE, "strategy": "ifca"}, {**ALONE, "strategy": "local"}),
    "ifca of one cluster": (
        {"strategy": "ifca", "ranks": "4", "ifca_clusters": 1},
        {"strategy": "fedavg", "ranks": "4"},
    ),
    "factors that are not rotated": ({**FEDIT, "strategy": "fedrot", "rotation_strength": 0.0}, FEDIT),
    "products of one rank": ({**FEDIT, "strategy": "raflora"}, {**FEDIT, "strategy": "flexlora"}),
    "own models without a pull": ({**FEDAVG, "personal_models": True}, {"strategy": "local", "ranks": "4"}),
    "second models without a pull": (
        {**PAIR, "strategy": "fedavg", "second_model": "proximal", "second_weight": 0.0},
        {**PAIR, "strategy": "local"},
    ),
}


def trained(folder: Path, round: int) -> dict[str, Tensor]:
    return audited(folder, round, "trained")[0]


@pytest.mark.core
@pytest.mark.parametrize("method", BEGIN_ALIKE)
def test_a_method_trains_as_another_in_round_one_and_not_in_round_two(config, finished, method: str) -> None:
    ours, theirs = (finished(config(**one, name=one["strategy"])).folder for one in BEGIN_ALIKE[method])
    assert same_tensors(trained(ours, 1), trained(theirs, 1))
    assert not any(torch.equal(tensor, trained(theirs, 2)[key]) for key, tensor in trained(ours, 2).items())
    if method == "fedex":
        assert same_tensors(*audited(ours, 1, "start"), *audited(theirs, 1, "start")), "the factors are those of FedIT"


@pytest.mark.core
@pytest.mark.parametrize("case", END_ALIKE)
def test_a_method_that_has_nothing_to_do_ends_in_the_bits_of_a_plain_one(config, finished, case: str) -> None:
    ours, theirs = (finished(config(**one, name=one["strategy"])).folder for one in END_ALIKE[case])
    files = sorted(path.relative_to(theirs) for path in theirs.glob("adapters/*/adapter_model.safetensors"))
    assert files and all((ours / path).read_bytes() == (theirs / path).read_bytes() for path in files)


@pytest.mark.slow
@pytest.mark.parametrize("method", with_marks(METHODS, first_of_each_rule() - {"centralized"}))
def test_permuting_clients_permutes_scores(config: Make, method: str) -> None:
    # one device for all: profiles go by place, and with another device a client arrives at another time
    small = {**words_of(method), "samples": 8, "local_epochs": 1, "devices": ("laptop_8gb",)}
    orders = (("movie", "trec"), ("trec", "movie"))
    straight, turned = (run_config(config(**small, tasks=tasks, name="-".join(tasks))) for tasks in orders)
    first = next(str(row["client"]) for row in rows(turned.folder) if "client" in row)
    assert first.startswith("trec"), "the order of the clients is another one"
    assert same_losses(straight.folder, turned.folder)
