"""Runs in sessions, and what two runs that are to be one and the same have left behind."""

from pathlib import Path

from atlas_fl.config import Config
from atlas_fl.experiment.run import RunResult, resume_run, run_config
from tests.runs.reading import rows, same_tensors, state


def in_sessions(config: Config) -> RunResult:
    """The complete run of this config, in sessions of as many rounds as it allows one."""
    result = run_config(config)
    while not result.complete:
        result = resume_run(result.folder, max_rounds=config.run.max_rounds)
    return result


def check_same_runs(left: Path, right: Path, *, round: int | None = None) -> None:
    """Raise AssertionError unless both runs have left the same models, metrics and bytes behind."""
    assert same_tensors(state(left, round=round), state(right, round=round))
    assert rows(left) == rows(right)
    assert rows(left, "ledger") == rows(right, "ledger")
