"""Federations that learn preferences (DPO) on a tiny model: trained, audited, gone on with, and across processes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atlas_fl.cli.main import main
from atlas_fl.config import Config, to_toml, with_values
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.answers import evaluate_run
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.planning.round_costs import heaviest_step
from atlas_fl.setup.assembly import assemble
from tests.runs.federation import Federation
from tests.runs.finished import FinishedRuns, Make
from tests.runs.processes import Programs
from tests.runs.reading import passing_audit, rows
from tests.runs.sessions import check_same_runs
from tests.runs.test_chat import TEMPLATE
from tests.runs.workers import check_same, in_threads

FORM = "chat=preference"


@pytest.fixture
def preferences(config: Make, tmp_path: Path, writer_of: Callable) -> Make:
    """Makes the config of two clients that prefer one answer to others; their rows are in files, too."""
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    source = np.random.default_rng(4)
    lines = []
    for number in range(80):
        row = {
            "prompt": "".join(source.choice([*"abcd"], size=6)),
            "chosen": "ja",
            "rejected": ("si", "no")[number % 3 // 2],
        }
        lines.append(json.dumps({**row, "who": f"who{number % 2}"}) + "\n")
    for name, own in (("pairs", lines), ("wish-0", lines[::2]), ("wish-1", lines[1::2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(own))
    task = f"wish={tmp_path}/pairs.jsonl,{FORM},client=who,template={tmp_path}/own.jinja"
    values = {"ranks": "4", "rounds": 3, "max_length": 32, "lr": 1e-2, "dpo_beta": 0.5, "rouge_examples": 0}
    base = config(strategy="fedavg", clusters="oracle", model=writer_of("qwen2").path, **values)
    base = replace(base, data=replace(base.data, tasks=(), task=(task,), clients_per_task=3, samples=24))
    return lambda **changes: with_values(base, {key: str(value) for key, value in changes.items()})


def preferred(folder: Path) -> list[float]:
    """The mean share of preferred answers of the test splits, by round."""
    found = [row for row in rows(folder) if row.get("split") == "test"]
    by_round = {number: [row["preferred"] for row in found if row["round"] == number] for number in (1, 2, 3)}
    return [float(np.mean(shares)) for shares in by_round.values()]  # type: ignore[arg-type]


@pytest.mark.core
@pytest.mark.parametrize("strategy", ["fedavg", "atlas"])
def test_preferences_are_learned_audited_and_gone_on_with(
    preferences: Make, finished: FinishedRuns, strategy: str
) -> None:
    whole = finished(preferences(strategy=strategy, name="whole"))
    passing_audit(whole.folder)
    shares = preferred(whole.folder)
    assert shares[0] < shares[-1] > 0.8, shares
    parts = run_config(preferences(strategy=strategy, name="parts", max_rounds=1))
    assert not parts.complete
    assert resume_run(parts.folder, max_rounds=None).complete
    check_same_runs(whole.folder, parts.folder)
    if strategy == "fedavg":
        scores = evaluate_run(whole.folder).scores["who0"]
        assert scores["base"]["preferred"] == 0 < scores["federated"]["preferred"]
        assert scores["federated"]["preferred"] == whole.summary["clients"]["who0"]["final"]["test"]["preferred"]
