"""The page of results, from run folders of invented numbers."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from atlas_fl.cli.main import main
from atlas_fl.errors import ConfigError
from atlas_fl.report.csv_text import unescape_cell
from atlas_fl.report.federation_ranks import rank_if_several
from atlas_fl.report.federation_results import federation_results
from atlas_fl.report.finished_runs import COLUMNS, find_finished_runs, read_csv, to_csv
from atlas_fl.report.statistics import compare_with_control
from tests.report.conftest import results_page

SECTIONS = ("what came out", "against fedavg", "score against costs")
GAINS = {"local": 0.0, "fedavg": 0.05, "fedper": 0.08}


def page_of(places: Sequence[Path], *, control: str) -> str:
    return results_page(find_finished_runs(places), control=control)


@pytest.mark.slow
def test_a_table_says_what_the_statistics_say(make_federation, tmp_path) -> None:
    make_federation(2)
    (result,) = federation_results(find_finished_runs([tmp_path]), control="fedavg")
    assert not result.incomplete
    scores = {name: np.array(values) for name, values in result.comparison.scores.items()}
    pair = compare_with_control(scores, control="fedavg", seed=0)["fedper"]
    page = page_of([tmp_path], control="fedavg")
    row = next(line for line in page.splitlines() if line.startswith("| `fedper` | +"))
    assert row.startswith(f"| `fedper` | {pair.mean:+.3f} | "), "all seeds differ by as much: there is no interval"
    assert "Means over 4 clients and the seeds 1, 2, 3." in page
    make_federation(2, gains={"flexlora": GAINS["fedavg"]})
    again = page_of([tmp_path], control="fedavg")
    assert "| `flexlora` | +0.000 |" in again
    start = page.index("## contradiction, dial 2: what came out\n\nfedper is ahead of fedavg by 0.0")
    about = "\n\nshare of the clients whose classes are reversed: 1/4.\n\nSettings of all its runs: lr=0.01.\n\n"
    assert page.index(about) == page.index("\n\n", start + 45)
    assert f"| `fedavg` | {scores['fedavg'].mean():.3f} ±" in page


@pytest.mark.slow
def test_the_same_folders_give_the_same_page(make_federation, tmp_path) -> None:
    make_federation(1)
    make_federation(3)
    assert page_of([tmp_path], control="fedavg") == page_of([tmp_path], control="fedavg")
    assert page_of([tmp_path, tmp_path], control="fedavg") == page_of([tmp_path], control="fedavg")


@pytest.mark.slow
def test_ranks_are_over_the_federations_by_hand(make_federation, tmp_path) -> None:
    make_federation(1)
    make_federation(3, gains={"local": 0.2, "fedavg": 0.1, "fedper": 0.0})
    results = federation_results(find_finished_runs([tmp_path]), control="fedavg")
    assert [result.title for result in results] == ["contradiction, dial 1", "contradiction, dial 3"]
    ranks = rank_if_several([result.comparison for result in results if result.comparison is not None])
    assert ranks is not None and ranks.average_ranks == {"local": 2.0, "fedavg": 2.0, "fedper": 2.0}
    assert "Note: 1 is the best of 2 federations; Friedman p" in page_of([tmp_path], control="fedavg")


@pytest.mark.slow
def test_at_a_glance_the_methods_stand_by_what_they_gain_on_average(make_federation, tmp_path) -> None:
    make_federation(1, gains={"local": 0.0, "fedavg": 0.05, "fedper": 0.2, "fedsa": 0.1})
    make_federation(3, gains={"local": 0.2, "fedavg": 0.1, "fedper": 0.0})
    results = federation_results(find_finished_runs([tmp_path]), control="fedavg")
    page = page_of([tmp_path], control="fedavg").splitlines()
    start = page.index("*At a glance*")
    head, control, *rows = page[start + 2], page[start + 4], *page[start + 5 : start + 8]
    assert head == "| method | contradiction, dial 1 | contradiction, dial 3 |"
    means = [result.comparison.rows["fedavg"].statistics.mean for result in results if result.comparison is not None]
    assert control == f"| `fedavg` | {means[0]:.3f} | {means[1]:.3f} |"
    gains = {
        name: np.mean(
            [one.comparison.pairs[name].mean for one in results if one.comparison and name in one.comparison.pairs]
        )
        for name in ("fedsa", "local", "fedper")
    }
    assert [row.split("`")[1] for row in rows] == sorted(gains, key=lambda name: -gains[name])
    (fedsa,) = (row for row in rows if row.startswith("| `fedsa` | +0.0"))
    assert fedsa.endswith(" | - |"), "the other federation has no run of it"


def test_a_method_that_lacks_seeds_is_named_and_in_no_table(make_federation, tmp_path) -> None:
    make_federation(2)
    make_federation(2, gains={"fedsa": 0.1}, seeds=(1,))
    page = page_of([tmp_path], control="fedavg")
    assert "fedsa lacks the seeds 2, 3, and is in no table." in page
    assert "| `fedsa` |" not in page


@pytest.mark.slow
def test_what_was_tuned_stands_beside_the_name(make_federation, tmp_path) -> None:
    make_federation(2)
    make_federation(2, gains={"fedper": 0.1}, lr=0.05)
    make_federation(2, gains={"fedper": 0.1}, seeds=(9001,), lr=0.02)
    (result,) = federation_results(find_finished_runs([tmp_path]), control="fedavg")
    assert set(result.comparison.rows) == {"local", "fedavg", "fedper lr=0.01", "fedper lr=0.05"}
    assert result.own_settings == {"local": "lr=0.01", "fedavg": "lr=0.01"}
    assert "Settings of each method: local lr=0.01, fedavg lr=0.01." in page_of([tmp_path], control="fedavg")
    assert result.comparison.seeds == (1, 2, 3), "development seeds are no results"
    with pytest.raises(ConfigError, match=r"--control is fedper, and .* has fedavg, fedper lr=0\.01, .*; name one of"):
        federation_results(find_finished_runs([tmp_path]), control="fedper")


@pytest.mark.slow
def test_other_settings_are_another_federation(make_federation, tmp_path) -> None:
    make_federation(2)
    make_federation(2, gains={"fedavg": 0.0, "local": 0.0}, rounds=5)
    assert len(federation_results(find_finished_runs([tmp_path]), control="fedavg")) == 2


@pytest.mark.slow
def test_what_is_not_there_is_one_line(make_federation, tmp_path, capsys) -> None:
    with pytest.raises(ConfigError, match=r"no finished run below .*; run `atlas compare` first"):
        page_of([tmp_path], control="fedavg")
    make_federation(2)
    with pytest.raises(ConfigError, match=r"--control is krum, and contradiction, dial 2 has fedavg, fedper, local"):
        page_of([tmp_path], control="krum")
    assert main(["results", str(tmp_path), "--all", "--to", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == page_of([tmp_path], control="fedavg")
    assert main(["results", str(tmp_path), "--to", str(tmp_path / "page.md")]) == 0, "its own page may be written anew"
    (tmp_path / "page.md").write_text("mine")
    assert main(["results", str(tmp_path), "--to", str(tmp_path / "page.md")]) == 2
    assert (tmp_path / "page.md").read_text() == "mine"
    assert main(["results"]) == 2
    assert "missing: FOLDER ...; see `atlas results --help`" in capsys.readouterr().err


def test_a_page_that_ends_with_html_has_charts_and_is_written_over_its_own_alone(make_federation, tmp_path) -> None:
    make_federation(2)
    page = tmp_path / "page.html"
    for _ in range(2):
        assert main(["results", str(tmp_path), "--to", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "vega" in text.lower() and "| method |" not in text
    page.write_text("# Results")
    assert main(["results", str(tmp_path), "--to", str(page)]) == 2
    assert page.read_text() == "# Results"


@pytest.mark.slow
def test_references_in_one_place_have_lines_of_their_own_by_hand(make_federation, tmp_path) -> None:
    make_federation(2)
    before = page_of([tmp_path], control="fedavg")
    make_federation(2, gains={"centralized": 0.0}, seeds=(1, 2))
    page = page_of([tmp_path], control="fedavg")
    assert "All examples of a task in one place (centralized): " in page and "over 2 seeds." in page
    assert "(centralized)" not in before
    assert "| `centralized` |" not in page


@pytest.mark.slow
def test_rows_give_the_page_of_the_folders_they_come_from(make_federation, tmp_path) -> None:
    make_federation(1)
    make_federation(3, gains={"local": 0.0, "fedavg": 0.1, "ditto": 0.2}, lr=0.05)
    make_federation(3, gains={"centralized": 0.0}, seeds=(3,))
    page, file = page_of([tmp_path], control="fedavg"), tmp_path / "runs.csv"
    assert main(["results", str(tmp_path), "--to", str(tmp_path / "page.md"), "--csv", str(file)]) == 0
    assert page_of([file], control="fedavg") == page
    runs = find_finished_runs([tmp_path])
    assert read_csv(file) == list(runs)
    # rows of some runs and folders of others, and a run that is in both counts once
    file.write_text(to_csv(runs[: len(runs) // 2]))
    assert page_of([file, tmp_path], control="fedavg") == page


def test_a_row_says_how_its_run_is_made_by_hand(make_federation, tmp_path) -> None:
    make_federation(1, gains={"fedprox": 0.1}, seeds=(2,), proximal_mu=0.5)
    (row,) = csv.DictReader(to_csv(find_finished_runs([tmp_path])).splitlines())
    assert [row[name] for name in ("preset", "dial", "strategy", "seed")] == ["contradiction", "1", "fedprox", "2"]
    assert unescape_cell(row["flags"]) == "--proximal-mu 0.5 --strategy fedprox --seed 2"
    assert len(row["clients"].split()) == len(row["tasks"].split()) == len(row["scores"].split())
    assert float(row["mean"]) == pytest.approx(np.mean([float(score) for score in row["scores"].split()]))


def test_a_row_whose_method_has_got_another_setting_is_refused(make_federation, tmp_path) -> None:
    make_federation(2, gains={"fedprox": 0.1}, seeds=(2,), proximal_mu=0.5)
    file = tmp_path / "runs.csv"
    file.write_text(to_csv(find_finished_runs([tmp_path])).replace("--strategy fedprox", "--strategy fedbabu"))
    with pytest.raises(ConfigError, match=r"line \d+ of .*runs\.csv is of a run .*, and its flags mean"):
        find_finished_runs([file])


def test_a_row_that_is_none_or_means_another_run_by_now_is_one_line(make_federation, tmp_path) -> None:
    make_federation(2)
    file = tmp_path / "runs.csv"
    text = to_csv(find_finished_runs([tmp_path]))
    for old, new, said in (
        ("--seed 1,", "--seed 4,", r"line \d+ of .*runs\.csv is of a run .*, and its flags mean .* today: a preset"),
        ("--seed 1,", "--sed 1,", r"line \d+ of .* is no row of a run \('sed'\); restore the file"),
        ("contradiction", "contradict", r"is no row of a run \(unknown preset"),
        ("movie-1 ", "", r"is no row of a run \(zip\(\) argument"),
        (COLUMNS[0], "other", r"runs\.csv is no file of runs; give folders of runs, or a CSV file"),
    ):
        assert old in text
        file.write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=said):
            find_finished_runs([file])


@pytest.mark.slow
def test_seeds_that_do_not_pair_are_said_and_other_federations_stay(make_federation, tmp_path, capsys) -> None:
    make_federation(2, gains={"local": 0.0}, seeds=(1, 2))
    make_federation(2, gains={"fedavg": 0.0}, seeds=(3,))
    file = tmp_path / "page.md"
    assert main(["results", str(tmp_path), "--to", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no method has the seeds of the others: contradiction, dial 2 has local 1, 2 and fedavg 3; run the" in line
    assert not file.exists()
    make_federation(3)
    assert main(["results", str(tmp_path), "--to", str(file)]) == 0
    said = "No method has the seeds of the control; there are local 1, 2 and fedavg 3."
    assert said in file.read_text()
    results = federation_results(find_finished_runs([tmp_path]), control="fedavg")
    assert [result.comparison is None for result in results] == [True, False]


def test_without_a_word_a_page_has_three_tables_a_federation_and_speaks_of_what_was_run(
    make_federation, tmp_path
) -> None:
    make_federation(2, gains={"ditto": 0.02, "atlas": 0.1})
    file = tmp_path / "page.md"
    assert main(["results", str(tmp_path), "--to", str(file)]) == 0
    page = file.read_text()
    titles = [line for line in page.splitlines() if line.startswith("*") and line.endswith("*")]
    assert titles == ["*Scores*", "*Against atlas*", "*Costs*"]
    assert "fedavg" not in page.lower() and "`local`" not in page
    assert main(["results", str(tmp_path), "--all", "--to", str(file)]) == 0
    titles = [line.strip("*") for line in file.read_text().splitlines() if line.startswith("*")]
    assert titles == ["Scores", "Clients", "Probabilities", "Against atlas", "Tests against atlas", "Costs"]
    assert main(["results", str(tmp_path), "--control", "ditto", "--to", str(file)]) == 0
    assert "*Against ditto*" in file.read_text()


def test_a_page_is_of_its_runs_and_of_no_claims(make_federation, tmp_path) -> None:
    make_federation(2, gains={"local": 0.0, "local_prior": 0.1, "fedavg": 0.05, "atlas": 0.2})
    page = page_of([tmp_path], control="fedavg")
    titles = [line for line in page.splitlines() if line.startswith("## ")]
    assert titles == [f"## contradiction, dial 2: {what}" for what in SECTIONS]
    assert "promise" not in page and ".913" not in page


@pytest.mark.slow
def test_tables_are_open_in_the_first_federation_and_hurt_by_fedavg_is_one_column(make_federation, tmp_path) -> None:
    make_federation(2, gains={"local": 0.0, "fedavg": 0.05})
    make_federation(3, gains={"local": 0.0, "fedavg": 0.05})
    file = tmp_path / "page.md"
    command = ["results", str(tmp_path), "--control", "fedavg", "--to", str(file)]
    assert main(command) == 0
    page = file.read_text()
    of_one = ("*Costs*", ": score against costs", "*Scores*", "*Against fedavg*")
    assert [page.count(words) for words in of_one] == [1, 1, 1, 1]
    assert page.count(": what came out") == 2
    assert main([*command, "--all"]) == 0
    page = file.read_text()
    assert [page.count(words) for words in of_one] == [2, 2, 2, 2]
    assert "hurt: FedAvg" in page and "hurt: control" not in page
