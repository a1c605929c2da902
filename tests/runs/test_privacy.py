"""Runs with a budget of differential privacy: spent, recorded, gone on with; what is not covered is refused."""

import re
from pathlib import Path

import numpy as np
import pytest

from atlas_fl.cli.main import main
from atlas_fl.client.options import TrainOptions
from atlas_fl.deployment.privacy_record import pay_job
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.storage.jsonl import read_json
from tests.runs.federation import SITES, Federations
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runs.resealing import check_altered_rows

ALTERED = (
    ("epsilon", 0.9, "it says epsilon"),
    ("epsilon", 1.1, "it says epsilon"),
    ("noise_multiplier", 1.1, "it says epsilon"),
    ("noise_multiplier", 0.9, "spends epsilon"),
    ("noise_multiplier", -1.0, "the noise multiplier is -"),
    ("paid_steps", 0.5, "it paid for"),
    ("steps", 0.5, "as planned"),
)
"""Fields of a row, the factor by which one is altered, and the fault that the audit then finds."""


@pytest.mark.core
def test_a_run_spends_its_budget_and_reports_no_training_loss(config: Make) -> None:
    given = {"strategy": "fedavg", "ranks": "4", "alone": "none", "dp": "example", "epsilon": 1.0}
    whole = run_config(config(name="whole", **given))
    passing_audit(whole.folder, "epsilon")
    check_altered_rows(whole.folder, ALTERED)
    importance = np.array(read_json(whole.folder / "plan.json")["importance"])
    assert np.ptp(importance) == 0 and not any(row["kind"] == "importance" for row in rows(whole.folder, "ledger"))
    trained = [row for row in rows(whole.folder) if row.get("split") == "train"]
    assert trained and not any("loss" in row for row in trained)
    by_client = {row["client"]: [r["epsilon"] for r in trained if r["client"] == row["client"]] for row in trained}
    assert all(spent == sorted(spent) and 0.98 < spent[-1] <= 1.0 for spent in by_client.values())
    parts = run_config(config(name="parts", max_rounds=1, **given))
    parts = resume_run(parts.folder)
    assert same_tensors(state(whole.folder), state(parts.folder))
    plain = run_config(config(name="plain", **{**given, "dp": "none", "epsilon": 8.0}))
    assert not same_tensors(state(whole.folder), state(plain.folder))


@pytest.mark.slow
def test_halves_are_paid_for_once_and_the_audit_knows(config: Make) -> None:
    """Rows of a run with halves; with the noise of one without, the audit finds more spent than the budget."""
    given = {"ranks": "4", "alone": "none", "dp": "example", "epsilon": 1.0}
    whole = run_config(config(name="whole", strategy="kriging", **given))
    passing_audit(whole.folder, "epsilon")
    noise = {row["client"]: row["noise_multiplier"] for row in rows(whole.folder) if row.get("split") == "train"}
    plain = run_config(config(name="plain", strategy="fedavg", **given))
    for row in rows(plain.folder):
        if row.get("split") == "train":
            assert noise[row["client"]] > row["noise_multiplier"]
    (last,) = {row["round"] for row in rows(whole.folder) if row.get("split") == "train" and row["epsilon"] > 0.98}
    assert last == max(row["round"] for row in rows(whole.folder))
    check_altered_rows(whole.folder, (("noise_multiplier", 0.9, "spends epsilon"), ("epsilon", 0.9, "it says epsilon")))
    parts = run_config(config(name="parts", strategy="kriging", max_rounds=1, **given))
    assert same_tensors(state(whole.folder), state(resume_run(parts.folder).folder))


def test_what_is_not_accounted_for_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = ["--dp", "example", "--ranks", "8", "--alone", "none", "--strategy", "fedavg"]
    for words, message in (
        (["--strategy", "fedpac"], "takes reports of the same examples"),
        (["--strategy", "fedavg_cluster"], "clusters by fingerprints of the same examples"),
        (["--strategy", "ditto"], "pays for the training of one model, and --second-model proximal has a second"),
        (["--ranks", "budget"], "measures importance on the same examples; set --ranks uniform"),
        (["--alone", "all"], "set --alone none"),
        (["--split", "1"], "leave --split out"),
        (["--clip", "0"], "set --clip to a norm"),
        (["--preset", "vision-lora"], "classes and numbers of texts alone"),
        (["--delta", "0.5", "--preset", "smoke"], "allowed: below one over that"),
        (["--dp", "none", "--epsilon", "3"], "set --dp example or --dp client, or leave --epsilon out"),
    ):
        assert main(["run", *usual, *words, "--runs-dir", str(tmp_path / "runs")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.slow
def test_sites_spend_their_own_budgets_and_the_audit_computes_them_again(federation: Federations, config: Make) -> None:
    """With their secrets a simulation has the same bits; without, it has others. A budget of its own stops a site."""
    values = {"strategy": "fedavg", "ranks": "4", "alone": "none", "dp": "example", "epsilon": 1.0, "rounds": 2}
    fed = federation(SITES, **values)
    server, port = fed.serve("--min-clients", "1")
    sites = [fed.join(name, port, "--dp", "example", "--epsilon", "1") for name in SITES]
    said = [site.end() for site in sites]
    assert "with noise of epsilon 1 for each example" in said[0]
    assert re.search(r"note: a new account of what this site spends is \S+-privacy\n", said[0])
    server.end()
    passing_audit(fed.served.path, "epsilon")
    fed.is_as_simulated()
    plain = run_config(config(tasks=("movie",), pack_tokens=1, name="plain", **values))
    assert not same_tensors(state(fed.served.path), state(plain.folder))
    paid = {name: read_json(fed.folder / f"{name}-privacy")["paid"] for name in SITES}
    assert {len(questions) for questions in paid.values()} == {2}


@pytest.mark.slow
def test_a_site_whose_budget_is_spent_trains_no_more_and_the_run_goes_on(federation: Federations) -> None:
    values = {"strategy": "fedavg", "ranks": "4", "alone": "none", "dp": "example", "epsilon": 1.0, "rounds": 2}
    fed = federation(SITES, **values)
    first = next(iter(SITES))
    options = TrainOptions(seed=0, rounds=2, batch_size=8, dp="example", epsilon=1.0)
    pay_job("a round of another run", 24, options, 3, path=fed.folder / f"{first}-privacy", epsilon=1.0)
    server, port = fed.serve("--min-clients", "1")
    sites = [fed.join(name, port) for name in SITES]
    said = [site.end() for site in sites]
    assert f"no train of {first} in round 2: it cannot do this; its own screen says why" in server.end()
    assert "does not do this job: the training examples here would spend epsilon" in said[0]
    assert re.search(rf"note: the account of what this site spends is \S*{first}-privacy\n", said[0])
    passing_audit(fed.served.path, "epsilon")
    assert {row["client"] for row in rows(fed.served.path) if row.get("split") == "train" and row["round"] == 2} == {
        name for name in SITES if name != first
    }
