"""Every rule of the server has one of the audit, which shares no code with it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from atlas_fl.audit.averages import CLUSTER_MEAN, MEAN, Laplacian, Own
from atlas_fl.audit.check import audit_run
from atlas_fl.audit.rules import RULES, formula_of
from atlas_fl.audit.run_files import AuditPlan, open_run
from atlas_fl.audit.step import Step, weights
from atlas_fl.config.schema import MixingConfig
from atlas_fl.errors import CheckpointError
from atlas_fl.methods import registry
from atlas_fl.methods.registry import ALIASES, METHODS
from tests.audit.test_honest import BY_FACTORS
from tests.audit.written import edit_tensors, found, plan_json, write_run


def test_every_strategy_has_an_independent_rule():
    assert RULES.keys() == registry.RULES.keys() | ALIASES.keys() | METHODS.keys()
    assert all(RULES[name] == RULES[method.rule] for name, method in METHODS.items())


@pytest.mark.parametrize("strategy", registry.RULES)
def test_a_model_that_was_altered_is_found_under_every_rule(tmp_path, strategy):
    space = "factors" if strategy in BY_FACTORS else "product"
    run = write_run(tmp_path / "run", MixingConfig(strategy=strategy, space=space))
    edit_tensors(run, 1, "start", lambda flat: flat["movie-1/layer.0.q.lora_B"].add_(0.5))
    assert (1, "movie-1", "mixed") in found(audit_run(run))


def three(run, **plan):
    """A plan of three clients, the third of another task."""
    values = {"tasks": ("x", "x", "y"), "examples": (1.0, 3.0, 4.0), "clusters": (0, 0, 0), "ranks": ((1,),) * 3}
    graph = np.array([[0, 1, 0], [1, 0, 3], [0, 3, 0]], float)
    values |= {"adjacency": graph, "importance": None, "layer_of": {}, "alpha": None, "rslora": False, **plan}
    return lambda present=(True, True, True): Step(
        run=run, round=1, before={}, trained={}, present=present, plan=AuditPlan(clients=("a", "b", "c"), **values)
    )


@pytest.fixture
def walk(tmp_path):
    """A run with the random walk's Laplacian."""
    return open_run(write_run(tmp_path / "run", MixingConfig(strategy="atlas_laplacian", eta=0.5)))


def test_rules_by_hand(walk):
    step = three(walk)
    assert weights(Own(), step(), "a").tolist() == np.eye(3).tolist()
    assert weights(MEAN, step(), "a").tolist() == [[1 / 8, 3 / 8, 4 / 8]] * 3
    assert weights(MEAN, step(), "head.w").tolist() == [[0.25, 0.75, 0], [0.25, 0.75, 0], [0, 0, 1]]
    assert weights(CLUSTER_MEAN, three(walk, clusters=(0, -1, 0))(), "a").tolist()[:2] == [[0.2, 0, 0.8], [0, 1, 0]]
    assert weights(Laplacian(), step(), "a").tolist() == [[0.5, 0.5, 0], [0.125, 0.5, 0.375], [0, 0.5, 0.5]]
    assert weights(Laplacian(), step(), "head.w").tolist() == [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]]
    assert weights(Laplacian(), step((False, True, True)), "a").tolist()[0] == [1, 0, 0]


def test_a_rule_without_an_audit_is_named(walk):
    settings = replace(walk.settings, mixing=replace(walk.mixing, strategy="fedmagic"))
    with pytest.raises(CheckpointError, match="no audit is written for strategy 'fedmagic'"):
        formula_of(replace(walk, settings=settings))


def test_importance_that_is_needed_and_missing_is_named(tmp_path):
    run = write_run(tmp_path / "run", MixingConfig(strategy="atlas_laplacian", layer_weighting="importance"))
    (run / "plan.json").write_text(json.dumps(plan_json() | {"importance": []}))
    with pytest.raises(CheckpointError, match="the plan holds no importance of the layers"):
        audit_run(run)


def test_without_edges_the_laplacian_leaves_models_as_they_are(tmp_path):
    run = open_run(write_run(tmp_path / "run", MixingConfig(strategy="atlas_laplacian")))
    step = three(run, adjacency=np.zeros((3, 3)))()
    assert weights(Laplacian(), step, "a").tolist() == np.eye(3).tolist()
