"""Runs with client-level differential privacy: spent, recorded, audited, gone on with; the rest is refused."""

import re
from pathlib import Path

import pytest

from atlas_fl.audit.check import audit_run
from atlas_fl.cli.main import main
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.storage.jsonl import read_json
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runs.resealing import check_altered_rows

pytest.importorskip("dp_accounting", reason="the extra dp is not installed")

GIVEN = {
    **{"strategy": "fedit", "ranks": "4", "alone": "none", "clients_per_task": 3, "rounds": 3},
    **{"dp": "client", "epsilon": 1.0, "update_filter": ("clip=0.5",)},
}


ALTERED = (
    ("epsilon", 0.9, "it says epsilon"),
    ("epsilon", 2.0, "spends epsilon"),
    ("noise_multiplier", 1.1, "it says epsilon"),
    ("paid_steps", 0.5, "it paid for"),
)
"""As in `test_privacy`, of the sums that a client is in."""


@pytest.mark.core
def test_a_run_spends_its_budget_goes_on_to_the_bit_and_is_audited(config: Make) -> None:
    whole = run_config(config(name="whole", **GIVEN))
    passing_audit(whole.folder, "epsilon")
    check_altered_rows(whole.folder, ALTERED)
    trained = [row for row in rows(whole.folder) if row.get("split") == "train"]
    spent = {row["round"]: row["epsilon"] for row in trained}
    assert spent[1] < spent[2] < spent[3] and 0.98 < spent[3] <= 1.0
    sums = [row["reason"] for row in rows(whole.folder) if row.get("event") == "summed"]
    assert sums and all(" clients, with noise of " in reason for reason in sums)
    notes = read_json(whole.folder / "plan.json")["notes"]
    assert any("each client has epsilon 1 at delta" in note and "times the largest update" in note for note in notes)
    parts = resume_run(run_config(config(name="parts", max_rounds=1, **GIVEN)).folder)
    assert same_tensors(state(whole.folder), state(parts.folder))
    other = run_config(config(name="other", **{**GIVEN, "epsilon": 0.8}))
    assert not same_tensors(state(whole.folder), state(other.folder))


@pytest.mark.core
def test_clients_add_the_noise_to_secure_sums_themselves(config: Make) -> None:
    given = {**GIVEN, "epsilon": 2.0, "secure": True, "secure_range": 16.0, "rounds": 2}
    whole = run_config(config(name="whole", **given))
    passing_audit(whole.folder, "epsilon")
    check_altered_rows(
        whole.folder, (("epsilon", 0.9, "it says epsilon"), ("noise_multiplier", 1.1, "it says epsilon"))
    )
    trained = [row for row in rows(whole.folder) if row.get("split") == "train"]
    spent = {row["round"]: row["epsilon"] for row in trained}
    assert spent[1] < spent[2] and 1.96 < spent[2] <= 2.0
    sums = [row["reason"] for row in rows(whole.folder) if row.get("event") == "summed"]
    assert sums and all(" clients, with noise of " in reason for reason in sums)
    notes = read_json(whole.folder / "plan.json")["notes"]
    assert any("the server sees the mean of the adapters over" in note for note in notes)
    assert any("labels, and scores are not covered" in note for note in notes)
    parts = resume_run(run_config(config(name="parts", max_rounds=1, **given)).folder)
    assert same_tensors(state(whole.folder), state(parts.folder))
    other = run_config(config(name="other", **{**given, "epsilon": 4.0}))
    assert not same_tensors(state(whole.folder), state(other.folder)), "there is noise"


@pytest.mark.core
def test_a_clip_that_follows_the_norms_is_gone_on_with_to_the_bit(config: Make) -> None:
    given = {**GIVEN, "epsilon": 40.0, "clip_quantile": 0.5}
    whole = run_config(config(name="whole", **given))
    passing_audit(whole.folder, "epsilon")
    said = [row["reason"] for row in rows(whole.folder) if "clipped to" in str(row.get("reason"))]
    clips = [[float(word) for word in re.findall(r"to ([0-9.e-]+)", line)] for line in said]
    assert clips[0][0] == 0.5 and [pair[1] for pair in clips[:-1]] == [pair[0] for pair in clips[1:]]
    assert all(before != after for before, after in clips)
    spent = [row["epsilon"] for row in rows(whole.folder) if row.get("split") == "train"]
    assert 39 < max(spent) <= 40.0
    parts = resume_run(run_config(config(name="parts", max_rounds=1, **given)).folder)
    assert same_tensors(state(whole.folder), state(parts.folder))
    plain = run_config(config(name="plain", **{**given, "clip_quantile": None}))
    assert not same_tensors(state(whole.folder), state(plain.folder))


@pytest.mark.core
def test_noise_in_bands_goes_on_to_the_bit_and_clients_wait_for_their_turn(config: Make, monkeypatch) -> None:
    given = {**GIVEN, "noise_bands": 3, "participation": 0.34}
    whole = run_config(config(name="whole", **given))
    passing_audit(whole.folder, "epsilon")
    trained = [row for row in rows(whole.folder) if row.get("split") == "train"]
    assert sorted(row["client"] for row in trained) == sorted({row["client"] for row in trained}), "each came once"
    assert {row["paid_steps"] for row in trained} == {1.0}
    parts = resume_run(run_config(config(name="parts", max_rounds=2, **given)).folder)
    assert same_tensors(state(whole.folder), state(parts.folder))

    for module in ("experiment.rounds", "planning.client_privacy"):
        monkeypatch.setattr(f"atlas_fl.{module}.sample_clients", lambda _, names, **__: names[:3])
    wrong = run_config(config(name="wrong", **given))
    faults = {fault.detail for fault in audit_run(wrong.folder).failures}
    assert faults == {f"it was in round {number} too, and noise has 3 bands" for number in (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"strategy": "mr_mtl"},
        {"strategy": "fedadam"},
        {"strategy": "ffa", "participation": 0.5},
        {"strategy": "mr_mtl", "secure": True, "secure_range": 16.0},
        {"strategy": "fedper", "secure": True, "secure_range": 16.0},
    ],
)
def test_methods_of_their_own_models_of_server_steps_and_of_samples_are_audited(
    config: Make, given: dict[str, object]
) -> None:
    result = run_config(config(**{**GIVEN, "space": "factors", "alone": "all", **given}))
    passing_audit(result.folder, "epsilon")
    spent = [row["epsilon"] for row in rows(result.folder) if row.get("split") == "train"]
    assert 0.98 < max(spent) <= 1.0


def test_what_is_not_accounted_for_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = ["--dp", "client", "--update-filter", "clip=0.5", "--ranks", "8", "--strategy", "fedit"]
    for words, message in (
        (["--strategy", "kriging"], "and --dp client is for sums alone; take --strategy fedit"),
        (["--strategy", "median"], "and --dp client is for sums alone; take --strategy fedit"),
        (["--strategy", "fedavg_cluster", "--space", "factors"], "clusters by fingerprints; take a strategy without"),
        (["--update-filter", "clip=0.5", "quantise=8"], "end --update-filter with a clip"),
        (
            ["--ranks", "budget", "--strategy", "fedavg", "--space", "factors"],
            "may give clients several by what their examples say; set --ranks to one of",
        ),
        (["--strategy", "fedavg"], "set --space factors, or take --strategy fedit"),
        (["--patience", "2"], "leave --patience out"),
        (["--clip-quantile", "0.5", "--secure"], "has the norms of single updates counted, and --secure shows none"),
        (["--noise-bands", "2", "--dp", "none"], "set --dp client, or leave --noise-bands out"),
        (["--noise-bands", "2", "--secure"], "takes back noise of earlier rounds, which nobody can where clients add"),
        (
            ["--noise-bands", "2", "--clip-quantile", "0.5"],
            "takes back noise of earlier rounds, which had another clip",
        ),
        (["--noise-bands", "2"], "so 4 of 9 clients come by turns, and --participation 1 is 9; allowed: bands times"),
        (["--clip-quantile", "0.5", "--dp", "none"], "set --dp client, or leave --clip-quantile out"),
        (["--clip-quantile", "0.5", "--epsilon", "1"], "clients or more; bring them, leave it out, or give a larger"),
        (["--delta", "0.5"], "allowed: below one over that"),
        (["--clients-per-task", "2"], "over at least 3 clients, and the head of"),
    ):
        assert main(["run", *usual, *words, "--runs-dir", str(tmp_path / "runs")]) == 2, words
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("atlas: ")]
        assert message in line
