import csv
import io
import re

import numpy as np
import pandas as pd
import pytest

from atlas_fl.errors import CheckpointError
from atlas_fl.report.score_table import comparison_rows, comparison_table, tasks_table, to_csv, to_latex
from tests.report.test_tables import printed, summary_of


@pytest.fixture
def runs(make_run):
    """Three strategies by three seeds; the federated ones are better by what is given."""
    gains = {"local": 0.0, "fedavg_cluster": 0.05, "atlas": 0.08}
    return [
        make_run(f"{name}-{seed}", strategy=name, gain=gain, seed=seed, sends=name != "local")
        for name, gain in gains.items()
        for seed in (1, 2, 3)
    ]


def by_strategy(runs) -> dict:
    return {"local": runs[:3], "fedavg_cluster": runs[3:6], "atlas": runs[6:]}


def test_comparison_agrees_with_pandas(runs) -> None:
    frame = pd.DataFrame(
        [
            {"strategy": summary["run"]["strategy"], "seed": summary["run"]["seed"], "client": client}
            | {"score": entry["final"]["test"]["primary"]}
            for summary in map(summary_of, runs)
            for client, entry in summary["clients"].items()
        ]
    )
    per_seed = frame.groupby(["strategy", "seed"])["score"].mean()
    worst = frame.groupby(["strategy", "seed"])["score"].min().groupby("strategy").mean()
    wide = frame.pivot(index=["seed", "client"], columns="strategy", values="score")
    rows = {row.name: row for row in comparison_rows(by_strategy(runs))}
    assert list(rows) == ["local", "fedavg_cluster", "atlas"]
    for name, row in rows.items():
        assert row.seeds == 3
        assert row.mean == pytest.approx(per_seed[name].mean())
        assert row.std == pytest.approx(np.std(per_seed[name], ddof=1))
        assert row.worst == pytest.approx(worst[name])
        assert row.gain_over_local == pytest.approx((wide[name] - wide["local"]).mean())
    assert rows["local"].bytes_up == 0
    assert rows["atlas"].bytes_up == pytest.approx(np.mean([summary_of(run)["bytes"]["up"] for run in runs[6:]]))
    assert set(rows["atlas"].tasks) == {"movie", "trec", "pairs"}


def test_best_is_another_score_than_final(runs) -> None:
    final, best = (comparison_rows(by_strategy(runs), score=score)[2] for score in ("final", "best"))
    summaries = [summary_of(run)["overall"]["best"]["test"]["primary"] for run in runs[6:]]
    assert best.mean == pytest.approx(np.mean(summaries))
    assert best.mean != final.mean


def test_gain_compares_the_same_seeds_only(runs) -> None:
    groups = {"local": runs[:1], "atlas": runs[6:]}
    atlas = comparison_rows(groups)[1]
    own, local = summary_of(runs[6])["clients"], summary_of(runs[0])["clients"]
    expected = np.mean(
        [own[name]["final"]["test"]["primary"] - local[name]["final"]["test"]["primary"] for name in own]
    )
    assert atlas.gain_over_local == pytest.approx(expected)
    assert comparison_rows({"atlas": runs[6:]})[0].gain_over_local is None
    given = comparison_rows({"atlas": runs[6:]}, local={"atlas": runs[:1]})[0]
    assert given.gain_over_local == pytest.approx(expected)


def test_one_seed_has_no_deviation(runs) -> None:
    row = comparison_rows({"atlas": runs[6:7]})[0]
    assert (row.seeds, row.std) == (1, None)


def test_an_unfinished_run_is_named_with_the_remedy(runs) -> None:
    (runs[0] / "summary.json").unlink()
    text = f"run {runs[0]} is not complete: it has no summary.json; atlas resume {runs[0]}"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        comparison_rows({"local": runs[:3]})


def test_the_comparison_is_printed_in_eighty_columns_with_the_best_in_bold(runs) -> None:
    rows = comparison_rows(by_strategy(runs))
    table = comparison_table(rows)
    assert "…" not in printed(table)
    assert "gain over local: " not in printed(table)
    assert [row[2].is_bold for row in table.rows] == [
        row.mean == max(other.mean or 0 for other in rows) for row in rows
    ]


def test_a_comparison_without_local_says_why_there_is_no_gain_over_it(runs) -> None:
    rows = comparison_rows(by_strategy(runs), local={})
    assert "gain over local: - where no run of strategy local" in printed(comparison_table(rows))


def test_the_tasks_of_a_comparison_are_a_table_of_their_own(runs) -> None:
    rows = comparison_rows(by_strategy(runs))
    text = printed(tasks_table(rows))
    assert all(f"{score:.3f}" in text for row in rows for score in row.tasks.values())


def test_csv_holds_every_digit(runs) -> None:
    rows = comparison_rows(by_strategy(runs))
    read = list(csv.DictReader(io.StringIO(to_csv(rows))))
    for line, row in zip(read, rows, strict=True):
        assert line["name"] == row.name
        assert float(line["mean"]) == row.mean
        assert float(line["task:movie"]) == row.tasks["movie"]
    alone = comparison_rows({"atlas": runs[6:7]})
    assert next(iter(csv.DictReader(io.StringIO(to_csv(alone)))))["std"] == ""


def test_latex_is_escaped_and_complete(runs) -> None:
    lines = to_latex(comparison_rows(by_strategy(runs))).splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrrrrr}"
    assert lines[5].startswith(r"fedavg\_cluster & 0.")
    assert all(line.count("&") == 7 for line in lines if "&" in line)
    assert lines[-1] == r"\end{tabular}"
