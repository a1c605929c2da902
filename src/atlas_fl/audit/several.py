"""Several runs side by side: those that should differ must not have ended with the same models."""

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import combinations

import numpy as np

from atlas_fl.audit.folder import Run, is_aggregated, read_models, read_plan, read_record
from atlas_fl.audit.report import AuditRow
from atlas_fl.audit.robust import robust_of
from atlas_fl.audit.rules import Rule, kind_of, weights
from atlas_fl.tree import digest

DECISIVE = {
    "data": ("tasks", "task", "clients_per_task", "samples", "partition", "shuffle_labels"),
    "model": ("model", "dropout", "precision", "init_adapter"),
    "training": ("local_epochs", "batch_size", "lr", "schedule", "weight_decay"),
    "run": ("seed",),
}
"""Settings that cannot change without changing the models. Settings that may turn out to say the same (a cluster
search that finds the true tasks, a clip that never binds) are judged by what the plan made of them."""


def signature(run: Run) -> str:
    """A digest of all that must lead to other models when it changes: equal for runs that may end alike."""
    decisive = {
        group: {name: run.config.get(group, {}).get(name) for name in names} for group, names in DECISIVE.items()
    }
    rounds = [_round_signature(run, round) for round in run.rounds]
    return sha256(json.dumps([decisive, rounds], sort_keys=True, default=str).encode()).hexdigest()


def _round_signature(run: Run, round: int) -> list[object]:
    record = read_record(run, round)
    plan = read_plan(run, record.plan)
    mixing = run.mixing
    present = tuple(client in record.accepted for client in plan.clients)
    rule = Rule(
        robust=robust_of(run),
        kind=kind_of(mixing.strategy) if is_aggregated(run, round) else "own",
        laplacian=mixing.laplacian,
        eta=mixing.eta * mixing.eta_decay ** (round - 1),
        by_layer=mixing.layer_weighting == "importance",
        present=present,
    )
    layers = sorted(set(plan.layer_of.values())) if rule.by_layer else []
    body = [weights(plan, rule, head=False, layer=layer) for layer in layers]
    body = body or [weights(plan, rule, head=False)]
    head = weights(plan, rule, head=True)
    own = np.eye(len(plan.clients))
    body_still = all((one == own).all() for one in body) or not {"A", "B"} & set(mixing.share)
    head_still = bool((head == own).all()) or "head" not in mixing.share
    return [
        [plan.clients, plan.ranks, sorted(plan.layer_of), plan.alpha, plan.rslora, record.participants],
        []
        if body_still
        else [[np.round(one, 12).tolist() for one in body], mixing.space, sorted(set(mixing.share) - {"head"})],
        [] if head_still else np.round(head, 12).tolist(),
        [] if body_still or mixing.space == "product" else mixing.align,
    ]


def compare_runs(runs: Sequence[Run]) -> Iterator[AuditRow]:
    """One row for each pair of runs that should differ."""
    ends = [
        {client: digest(params) for client, params in read_models(run, run.rounds[-1], "start").items()} for run in runs
    ]
    signatures = [signature(run) for run in runs] if len(runs) > 1 else [""]
    for one, other in combinations(range(len(runs)), 2):
        if signatures[one] != signatures[other]:
            same = ends[one] == ends[other]
            yield AuditRow(
                run=runs[one].path.name,
                round=0,
                client="",
                check="different",
                ok=not same,
                detail=f"ends with the very models of {runs[other].path.name}, yet it should differ" if same else "",
            )
