"""Runs with a budget of differential privacy: spent, recorded, gone on with; what is not covered is refused."""

import json
from pathlib import Path

import pytest

from atlas_fl.audit.check import audit_run
from atlas_fl.cli.main import main
from atlas_fl.experiment.run import resume_run, run_config
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runs.resealing import with_new_digests


@pytest.mark.core
def test_a_run_spends_its_budget_and_reports_no_training_loss(config: Make) -> None:
    given = {"strategy": "fedavg", "ranks": "4", "alone": "none", "dp": "example", "epsilon": 5.0}
    whole = run_config(config(name="whole", **given))
    passing_audit(whole.folder, "epsilon")
    check_altered_rows(whole.folder)
    trained = [row for row in rows(whole.folder) if row.get("split") == "train"]
    assert trained and not any("loss" in row for row in trained)
    by_client = {row["client"]: [r["epsilon"] for r in trained if r["client"] == row["client"]] for row in trained}
    assert all(spent == sorted(spent) and 4.9 < spent[-1] <= 5.0 for spent in by_client.values())
    parts = run_config(config(name="parts", max_rounds=1, **given))
    parts = resume_run(parts.folder)
    assert same_tensors(state(whole.folder), state(parts.folder))
    plain = run_config(config(name="plain", **{**given, "dp": "none", "epsilon": 8.0}))
    assert not same_tensors(state(whole.folder), state(plain.folder))


def check_altered_rows(folder: Path) -> None:
    """Assert that the audit finds rows that say less noise, epsilon or steps than there were, each for what it is."""
    whole = (folder / "metrics.jsonl").read_text()
    for name, factor, message in (
        ("epsilon", 0.9, "it says epsilon"),
        ("epsilon", 1.1, "it says epsilon"),
        ("noise_multiplier", 1.1, "it says epsilon"),
        ("noise_multiplier", 0.9, "spends epsilon"),
        ("noise_multiplier", -1.0, "the noise multiplier is -"),
        ("paid_steps", 0.5, "it paid for"),
        ("steps", 0.5, "and the plan has"),
    ):
        changed = [json.loads(line) for line in whole.splitlines()]
        row = next(row for row in changed if row.get("round") == 2 and row.get("split") == "train")
        row[name] *= factor
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
        (failure,) = audit_run(with_new_digests(folder)).failures
        assert (failure.check, failure.client, failure.round) == ("epsilon", row["client"], 2)
        assert message in failure.detail
    (folder / "metrics.jsonl").write_text(whole)
    with_new_digests(folder)


def test_what_is_not_accounted_for_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = ["--dp", "example", "--ranks", "8", "--alone", "none", "--strategy", "fedavg"]
    for words, message in (
        (["--strategy", "kriging"], "has two more; take a strategy without halves"),
        (["--strategy", "fedavg_cluster"], "clusters by fingerprints of the same examples"),
        (["--strategy", "ditto"], "trains twice"),
        (["--ranks", "budget"], "measures importance on the same examples; set --ranks uniform"),
        (["--alone", "all"], "set --alone none"),
        (["--split", "1"], "leave --split out"),
        (["--clip", "0"], "set --clip to a norm"),
        (["--preset", "vision-lora"], "classes and numbers of texts alone"),
        (["--dp", "none", "--epsilon", "3"], "set --dp example, or leave --epsilon out"),
    ):
        assert main(["run", *usual, *words, "--runs-dir", str(tmp_path / "runs")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert not list(tmp_path.iterdir())
