"""The audit of a run, round by round and client by client (`audit_run`), and of several runs side by side.

Several runs that differ in a decisive setting must not have ended with the same models.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from atlas_fl.audit.bounds import check_bounds, read_bounds, restored_fault
from atlas_fl.audit.class_features import check_centroids, head_row, read_reports, report_fault
from atlas_fl.audit.companions import check_corrections, check_second_models
from atlas_fl.audit.exact_average import ExactStep, frozen_tensors
from atlas_fl.audit.feddyn import DynamicStep
from atlas_fl.audit.kriging import Predictions, check_halves
from atlas_fl.audit.plan_changes import JoinedClients, check_joined, check_ranks, is_reranked, read_joined
from atlas_fl.audit.recompute import TOLERANCE, Comparison, Recomputed, Round, common_faults, with_common_tensors
from atlas_fl.audit.report import AuditReport, AuditRow
from atlas_fl.audit.rule_weights import (
    BY_UPDATES,
    HEADS_BY_FEATURES,
    KRIGING,
    PLUGGED,
    RESIDUAL,
    STACKED,
    Rule,
    attention_of,
    has_state,
    norms_of,
    points_of,
    reducer,
    robust_of,
    run_kind,
    weights,
)
from atlas_fl.audit.run_files import (
    NO_ANSWER,
    AuditPlan,
    AuditRecord,
    Models,
    Run,
    frozen_fault,
    is_aggregated,
    open_run,
    read_audit_record,
    read_models,
    read_plan,
    recorded_rows,
    round_folder,
)
from atlas_fl.audit.sent_bytes import check_sent_bytes
from atlas_fl.audit.server_state import (
    Directions,
    Flat,
    OptimizerStep,
    check_server_state,
    check_unchanged,
    flat_arrays,
    latest_state,
    read_state,
    recompute_server_step,
    state_after,
    with_initial,
)
from atlas_fl.audit.update_clusters import (
    RoundUpdates,
    begun_fault,
    labels_in,
    state_after_choice,
    state_after_updates,
)
from atlas_fl.errors import CheckpointError
from atlas_fl.events import OnEvent, Progress, ignore
from atlas_fl.params import HEAD, LORA_A, LORA_B, PRIVATE, digest, is_last_layer, with_frozen
from atlas_fl.storage.digests import find_faults
from atlas_fl.storage.run_folder import RunFolder

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
    record = read_audit_record(run, round)
    plan = read_plan(run, record.plan)
    mixing = run.mixing
    present = tuple(client in record.accepted_clients for client in plan.clients)
    state = latest_state(run, round)
    rule = Rule(
        robust=robust_of(run),
        kind=run_kind(run) if is_aggregated(run, round) else "own",
        laplacian=mixing.laplacian,
        eta=mixing.eta * mixing.eta_decay ** (round - 1),
        by_layer=mixing.layer_weighting == "importance",
        present=present,
        clusters=_labels_of(state, plan),
        recorded=recorded_rows(run, round) or None,
    )
    layers = sorted(set(plan.layer_of.values())) if rule.by_layer or rule.kind in BY_UPDATES else []
    body = [weights(plan, rule, head=False, layer=layer) for layer in layers]
    body = body or [weights(plan, rule, head=False)]
    head = weights(plan, rule, head=True)
    identity = np.eye(len(plan.clients))
    body_still = all((one == identity).all() for one in body) or not {"A", "B"} & set(mixing.share)
    head_still = bool((head == identity).all()) or "head" not in mixing.share
    return [
        [plan.clients, plan.ranks, sorted(plan.layer_of), plan.alpha, plan.rslora, record.participants],
        []
        if body_still
        else [[np.round(one, 12).tolist() for one in body], mixing.space, sorted(set(mixing.share) - {"head"})],
        [] if head_still else np.round(head, 12).tolist(),
        [] if body_still or mixing.space == "product" else mixing.align,
        [rule.kind, run.config.get("server")] if has_state(rule.kind) and not (body_still and head_still) else [],
    ]


def compare_runs(runs: Sequence[Run]) -> Iterator[AuditRow]:
    """One row for each pair of runs that should differ."""
    ends = [
        {client: digest(params) for client, params in read_models(run, run.rounds[-1], "start").items()} for run in runs
    ]
    signatures = [signature(run) for run in runs] if len(runs) > 1 else [""]
    known = [index for index, run in enumerate(runs) if run_kind(run) != PLUGGED or _has_rows(run)]
    for one, other in combinations(known, 2):
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


SHIFT = 1e-6
"""A recomputed move above this is more than rounding, so the tensor cannot have stayed as it was."""


def audit_run(run_dir: Path | str, others: Sequence[Path | str] = (), *, on_event: OnEvent = ignore) -> AuditReport:
    """Every check of every round of these runs, and that runs which should differ ended differently.

    Raises CheckpointError where a folder is no run, kept nothing for an audit, or holds a file that cannot be read; a
    file that is known to be damaged is a row instead.
    """
    paths = [Path(path) for path in (run_dir, *others)]
    rows: list[AuditRow] = []
    runs: list[Run] = []
    unseen: list[str] = []
    unchecked: list[str] = []
    for path in paths:
        damaged = list(damaged_files(path))
        rows += damaged
        try:
            run = open_run(path)
            checked = [*check_run(run, on_event=on_event), *check_sent_bytes(run)]
            hidden = list(_unseen(run))
            unchecked += _unchecked(run)
        except CheckpointError as error:
            if not damaged:
                raise
            rows.append(AuditRow(run=path.name, round=0, client="", check="files", ok=False, detail=str(error)))
            continue
        rows, unseen = [*rows, *checked], [*unseen, *hidden]
        runs += [] if damaged else [run]
    return AuditReport(rows=(*rows, *compare_runs(runs)), unseen=tuple(unseen), unchecked=tuple(unchecked))


def damaged_files(path: Path) -> Iterator[AuditRow]:
    """A row for every file of this run that is not what was written, by the digests that the run keeps."""
    for file, fault in find_faults(RunFolder(path)):
        name = file.relative_to(path).as_posix()
        detail = f"{name} is damaged: {fault}; restore it from a copy, or run again"
        yield AuditRow(run=path.name, round=0, client="", check="files", ok=False, detail=detail)


def _has_rows(run: Run) -> bool:
    return all(recorded_rows(run, round) for round in run.rounds if is_aggregated(run, round))


def _unchecked(run: Run) -> Iterator[str]:
    """A line for a run whose method is a plug-in's, on what was not computed a second time."""
    if run_kind(run) != PLUGGED:
        return
    mixes = _has_rows(run)
    checked = "models follow from the matrices that it recorded" if mixes else "its server step was not computed again"
    yield (
        f"{run.path.name}: --strategy {run.mixing.strategy} is a plug-in's, for which there is no second formula:"
        f" {checked}; records, names, what clients loaded, norms and bytes were checked as ever"
    )


def _unseen(run: Run) -> Iterator[str]:
    """The clients of this run whose models are here in part."""
    for client, params in read_models(run, run.rounds[-1], "start").items():
        if PRIVATE in params:
            yield f"{run.path.name}: {client}"


def check_run(run: Run, *, on_event: OnEvent = ignore) -> Iterator[AuditRow]:
    """The rows of one run."""
    run_kind(run)
    missing = sorted(set(range(1, max(run.done, run.rounds[-1]) + 1)) - set(run.rounds))
    if missing:
        yield AuditRow(run=run.path.name, round=0, client="", check="record", ok=False, detail=f"no rounds {missing}")
    # a run that goes on keeps a round for the audit before the checkpoint by which it is complete
    if run.complete and run.rounds[-1] > run.done:
        detail = f"it had to end after round {run.done} and went on"
        yield AuditRow(run=run.path.name, round=0, client="", check="record", ok=False, detail=detail)
    before = server_models = read_models(run, 0, "start")
    state: Flat = state_after(run, 0, {})
    yield from _check_start(run, server_models, state)
    for index, round in enumerate(run.rounds):
        on_event(Progress(f"audit of {run.path.name}", index, len(run.rounds)))
        after = read_models(run, round, "start")
        record = read_audit_record(run, round)
        if (joined := read_joined(run, round, record.plan, before)) is not None:
            extended = read_state(run.path / "audit" / f"joined-{round:04d}", within=run.path) or state
            yield from _check_join(run, round, joined, server_models, state, extended)
            state = extended
            before, server_models = {**before, **joined.start}, {**server_models, **joined.start}
        if is_reranked(run, record, round):
            initial, before = before, read_models(run, round, "begun")
            server_models = before
            yield from check_ranks(run, read_plan(run, record.plan), round, initial, before)
        if _is_chosen(run, round, state):
            initial, before = before, read_models(run, round, "begun")
            server_models = before
            yield from _check_choice(run, round, read_plan(run, record.plan), initial, before, state=state)
        if round - 1 not in missing and round not in missing:
            yield from _check_round(run, round, before, after, server_models=server_models, state=state)
        before, state = after, state_after(run, round, state)
        server_models = _mixed_models(run, round, after) if is_aggregated(run, round) else server_models


def _check_join(
    run: Run, round: int, joined: JoinedClients, server_models: Models, before: Flat, state: Flat
) -> Iterator[AuditRow]:
    """Rows on the models of clients that join before this round, and on the state with them."""
    if run_kind(run) != PLUGGED:
        yield from check_joined(run, round, joined, server_models)
        yield from check_unchanged(run, round, with_initial(run, before, joined.start), state)


def _check_start(run: Run, models: Models, state: Flat) -> Iterator[AuditRow]:
    """A row for the server state before round one, from the models that clients start with."""
    if run_kind(run) != PLUGGED:
        yield from check_unchanged(run, 0, with_initial(run, {}, models), state)


def _mixed_models(run: Run, round: int, after: Models) -> Models:
    """Mixed models: those that clients start with, or the anchors of clients that keep their own."""
    return read_models(run, round, "anchor") if run.mixing.personal_models else after


def _row(run: Run, round: int, check: str, client: str, detail: str, error: float | None = None) -> AuditRow:
    return AuditRow(
        run=run.path.name, round=round, client=client, check=check, ok=not detail, error=error, detail=detail
    )


def _check_record(
    run: Run,
    round: int,
    plan: AuditPlan,
    record: AuditRecord,
    *,
    initial: Models,
    trained: Models,
    after: Models,
    state: Flat,
) -> Iterator[AuditRow]:
    """A row for the record of a round, and for what each client says that it loaded, and was sent beside it."""
    recorded = {*record.participants, *record.refused, *initial, *after}
    absent = sorted(recorded - set(plan.clients))
    faults = [_eta_fault(run, record, round), _edges_fault(record), *_trained_faults(record, trained)]
    faults += [f"{absent} are not in the plan"] if absent else []
    yield _row(run, round, "record", "", "; ".join(fault for fault in faults if fault))
    frozen = frozen_tensors(state) if run_kind(run) in (STACKED, RESIDUAL) else {}
    stood_on = {client: with_frozen(params, frozen) for client, params in initial.items()}
    for client in plan.clients:
        if client in record.loaded or client in record.accepted_clients:
            yield _row(run, round, "loaded", client, _loaded_fault(record, client, stood_on))
    yield from check_corrections(run, round, plan, record)
    yield from check_second_models(run, round, plan, record)
    yield from check_centroids(run, round, plan, record, state)


def _check_round(
    run: Run, round: int, initial: Models, after: Models, *, server_models: Models, state: Flat
) -> Iterator[AuditRow]:
    """The rows of one round, from the clients' initial models, the server's models and its state before it."""
    record, trained = read_audit_record(run, round), read_models(run, round, "trained")
    plan, bounds = read_plan(run, record.plan), read_bounds(run, round)
    row = partial(_row, run, round)
    yield from _check_record(run, round, plan, record, initial=initial, trained=trained, after=after, state=state)
    present = {client: trained[client] for client in record.accepted_clients if client in trained}
    wrong = {client: _names_fault(plan, client, initial, present.get(client), after) for client in plan.clients}
    for client, fault in wrong.items():
        wrong[client] = fault or _number_fault(client, initial, present, after, server_models)
        yield row("names", client, wrong[client])
    yield from (row("frozen", client, fault) for client, fault in _frozen_faults(run, wrong, initial, present))
    if any(wrong.values()):
        return  # what has other names or shapes, or no numbers, cannot be compared by value
    yield from check_bounds(run, round, bounds, plan=plan, record=record, initial=initial, trained=present)
    kind = run_kind(run) if is_aggregated(run, round) else "own"
    if run.mixing.personal_models and kind != "own":
        yield from _check_own_models(run, round, plan, {**initial, **present}, after)
        after = _mixed_models(run, round, after)
        if fault := max(_names_fault(plan, one, initial, None, after) for one in plan.clients):
            yield row("mixed", "", f"of an anchor: {fault}")
            return
    before = {**(initial if kind == "own" else server_models), **present}
    yield from (row("common", *one) for one in common_faults(plan, present, after, excluded=record.kept))
    shared = with_common_tensors(plan, before, present)
    if kind == PLUGGED:
        yield from _check_plugged(run, round, plan, record, shared, after)
        return
    step = recompute_server_step(run, plan, kind, present=present, before=server_models, trained=shared, state=state)
    there = [client in present for client in plan.clients]
    updates = RoundUpdates(run=run, plan=plan, present=there, before=server_models, trained=before)
    expected = _expected_state(run, round, updates, kind=kind, state=state) if step is None else step.moments()
    if isinstance(step, ExactStep):
        yield row("server", "", *step.frozen_fault(state_after(run, round, state), is_restored=bool(bounds.restored)))
    elif kind in (HEADS_BY_FEATURES, KRIGING):
        yield from _check_reports(run, round, plan, present, state, kind=kind, is_restored=bool(bounds.restored))
    else:
        yield from check_server_state(run, round, expected, before=state)
    rule = _rule_of(run, record, plan, shared, kind=kind, state=_seen_state(run, round, state, kind=kind))
    truth = _recompute(run, plan, shared, after, rule=replace(rule, clusters=_labels_of(expected, plan)), step=step)
    restored = {one: restored_fault(run, plan, initial[one], after[one], trained=present) for one in bounds.restored}
    yield from _compare_models(run, round, plan, record, truth, restored)


def _check_plugged(
    run: Run, round: int, plan: AuditPlan, record: AuditRecord, before: Models, after: Models
) -> Iterator[AuditRow]:
    """Rows on the step of a plug-in's method: its recorded matrices, and the models that follow from them.

    Nothing of a step that is no mixing matrix can be computed again.
    """
    recorded = recorded_rows(run, round)
    if not recorded:
        return
    fault = _rows_fault(plan, recorded)
    yield _row(run, round, "rows", "", fault)
    if fault:
        return
    rule = replace(_rule_of(run, record, plan, before, kind=PLUGGED, state={}), recorded=recorded)
    yield from _compare_models(run, round, plan, record, _recompute(run, plan, before, after, rule=rule, step=None), {})


def _rows_fault(plan: AuditPlan, recorded: Mapping[str, np.ndarray]) -> str:
    n = len(plan.clients)
    for part, matrix in recorded.items():
        if matrix.shape != (n, n) or not np.allclose(matrix.sum(axis=1), 1.0, atol=1e-9):
            return f"the matrix of {part} is {matrix.shape} or has a row that does not sum to 1"
    apart = [[one != other for other in plan.tasks] for one in plan.tasks]
    if "head" in recorded and np.abs(recorded["head"][np.array(apart)]).max(initial=0.0) > 0:
        return "heads of different tasks were mixed"
    return ""


def _compare_models(
    run: Run, round: int, plan: AuditPlan, record: AuditRecord, truth: Recomputed, restored: Mapping[str, str]
) -> Iterator[AuditRow]:
    """Two rows for each client: whether it starts with what was computed again, and moved; `restored` has faults."""
    comparisons = _comparisons(truth)
    for k, client in enumerate(plan.clients):
        mixed, moved, error = _compare(run, record, truth, k, comparisons[k])
        if client in restored:
            mixed, moved, error = restored[client], "", 0.0
        yield _row(run, round, "mixed", client, mixed, error)
        yield _row(run, round, "moved", client, moved)


def _expected_state(run: Run, round: int, updates: RoundUpdates, *, kind: str, state: Flat) -> dict[str, np.ndarray]:
    """Expected state of a rule that is no server optimizer after this round."""
    if kind == "ifca":
        return state_after_choice(flat_arrays(state), latest_state(run, round))
    return state_after_updates(kind, updates, state)


def _seen_state(run: Run, round: int, state: Flat, *, kind: str) -> Flat:
    """The server state that the weights of a round follow from: that of before, or with what clients reported in it."""
    return state_after(run, round, state) if kind in (HEADS_BY_FEATURES, KRIGING) else state


def _check_reports(
    run: Run, round: int, plan: AuditPlan, trained: Models, before: Flat, *, kind: str, is_restored: bool
) -> Iterator[AuditRow]:
    """A row for what the clients that trained these models reported beside them."""
    if is_restored:
        return
    if kind == KRIGING:
        yield from check_halves(run, round, trained=trained, before=before, after=state_after(run, round, before))
        return
    fault = report_fault(plan, read_audit_record(run, round), state_after(run, round, {}))
    yield _row(run, round, "server", "", fault)


def _is_chosen(run: Run, round: int, state: Flat) -> bool:
    """Return whether clients chose or drew clusters before this round; once there are any, before every aggregation."""
    is_kept = (round_folder(run, round) / "begun.safetensors").is_file()
    return run_kind(run) == "ifca" and (is_kept or (bool(state) and is_aggregated(run, round)))


def _check_choice(
    run: Run, round: int, plan: AuditPlan, before: Models, begun: Models, *, state: Flat
) -> Iterator[AuditRow]:
    """A row for each client: whether it began the round with the model of the cluster that it chose."""
    now = latest_state(run, round)
    new = labels_in(now, plan, head=False, layer=None)
    old = labels_in(flat_arrays(state), plan, head=False, layer=None) if state else new
    if state and not any(path.startswith("losses/") for path in now):
        yield _row(run, round, "chosen", "", "nobody has told a loss, and every client that takes part has to")
    for k, client in enumerate(plan.clients):
        yield _row(run, round, "chosen", client, begun_fault(plan, k, before, begun, old, new))


def _check_own_models(run: Run, round: int, plan: AuditPlan, own: Models, after: Models) -> Iterator[AuditRow]:
    """A row for everyone who is to start with the very model that it trained, or had."""
    for client in plan.clients:
        changed = [key for key, tensor in own[client].items() if not torch.equal(tensor, after[client][key])]
        detail = f"{changed[0]} is not that of its own model" if changed else ""
        yield _row(run, round, "own", client, detail)


def _frozen_faults(run: Run, wrong: Mapping[str, str], initial: Models, present: Models) -> Iterator[tuple[str, str]]:
    """(client, fault) of everyone who trained under a mask, and whose tensors can be compared."""
    for client in present:
        if run.mask is not None and not wrong[client]:
            yield client, frozen_fault(run.mask, initial[client], present[client])


def _eta_fault(run: Run, record: AuditRecord, round: int) -> str:
    eta = run.mixing.eta * run.mixing.eta_decay ** (round - 1) if is_aggregated(run, round) else 0.0
    same = record.eta is not None and abs(record.eta - eta) <= 1e-9 * max(eta, 1.0)
    return "" if same or run_kind(run) != "laplacian" else f"eta was {record.eta}, not {eta:g}"


def _edges_fault(record: AuditRecord) -> str:
    """The fault where those without neighbours are not those who were refused."""
    refused = {client for client, reason in record.refused.items() if reason != NO_ANSWER}
    if set(record.without_edges) == refused:
        return ""
    return f"the updates of {sorted(refused)} were refused, and without edges were {sorted(record.without_edges)}"


def _trained_faults(record: AuditRecord, trained: Models) -> Iterator[str]:
    absent = sorted(record.accepted_clients - trained.keys())
    strange = sorted(trained.keys() - record.accepted_clients - record.refused.keys())
    if absent:
        yield f"no trained model of {', '.join(absent)}"
    if strange:
        yield f"trained models of {', '.join(strange)}, who took no part"


def _loaded_fault(record: AuditRecord, client: str, initial: Models) -> str:
    """Return whether what the client says it loaded is what the server sent."""
    loaded = record.loaded.get(client)
    if loaded is None or client not in initial:
        return "what it loaded was not recorded" if loaded is None else "nothing was sent to it"
    if loaded.get("keys") != len(initial[client]):
        return f"loaded {loaded.get('keys')} tensors, {len(initial[client])} were sent"
    sent = digest(initial[client])
    return "" if loaded.get("digest") == sent else f"loaded {str(loaded.get('digest'))[:12]}, sent was {sent[:12]}"


def _difference(want: Mapping[str, Tensor], have: Mapping[str, Tensor], what: str) -> str:
    lost, new = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
    if lost or new:
        return f"{what} lacks {lost[:2]} and has unknown {new[:2]} ({len(lost)} and {len(new)} in all)"
    # what a client has kept to itself since is no longer here, and `mixed` holds that it was not to be shared
    emptied = {key for key in have if PRIVATE in have and not have[key].numel()}
    wrong = [key for key in want if want[key].shape != have[key].shape and key not in emptied]
    return f"{what} has {wrong[0]} of shape {tuple(have[wrong[0]].shape)}" if wrong else ""


def _names_fault(
    plan: AuditPlan, client: str, initial: Models, trained: Mapping[str, Tensor] | None, after: Models
) -> str:
    """Return whether names and shapes stayed, and the ranks are those of the plan."""
    if client not in initial:
        return "it has no model"
    fault = "" if trained is None else _difference(initial[client], trained, "what it trained")
    fault = fault or _difference(initial[client], after.get(client, {}), "what it starts with")
    ranks = plan.ranks[plan.clients.index(client)]
    for key, tensor in after.get(client, {}).items():
        if fault or not key.endswith(LORA_A):
            continue
        layer = plan.layer_of.get(key.removesuffix(LORA_A))
        if layer is None:
            fault = f"{key} is in no layer of the plan"
        elif tensor.shape[0] != ranks[layer]:
            fault = f"{key} has rank {tensor.shape[0]}, the plan says {ranks[layer]}"
    return fault


def _number_fault(client: str, *models: Models) -> str:
    """The first tensor of this client that holds a NaN or an infinity, with which every comparison would be lost."""
    for one in models:
        for key, tensor in one.get(client, {}).items():
            if not bool(tensor.isfinite().all()):
                return f"{key} holds NaN or infinity"
    return ""


def _rule_of(run: Run, record: AuditRecord, plan: AuditPlan, before: Models, *, kind: str, state: Flat) -> Rule:
    """Input of the weights of this round."""
    mixing = run.mixing
    predictions = Predictions(run, plan, before, state) if kind == KRIGING else None
    return Rule(
        kind=kind,
        laplacian=mixing.laplacian,
        eta=mixing.eta if record.eta is None else record.eta,
        by_layer=mixing.layer_weighting == "importance",
        present=tuple(client in record.accepted_clients for client in plan.clients),
        without_edges=record.without_edges,
        robust=robust_of(run),
        points=lambda clients, head: points_of(before, plan, mixing.share, clients, head=head),
        project=Directions(run, plan, before, state).row,
        norms=lambda clients: norms_of(before, plan, clients),
        attention=attention_of(run),
        combine=_head_rows(plan, state) if kind == HEADS_BY_FEATURES else None,
        predict=None if predictions is None else predictions.row,
        predict_cluster=None if predictions is None else predictions.cluster_row,
    )


def _labels_of(state: Mapping[str, np.ndarray], plan: AuditPlan) -> Callable[[bool, int | None], list[int]]:
    """For heads or a layer: the clusters that such a server state holds."""
    return lambda head, layer: labels_in(state, plan, head=head, layer=layer)


def _head_rows(plan: AuditPlan, state: Flat) -> Callable[[int, Sequence[int]], list[float]]:
    """Row of a client's head from the reports of its members in the round."""
    reports = read_reports(state)

    def row(k: int, members: Sequence[int]) -> list[float]:
        names, result = [plan.clients[one] for one in members], [0.0] * len(plan.clients)
        if not set(names) <= reports.keys() or len({reports[name].means.shape for name in names}) > 1:
            result[k] = 1.0  # the row of the server state has failed then, or the heads differ in shape
            return result
        shares = [plan.examples[one] for one in members]
        for one, weight in zip(members, head_row(reports, names, plan.clients[k], shares), strict=True):
            result[one] = weight
        return result

    return row


def _cached_weights(plan: AuditPlan, rule: Rule) -> Callable[[str], np.ndarray]:
    """The weights for a parameter's name; names that share a matrix have it computed once."""
    matrices: dict[tuple[bool, int | None, str], np.ndarray] = {}

    def weights_of(key: str) -> np.ndarray:
        head = key.startswith(HEAD)
        layer = plan.layer_of.get(key.removesuffix(LORA_A).removesuffix(LORA_B))
        by_kind = rule.kind in ("pfedgraph", KRIGING) and key.endswith((LORA_A, LORA_B))
        kind = key[-1] if by_kind else "last layer" if is_last_layer(key) else ""
        if (head, layer, kind) not in matrices:
            matrices[head, layer, kind] = weights(plan, rule, head=head, layer=layer, key=key)
        return matrices[head, layer, kind]

    return weights_of


def _recompute(
    run: Run,
    plan: AuditPlan,
    before: Models,
    after: Models,
    *,
    rule: Rule,
    step: OptimizerStep | DynamicStep | ExactStep | None,
) -> Recomputed:
    mixing = run.mixing
    return Recomputed(
        Round(
            plan=plan,
            before=before,
            after=after,
            weights=_cached_weights(plan, rule),
            space="factors" if rule.kind in ("feddyn", STACKED, RESIDUAL) else mixing.space,
            share=mixing.share if rule.kind != "own" else (),
            align=mixing.align,
            reduce=reducer(rule.kind, rule.robust),
            server=None if step is None else step.next,
        )
    )


def _comparisons(truth: Recomputed) -> list[list[tuple[str, Comparison]]]:
    """For each client every tensor or module with its comparison; module by module, so that little is kept."""
    models = [truth.round.before[client] for client in truth.round.plan.clients]
    comparisons: list[list[tuple[str, Comparison]]] = [[] for _ in models]
    for key in dict.fromkeys(key for one in models for key in one):
        for k in (k for k, one in enumerate(models) if key in one):
            comparisons[k] += truth.compare(k, key)
    return comparisons


def _compare(
    run: Run, record: AuditRecord, truth: Recomputed, k: int, comparisons: list[tuple[str, Comparison]]
) -> tuple[str, str, float]:
    """Faults of value, faults of standing still, and the largest error of client k."""
    client = truth.round.plan.clients[k]
    unchanged = all(truth.is_still(k, key) for key in truth.round.before[client])
    if run.mixing.keep == "best" and client in record.kept:
        return ("" if unchanged else "it was to keep its own model, but it changed"), "", 0.0
    worst, largest = max(comparisons, key=lambda one: one[1].error)
    mixed = moved = ""
    if largest.error == float("inf"):
        mixed = f"{worst} changed, but should have stayed as it was"
    elif not largest.error <= TOLERANCE:
        mixed = f"{worst} is {largest.error:.2g} away from the recomputation (allowed: {TOLERANCE:g})"
    stuck = [(one.shift, name) for name, one in comparisons if one.still and one.shift > SHIFT]
    if stuck:
        shift, name = max(stuck)
        moved = f"{len(stuck)} of {len(comparisons)} were left as trained; {name} should move by {shift:.2g}"
    return mixed, moved, largest.error
