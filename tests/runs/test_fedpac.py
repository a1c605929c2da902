"""Runs of FedPAC: audited, resumed to the bit, with the bytes of the class features in the ledger."""

import json
from collections.abc import Callable
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from atlas_fl.audit.check import audit_run
from atlas_fl.audit.run_files import read_audited
from atlas_fl.experiment.run import run_config
from atlas_fl.params import is_last_layer
from atlas_fl.storage.tensors import encoded_size
from tests.conftest import Tiny
from tests.runs.finished import FinishedRuns, Make
from tests.runs.reading import failed_checks, passing_audit, rows, same_tensors, state

pytestmark = pytest.mark.core


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_the_last_layer_of_a_head_alone_is_a_client_s_own_and_the_audit_agrees(
    config: Make, tiny_of: Callable[[str], Tiny], family: str
) -> None:
    model = str(tiny_of(family).path)
    folder = run_config(config(strategy="fedpac", ranks="4", model=model, batch_size=4, tasks="movie")).folder
    passing_audit(folder, "server", "mixed", "aligned")
    final = state(folder)
    for key in {key.split("/", 2)[2] for key in final if key.startswith("strategy/movie-0/")}:
        same = torch.equal(final[f"strategy/movie-0/{key}"], final[f"strategy/movie-1/{key}"])
        assert same != is_last_layer(key), key


def test_the_ledger_has_what_each_client_reported(config: Make) -> None:
    folder = run_config(config(strategy="fedpac", participation=0.75, aggregate_every=2)).folder
    sent = [row for row in rows(folder, "ledger") if row["kind"] == "features"]
    participants = json.loads((folder / "audit/round-0002/record.json").read_text())["participants"]
    assert sorted(str(row["client"]) for row in sent) == sorted(participants) and len(participants) == 3
    assert {(row["round"], row["direction"]) for row in sent} == {(2, "up")}
    reports = load_file(folder / "audit/round-0002/server.safetensors")
    for row in sent:
        prefix = f"class_features/{row['client']}/"
        own = {key.removeprefix(prefix): tensor for key, tensor in reports.items() if key.startswith(prefix)}
        assert own.keys() == {"counts", "means", "variances"} and row["bytes"] == encoded_size(own)
    passing_audit(folder)


def test_who_joins_later_reports_from_its_first_round_on(config: Make) -> None:
    late = run_config(config(strategy="fedpac", arrive=("movie-1=2",), name="late")).folder
    passing_audit(late)
    names = {path.split("/")[1] for path in load_file(late / "audit/round-0002/server.safetensors")}
    assert names == {"movie-0", "movie-1", "trec-0", "trec-1"}


def test_an_audit_finds_reports_and_heads_that_were_altered(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(strategy="fedpac", tasks="movie")).folder
    start, reports = (folder / f"audit/round-0002/{name}.safetensors" for name in ("start", "server"))
    failed = partial(failed_checks, folder)
    assert "mixed" in failed(start, lambda tensors: tensors["movie-0/head.classifier.bias"].add_(0.01))
    assert "mixed" in failed(reports, lambda tensors: tensors["class_features/movie-0/means"].mul_(3.0))
    assert "server" in failed(reports, lambda tensors: tensors["class_features/movie-0/counts"].add_(1))
    assert "server" in failed(reports, lambda tensors: tensors.update({"class_features/movie-1/means": torch.ones(2)}))
    passing_audit(folder)


def test_features_are_pulled_to_the_means_of_the_round_before(config: Make) -> None:
    plain = run_config(config(strategy="classifier_collaboration", trained_parts="head_then_rest", name="plain")).folder
    pulled = run_config(config(strategy="fedpac", participation=0.75, name="pulled")).folder
    assert not (plain / "audit/round-0002/centroids.safetensors").exists()
    assert not (pulled / "audit/round-0001/centroids.safetensors").exists(), "nobody has reported anything yet"
    sent = read_audited(pulled / "audit/round-0002/centroids.safetensors")
    reports = load_file(pulled / "audit/round-0001/server.safetensors")
    reporters = {path.split("/")[1] for path in reports}
    assert len(reporters) == 3
    for client in {path.split("/")[0] for path in sent}:
        mates = [name for name in reporters if name.split("-")[0] == client.split("-")[0]]
        own = [{part: reports[f"class_features/{name}/{part}"] for part in ("counts", "means")} for name in mates]
        for label, mean in enumerate(sent[f"{client}/means"]):
            counts = [int(report["counts"][label]) for report in own]
            assert bool(sent[f"{client}/seen"][label]) == (sum(counts) > 0)
            for count, report in zip(counts, own, strict=True):
                mean = mean - report["means"][label] * count / max(1, sum(counts))
            torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-6, rtol=0)
    down = [row for row in rows(pulled, "ledger") if (row["kind"], row["direction"]) == ("features", "down")]
    assert {row["round"] for row in down} == {2}
    for row in down:
        if row["round"] == 2:
            part = {name: sent[f"{row['client']}/{name}"] for name in ("means", "seen")}
            assert row["bytes"] == encoded_size(part)
    passing_audit(pulled, "aligned")
    assert not same_tensors(state(plain), state(pulled))


def test_an_audit_finds_class_means_that_were_altered(config: Make, finished: FinishedRuns) -> None:
    folder = finished(config(strategy="fedpac", tasks="movie")).folder
    path = folder / "audit/round-0002/centroids.safetensors"
    kept = path.read_bytes()
    for change in (
        lambda tensors: tensors["movie-0/means"].mul_(1.01),
        lambda tensors: tensors["movie-0/seen"].logical_not_(),
        lambda tensors: tensors.pop("movie-0/seen"),
        lambda tensors: tensors.update({"movie-0/means": tensors["movie-0/means"][:1].clone()}),
        lambda tensors: [tensors.pop(f"movie-0/{name}") for name in ("means", "seen")],
    ):
        tensors = {key: tensor.clone() for key, tensor in read_audited(path).items()}  # movie-1 holds the same ones
        change(tensors)
        save_file(tensors, path)
        failures = {(row.round, row.client, row.check) for row in audit_run(folder).failures}
        assert (2, "movie-0", "aligned") in failures and (2, "movie-1", "aligned") not in failures
        path.write_bytes(kept)
    path.unlink()
    assert {row.check for row in audit_run(folder).failures} >= {"aligned"}


def test_in_personal_rounds_nobody_is_pulled(config: Make) -> None:
    folder = run_config(config(strategy="fedpac", rounds=3, personal_rounds=1)).folder
    assert {path.parent.name for path in folder.glob("audit/round-*/centroids.safetensors")} == {"round-0002"}
    passing_audit(folder)
