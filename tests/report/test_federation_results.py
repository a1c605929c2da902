"""Which runs are one row of a page of results, by hand; and that a page says what was tuned."""

import csv
import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest

from atlas_fl.cli.main import main
from atlas_fl.errors import CheckpointError, ConfigError
from atlas_fl.experiment.tuning import TunedMethod, TuningTrial, read_tuning, write_tuning
from atlas_fl.report import finished_runs
from atlas_fl.report.federation_results import FederationResults, federation_results, method_rows
from atlas_fl.report.finished_runs import find_finished_runs, to_csv
from atlas_fl.storage.run_folder import RunFolder
from tests.report.conftest import results_page

MakeFederation = Callable[..., None]


def results_of(folder: Path, control: str = "fedavg") -> FederationResults:
    (result,) = federation_results(find_finished_runs([folder]), control=control)
    return result


def rows(result: FederationResults) -> set[str]:
    return set(result.comparison.rows)


@pytest.mark.slow
def test_runs_of_one_method_with_other_settings_are_other_rows(make_federation, tmp_path) -> None:
    make_federation(2)
    make_federation(2, gains={"fedprox": 0.0})
    make_federation(2, gains={"fedprox": 0.1}, proximal_mu=5.0)
    result = results_of(tmp_path)
    assert rows(result) == {"local", "fedavg", "fedper", "fedprox proximal_mu=0.01", "fedprox proximal_mu=5.0"}
    assert result.own_settings == {}


@pytest.mark.slow
def test_another_rank_is_another_row_of_a_method_that_does_not_own_it(make_federation, tmp_path) -> None:
    make_federation(2)
    make_federation(2, gains={"fedavg": 0.1}, ranks="4")
    with pytest.raises(
        ConfigError, match=r"--control is fedavg, and .* has fedavg ranks=4, fedavg ranks=8, fedper, lo"
    ):
        results_of(tmp_path)
    result = results_of(tmp_path, control="fedavg ranks=8")
    assert rows(result) == {"local", "fedper", "fedavg ranks=4", "fedavg ranks=8"}


@pytest.mark.slow
def test_what_a_method_sets_or_suggests_goes_without_saying(make_federation, tmp_path) -> None:
    make_federation(2)
    make_federation(2, gains={"fedprox": 0.1, "ditto": 0.1, "fedlease": 0.0, "fedavg_ft": 0.1})
    result = results_of(tmp_path)
    assert rows(result) == {"local", "fedavg", "fedper", "fedprox", "ditto", "fedlease", "fedavg_ft"}
    assert (result.own_settings, result.changed) == ({}, {"lr": 0.01})


@pytest.mark.slow
def test_a_setting_that_no_method_suggests_stands_above_the_table(make_federation, tmp_path) -> None:
    make_federation(2)
    make_federation(2, gains={"fedprox": 0.1}, proximal_mu=5.0)
    make_federation(2, gains={"fedavg_ft": 0.1}, personal_rounds=4)
    assert results_of(tmp_path).own_settings == {"fedprox": "proximal_mu=5.0", "fedavg_ft": "personal_rounds=4"}


@pytest.mark.slow
def test_references_in_one_place_with_other_settings_are_other_lines(make_federation, tmp_path) -> None:
    make_federation(2)
    make_federation(2, gains={"centralized": 0.0})
    make_federation(2, gains={"centralized": 0.0}, lr=0.05)
    assert {name: len(scores) for name, scores in results_of(tmp_path).in_one_place.items()} == {
        "centralized lr=0.01": 3,
        "centralized lr=0.05": 3,
    }


@pytest.mark.slow
def test_federations_of_one_preset_have_titles_that_tell_them_apart(make_federation, tmp_path) -> None:
    make_federation(2)
    make_federation(2, rounds=5)
    titles = [result.title for result in federation_results(find_finished_runs([tmp_path]), control="fedavg")]
    assert sorted(titles) == ["contradiction, dial 2, lr=0.01", "contradiction, dial 2, lr=0.01 rounds=5"]


def test_two_runs_of_one_row_and_seed_are_one_line(make_federation, tmp_path) -> None:
    make_federation(2, gains={"local": 0.0}, seeds=(1,))
    (run,) = find_finished_runs([tmp_path])
    with pytest.raises(ConfigError, match="local has two runs with seed 1 in contradiction, dial 2, which no setting"):
        method_rows([run, run])


DITTO = TunedMethod(
    strategy="ditto",
    trials=(
        TuningTrial(settings={"lr": 0.01, "second_weight": 0.5}, validation=0.8),
        TuningTrial(settings={"lr": 0.02, "second_weight": 0.5}, validation=0.7),
        TuningTrial(settings={"lr": 0.01, "second_weight": 0.1}, validation=0.9),
    ),
)
TRIED = "3 settings tried on seeds 9001, 9002, lr 0.01..0.02"
TABLE = """*Tuning*

| method | tried | chosen | validation |
|---|---|---|---|
| `ditto` | 3 | lr 0.01, second_weight 0.1 of 0.1..0.5 | 0.900 |
"""


@pytest.fixture
def tuned(make_federation, tmp_path) -> Path:
    """The folder of a federation of which one method was tuned."""
    make_federation(2)
    make_federation(2, gains={"ditto": 0.1}, second_weight=0.1)
    for path in tmp_path.glob("2-ditto-*"):
        write_tuning(RunFolder(path), DITTO)
    return tmp_path


def test_a_choice_that_was_tried_stands_by_its_names() -> None:
    trials = [
        TuningTrial(settings={"lr": lr, "trained_parts": parts}, validation=0.5 + lr)
        for lr, parts in ((0.01, "all"), (0.02, "all"), (0.01, "head_then_rest"))
    ]
    said = str(TunedMethod(strategy="kriging", trials=tuple(trials)))
    assert said.endswith("lr 0.01..0.02; chosen lr 0.02, trained_parts all of all or head_then_rest (validation 0.520)")


@pytest.mark.slow
def test_a_page_says_what_was_tuned_and_so_does_that_of_its_rows(tuned) -> None:
    page = results_page(find_finished_runs([tuned]), control="fedavg")
    assert f"\n\n{TRIED}.\n\nNo tuning on record of all runs: local, fedavg, fedper.\n" in page
    assert TABLE in page
    assert "Settings of each method" not in page, "what was tuned is said once"
    file = tuned / "rows.csv"
    file.write_text(to_csv(find_finished_runs([tuned])))
    assert results_page(find_finished_runs([file]), control="fedavg") == page


def test_without_a_record_a_page_says_that_there_is_none(make_federation, tmp_path) -> None:
    make_federation(2)
    page = results_page(find_finished_runs([tmp_path]), control="fedavg")
    assert (
        "Settings of all its runs: lr=0.01.\n\nNo tuning on record of all runs: local, fedavg, fedper.\n\nMeans over 4"
        in page
    )


def test_a_method_of_which_a_run_has_no_record_is_named(tuned) -> None:
    assert results_of(tuned).tuned == {"ditto": DITTO}
    RunFolder(tuned / "2-ditto-10.1").tuning.unlink()
    assert results_of(tuned).tuned == {}
    page = results_page(find_finished_runs([tuned]), control="fedavg")
    assert "No tuning on record of all runs: local, fedavg, ditto, fedper." in page and "*Tuning*" not in page


def test_the_memory_of_a_method_is_that_of_the_client_that_needs_most(make_federation, tmp_path) -> None:
    make_federation(2)
    path = tmp_path / "2-fedper-1" / "summary.json"
    summary = json.loads(path.read_text())
    list(summary["clients"].values())[3]["predicted"]["memory_bytes"] = 2e9
    path.write_text(json.dumps(summary))
    runs = find_finished_runs([tmp_path])
    found = {(run.method, run.seed): run.scores.memory_bytes for run in runs}
    assert found["fedper", 1] == 2e9 and found["fedper", 2] == found["local", 1] == 552.9e6
    file = tmp_path / "rows.csv"
    file.write_text(to_csv(runs))
    assert {(run.method, run.seed): run.scores.memory_bytes for run in find_finished_runs([file])} == found
    # the mean over seeds of 2,000, 552.9 and 552.9 MB
    assert "1.0 GB" in next(
        line for line in results_page(runs, control="fedavg").split("*Costs*")[1].splitlines() if "fedper" in line
    )


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("memory_bytes", "1e308", "1e308 is no number of at most"),
        ("bytes", "", "could not convert string to float"),
        ("bytes", "9" * 400, "is no number of at most"),
        ("bytes_below_whole", "-inf", "-inf is no number of at most"),
        ("scores", "0.5 nan", "nan is no number of at most"),
        ("flags", "x", "the column flags begins with x"),
        *(("loss", value, "") for value in ("nan", "inf", "1e400", "x")),
        ("tuning", "[" * 100_000, "its lists are nested more than 64 deep"),
        (
            "tuning",
            '{"strategy": "local", "seeds": [1], "trials": [{"settings": {"lr": 3}, "validation": 0.1},'
            ' {"settings": {}, "validation": 0.5}]}',
            "the trials of a tuning are one and more, of the same settings",
        ),
        (
            "tuning",
            '{"strategy": "local", "seeds": [1], "trials": [{"settings": {"lr": "<b>3"}, "validation": 0.1}]}',
            "no tuning tries lr '<b>3'",
        ),
    ],
)
def test_a_row_that_says_no_number_is_one_line(column: str, value: str, told: str, altered_rows) -> None:
    def alter(header: list[str], row: list[str]) -> list[str]:
        return [value if name == column else cell for name, cell in zip(header, row, strict=True)]

    with pytest.raises(ConfigError, match=f"^line 2 of .* is no row of a run .*{re.escape(told)}") as caught:
        find_finished_runs([altered_rows(alter)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("alter", [lambda _, row: row[:-1], lambda _, row: [*row, "x"]], ids=["fewer", "more"])
def test_a_row_with_fewer_or_more_cells_is_one_line(alter, altered_rows) -> None:
    with pytest.raises(ConfigError, match="it has more or fewer cells than the header has names"):
        find_finished_runs([altered_rows(alter)])


def test_a_cell_without_end_is_one_line(altered_rows) -> None:
    with pytest.raises(ConfigError, match=r"rows\.csv cannot be read \(field larger"):
        find_finished_runs([altered_rows(lambda _, row: [*row[:-1], "x" * 200_000])])


@pytest.fixture
def altered_rows(make_federation, tmp_path) -> Callable[..., Path]:
    """A file of runs whose first row is what a function makes of it and of the header."""

    def write(alter: Callable[[list[str], list[str]], list[str]]) -> Path:
        make_federation(2)
        header, first, *rest = csv.reader(StringIO(to_csv(find_finished_runs([tmp_path]))))
        file = tmp_path / "rows.csv"
        with file.open("w", newline="") as out:
            csv.writer(out).writerows([header, alter(header, first), *rest])
        return file

    return write


def test_what_is_no_run_is_passed_by_and_what_is_not_there_is_one_line(make_federation, tmp_path) -> None:
    make_federation(2)
    runs = find_finished_runs([tmp_path])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "summary.json").write_text('{"hello": 1}')
    assert find_finished_runs([tmp_path]) == runs
    for place in ("nosuch", ""):
        with pytest.raises(ConfigError, match=f"^there is no folder or file '{place}'; name folders of runs"):
            find_finished_runs([tmp_path, place])


def test_losses_are_means_over_clients_and_stand_in_rows_and_pages(make_run, tmp_path) -> None:
    for seed in (1, 2):
        for name in ("fedavg", "local"):
            make_run(f"{name}-{seed}", strategy=name, seed=seed, calibration_error=0.25)
    runs = find_finished_runs([tmp_path])
    summary = json.loads((tmp_path / "fedavg-1" / "summary.json").read_text())
    losses = [entry["final"]["test"]["loss"] for entry in summary["clients"].values()]
    (first,) = (run for run in runs if (run.method, run.seed) == ("fedavg", 1))
    assert first.scores.loss == pytest.approx(sum(losses) / 9) and first.scores.calibration_error == pytest.approx(0.25)
    file = tmp_path / "rows.csv"
    file.write_text(to_csv(runs))
    page = results_page(find_finished_runs([file]), control="fedavg")
    assert "| method | test loss | calibration error |" in page
    mean = sum(run.scores.loss or 0 for run in runs if run.method == "fedavg") / 2
    assert f"| `fedavg` | {mean:.3f} | 0.250 |" in page


def test_losses_of_different_kinds_have_no_mean() -> None:
    loss, other = {"primary": 0.5, "loss": 1.0, "mcc": 0.5}, {"primary": 0.5, "loss": 9.0}
    clients = {"a": loss, "b": loss}
    assert finished_runs._mean_of(clients, "loss") == 1
    assert finished_runs._mean_of(clients | {"c": other}, "loss") is None


def test_a_record_of_more_trials_stays_and_one_that_chose_another_does_not(tmp_path) -> None:
    folder = RunFolder(tmp_path)
    fewer = TunedMethod(strategy="ditto", trials=DITTO.trials[2:])
    other = TunedMethod(strategy="ditto", trials=DITTO.trials[:1])
    for written, kept in ((fewer, fewer), (DITTO, DITTO), (fewer, DITTO), (other, other)):
        write_tuning(folder, written)
        assert read_tuning(folder) == kept


def test_a_record_that_does_not_fit_its_run_is_one_line(tuned, capsys) -> None:
    write_tuning(RunFolder(tuned / "2-local-1"), TunedMethod(strategy="local", trials=DITTO.trials[1:2]))
    with pytest.raises(
        ConfigError, match=r"2-local-1/tuning\.json says that tuning chose lr 0\.02, second_weight 0\.5"
    ):
        find_finished_runs([tuned])
    assert main(["results", str(tuned)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    RunFolder(tuned / "2-local-1").tuning.write_text('{"strategy": "local", "seeds": [9001], "trials": []}')
    with pytest.raises(CheckpointError, match=r"damaged file .*tuning\.json: it is not what was written; restore it"):
        find_finished_runs([tuned])
