"""Runs whose updates are compressed: fewer bytes up, the same bits in workers and sessions, an audit."""

from pathlib import Path

import pytest

from atlas_fl.experiment.run import resume_run, run_config
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runs.workers import run_in_threads

FILTER = "update_filter"
SMALL = {"strategy": "fedavg", "ranks": "4", "alone": "none", "rounds": 3, FILTER: ("topk=0.1", "quantise=8")}


def sent(folder: Path, direction: str = "up") -> int:
    return sum(int(row["bytes"]) for row in rows(folder, "ledger") if row["direction"] == direction)


@pytest.mark.core
def test_a_tenth_of_the_change_in_a_byte_each_goes_up_and_the_run_is_audited(config: Make) -> None:
    plain = run_config(config(name="plain", **{key: one for key, one in SMALL.items() if key != FILTER})).folder
    short = run_config(config(name="short", **SMALL)).folder
    passing_audit(short)
    assert sent(short) < 0.25 * sent(plain)
    assert sent(short, "down") == sent(plain, "down")


@pytest.mark.slow
def test_what_a_filter_takes_is_given_back_in_the_next_round_also_in_a_later_session(config: Make) -> None:
    values = {**SMALL, FILTER: ("topk=0.1",), "error_feedback": True}
    without = run_config(config(name="without", **{**values, "error_feedback": False})).folder
    whole = run_config(config(name="whole", **values)).folder
    parts = run_config(config(name="parts", max_rounds=1, **values))
    assert resume_run(parts.folder).complete
    assert same_tensors(state(whole), state(parts.folder))
    passing_audit(whole)
    owed = {key: one for key, one in state(whole).items() if key.startswith("by client/residual/")}
    assert owed and any(one.any() for one in owed.values())
    trained = [Path("audit", f"round-000{round}", "trained.safetensors") for round in (1, 2)]
    assert (whole / trained[0]).read_bytes() == (without / trained[0]).read_bytes()
    assert (whole / trained[1]).read_bytes() != (without / trained[1]).read_bytes()


@pytest.mark.slow
def test_workers_end_in_the_same_bits(config: Make) -> None:
    one = run_config(config(name="one", **SMALL)).folder
    two = run_in_threads(config(name="two", **SMALL), 2).folder
    assert same_tensors(state(one), state(two))
    assert sent(one) == sent(two)
