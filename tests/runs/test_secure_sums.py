"""Runs under secure sums end where plain runs do, to the quantisation, and say what the server sees."""

import json

import pytest

from atlas_fl.errors import ConfigError, DataError
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.methods.registry import METHODS
from tests.laws.test_secure_sums import refusals
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors, state

GIVEN = {"space": "factors", "ranks": "4", "alone": "none", "max_rounds": 1, "rounds": 4, "clients_per_task": 3}
TAKEN = [name for name, reason in refusals() if not reason]


def compare(config: Make, strategy: str, **given: object) -> None:
    forced = METHODS[strategy].settings if strategy in METHODS else {}
    options = {**GIVEN, **{key: value for key, value in forced.items() if key in GIVEN}, **given}
    plain = run_config(config(name="plain", strategy=strategy, **options))
    secure = run_config(config(name="secure", strategy=strategy, secure=True, **options))
    passing_audit(secure.folder)
    one, other = state(plain.folder), state(secure.folder)
    assert one.keys() == other.keys()
    moved = 0
    for name, tensor in one.items():
        if tensor.is_floating_point():
            # c n / R of means that round to float32; ten times as much of a server's step
            assert (tensor - other[name]).abs().max() <= 2e-6, name
        moved += not tensor.equal(other[name])
    assert moved  # it went through the protocol


@pytest.mark.core
def test_a_round_ends_where_a_plain_one_does(config: Make) -> None:
    compare(config, "fedavg")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [name for name in TAKEN if name != "fedavg"])
def test_a_round_of_every_method_that_is_taken_ends_where_a_plain_one_does(config: Make, strategy: str) -> None:
    compare(config, strategy)


@pytest.mark.core
def test_private_training_ends_where_it_does_without_secure_sums_and_spends_the_same(config: Make) -> None:
    pytest.importorskip("dp_accounting", reason="the extra dp is not installed")
    given = {**GIVEN, "strategy": "fedper", "dp": "example", "epsilon": 1.0, "rounds": 2}
    plain = run_config(config(name="plain", **{**given, "max_rounds": 2}))
    secure = run_config(config(name="secure", secure=True, **given))
    secure = resume_run(secure.folder, max_rounds=2)
    passing_audit(secure.folder, "epsilon")
    one, other = state(plain.folder), state(secure.folder)
    for name, tensor in one.items():
        if tensor.is_floating_point():
            assert (tensor - other[name]).abs().max() <= 2e-6, name
    assert not same_tensors(one, other)
    spent = [[row["epsilon"] for row in rows(run.folder) if row.get("split") == "train"] for run in (plain, secure)]
    assert spent[0] == spent[1] and 0.98 < max(spent[0]) <= 1.0


def test_a_run_says_what_is_seen_goes_on_and_is_audited(config: Make) -> None:
    given = {"strategy": "fedit", "ranks": "4", "secure": True, "clients_per_task": 3}
    whole = run_config(config(name="whole", **given))
    passing_audit(whole.folder)
    plan = json.loads((whole.folder / "plan.json").read_text())
    assert any("the server sees the mean of the adapters over" in note for note in plan["notes"])
    control = [row for row in rows(whole.folder, "ledger") if row["kind"] == "control"]
    assert {row["direction"] for row in control} == {"up", "down"} and min(row["bytes"] for row in control) > 0
    resume_run(run_config(config(name="parts", max_rounds=1, **given)).folder)
    # masks come from the operating system, and leave no trace in a sum
    assert same_tensors(state(whole.folder), state(whole.folder.with_name("parts")))


def test_a_value_out_of_range_and_too_few_clients_end_a_run_in_one_line(config: Make) -> None:
    given = {"strategy": "fedit", "ranks": "4", "secure": True, "max_rounds": 1}
    with pytest.raises(ConfigError, match="would be of movie-0 and movie-1; bring more of them"):
        run_config(config(name="none", **given))
    with pytest.raises(DataError, match=r"is beyond the range 0\.001 of a secure sum; raise --secure-range"):
        run_config(config(clients_per_task=3, secure_range=1e-3, **given))
