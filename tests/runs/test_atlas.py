"""The default strategy: clusters predicted by clusters until it has measured, kriging from then on, over cuts too."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atlas_fl.config import Config, with_values
from atlas_fl.config.schema import MixingConfig
from atlas_fl.experiment.run import run_config
from atlas_fl.methods.kriging import Kriging
from atlas_fl.setup.options import strategy_of
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors

pytestmark = pytest.mark.core

ATLAS = {"strategy": "atlas", "measure_round": 2}


def starts(folder: Path, round: int) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / f"audit/round-{round:04}/start.safetensors"))


def test_clusters_that_fit_and_have_nothing_in_common_are_averaged_to_the_bit(config: Make) -> None:
    result = run_config(config(**ATLAS))
    clustered = run_config(config(strategy="fedavg_cluster", name="clustered")).folder
    for round in (1, 2):
        assert same_tensors(starts(result.folder, round), starts(clustered, round))
    passing_audit(result.folder)
    told = [row["variance_over_noise"] for one in result.summary["sharing"].values() for row in one.values()]
    assert max(told) < 1, "the reason that a run gives"


@pytest.mark.slow
def test_clusters_that_are_after_the_same_share_before_they_are_measured(config: Make, tmp_path: Path) -> None:
    """Two tasks of the same texts, one of them under other names of its labels."""
    places = [
        f"text,label\n{rows_of('good' if name == 'a' else 'yes', 'bad' if name == 'a' else 'no')}" for name in "ab"
    ]
    for name, text in zip("ab", places, strict=True):
        (tmp_path / f"{name}.csv").write_text(text)
    tasks = tuple(f"{name}={tmp_path}/{name}.csv" for name in "ab")
    same = {"tasks": ("a", "b"), "task": tasks, "clients_per_task": 3, "clusters": "oracle"}
    same |= {"local_epochs": 4, "lr": 0.02}
    folder = run_config(config(**ATLAS, **same)).folder
    clustered = run_config(config(strategy="fedavg_cluster", name="clustered", **same)).folder
    mine, apart = starts(folder, 1), starts(clustered, 1)
    adapters = [key for key in mine if "lora" in key]
    assert not all(torch.equal(mine[key], apart[key]) for key in adapters)
    assert all(torch.equal(mine[key], apart[key]) for key in mine.keys() - adapters), "heads stay inside their task"
    passing_audit(folder)


def rows_of(first: str, second: str) -> str:
    """Two hundred and forty short reviews with these two labels."""
    return "\n".join(
        f"this film number {k} is {('lovely', 'awful')[k % 2]},{(first, second)[k % 2]}" for k in range(240)
    )


@pytest.mark.slow
def test_a_cluster_that_contradicts_itself_comes_apart_when_it_is_measured(config: Make) -> None:
    forced = {"tasks": ("sms", "movie"), "clients_per_task": 4, "flipped_clients": 0.5, "local_epochs": 4, "lr": 0.02}
    result = run_config(config(**ATLAS, **forced))
    clustered = run_config(config(strategy="fedavg_cluster", name="clustered", **forced)).folder
    kriging = run_config(config(**{**ATLAS, "strategy": "kriging"}, within="clusters", name="kriging", **forced)).folder
    for round, is_average in ((1, True), (2, False)):
        assert same_tensors(starts(result.folder, round), starts(clustered, round)) is is_average
    assert same_tensors(starts(result.folder, 2), starts(kriging, 2))
    sharing = result.summary["sharing"]
    assert (
        min(sharing[f"sms-{k}"][group]["variance_over_noise"] for k in range(4) for group in ("adapters", "head")) > 1
    )
    told = {client: row["adapters"]["variance_over_noise"] for client, row in sharing.items()}
    assert told["movie-0"] == told["movie-3"] != told["sms-0"] == told["sms-3"], "of its cluster, not over all"
    passing_audit(result.folder)


def test_adapters_that_differ_by_less_than_their_noise_are_averaged_over_all_to_the_bit_and_heads_are_not(
    config: Make,
) -> None:
    """Reviews, in which a model that has read nothing finds nothing: what tells clients apart is noise."""
    settings = {"tasks": ("movie",), "clients_per_task": 4, "clusters": "4"}
    result = run_config(config(**ATLAS, **settings))
    average = run_config(config(strategy="fedavg", name="average", **settings)).folder
    kriging = run_config(config(**{**ATLAS, "strategy": "kriging"}, name="kriging", **settings)).folder
    mine, of_all, predicted = (starts(folder, 2) for folder in (result.folder, average, kriging))
    adapters = [key for key in mine if "lora" in key]
    assert adapters and all(torch.equal(mine[key], of_all[key]) for key in adapters)
    assert not all(torch.equal(predicted[key], of_all[key]) for key in adapters)
    assert all(torch.equal(mine[key], predicted[key]) for key in mine.keys() - adapters), "each is a cluster of its own"
    assert not all(torch.equal(mine[key], of_all[key]) for key in mine.keys() - adapters)
    assert all(row["adapters"]["variance_over_noise"] < 1 for row in result.summary["sharing"].values())
    passing_audit(result.folder)


@pytest.mark.slow
def test_a_cut_client_is_measured_through_its_cut(config: Make) -> None:
    words = {**ATLAS, "pack_tokens": 1}  # who is cut is in no pack
    whole, cut = (run_config(config(**words, split=split, name=f"cut-{split}")).folder for split in ("none", "1"))
    assert same_tensors(starts(whole, 2), starts(cut, 2)), "where a model is cut changes nothing of it"
    came_back = dict.fromkeys((0, 1, 2), 0)
    for row in rows(cut, "ledger"):
        came_back[row["round"]] += row["bytes"] if row["kind"] == "gradient" else 0
    assert came_back[1] > 0
    # as many steps on each half, whose batches are smaller where passes end
    assert 2.5 * came_back[1] < came_back[2] < 3 * came_back[1]
    passing_audit(cut)


def test_it_is_the_default() -> None:
    assert MixingConfig().strategy == "atlas"


@pytest.mark.parametrize(
    ("rounds", "personal", "asked", "measured"), [(12, 0, 4, 4), (3, 0, 4, 1), (4, 0, 4, 4), (5, 2, 4, 1), (1, 0, 4, 1)]
)
def test_it_measures_after_a_third_of_a_run_that_is_too_short(
    rounds: int, personal: int, asked: int, measured: int
) -> None:
    settings = {"rounds": rounds, "personal_rounds": personal, "measure_round": asked}
    strategy = strategy_of(with_values(Config(), settings))
    assert isinstance(strategy, Kriging)
    assert strategy.first_measured_round == measured


def test_a_short_run_is_measured_and_audited(config: Make) -> None:
    folder = run_config(config(strategy="atlas", rounds=2)).folder
    assert {row["round"] for row in rows(folder) if row.get("event") == "sharing measured"} == {1}
    passing_audit(folder)
