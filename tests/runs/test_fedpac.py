"""Runs of FedPAC: audited, resumed to the bit, with the bytes of the class features in the ledger."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from atlas_fl.audit.check import audit_run
from atlas_fl.config import Config, to_toml
from atlas_fl.deployment.server import check_served
from atlas_fl.deployment.service import ServerOptions
from atlas_fl.errors import ConfigError
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.storage.tensors import encoded_size
from tests.runs.processes import Programs
from tests.runs.reading import rows, same_tensors, state

pytestmark = pytest.mark.core

MakeConfig = Callable[..., Config]


def changed(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    with safe_open(path, "pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


def test_heads_differ_inside_a_task_adapters_do_not_and_the_audit_agrees(config: MakeConfig) -> None:
    folder = run_config(config(strategy="fedpac", ranks="4", share="A+B+head")).folder
    report = audit_run(folder)
    assert report.ok, report.failures
    assert {"server", "mixed"} <= {row.check for row in report.rows}
    final = state(folder)
    for key in {key.split("/", 2)[2] for key in final if key.startswith("strategy/movie-0/")}:
        same = torch.equal(final[f"strategy/movie-0/{key}"], final[f"strategy/movie-1/{key}"])
        assert same != key.startswith("head."), key


def test_the_ledger_has_what_each_client_reported(config: MakeConfig) -> None:
    folder = run_config(config(strategy="fedpac", participation=0.75, aggregate_every=3)).folder
    sent = [row for row in rows(folder, "ledger") if row["kind"] == "features"]
    participants = json.loads((folder / "audit/round-0003/record.json").read_text())["participants"]
    assert sorted(str(row["client"]) for row in sent) == sorted(participants) and len(participants) == 3
    assert {(row["round"], row["direction"]) for row in sent} == {(3, "up")}
    reports = load_file(folder / "audit/round-0003/server.safetensors")
    for row in sent:
        prefix = f"class_features/{row['client']}/"
        own = {key.removeprefix(prefix): tensor for key, tensor in reports.items() if key.startswith(prefix)}
        assert own.keys() == {"counts", "means", "variances"} and row["bytes"] == encoded_size(own)
    assert audit_run(folder).ok


def test_a_run_that_is_killed_goes_on_to_the_same_bits(config: MakeConfig, programs: Programs, tmp_path: Path) -> None:
    whole = run_config(config(strategy="fedpac")).folder
    (tmp_path / "config.toml").write_text(to_toml(config(strategy="fedpac", name="killed")))
    fault = "dies before the checkpoint of round two"
    programs.start("run", "--config", "config.toml", folder=tmp_path, fault=fault).end(-signal.SIGKILL)
    killed = tmp_path / "runs/killed"
    assert resume_run(killed).complete
    assert same_tensors(state(whole), state(killed))
    assert rows(whole) == rows(killed) and rows(whole, "ledger") == rows(killed, "ledger")
    assert audit_run(killed).ok


def test_who_joins_later_reports_from_its_first_round_on(config: MakeConfig) -> None:
    late = run_config(config(strategy="fedpac", arrive=("movie-1=2",), name="late")).folder
    assert audit_run(late).ok
    names = {path.split("/")[1] for path in load_file(late / "audit/round-0003/server.safetensors")}
    assert names == {"movie-0", "movie-1", "trec-0", "trec-1"}


def test_an_audit_finds_reports_and_heads_that_were_altered(config: MakeConfig) -> None:
    folder = run_config(config(strategy="fedpac", tasks="movie")).folder
    start, reports = (folder / f"audit/round-0002/{name}.safetensors" for name in ("start", "server"))
    kept = {path: path.read_bytes() for path in (start, reports)}

    def failed(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> set[str]:
        changed(path, change)
        checks = {row.check for row in audit_run(folder).failures if row.round == 2}
        path.write_bytes(kept[path])
        return checks

    assert "mixed" in failed(start, lambda tensors: tensors["movie-0/head.classifier.bias"].add_(0.01))
    assert "mixed" in failed(reports, lambda tensors: tensors["class_features/movie-0/means"].mul_(3.0))
    assert "server" in failed(reports, lambda tensors: tensors["class_features/movie-0/counts"].add_(1))
    assert "server" in failed(reports, lambda tensors: tensors.update({"class_features/movie-1/means": torch.ones(2)}))
    assert audit_run(folder).ok


def test_it_is_refused_across_machines(config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="--strategy fedpac sends class features beside the update, which no message"):
        check_served(config(strategy="fedpac"), ServerOptions(certs=Path("certs")))
