"""Every rule of the server has one of the audit, which shares no code with it."""

import json

import numpy as np
import pytest

from atlas_fl.audit.check import audit_run
from atlas_fl.audit.rule_weights import RULES, Rule, kind_of, weights
from atlas_fl.audit.run_files import AuditPlan
from atlas_fl.config import MixingConfig
from atlas_fl.errors import CheckpointError
from atlas_fl.methods import registry
from atlas_fl.methods.registry import ALIASES, METHODS
from tests.audit.written import plan_json, write_run


def test_every_strategy_has_an_independent_rule():
    assert RULES.keys() == registry.RULES.keys() | ALIASES.keys() | METHODS.keys()
    assert all(RULES[name] == RULES[method.rule] for name, method in METHODS.items())


def test_rules_by_hand():
    plan = AuditPlan(
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


def test_a_rule_without_an_audit_is_named():
    with pytest.raises(CheckpointError, match="no audit is written for strategy 'fedmagic'"):
        kind_of("fedmagic")


def test_importance_that_is_needed_and_missing_is_named(tmp_path):
    run = write_run(tmp_path / "run", MixingConfig(strategy="atlas_laplacian", layer_weighting="importance"))
    (run / "plan.json").write_text(json.dumps(plan_json() | {"importance": []}))
    with pytest.raises(CheckpointError, match="the plan holds no importance of the layers"):
        audit_run(run)


def test_without_edges_every_laplacian_leaves_models_as_they_are():
    plan = AuditPlan(
        clients=("a", "b"), tasks=("x", "x"), examples=(1.0, 3.0), clusters=(0, 0), ranks=((1,),) * 2,
        adjacency=np.zeros((2, 2)), importance=None, layer_of={}, alpha=None, rslora=False,
    )  # fmt: skip
    for laplacian in ("symmetric", "random_walk", "metropolis"):
        rule = Rule(kind="laplacian", laplacian=laplacian, eta=0.5, by_layer=False, present=(True, True))
        assert weights(plan, rule, head=False).tolist() == np.eye(2).tolist()
