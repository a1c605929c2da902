"""The audit must pass what the real strategies did, and find every fault that is planted."""

import ast
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import atlas_fl.audit
from atlas_fl.audit import audit
from atlas_fl.audit.dense import Round, Truth, decompose
from atlas_fl.audit.folder import Plan
from atlas_fl.audit.rules import RULES, Rule, kind_of, weights
from atlas_fl.config import Config, MixingConfig, to_toml
from atlas_fl.errors import CheckpointError
from atlas_fl.mixing.matrices import Federation
from atlas_fl.strategies import ALIASES, STRATEGIES, StrategyOptions, find_strategy
from atlas_fl.tree import digest, prefixed

CLIENTS = ("movie-0", "movie-1", "movie-2", "trec-0", "trec-1", "pairs-0")
TASKS = ("movie", "movie", "movie", "trec", "trec", "pairs")
LABELS = {"movie": 2, "trec": 6, "pairs": 2}
CLUSTERS = (0, 0, 0, 1, 1, -1)
RANKS = ((4, 8), (4, 8), (6, 4), (3, 5), (8, 3), (4, 4))
EXAMPLES = (200, 100, 300, 50, 150, 80)
LAYER_OF = {"layer.0.q": 0, "layer.1.q": 1}
D_IN, D_OUT = 14, 11
ROUNDS = 3


def adjacency():
    graph = np.triu(np.random.default_rng(3).random((6, 6)) + 0.1, 1)
    together = [[one >= 0 and one == other for other in CLUSTERS] for one in CLUSTERS]
    return (graph + graph.T) * np.array(together)


def importance():
    return np.random.default_rng(4).dirichlet(np.ones(2), 6)


def model(draw, ranks, labels):
    params = {}
    for module, layer in LAYER_OF.items():
        params[f"{module}.lora_A"] = torch.randn(ranks[layer], D_IN, generator=draw)
        params[f"{module}.lora_B"] = torch.randn(D_OUT, ranks[layer], generator=draw)
    return {**params, "head.weight": torch.randn(labels, D_IN, generator=draw)}


def trained(start, *, round):
    draw = torch.Generator().manual_seed(round)
    return {
        client: {key: tensor + 0.3 * torch.randn(tensor.shape, generator=draw) for key, tensor in params.items()}
        for client, params in start.items()
    }


def plan_json(*, alpha=None, rslora=False, graph=None):
    clients = [
        {"name": name, "task": task, "device": "cpu_2gb", "examples": count, "cluster": cluster, "ranks": list(ranks)}
        for name, task, count, cluster, ranks in zip(CLIENTS, TASKS, EXAMPLES, CLUSTERS, RANKS)
    ]
    return {
        "clients": clients,
        "adjacency": (adjacency() if graph is None else graph).tolist(),
        "importance": importance().tolist(),
        "layer_of": LAYER_OF,
        "lora": {"alpha": alpha, "rslora": rslora},
        "clustering": {},
    }


def federation(graph=None):
    return Federation(
        clients=CLIENTS,
        weights=np.array(EXAMPLES, float),
        clusters=np.array(CLUSTERS),
        adjacency=adjacency() if graph is None else graph,
        head_groups=TASKS,
        importance=importance(),
        layer_of=LAYER_OF,
    )


def write_models(folder, name, models):
    folder.mkdir(parents=True, exist_ok=True)
    flat = {key: tensor.clone().contiguous() for key, tensor in prefixed(models).items()}
    save_file(flat, folder / f"{name}.safetensors")


def who(round):
    """(who was asked to train, whose update was refused): all in round one, fewer later."""
    return {1: (CLIENTS, ()), 2: (CLIENTS[1:], ("movie-1",)), 3: (("movie-0", "trec-1", "pairs-0"), ("trec-1",))}[round]


def write_run(path, mixing=None, *, seed=42, alpha=None, rslora=False, real=None, served=None):
    """A run folder as the round loop writes it. `real` are the words that the server really followed, `served(round,
    trained, start)` may replace what it delivers.
    """
    mixing = mixing or MixingConfig()
    real = real or mixing
    options = StrategyOptions(
        eta=real.eta, eta_decay=real.eta_decay, laplacian=real.laplacian, space=real.space, share=real.share,
        align=real.align, layer_weighting=real.layer_weighting,
        scale=lambda rank: (2 * rank if alpha is None else alpha) / (rank**0.5 if rslora else rank),
    )  # fmt: skip
    strategy = find_strategy(real.strategy, options)
    config = Config(mixing=mixing)
    path.mkdir()
    (path / "config.toml").write_text(to_toml(replace(config, run=replace(config.run, seed=seed))))
    (path / "plan.json").write_text(json.dumps(plan_json(alpha=alpha, rslora=rslora)))
    draw = torch.Generator().manual_seed(seed)
    start = {name: model(draw, ranks, LABELS[task]) for name, ranks, task in zip(CLIENTS, RANKS, TASKS)}
    write_models(path / "audit" / "round-0000", "start", start)
    state = strategy.init(start)
    for round in range(1, ROUNDS + 1):
        asked, refused = who(round)
        updates = {client: params for client, params in trained(start, round=round).items() if client in asked}
        good = {client: params for client, params in updates.items() if client not in refused}
        loaded = {client: {"digest": digest(start[client]), "keys": len(start[client])} for client in good}
        server = strategy.aggregate(state, good, federation(), round=round)
        state, start = server.state, server.start
        if served is not None:
            start = served(round, good, start)
            state = start
        folder = path / "audit" / f"round-{round:04d}"
        write_models(folder, "trained", good)
        write_models(folder, "start", start)
        record = {
            "round": round,
            "participants": list(asked),
            "refused": dict.fromkeys(refused, "head.weight holds 1 values that are NaN"),
            "eta": strategy.eta(round),
            "plan": "plan.json",
            "loaded": loaded,
            "kept": [],
        }
        (folder / "record.json").write_text(json.dumps(record))
    return path


def edit_record(path, round, **changes):
    file = path / "audit" / f"round-{round:04d}" / "record.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(path, round, name, change):
    file = path / "audit" / f"round-{round:04d}" / f"{name}.safetensors"
    flat = load_file(file)
    change(flat)
    save_file(flat, file)


def found(report):
    return {(row.round, row.client, row.check) for row in report.failures}


def only(report, check, *, round=None):
    return [row for row in report.failures if row.check == check and (round is None or row.round == round)]


# what an honest run passes

HONEST = {
    "product": MixingConfig(),
    "factors": MixingConfig(space="factors"),
    "truncate": MixingConfig(space="factors", align="truncate"),
    "symmetric": MixingConfig(laplacian="symmetric", eta=0.7),
    "metropolis": MixingConfig(laplacian="metropolis", eta=1.0, eta_decay=0.5),
    "by layer": MixingConfig(layer_weighting="importance", eta=0.5),
    "swap": MixingConfig(eta=1.0),
    "head": MixingConfig(share=("head",)),
    "A": MixingConfig(share=("A",), space="factors"),
    "B": MixingConfig(share=("B",), space="factors"),
    "eta 0": MixingConfig(eta=0.0),
}


@pytest.mark.parametrize("strategy", [*STRATEGIES, *ALIASES])
@pytest.mark.parametrize("words", HONEST)
def test_an_honest_run_passes(tmp_path, strategy, words):
    report = audit(write_run(tmp_path / "run", replace(HONEST[words], strategy=strategy)))
    assert report.ok, report.failures[:3]
    assert {row.check for row in report.rows} == {"record", "loaded", "names", "mixed", "moved"}
    assert len(only_rows(report, "mixed")) == ROUNDS * len(CLIENTS)


def test_the_audit_tells_how_far_it_is(tmp_path):
    told = []
    audit(write_run(tmp_path / "run"), on_event=told.append)
    assert [(event.done, event.total) for event in told] == [(done, ROUNDS) for done in range(ROUNDS)]


def only_rows(report, check):
    return [row for row in report.rows if row.check == check]


@pytest.mark.parametrize("space", ["product", "factors"])
@pytest.mark.parametrize(("alpha", "rslora"), [(16.0, False), (None, True), (16.0, True)])
def test_the_scale_of_the_ranks_is_that_of_the_plan(tmp_path, space, alpha, rslora):
    run = write_run(tmp_path / "run", MixingConfig(space=space), alpha=alpha, rslora=rslora)
    assert audit(run).ok
    plan = plan_json(alpha=None if alpha else 16.0, rslora=rslora)
    (run / "plan.json").write_text(json.dumps(plan))
    assert only(audit(run), "mixed"), "another scale is another mixture"


def test_a_refused_update_may_be_on_record_but_counts_for_nothing(tmp_path):
    run = write_run(tmp_path / "run")
    held = load_file(run / "audit" / "round-0001" / "start.safetensors")
    refused = {key: tensor * float("nan") for key, tensor in held.items() if key.startswith("movie-1/")}
    edit_tensors(run, 2, "trained", lambda flat: flat.update(refused))
    assert audit(run).ok


def test_every_strategy_has_an_independent_rule():
    assert RULES.keys() == STRATEGIES.keys() | ALIASES.keys()


def test_the_audit_shares_no_code_with_the_server():
    for file in Path(atlas_fl.audit.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any("mixing" in name or "strategies" in name for name in names), file


def test_the_errors_of_an_honest_run_are_far_below_the_tolerance(tmp_path):
    report = audit(write_run(tmp_path / "run"))
    worst = max(row.error for row in report.rows if row.error is not None)
    assert 0 < worst < 1e-5
    assert [(one.run, one.round, one.failed) for one in report.rounds()] == [("run", round, 0) for round in (1, 2, 3)]
    assert report.rounds()[0].worst_error <= worst


def test_an_honest_run_passes_although_divide_and_conquer_fails(tmp_path, monkeypatch):
    """It did on a real run: a finite sum of updates of rank 56 in 384 dimensions."""
    calls = []

    def fails(matrix, **_):
        calls.append(matrix.shape)
        raise np.linalg.LinAlgError("SVD did not converge")

    run = write_run(tmp_path / "run")
    monkeypatch.setattr(np.linalg, "svd", fails)
    assert audit(run).ok
    edit_tensors(run, 1, "start", lambda flat: flat["movie-2/layer.1.q.lora_B"].mul_(1.001))
    assert (1, "movie-2", "mixed") in found(audit(run))
    assert calls


def test_the_decomposition_is_that_of_the_matrix():
    matrix = np.random.default_rng(0).normal(size=(7, 3)) @ np.ones((3, 5))
    left, values, right = decompose(matrix)
    assert (left * values) @ right == pytest.approx(matrix)


def test_rules_by_hand():
    plan = Plan(
        clients=("a", "b", "c"), tasks=("x", "x", "y"), examples=(1.0, 3.0, 4.0), clusters=(0, 0, 0),
        ranks=((1,),) * 3, adjacency=np.array([[0, 1, 0], [1, 0, 3], [0, 3, 0]], float), importance=None,
        layer_of={}, alpha=None, rslora=False,
    )  # fmt: skip

    def matrix(kind, *, head=False, present=(True, True, True)):
        rule = Rule(kind=kind, laplacian="random_walk", eta=0.5, by_layer=False, present=present)
        return weights(plan, rule, head=head).tolist()

    assert matrix("own") == np.eye(3).tolist()
    assert matrix("mean") == [[1 / 8, 3 / 8, 4 / 8]] * 3
    assert matrix("mean", head=True) == [[0.25, 0.75, 0], [0.25, 0.75, 0], [0, 0, 1]]
    assert matrix("laplacian") == [[0.5, 0.5, 0], [0.125, 0.5, 0.375], [0, 0.5, 0.5]]
    assert matrix("laplacian", head=True) == [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]]
    assert matrix("laplacian", present=(False, True, True))[0] == [1, 0, 0]


@pytest.mark.parametrize("kept_is_recorded", [True, False])
def test_who_kept_its_own_model_on_validation_is_believed_if_it_is_true(tmp_path, kept_is_recorded):
    kept = {1: ("movie-0", "trec-0")}

    def served(round, updates, start):
        return {client: updates[client] if client in kept.get(round, ()) else start[client] for client in CLIENTS}

    run = write_run(tmp_path / "run", MixingConfig(keep="best"), served=served)
    if kept_is_recorded:
        assert {("movie-0", "mixed"), ("trec-0", "mixed")} <= {(row.client, row.check) for row in audit(run).failures}
        edit_record(run, 1, kept=["movie-0", "trec-0"])
        assert audit(run).ok
        edit_record(run, 1, kept=["movie-0", "trec-0", "movie-1"])
        assert [row.detail for row in audit(run).failures] == ["it was to keep its own model, but it changed"]
    else:
        for round in range(1, ROUNDS + 1):
            file = run / "audit" / f"round-{round:04d}" / "record.json"
            file.write_text(
                json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "kept"})
            )
        assert audit(run).ok


# what must be found


def test_a_write_back_that_does_not_happen_is_found(tmp_path):
    def served(_round, updates, start):
        return {client: updates.get(client, start[client]) for client in CLIENTS}

    report = audit(write_run(tmp_path / "run", MixingConfig(eta=0.1), served=served))
    moved = only(report, "moved", round=1)
    assert {row.client for row in moved} == set(CLIENTS) - {"pairs-0"}, "who is alone may stay"
    assert moved[0].detail.startswith("3 of 3 were left as trained; ")
    assert " should move by 0." in moved[0].detail
    assert {row.client for row in only(report, "mixed", round=1)} == set(CLIENTS) - {"pairs-0"}


def test_a_write_back_of_the_head_alone_is_found(tmp_path):
    def served(_round, updates, start):
        return {c: {**updates.get(c, start[c]), "head.weight": start[c]["head.weight"]} for c in CLIENTS}

    moved = only(audit(write_run(tmp_path / "run", served=served)), "moved", round=1)
    assert {row.client for row in moved} == set(CLIENTS) - {"pairs-0"}
    assert moved[0].detail.startswith("2 of 3 were left as trained")


def test_a_tiny_step_that_is_left_out_is_found_by_its_bits(tmp_path):
    def served(_round, updates, start):
        return {client: updates.get(client, start[client]) for client in CLIENTS}

    report = audit(write_run(tmp_path / "run", MixingConfig(eta=1e-5), served=served))
    assert not only(report, "mixed"), "too small to be seen by value"
    assert {row.client for row in only(report, "moved", round=1)} == set(CLIENTS) - {"pairs-0"}


def test_clients_that_go_on_with_what_they_trained_are_found(tmp_path):
    run = write_run(tmp_path / "run")
    own = load_file(run / "audit" / "round-0001" / "trained.safetensors")
    params = {key.split("/", 1)[1]: tensor for key, tensor in own.items() if key.startswith("trec-0/")}
    loaded = json.loads((run / "audit" / "round-0002" / "record.json").read_text())["loaded"]
    loaded["trec-0"]["digest"] = digest(params)
    edit_record(run, 2, loaded=loaded)
    report = audit(run)
    assert found(report) == {(2, "trec-0", "loaded")}
    assert report.failures[0].detail.startswith(f"loaded {digest(params)[:12]}, sent was ")
    assert report.rounds()[1].first_failure.startswith("trec-0 loaded: loaded ")


def test_a_client_that_loaded_fewer_tensors_is_found(tmp_path):
    run = write_run(tmp_path / "run")
    loaded = json.loads((run / "audit" / "round-0001" / "record.json").read_text())["loaded"]
    loaded["movie-0"]["keys"] = 4
    del loaded["trec-1"]
    edit_record(run, 1, loaded=loaded)
    report = audit(run)
    assert found(report) == {(1, "movie-0", "loaded"), (1, "trec-1", "loaded")}
    assert [row.detail for row in report.failures] == [
        "loaded 4 tensors, 5 were sent",
        "what it loaded was not recorded",
    ]


@pytest.mark.parametrize(
    "real",
    [
        {"eta": 0.0},
        {"eta": 0.11},
        {"laplacian": "symmetric"},
        {"strategy": "fedavg_cluster"},
        {"strategy": "fedavg"},
        {"strategy": "local"},
        {"share": ("A", "B")},
        {"space": "factors"},
        {"layer_weighting": "importance"},
    ],
    ids=str,
)
def test_a_server_that_followed_other_words_is_found(tmp_path, real):
    said = MixingConfig(eta=0.1)
    run = write_run(tmp_path / "run", said, real=replace(said, **real))
    for round in range(1, ROUNDS + 1):
        edit_record(run, round, eta=0.1)  # it claims to have done what it was told
    assert only(audit(run), "mixed")


def test_truncation_in_place_of_padding_is_found(tmp_path):
    said = MixingConfig(space="factors")
    assert only(audit(write_run(tmp_path / "run", said, real=replace(said, align="truncate"))), "mixed")


def test_an_eta_that_is_not_the_configs_is_found(tmp_path):
    said = MixingConfig(eta=0.1, eta_decay=0.5)
    report = audit(write_run(tmp_path / "run", said, real=replace(said, eta_decay=1.0)))
    assert found(report) == {(2, "", "record"), (3, "", "record")}
    assert report.failures[0].detail == "eta was 0.1, not 0.05"


@pytest.mark.parametrize("key", ["movie-2/layer.1.q.lora_B", "movie-2/head.weight", "trec-0/layer.0.q.lora_A"])
@pytest.mark.parametrize("space", ["product", "factors"])
def test_one_changed_tensor_is_found(tmp_path, key, space):
    run = write_run(tmp_path / "run", MixingConfig(space=space))

    def change(flat):
        flat[key] = flat[key] * 1.001

    edit_tensors(run, 1, "start", change)
    client, name = key.split("/")
    failures = audit(run).failures
    assert (1, client, "mixed") in {(row.round, row.client, row.check) for row in failures}
    (row,) = [row for row in failures if row.check == "mixed" and row.round == 1]
    assert row.detail.startswith(name if space == "factors" or "head" in name else name.rsplit(".", 1)[0])
    assert row.error > 1e-4


def test_a_changed_trained_tensor_is_found(tmp_path):
    run = write_run(tmp_path / "run")
    edit_tensors(run, 1, "trained", lambda flat: flat["movie-0/layer.0.q.lora_A"].mul_(1.5))
    assert {row.client for row in only(audit(run), "mixed", round=1)} == {"movie-0", "movie-1", "movie-2"}


def test_an_absent_client_whose_model_changed_is_found(tmp_path):
    run = write_run(tmp_path / "run")
    edit_tensors(run, 2, "start", lambda flat: flat["movie-0/head.weight"].add_(1e-6))
    failures = [row for row in audit(run).failures if row.round == 2]
    assert [(row.client, row.check) for row in failures] == [("movie-0", "mixed")]
    assert failures[0].detail == "head.weight changed, but should have stayed as it was"


@pytest.mark.parametrize("name", ["trained", "start"])
def test_renamed_tensors_are_found(tmp_path, name):
    run = write_run(tmp_path / "run")

    def rename(flat):
        flat["movie-1/base.layer.0.q.lora_A"] = flat.pop("movie-1/layer.0.q.lora_A")

    edit_tensors(run, 1, name, rename)
    row = only(audit(run), "names", round=1)[0]
    assert row.client == "movie-1"
    what = {"trained": "what it trained", "start": "what it starts with"}[name]
    assert row.detail == f"{what} lacks ['layer.0.q.lora_A'] and has unknown ['base.layer.0.q.lora_A'] (1 and 1 in all)"


def test_a_tensor_of_another_shape_is_found(tmp_path):
    run = write_run(tmp_path / "run")
    edit_tensors(run, 1, "start", lambda flat: flat.update({"trec-0/head.weight": torch.zeros(2, D_IN)}))
    assert only(audit(run), "names", round=1)[0].detail == "what it starts with has head.weight of shape (2, 14)"


def test_swapped_clients_are_found(tmp_path):
    def served(_round, _updates, start):
        return {**start, "trec-0": start["trec-1"], "trec-1": start["trec-0"]}

    report = audit(write_run(tmp_path / "other ranks", served=served))
    assert {(1, "trec-0", "names"), (1, "trec-1", "names")} <= found(report)

    def served_alike(_round, _updates, start):
        return {**start, "movie-0": start["movie-1"], "movie-1": start["movie-0"]}

    report = audit(write_run(tmp_path / "run", served=served_alike))
    assert {row.client for row in only(report, "mixed", round=1)} == {"movie-0", "movie-1"}


def test_a_refused_update_that_was_mixed_all_the_same_is_found(tmp_path):
    run = write_run(tmp_path / "run", MixingConfig(strategy="fedavg"))
    # the record says that movie-0 was refused, but its update is in the mean
    edit_record(run, 1, refused={"movie-0": "head.weight holds 1 values that are NaN"})
    mixed = {row.client for row in only(audit(run), "mixed", round=1)}
    assert mixed == set(CLIENTS)


def test_a_refused_client_that_did_not_keep_its_model_is_found(tmp_path):
    run = write_run(tmp_path / "run")
    edit_record(run, 1, refused={"trec-0": "head.weight holds 1 values that are NaN"})
    report = audit(run)
    row = next(row for row in report.failures if row.client == "trec-0" and row.check == "mixed")
    assert row.detail.endswith("changed, but should have stayed as it was")


def test_ranks_that_are_not_the_plans_are_found(tmp_path):
    run = write_run(tmp_path / "run")
    plan = plan_json()
    plan["clients"][3]["ranks"] = [8, 5]
    (run / "plan.json").write_text(json.dumps(plan))
    report = audit(run)
    assert only(report, "names", round=1)[0].detail == "layer.0.q.lora_A has rank 3, the plan says 8"


def test_participants_without_a_model_and_models_without_a_participant_are_found(tmp_path):
    run = write_run(tmp_path / "run")
    edit_tensors(run, 1, "trained", lambda flat: [flat.pop(key) for key in list(flat) if key.startswith("pairs-0/")])
    assert only(audit(run), "record", round=1)[0].detail == "no trained model of pairs-0"
    edit_record(run, 1, participants=list(CLIENTS[1:-1]))
    assert only(audit(run), "record", round=1)[0].detail == "trained models of movie-0, who took no part"
    edit_record(run, 3, participants=["movie-0", "trec-1", "pairs-0", "intruder"])
    assert (
        "no trained model of intruder; ['intruder'] are not in the plan"
        in only(audit(run), "record", round=3)[0].detail
    )


def test_a_client_without_a_model_is_found(tmp_path):
    run = write_run(tmp_path / "run")
    for round in range(4):
        edit_tensors(
            run, round, "start", lambda flat: [flat.pop(key) for key in list(flat) if key.startswith("trec-0")]
        )
    rows = [row for row in audit(run).failures if row.client == "trec-0" and row.round == 1]
    assert [(row.check, row.detail) for row in rows] == [
        ("loaded", "nothing was sent to it"),
        ("names", "it has no model"),
    ]


def test_a_lost_round_is_found(tmp_path):
    run = write_run(tmp_path / "run")
    shutil.rmtree(run / "audit" / "round-0002")
    report = audit(run)
    assert [(row.check, row.detail) for row in report.failures] == [("record", "no rounds [2]")]


def test_a_plan_that_changed_on_the_way_is_followed(tmp_path):
    run = write_run(tmp_path / "run")
    shutil.copy(run / "plan.json", run / "plan-0003.json")
    edit_record(run, 3, plan="plan-0003.json")
    assert audit(run).ok
    graph = adjacency()
    graph[0, 1] = graph[1, 0] = 0.0
    (run / "plan-0003.json").write_text(json.dumps(plan_json(graph=graph)))
    report = audit(run)
    assert found(report) == {(3, "movie-0", "mixed")}


def near_tie(kept, *, spoil=0.0):
    """One client's module whose second and third singular values differ by 1e-6; `kept` is which of them it keeps."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(6, 6)))[0] for _ in range(2))
    values = np.array([3.0, 1.0 + 1e-6, 1.0])
    plan = Plan(
        clients=("a", "b"), tasks=("x", "x"), examples=(1.0, 1.0), clusters=(0, 0), ranks=((2,), (1,)),
        adjacency=np.zeros((2, 2)), importance=None, layer_of={}, alpha=None, rslora=False,
    )  # fmt: skip

    def factors(places, times=1.0):
        b = torch.from_numpy(left[:, places] * values[places] / 2 * times)
        return {"q.lora_A": torch.from_numpy(right[:, places].T.copy()), "q.lora_B": b}

    after = factors([0, kept])
    after["q.lora_B"][0] += spoil
    before = {"a": factors([0, 1], 2.0), "b": factors([2], 2.0)}
    half = np.full((2, 2), 0.5)
    sides = {"before": before, "after": {"a": after, "b": before["b"]}}
    return Truth(
        Round(plan=plan, **sides, weights=lambda _: half, space="product", share=("A", "B"), align="pad")
    ).module(0, "q")


def test_where_singular_values_tie_any_best_approximation_is_right():
    assert near_tie(1).error <= 1e-4
    assert near_tie(2).error <= 1e-4, "the other of two equals"
    assert near_tie(2, spoil=0.01).error > 1e-4
    assert near_tie(3 - 3).error > 1e-4, "the first twice is no best approximation"


# several runs


def test_two_runs_that_should_differ_must_not_end_alike(tmp_path):
    local = write_run(tmp_path / "local", MixingConfig(strategy="local"))
    disguised = write_run(tmp_path / "atlas", MixingConfig(), real=MixingConfig(strategy="local"))
    honest = write_run(tmp_path / "honest", MixingConfig())
    report = audit(local, [honest])
    assert report.ok
    assert [row.check for row in report.rows if row.round == 0] == ["different"]
    rows = only(audit(local, [disguised, honest]), "different")
    assert [(row.run, row.detail) for row in rows] == [
        ("local", "ends with the very models of atlas, yet it should differ")
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (MixingConfig(strategy="local", eta=0.1), MixingConfig(strategy="local", eta=0.5, space="factors")),
        (MixingConfig(strategy="local"), MixingConfig(strategy="atlas", eta=0.0)),
        (MixingConfig(strategy="fedavg_cluster"), MixingConfig(strategy="atlas_no_laplacian", eta=0.7)),
        (MixingConfig(strategy="fedavg", alpha=2.0), MixingConfig(strategy="standard_fl")),
    ],
)
def test_runs_that_say_the_same_in_other_words_may_end_alike(tmp_path, first, second):
    one, other = write_run(tmp_path / "one", first), write_run(tmp_path / "other", second)
    report = audit(one, [other])
    assert report.ok
    assert not only_rows(report, "different")


@pytest.mark.parametrize("eta", [0.1, 0.5])
def test_the_step_that_moved_nothing_would_have_been_found(tmp_path, eta):
    """The earlier system's results for eta = 0, 0.1 and 0.5 were the same to the last bit."""
    zero = write_run(tmp_path / "zero", MixingConfig(eta=0.0))
    same = write_run(tmp_path / "same", MixingConfig(eta=eta), real=MixingConfig(eta=0.0))
    assert only(audit(zero, [same]), "different")


def test_another_seed_is_another_run(tmp_path):
    one = write_run(tmp_path / "one")
    copy = tmp_path / "copy"
    shutil.copytree(one, copy)
    assert audit(one, [copy]).ok, "the same run twice"
    text = (copy / "config.toml").read_text()
    assert "seed = 42" in text
    (copy / "config.toml").write_text(text.replace("seed = 42", "seed = 43"))
    assert only(audit(one, [copy]), "different")


# what cannot be read


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"is no run: it has no config\.toml"):
        audit(tmp_path)
    run = write_run(tmp_path / "run")
    shutil.rmtree(run / "audit")
    with pytest.raises(CheckpointError, match="holds no audited round; run it again with --audit"):
        audit(run)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.toml", "[mixing", "config.toml cannot be read"),
        ("config.toml", '[mixing]\nstrategy = "fedprox"', "config.toml cannot be read: unknown strategy 'fedprox'"),
        ("config.toml", "[mixing]\naggregate_every = 0", "config.toml cannot be read: --aggregate-every is 0"),
        ("plan.json", "{", "plan.json cannot be read"),
        ("plan.json", "{}", "plan.json is no plan: KeyError"),
        ("plan.json", None, "plan.json is missing"),
        ("audit/round-0002/record.json", None, "record.json is missing"),
        ("audit/round-0002/record.json", '{"round": 2}', "record.json is no record of a round: KeyError"),
        ("audit/round-0002/start.safetensors", "broken", "start.safetensors is damaged"),
        ("audit/round-0001/trained.safetensors", None, "trained.safetensors is missing"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, file, content, message):
    run = write_run(tmp_path / "run")
    if content is None:
        (run / file).unlink()
    else:
        (run / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        audit(run)


def test_a_rule_without_an_audit_is_named():
    with pytest.raises(CheckpointError, match="no audit is written for strategy 'fedprox'"):
        kind_of("fedprox")


@pytest.mark.parametrize("name", ["start", "trained"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["movie-0/head.weight", "trec-1/layer.0.q.lora_A"])
def test_numbers_that_are_none_are_found_and_end_in_no_traceback(tmp_path, name, value, key):
    run = write_run(tmp_path / "run")
    file = run / f"audit/round-0001/{name}.safetensors"
    flat = load_file(file)
    assert key in flat, sorted(flat)[:30]
    flat[key].view(-1)[-1] = value
    save_file(flat, file)
    failed = [row for row in audit(run).failures if row.check == "names" and "NaN or infinity" in row.detail]
    assert key.split("/")[0] in {row.client for row in failed}


@pytest.mark.parametrize("told_by", ["summary", "checkpoint"])
def test_last_rounds_that_are_missing_are_found(tmp_path, told_by):
    run = write_run(tmp_path / "run")
    if told_by == "summary":
        text = (run / "config.toml").read_text()
        (run / "config.toml").write_text(re.sub(r"(?m)^rounds = .*$", f"rounds = {ROUNDS}", text))
        (run / "summary.json").write_text("{}")
    else:
        (run / f"checkpoints/round-{ROUNDS:04d}").mkdir(parents=True)
    assert audit(run).ok
    shutil.rmtree(run / f"audit/round-{ROUNDS:04d}")
    assert [row.detail for row in audit(run).failures] == [f"no rounds [{ROUNDS}]"]


def test_other_folders_beside_the_rounds_do_not_matter(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "audit/round-0001.bak").mkdir()
    assert audit(run).ok


def test_importance_that_is_needed_and_missing_is_named(tmp_path):
    run = write_run(tmp_path / "run", MixingConfig(layer_weighting="importance"))
    (run / "plan.json").write_text(json.dumps(plan_json() | {"importance": []}))
    with pytest.raises(CheckpointError, match="the plan holds no importance of the layers"):
        audit(run)
