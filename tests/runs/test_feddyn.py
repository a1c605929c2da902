"""Runs whose clients are held and corrected by their own changes: FedDyn."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from atlas_fl.audit.check import audit_run
from atlas_fl.config import Config, to_toml, validate
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.run import resume_run, run_config
from tests.runs.conftest import QUICK
from tests.runs.finished import FinishedRuns
from tests.runs.processes import Programs
from tests.runs.reading import rows, same_tensors, state

pytestmark = [pytest.mark.core, QUICK]

MakeConfig = Callable[..., Config]
FEDDYN = {"strategy": "feddyn", "ranks": "4", "proximal_mu": 0.1}


def test_a_run_passes_its_audit_and_what_is_sent_is_in_the_ledger(config: MakeConfig, finished: FinishedRuns) -> None:
    folder = finished(config(**FEDDYN)).folder
    report = audit_run(folder)
    assert report.ok, report.failures[:3]
    assert {"corrected", "server", "mixed"} <= {row.check for row in report.rows}
    sent = [row for row in rows(folder, "ledger") if row["kind"] == "correction"]
    assert {(row["round"], row["direction"]) for row in sent} == {(2, "down"), (3, "down")}
    first = load_file(folder / "audit/round-0000/start.safetensors")
    trained = load_file(folder / "audit/round-0001/trained.safetensors")
    correction = load_file(folder / "audit/round-0002/correction.safetensors")
    changed = {key: trained[key] - first[key] for key in trained if key in first and key in correction}
    assert changed and any(bool(change.any()) for change in changed.values())
    for key, change in changed.items():
        torch.testing.assert_close(correction[key], 0.1 * change, atol=1e-8, rtol=1e-4)


def test_round_one_trains_as_fedprox_does(config: MakeConfig, finished: FinishedRuns) -> None:
    plain = {**FEDDYN, "strategy": "fedprox", "space": "factors", "name": "fedprox"}
    folders = [finished(config(**one)).folder for one in (FEDDYN, plain)]
    for round, is_same in ((1, True), (2, False)):
        first, second = (load_file(folder / f"audit/round-000{round}/trained.safetensors") for folder in folders)
        assert all((first[key] == second[key]).all() for key in first) == is_same


def test_a_run_that_is_killed_goes_on_to_the_same_bits(config: MakeConfig, programs: Programs, tmp_path: Path) -> None:
    partly = {**FEDDYN, "participation": 0.5}
    whole = run_config(config(**partly)).folder
    assert audit_run(whole).ok
    (tmp_path / "config.toml").write_text(to_toml(config(**partly, name="killed")))
    fault = "dies before the checkpoint of round two"
    programs.start("run", "--config", "config.toml", folder=tmp_path, fault=fault).end(-signal.SIGKILL)
    killed = tmp_path / "runs/killed"
    assert resume_run(killed).complete
    assert same_tensors(state(whole), state(killed))
    assert rows(whole) == rows(killed) and rows(whole, "ledger") == rows(killed, "ledger")


@pytest.mark.parametrize(("file", "check"), [("correction", "corrected"), ("server", "server"), ("start", "mixed")])
def test_an_audit_finds_what_was_altered(config: MakeConfig, finished: FinishedRuns, file: str, check: str) -> None:
    folder = finished(config(**FEDDYN)).folder
    path = folder / f"audit/round-0002/{file}.safetensors"
    with safe_open(path, "pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(path)
    key = next(key for key in tensors if key.endswith("lora_B"))
    tensors[key] += tensors[key].abs().max()
    save_file(tensors, path, metadata)
    assert check in {row.check for row in audit_run(folder).failures}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": "fedavg_dynamic"}, r"^--strategy fedavg_dynamic sums changes of A and B, .* --space factors"),
        (
            {"strategy": "fedavg_dynamic", "space": "factors", "proximal_mu": 0.0},
            r"^--proximal-mu is 0; allowed: above 0 with --strategy fedavg_dynamic",
        ),
        ({"workers": 2}, r"^--strategy feddyn has a second set of tensors beside the model"),
        ({"split": "movie-0=1"}, r"^--strategy feddyn and --split movie-0=1 do not go together"),
        ({"aggregate_every": 2, "rounds": 4}, r"^--strategy feddyn and --aggregate-every 2 do not go together"),
        ({"ranks": "greedy"}, r"^--strategy feddyn .* one rank"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(config: MakeConfig, values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        validate(config(**{**FEDDYN, **values}))
    assert "\n" not in str(caught.value)
