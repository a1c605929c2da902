"""Methods compared over seeds, from run folders of invented numbers; pandas and scipy say the same."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from atlas_fl.errors import CheckpointError, ConfigError, DataError
from atlas_fl.report.comparison_tables import first_tables, shown
from atlas_fl.report.finished_runs import read_finished_run
from atlas_fl.report.method_comparison import (
    MethodComparison,
    compare_methods,
    compare_scores,
    comparison_sentence,
    describe_runs,
    variance_in_tasks,
)
from atlas_fl.report.table import text_of

Groups = Mapping[str, Sequence[Path]]


@pytest.fixture
def groups(make_run) -> Groups:
    """Three runs of different seeds by strategy."""
    gains = {"local": 0.0, "fedavg_cluster": 0.05, "atlas": 0.08}
    return {
        name: [
            make_run(f"{name}-{seed}", strategy=name, gain=gain, seed=seed, sends=name != "local") for seed in (1, 2, 3)
        ]
        for name, gain in gains.items()
    }


@pytest.fixture
def comparison(groups) -> MethodComparison:
    return compare_methods(groups)


def scores(groups: Groups) -> pd.DataFrame:
    rows = []
    for name, folders in groups.items():
        for folder in folders:
            summary = json.loads((folder / "summary.json").read_text())
            rows += [
                {"method": name, "seed": summary["run"]["seed"], "client": client}
                | {"score": entry["final"]["test"]["primary"]}
                for client, entry in summary["clients"].items()
            ]
    return pd.DataFrame(rows)


def test_a_method_is_described_as_pandas_does(groups, comparison) -> None:
    frame = scores(groups)
    wide = frame.pivot(index=["seed", "client"], columns="method", values="score")
    means = frame.groupby(["method", "seed"])["score"].mean()
    assert (comparison.control, len(comparison.seeds)) == ("fedavg_cluster", 3)
    for name, row in comparison.rows.items():
        assert row.statistics.mean == pytest.approx(means[name].mean())
        assert row.statistics.std == pytest.approx(means[name].std())
        assert row.statistics.hurt == pytest.approx((wide[name] < wide["local"]).mean())
        if name != "fedavg_cluster":
            assert row.hurt_by_control == pytest.approx((wide[name] < wide["fedavg_cluster"]).mean())
    assert comparison.rows["fedavg_cluster"].hurt_by_control is None
    by_task = frame.assign(task=frame["client"].str.rsplit("-", n=1).str[0]).groupby(["method", "task"])["score"].mean()
    assert comparison.rows["atlas"].tasks == pytest.approx(by_task["atlas"].to_dict())


def test_one_sentence_says_who_is_ahead(groups, comparison) -> None:
    mean = {name: row.statistics.mean for name, row in comparison.rows.items()}
    ahead, behind = mean["atlas"] - mean["fedavg_cluster"], mean["fedavg_cluster"] - mean["local"]
    clients = len(comparison.clients)
    chance = "p 0.25, not significant"
    assert comparison_sentence(comparison) == (
        f"atlas is ahead of fedavg_cluster by {ahead:.3f} (better on {clients} of {clients} clients, {chance};"
        " 3 seeds cannot show less than 0.25);"
        f" local is behind it by {behind:.3f} (better on 0 of {clients} clients, {chance})"
    )
    one_seed = compare_methods({name: runs[:1] for name, runs in groups.items()}, control="local")
    assert comparison_sentence(one_seed).startswith("atlas is ahead of local by ")
    assert comparison_sentence(one_seed).endswith(f"(better on {clients} of {clients} clients, one seed)")
    same = compare_methods({"a": groups["local"], "b": groups["local"]}, control="a")
    assert comparison_sentence(same) == f"b is level with a (better on 0 of {clients} clients, p 1)"
    assert comparison_sentence(compare_methods({"a": groups["local"]})) == ""


def test_the_sentence_counts_the_methods_that_it_does_not_name(groups) -> None:
    many = {f"a{k}": groups["atlas"] for k in range(5)} | {f"f{k}": groups["fedavg_cluster"] for k in range(3)}
    compared = compare_methods({**many, "local": groups["local"]}, control="f0")
    assert comparison_sentence(compared).endswith("; the other 4: 1 ahead, 2 level, 1 behind")


def test_intervals_of_a_users_own_data_are_over_draws_of_test_examples(groups) -> None:
    draw = np.random.default_rng(0)
    noise = draw.normal(0, 0.05, 1000)  # of the examples, alike for all methods and seeds
    own = {"local": noise, "atlas": noise + draw.normal(0.1, 0.01, 1000)}
    read = {name: [read_finished_run(run).scores for run in groups[name]] for name in own}
    drawn = {
        name: [replace(run, resampled=dict.fromkeys(run.scores, own[name])) for run in runs]
        for name, runs in read.items()
    }
    compared = compare_scores(drawn, control="local")
    assert compared.by_examples and not compare_scores(read, control="local").by_examples
    low, high = compared.pairs["atlas"].interval
    assert (low, high) == pytest.approx((0.1 - 0.0196, 0.1 + 0.0196), abs=0.003)
    low, high = compared.rows["local"].statistics.interval
    assert high - low == pytest.approx(4 * 0.05, abs=0.02)
    assert compared.pairs["atlas"].bayesian.right == 1 and shown(compared.pairs["atlas"]) == "better"
    assert f"clients, 95% {compared.by_examples['atlas'][0]:+.3f} to " in comparison_sentence(compared)
    one_seed = compare_scores({name: runs[:1] for name, runs in drawn.items()}, control="local")
    assert comparison_sentence(one_seed).endswith(")") and "95% +0.08" in comparison_sentence(one_seed)
    level = compare_scores({"local": drawn["local"], "same": drawn["local"]}, control="local")
    assert shown(level.pairs["same"]) == "equal" and "within noise" in comparison_sentence(level)
    for seeds in (1, 3):  # of two methods that end in the same models all draws are alike, and there is no interval
        same = compare_scores(dict.fromkeys(("a", "b"), drawn["local"][:seeds]), control="a")
        texts = [text_of(cell) for table in first_tables(same) for row in table.rows for cell in row]
        assert any("±" in text for text in texts) and not any("±0.000" in text for text in texts)
    rows = drawn["atlas"][1:] + read["atlas"][:1]  # a row of a file has no draws
    assert not compare_scores({**drawn, "atlas": rows}, control="local").by_examples


def test_a_sweep_is_described_as_a_comparison_is_and_hurts_nobody(groups, comparison) -> None:
    described = describe_runs({name: [read_finished_run(run).scores for run in runs] for name, runs in groups.items()})
    for name, row in described.rows.items():
        assert (row.statistics.hurt, row.hurt_by_control) == (None, None)
        assert replace(row.statistics, hurt=0) == replace(comparison.rows[name].statistics, hurt=0)
        assert (row.tasks, row.loss, row.num_bytes) == (
            comparison.rows[name].tasks,
            comparison.rows[name].loss,
            comparison.rows[name].num_bytes,
        )


def test_the_best_round_has_other_scores_than_the_last(groups, comparison) -> None:
    best = compare_methods(groups, score="best").rows["atlas"]
    means = [json.loads((run / "summary.json").read_text())["overall"]["best"] for run in groups["atlas"]]
    assert best.statistics.mean == pytest.approx(np.mean([mean["test"]["primary"] for mean in means]))
    assert best.statistics.mean != comparison.rows["atlas"].statistics.mean


def test_an_unfinished_run_is_named_with_the_remedy(groups) -> None:
    run = groups["local"][0]
    (run / "summary.json").unlink()
    text = f"run {run} is not complete: it has no summary.json; atlas resume {run}"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        compare_methods(groups)


def test_a_pair_is_tested_as_scipy_does(groups, comparison) -> None:
    means = scores(groups).groupby(["method", "seed"])["score"].mean()
    for name, pair in comparison.pairs.items():
        differences = np.asarray(means[name]) - np.asarray(means["fedavg_cluster"])
        assert pair.differences == pytest.approx(differences.tolist())
        low, high = stats.ttest_1samp(differences, 0).confidence_interval()
        assert pair.interval == pytest.approx((low, high))
        assert pair.least_p == 0.25
    assert comparison.pairs.keys() == {"local", "atlas"}


def test_hurt_is_against_local_the_average_and_the_control(groups) -> None:
    renamed = {"fedavg" if name == "fedavg_cluster" else name: runs for name, runs in groups.items()}
    compared = compare_methods({**renamed, "fedper": groups["atlas"]}, control="atlas")
    values = {name: np.array(rows) for name, rows in compared.scores.items()}
    for name, row in compared.rows.items():
        assert row.statistics.hurt == pytest.approx((values[name] < values["local"]).mean())
        average, control = (values[name] < values["fedavg"]).mean(), (values[name] < values["atlas"]).mean()
        assert row.hurt_by_average == (None if name == "fedavg" else pytest.approx(average))
        assert row.hurt_by_control == (None if name == "atlas" else pytest.approx(control))
    assert {row.hurt_by_average for row in compare_methods(groups).rows.values()} == {None}, "there is no fedavg"


def test_one_seed_is_described_and_not_tested(groups) -> None:
    comparison = compare_methods({name: folders[:1] for name, folders in groups.items()})
    assert comparison.pairs == {}
    assert comparison.rows["atlas"].statistics.interval is None


def test_what_does_not_pair_is_refused(groups) -> None:
    with pytest.raises(ConfigError, match="--control is fedprox; allowed: one of the compared, local, fedavg_cluster,"):
        compare_methods(groups, control="fedprox")
    with pytest.raises(DataError, match=r"atlas has the seeds \[.*\] and local \[.*\]; pairs need the same"):
        compare_methods({**groups, "atlas": groups["atlas"][:2]})


def test_the_variance_between_clients_of_a_task_by_hand() -> None:
    """Of .6 and .8 it is .02, of .5, .6 and .7 .01; a task with one client has none: (.02 + .01) / 2 in both seeds."""
    scores = np.array([[0.6, 0.8, 0.5, 0.6, 0.7, 0.1], [0.8, 0.6, 0.7, 0.6, 0.5, 0.9]])
    assert variance_in_tasks(scores, ["a", "a", "b", "b", "b", "c"]) == pytest.approx(0.015)
    assert variance_in_tasks(scores, list("abcdef")) is None
