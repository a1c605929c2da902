"""Every way in which a round may lie is found, and named for what it is."""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from atlas_fl.audit.check import audit_run
from atlas_fl.config.schema import MixingConfig
from atlas_fl.params import digest
from tests.audit.written import CLIENTS, D_IN, ROUNDS, edit_record, edit_tensors, found, only, plan_json, write_run


def as_trained(_round, updates, start):
    """Models as clients have trained them, of whom nobody gets a mixed one."""
    return {client: updates.get(client, start[client]) for client in CLIENTS}


def test_a_write_back_that_does_not_happen_is_found(tmp_path):
    mixing = MixingConfig(strategy="atlas_laplacian", eta=0.1)
    report = audit_run(write_run(tmp_path / "run", mixing, served=as_trained))
    moved = only(report, "moved", round=1)
    assert {row.client for row in moved} == set(CLIENTS) - {"pairs-0"}, "who is alone may stay"
    assert moved[0].detail.startswith("3 of 3 were left as trained; ")
    assert " should move by 0." in moved[0].detail
    assert {row.client for row in only(report, "mixed", round=1)} == set(CLIENTS) - {"pairs-0"}


def test_a_write_back_of_the_head_alone_is_found(tmp_path):
    def served(_round, updates, start):
        trained = as_trained(None, updates, start)
        return {client: {**trained[client], "head.weight": start[client]["head.weight"]} for client in CLIENTS}

    moved = only(audit_run(write_run(tmp_path / "run", served=served)), "moved", round=1)
    assert {row.client for row in moved} == set(CLIENTS) - {"pairs-0"}
    assert moved[0].detail.startswith("2 of 3 were left as trained")


def test_a_tiny_step_that_is_left_out_is_found_by_its_bits(tmp_path):
    mixing = MixingConfig(strategy="atlas_laplacian", eta=1e-5)
    report = audit_run(write_run(tmp_path / "run", mixing, served=as_trained))
    assert not only(report, "mixed"), "too small to be seen by value"
    assert {row.client for row in only(report, "moved", round=1)} == set(CLIENTS) - {"pairs-0"}


@pytest.mark.parametrize("eta", [0.1, 0.5])
def test_the_step_that_moved_nothing_would_have_been_found(tmp_path, eta):
    """The earlier system's results for eta = 0, 0.1 and 0.5 were the same to the last bit."""
    nothing = MixingConfig(strategy="atlas_laplacian", eta=0.0)
    assert only(audit_run(write_run(tmp_path / "run", replace(nothing, eta=eta), real=nothing)), "moved")


def test_a_run_under_another_name_is_found(tmp_path):
    assert audit_run(write_run(tmp_path / "local", MixingConfig(strategy="local"))).ok
    assert only(audit_run(write_run(tmp_path / "atlas", real=MixingConfig(strategy="local"))), "moved")


def test_clients_that_go_on_with_what_they_trained_are_found(run):
    own = load_file(run / "audit" / "round-0001" / "trained.safetensors")
    params = {key.split("/", 1)[1]: tensor for key, tensor in own.items() if key.startswith("trec-0/")}
    loaded = json.loads((run / "audit" / "round-0002" / "record.json").read_text())["loaded"]
    loaded["trec-0"]["digest"] = digest(params)
    edit_record(run, 2, loaded=loaded)
    report = audit_run(run)
    assert found(report) == {(2, "trec-0", "loaded")}
    assert report.failures[0].detail.startswith(f"it says that it loaded 5 tensors of {digest(params)[:12]}, and sent")


def test_a_client_that_loaded_fewer_tensors_is_found(run):
    loaded = json.loads((run / "audit" / "round-0001" / "record.json").read_text())["loaded"]
    loaded["movie-0"]["keys"] = 4
    del loaded["trec-1"]
    edit_record(run, 1, loaded=loaded)
    report = audit_run(run)
    assert found(report) == {(1, "movie-0", "loaded"), (1, "trec-1", "loaded")}
    assert [row.detail[:32] for row in report.failures] == [f"it says that it loaded {count} tensors" for count in "40"]


OTHER_WORDS = [{"eta": 0.0}, {"eta": 0.11}, {"layer_weighting": "importance"}]
OTHER_WORDS += [{"strategy": name} for name in ("fedavg_cluster", "fedavg", "local")]
OTHER_WORDS += [{"share": ("A", "B")}, {"space": "factors"}]


@pytest.mark.parametrize("real", OTHER_WORDS, ids=str)
def test_a_server_that_followed_other_words_is_found(tmp_path, real):
    said = MixingConfig(strategy="atlas_laplacian", eta=0.1)
    run = write_run(tmp_path / "run", said, real=replace(said, **real))
    for round in range(1, ROUNDS + 1):
        edit_record(run, round, eta=0.1)  # it claims to have done what it was told
    assert only(audit_run(run), "mixed")


def test_truncation_in_place_of_padding_is_found(tmp_path):
    said = MixingConfig(strategy="atlas_laplacian", space="factors")
    assert only(audit_run(write_run(tmp_path / "run", said, real=replace(said, align="truncate"))), "mixed")


def test_an_eta_that_is_not_the_configs_is_found(tmp_path):
    said = MixingConfig(strategy="atlas_laplacian", eta=0.1, eta_decay=0.5)
    report = audit_run(write_run(tmp_path / "run", said, real=replace(said, eta_decay=1.0)))
    assert [row.detail for row in only(report, "record")] == ["eta was 0.1, not 0.05", "eta was 0.1, not 0.025"]
    assert {row.round for row in only(report, "mixed")} == {2, 3}


@pytest.mark.parametrize("key", ["movie-2/layer.1.q.lora_B", "movie-2/head.weight", "trec-0/layer.0.q.lora_A"])
@pytest.mark.parametrize("space", ["product", "factors"])
def test_one_changed_tensor_is_found(tmp_path, key, space):
    run = write_run(tmp_path / "run", MixingConfig(strategy="atlas_laplacian", space=space))
    edit_tensors(run, 1, "start", lambda flat: flat[key].mul_(1.001))
    client, name = key.split("/")
    failures = audit_run(run).failures
    assert (1, client, "mixed") in {(row.round, row.client, row.check) for row in failures}
    (row,) = [row for row in failures if row.check == "mixed" and row.round == 1]
    assert row.detail.startswith(name if space == "factors" or "head" in name else name.rsplit(".", 1)[0])
    assert row.error > 1e-4


def test_a_changed_trained_tensor_is_found(run):
    edit_tensors(run, 1, "trained", lambda flat: flat["movie-0/layer.0.q.lora_A"].mul_(1.5))
    assert {row.client for row in only(audit_run(run), "mixed", round=1)} == {"movie-0", "movie-1", "movie-2"}


def test_an_absent_client_whose_model_changed_is_found(run):
    edit_tensors(run, 2, "start", lambda flat: flat["movie-0/head.weight"].add_(1e-6))
    failures = [row for row in audit_run(run).failures if row.round == 2]
    assert [(row.client, row.check) for row in failures] == [("movie-0", "mixed")]
    assert failures[0].detail == "head.weight changed, but should have stayed as it was"


@pytest.mark.parametrize("name", ["trained", "start"])
def test_renamed_tensors_are_found(run, name):
    old, new = "movie-1/layer.0.q.lora_A", "movie-1/base.layer.0.q.lora_A"
    edit_tensors(run, 1, name, lambda flat: flat.update({new: flat.pop(old)}))
    row = only(audit_run(run), "names", round=1)[0]
    assert row.client == "movie-1"
    what = {"trained": "what it trained", "start": "what it starts with"}[name]
    assert row.detail == f"{what} lacks ['layer.0.q.lora_A'] and has unknown ['base.layer.0.q.lora_A'] (1 and 1 in all)"


def test_a_tensor_of_another_shape_is_found(run):
    edit_tensors(run, 1, "start", lambda flat: flat.update({"trec-0/head.weight": torch.zeros(2, D_IN)}))
    assert only(audit_run(run), "names", round=1)[0].detail == "what it starts with has head.weight of shape (2, 14)"


def test_swapped_clients_are_found(tmp_path):
    def served(_round, _updates, start):
        return {**start, "trec-0": start["trec-1"], "trec-1": start["trec-0"]}

    report = audit_run(write_run(tmp_path / "other ranks", served=served))
    assert {(1, "trec-0", "names"), (1, "trec-1", "names")} <= found(report)

    def served_alike(_round, _updates, start):
        return {**start, "movie-0": start["movie-1"], "movie-1": start["movie-0"]}

    report = audit_run(write_run(tmp_path / "run", served=served_alike))
    assert {row.client for row in only(report, "mixed", round=1)} == {"movie-0", "movie-1"}


def test_a_refused_update_that_was_mixed_all_the_same_is_found(tmp_path):
    run = write_run(tmp_path / "run", MixingConfig(strategy="fedavg"))
    # the record says that movie-0 was refused, but its update is in the mean
    edit_record(run, 1, refused={"movie-0": "head.weight holds 1 values that are NaN"})
    mixed = {row.client for row in only(audit_run(run), "mixed", round=1)}
    assert mixed == set(CLIENTS)


def test_a_refused_client_that_did_not_keep_its_model_is_found(run):
    edit_record(run, 1, refused={"trec-0": "head.weight holds 1 values that are NaN"})
    report = audit_run(run)
    row = next(row for row in report.failures if row.client == "trec-0" and row.check == "mixed")
    assert row.detail.endswith("changed, but should have stayed as it was")


def test_ranks_that_are_not_the_plans_are_found(run):
    plan = plan_json()
    plan["clients"][3]["ranks"] = [8, 5]
    (run / "plan.json").write_text(json.dumps(plan))
    report = audit_run(run)
    assert only(report, "names", round=1)[0].detail == "layer.0.q.lora_A has rank 3, the plan says 8"


def leave_out(client, flat):
    for key in [key for key in flat if key.startswith(f"{client}/")]:
        del flat[key]


def test_participants_without_a_model_and_models_without_a_participant_are_found(run):
    edit_tensors(run, 1, "trained", partial(leave_out, "pairs-0"))
    assert only(audit_run(run), "record", round=1)[0].detail == "no trained model of pairs-0"
    edit_record(run, 1, participants=list(CLIENTS[1:-1]))
    assert only(audit_run(run), "record", round=1)[0].detail == "trained models of movie-0, who took no part"
    edit_record(run, 3, participants=["movie-0", "trec-1", "pairs-0", "intruder"])
    detail = only(audit_run(run), "record", round=3)[0].detail
    assert "no trained model of intruder; ['intruder'] are not in the plan" in detail


def test_a_client_without_a_model_is_found(run):
    for round in range(4):
        edit_tensors(run, round, "start", partial(leave_out, "trec-0"))
    rows = [row for row in audit_run(run).failures if row.client == "trec-0" and row.round == 1]
    told = [("loaded", "nothing was sent to it"), ("names", "it has no model")]
    assert [(row.check, row.detail) for row in rows] == told


def test_a_lost_round_is_found(run):
    shutil.rmtree(run / "audit" / "round-0002")
    report = audit_run(run)
    assert [(row.check, row.detail) for row in report.failures] == [("record", "no rounds [2]")]
