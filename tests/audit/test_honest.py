"""A run that did what it says passes, whatever its settings."""

import ast
import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from safetensors.torch import load_file

import atlas_fl.audit
from atlas_fl.audit.check import audit_run
from atlas_fl.config.schema import MixingConfig, RobustConfig, server_config
from atlas_fl.methods.registry import RULES
from atlas_fl.methods.server_optimizers import ServerStep
from tests.audit.written import (
    CLIENTS,
    ROUNDS,
    adjacency,
    edit_record,
    edit_tensors,
    found,
    only,
    only_rows,
    plan_json,
    write_run,
)

HONEST = {
    "product": MixingConfig(strategy="atlas_laplacian"),
    "factors": MixingConfig(strategy="atlas_laplacian", space="factors"),
    "truncate": MixingConfig(strategy="atlas_laplacian", space="factors", align="truncate"),
    "decay": MixingConfig(strategy="atlas_laplacian", eta=0.7, eta_decay=0.5),
    "by layer": MixingConfig(strategy="atlas_laplacian", layer_weighting="importance", eta=0.5),
    "swap": MixingConfig(strategy="atlas_laplacian", eta=1.0),
    "head": MixingConfig(strategy="atlas_laplacian", share=("head",)),
    "A": MixingConfig(strategy="atlas_laplacian", share=("A",), space="factors"),
    "B": MixingConfig(strategy="atlas_laplacian", share=("B",), space="factors"),
    "eta 0": MixingConfig(strategy="atlas_laplacian", eta=0.0),
}


WITH_STATE = (
    *("fedavg_dynamic", "fedavg_stacked", "fedavg_with_residual", "fedavg_by_arrival"),
    *("fedavg_by_rank_one", "fedavg_in_tree_and_outside", "fedavg_cluster_routed", "fedavg_by_qr", "fedavg_of_others"),
)
CORES = ("fedavg_of_cores", "fedavg_of_heads")
BY_FACTORS = (
    *(*WITH_STATE, "fedavg_orthonormal", "fedavg_rotated"),
    *CORES,
)
"""Rules of A and B, which validation says."""
BY_PRODUCTS = ("fedavg_by_rank", "fedavg_with_rest", "fedavg_in_levels")
"""Rules of products alone, which validation says."""
MEASURED = tuple(name for name, rule in RULES.items() if rule.report == "halves")
MORE = {
    "fedavg": ("truncate", "A"),
    **dict.fromkeys(("fedtreelora", "classifier_collaboration", "pfedgraph", "fedadam"), ("head",)),
}
"""Other words under which these rules run too."""
SERVER_OPTIMIZERS = tuple(name for name, rule in RULES.items() if issubclass(rule, ServerStep))
FROM_UPDATES = ("pfedgraph", "cfl", "fedtreelora", "classifier_collaboration")
STATEFUL = (*SERVER_OPTIMIZERS, *WITH_STATE, *BY_PRODUCTS[1:], *FROM_UPDATES, *MEASURED)
ROBUST = ("median", "trimmed_mean", "krum", "multi_krum", "geometric_median")


@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        (words, strategy)
        for words, strategy in product(HONEST, RULES)
        # no other rule reads how the Laplacian steps, and what is shared is asked of one rule of each kind
        if (strategy == "atlas_laplacian" or words in ("product", "factors") or words in MORE.get(strategy, ()))
        and not (words == "factors" and strategy in ("local", *BY_PRODUCTS, *MEASURED))
    ],
)
def test_an_honest_run_passes(tmp_path, strategy, words):
    is_dynamic = strategy == "fedavg_dynamic"
    space = "factors" if strategy in BY_FACTORS else HONEST[words].space
    report = audit_run(write_run(tmp_path / "run", replace(HONEST[words], strategy=strategy, space=space)))
    assert report.ok, report.failures[:3]
    bounded = set() if strategy in ("local", "local_only") else {"bounded"}
    # without adapters there is nothing that a tree could be made from
    has_state = strategy in STATEFUL and strategy not in CORES and (strategy, words) != ("fedtreelora", "head")
    remembers = ({"server"} if has_state else set()) | ({"corrected"} if is_dynamic else set())
    assert {row.check for row in report.rows} == {"record", "loaded", "names", "mixed", "moved"} | bounded | remembers
    assert len(only_rows(report, "mixed")) == ROUNDS * len(CLIENTS)


@pytest.mark.parametrize("strategy", ROBUST)
@pytest.mark.parametrize("space", ["product", "factors"])
def test_a_robust_rule_inside_clusters_passes_and_another_rule_in_its_name_does_not(tmp_path, strategy, space):
    robust, server = RobustConfig(within="clusters"), server_config(trim=0.4, byzantine=2)
    mixing = MixingConfig(strategy=strategy, space=space)
    assert audit_run(write_run(tmp_path / "run", mixing, robust=robust, server=server)).ok
    place = ROBUST.index(strategy)
    for other in ("fedavg_cluster", ROBUST[place - 2]):
        liar = write_run(tmp_path / other, mixing, robust=robust, server=server, real=replace(mixing, strategy=other))
        # of two or three clients some rules are the same
        same = {strategy, other} <= {"median", "trimmed_mean"} or {strategy, other} <= {"krum", "multi_krum"}
        assert same or only(audit_run(liar), "mixed"), other


def test_the_audit_tells_how_far_it_is(run):
    told = []
    audit_run(run, on_event=told.append)
    assert [(event.done, event.total) for event in told] == [(done, ROUNDS) for done in range(ROUNDS)]


@pytest.mark.parametrize("space", ["product", "factors"])
@pytest.mark.parametrize(("alpha", "rslora"), [(16.0, False), (None, True), (16.0, True)])
def test_the_scale_of_the_ranks_is_that_of_the_plan(tmp_path, space, alpha, rslora):
    run = write_run(tmp_path / "run", MixingConfig(strategy="atlas_laplacian", space=space), alpha=alpha, rslora=rslora)
    assert audit_run(run).ok
    plan = plan_json(alpha=None if alpha else 16.0, rslora=rslora)
    (run / "plan.json").write_text(json.dumps(plan))
    assert only(audit_run(run), "mixed"), "another scale is another mixture"


def test_a_refused_update_may_be_on_record_but_counts_for_nothing(run):
    held = load_file(run / "audit" / "round-0001" / "start.safetensors")
    refused = {key: tensor * float("nan") for key, tensor in held.items() if key.startswith("movie-1/")}
    edit_tensors(run, 2, "trained", lambda flat: flat.update(refused))
    assert audit_run(run).ok


def test_the_audit_shares_no_code_with_the_server():
    for file in Path(atlas_fl.audit.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not any(name.startswith(("atlas_fl.methods", "atlas_fl.aggregation")) for name in names), file
            assert not {"methods", "aggregation", "mixing"} & {*names}, file


def test_a_plan_that_changed_on_the_way_is_followed(run):
    shutil.copy(run / "plan.json", run / "plan-0003.json")
    edit_record(run, 3, plan="plan-0003.json")
    assert audit_run(run).ok
    graph = adjacency()
    graph[0, 1] = graph[1, 0] = 0.0
    (run / "plan-0003.json").write_text(json.dumps(plan_json(graph=graph)))
    report = audit_run(run)
    assert found(report) == {(3, "movie-0", "mixed")}
