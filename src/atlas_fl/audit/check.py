"""The audit of a run, round by round and client by client (`audit_run`), and of several runs side by side.

Several runs that differ in a decisive setting must not have ended with the same models.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import combinations
from pathlib import Path

import numpy as np
from torch import Tensor

from atlas_fl.audit.bounds import check_bounds, restored_fault
from atlas_fl.audit.changes import check_joined, check_ranks, is_reranked, read_joined
from atlas_fl.audit.dense import TOLERANCE
from atlas_fl.audit.recompute import Comparison, Recomputed, common_faults, recompute, with_common_adapter
from atlas_fl.audit.report import AuditReport, AuditRow, Finding
from atlas_fl.audit.rules import formula_of
from atlas_fl.audit.run_files import NO_ANSWER, AuditPlan, AuditRecord, Models, Run, frozen_fault, open_run
from atlas_fl.audit.sent import check_bytes, check_kept, check_sent
from atlas_fl.audit.step import Formula, Step, compare_states
from atlas_fl.errors import CheckpointError
from atlas_fl.events import OnEvent, Progress, ignore
from atlas_fl.params import HEAD, LORA_A, PRIVATE, digest, with_frozen
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
SHIFT = 1e-6
"""A recomputed move above this is more than rounding, so the tensor cannot have stayed as it was."""

OF_DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors in which content may end that is known not to be what was written; of other content they are our own."""


def audit_run(run_dir: Path | str, others: Sequence[Path | str] = (), *, on_event: OnEvent = ignore) -> AuditReport:
    """Every check of every round of these runs, and that runs which should differ ended differently.

    Raises CheckpointError where a folder is no run, kept nothing for an audit, or holds a file that cannot be read; a
    file that is known to be damaged is a row instead.
    """
    rows: list[AuditRow] = []
    checks: list[RunCheck] = []
    unseen: list[str] = []
    unchecked: list[str] = []
    for path in (Path(path) for path in (run_dir, *others)):
        damage = [_row(path, 0, finding) for finding in damaged_files(path)]
        rows += damage
        try:
            check = RunCheck(open_run(path))
            rows += check.rows(on_event)
            unseen += check.unseen()
            unchecked += check.unchecked()
        except (CheckpointError, *OF_DAMAGE) as error:
            if not damage:
                raise
            rows.append(_row(path, 0, Finding("files", "", str(error))))
        else:
            checks += [] if damage else [check]
    return AuditReport(rows=(*rows, *compare_runs(checks)), unseen=tuple(unseen), unchecked=tuple(unchecked))


def damaged_files(path: Path) -> Iterator[Finding]:
    """A finding for every file of this run that is not what was written, by the digests that the run keeps."""
    for file, fault in find_faults(RunFolder(path)):
        name = file.relative_to(path).as_posix()
        yield Finding("files", "", f"{name} is damaged: {fault}; restore it from a copy, or run again")


def _row(path: Path, round: int, finding: Finding) -> AuditRow:
    return AuditRow(
        run=path.name,
        round=round,
        client=finding.client,
        check=finding.check,
        ok=not finding.fault,
        error=finding.error,
        detail=finding.fault,
    )


def compare_runs(checks: Sequence["RunCheck"]) -> Iterator[AuditRow]:
    """One row for each pair of runs that should differ."""
    known = [check for check in checks if None not in check.mixtures] if len(checks) > 1 else []
    signatures = {id(check): check.signature() for check in known}
    for one, other in combinations(known, 2):
        if signatures[id(one)] != signatures[id(other)]:
            same = one.end() == other.end()
            fault = f"ends with the very models of {other.run.path.name}, yet it should differ" if same else ""
            yield _row(one.run.path, 0, Finding("different", "", fault))


class RunCheck:
    """The checks of one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.formula = formula_of(run)
        self.held = self.server_models = run.models(0, "start")
        """Models that clients begin the round with, and those of the last aggregation."""
        self.state = run.state_after(0, {})
        self.mixtures: list[object] = []
        """Mixture of each round as data: equal for rounds that may end alike; None of one that nobody knows."""

    def rows(self, on_event: OnEvent) -> Iterator[AuditRow]:
        """A row for each check."""
        for round, finding in self._findings(on_event):
            yield _row(self.run.path, round, finding)
        for round, finding in check_bytes(self.run):
            yield _row(self.run.path, round, finding)

    def signature(self) -> str:
        """A digest of all that must lead to other models when it changes: equal for runs that may end alike."""
        settings = self.run.settings
        decisive = {name: getattr(getattr(settings, group), name) for group in DECISIVE for name in DECISIVE[group]}
        return sha256(json.dumps([decisive, self.mixtures], sort_keys=True, default=str).encode()).hexdigest()

    def end(self) -> dict[str, str]:
        """Digests of the models that clients ended with."""
        return {client: digest(params) for client, params in self.run.models(self.run.rounds[-1], "start").items()}

    def unseen(self) -> Iterator[str]:
        """The clients whose models are here in part."""
        for client, params in self.run.models(self.run.rounds[-1], "start").items():
            if PRIVATE in params:
                yield f"{self.run.path.name}: {client}"

    def unchecked(self) -> Iterator[str]:
        """A line for a run whose method is a plug-in's, on what was not computed a second time."""
        if not self.formula.is_known:
            checked = "its server step was not computed again"
            if None not in self.mixtures:
                checked = "models follow from the matrices that it recorded"
            yield (
                f"{self.run.path.name}: --strategy {self.run.mixing.strategy} is a plug-in's, for which there is no"
                f" second formula: {checked}; records, names, what clients loaded, norms and bytes were checked as ever"
            )

    def _findings(self, on_event: OnEvent) -> Iterator[tuple[int, Finding]]:
        run = self.run
        missing = sorted(set(range(1, max(run.done, run.rounds[-1]) + 1)) - set(run.rounds))
        yield from _marked(0, _rounds_findings(run, missing))
        if self.formula.is_known:
            expected = self.formula.initial(run, self.held)
            yield from _marked(0, _server(compare_states(expected, self.state, before=self.state)))
        for index, round in enumerate(run.rounds):
            on_event(Progress(f"audit of {run.path.name}", index, len(run.rounds)))
            record, after = run.record(round), run.models(round, "start")
            yield from _marked(round, self._before_round(round, record))
            if round - 1 not in missing and round not in missing:
                yield from _marked(round, self._round(round, record, after))
            self.held, self.state = after, run.state_after(round, self.state)
            if run.is_aggregated(round):
                self.server_models = run.models(round, "anchor") if run.mixing.personal_models else after

    def _before_round(self, round: int, record: AuditRecord) -> Iterator[Finding]:
        """The findings on clients that join before this round, on new ranks, and on models that clients chose."""
        run, formula, plan = self.run, self.formula, self.run.plan(record.plan)
        joined = read_joined(run, round, record.plan, self.held)
        if joined is not None:
            yield from check_joined(run, joined, self.server_models, self.state)
            self.state = self.state if joined.state is None else joined.state
            self.held = {**self.held, **joined.start}
            self.server_models = {**self.server_models, **joined.start}
        if is_reranked(run, record, round):
            begun = run.models(round, "begun")
            yield from check_ranks(plan, self.held, begun)
            self.held = self.server_models = begun
        # once there is a state, clients choose before every aggregation
        is_kept = (run.folder(round) / "begun.safetensors").is_file()
        if formula.chooses and (is_kept or (self.state and run.is_aggregated(round))):
            begun = run.models(round, "begun")
            faults = formula.begun_faults(run, round, plan, self.held, begun, self.state)
            yield from (Finding("chosen", *one) for one in faults)
            self.held = self.server_models = begun

    def _round(self, round: int, record: AuditRecord, after: Models) -> Iterator[Finding]:
        """The findings of one round, after which clients start with these models."""
        held, server_models, state = self.held, self.server_models, self.state
        run, formula = self.run, formula_of(self.run, round)
        self.mixtures.append(None)
        plan, trained = run.plan(record.plan), run.models(round, "trained")
        yield from _record_findings(run, round, plan, record, held, trained, after)
        yield from _loaded(plan, record, held, self.formula.frozen(state))
        yield from check_sent(run, round, plan, record, state)
        yield from check_kept(run, round, plan, record)
        present = {client: trained[client] for client in record.accepted_clients if client in trained}
        wrong = {client: _names_fault(plan, client, held, present, after) for client in plan.clients}
        for client in plan.clients:
            wrong[client] = wrong[client] or _number_fault(client, held, present, after, server_models)
            yield Finding("names", client, wrong[client])
        if run.mask is not None:
            for client in (client for client in present if not wrong[client]):
                yield Finding("frozen", client, frozen_fault(run.mask, held[client], present[client]))
        if any(wrong.values()):
            return  # what has other names or shapes, or no numbers, cannot be compared by value
        sent = run.models_if_any(round, "out_of_bound")
        yield from check_bounds(run, plan, record, initial=held, trained=present, sent=sent)
        if run.mixing.personal_models and formula.mixes:
            own = {**held, **present}
            yield from (Finding("own", client, _own_fault(own[client], after[client])) for client in plan.clients)
            after = run.models(round, "anchor")
            if fault := max(_names_fault(plan, one, held, {}, after) for one in plan.clients):
                yield Finding("mixed", "", f"of an anchor: {fault}")
                return
        before = {**(server_models if formula.mixes else held), **present}
        if run.settings.training.multitask:
            yield from (Finding("common", *one) for one in common_faults(plan, present, after, excluded=record.kept))
            before = with_common_adapter(before, present)
        step = Step(
            run=run,
            plan=plan,
            round=round,
            present=tuple(client in present for client in plan.clients),
            before=server_models,
            trained=before,
            eta=run.mixing.eta if record.eta is None else record.eta,
            without_edges=record.without_edges,
            state=state,
            told=run.state_after(round, state),
            is_undone=bool(record.restored),
        )
        yield from self._step(step, formula, record, present, after)

    def _step(
        self, step: Step, formula: Formula, record: AuditRecord, present: Models, after: Models
    ) -> Iterator[Finding]:
        """The findings of a server step: its state, and two for each client, on what it starts with."""
        run, plan = self.run, step.plan
        if formula.is_known:
            yield from _server(formula.state_fault(step))
        else:
            rows = run.mixing_rows(step.round)
            if not rows:
                return
            fault = _rows_fault(plan, rows)
            yield Finding("rows", "", fault)
            if fault:
                return
        truth = recompute(formula, step, after)
        comparisons = _comparisons(truth)
        self.mixtures[-1] = _mixture(step, formula, record)
        for k, client in enumerate(plan.clients):
            if client in record.restored:
                fault = restored_fault(run, plan, self.held[client], after[client], trained=present)
                yield Finding("mixed", client, fault, 0.0)
                yield Finding("moved", client, "")
            elif run.mixing.keep == "best" and client in record.kept:
                is_still = all(truth.is_still(k, key) for key in step.trained[client])
                yield Finding("mixed", client, "" if is_still else "it was to keep its own model, but it changed", 0.0)
                yield Finding("moved", client, "")
            else:
                yield from _compared(client, comparisons[k])


def _rounds_findings(run: Run, missing: Sequence[int]) -> Iterator[Finding]:
    if missing:
        yield Finding("record", "", f"no rounds {missing}")
    # a run that goes on keeps a round for the audit before the checkpoint by which it is complete
    if run.complete and run.rounds[-1] > run.done:
        yield Finding("record", "", f"it had to end after round {run.done} and went on")


def _marked(round: int, findings: Iterable[Finding]) -> Iterator[tuple[int, Finding]]:
    yield from ((round, finding) for finding in findings)


def _server(found: tuple[str, float | None] | None) -> Iterator[Finding]:
    if found is not None:
        yield Finding("server", "", *found)


def _mixture(step: Step, formula: Formula, record: AuditRecord) -> list[object]:
    """Mixture of this step as data: equal for steps that may end alike."""
    mixing, plan = step.run.mixing, step.plan
    identity = np.eye(step.num_clients)
    shared = set(mixing.share)
    matrices = {group: matrix for group, matrix in step.matrices.items() if (matrix != identity).any()}
    body, head = (
        sorted({str(np.round(matrix, 12).tolist()) for (of_head, *_), matrix in matrices.items() if of_head == is_head})
        for is_head in (False, True)
    )
    body = body if shared & {"A", "B"} else []
    head = head if "head" in shared else []
    return [
        [plan.clients, plan.ranks, sorted(plan.layer_of), plan.alpha, plan.rslora, record.participants],
        [body, mixing.space, sorted(shared - {"head"})] if body else [],
        head,
        mixing.align if body and mixing.space == "factors" else "",
        [repr(formula), repr(step.run.settings.server)] if formula.has_value and (body or head) else [],
        # the matrices are of the recorded step, and what was asked for is another mixture
        step.run.eta(step.round) if formula.steps and not _is_close(step.eta, step.run.eta(step.round)) else "",
    ]


def _is_close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * max(other, 1.0)


def _rows_fault(plan: AuditPlan, recorded: Mapping[str, np.ndarray]) -> str:
    n = len(plan.clients)
    for part, matrix in recorded.items():
        if matrix.shape != (n, n) or not np.allclose(matrix.sum(axis=1), 1.0, atol=1e-9):
            return f"the matrix of {part} is {matrix.shape} or has a row that does not sum to 1"
    apart = [[not plan.may_meet(k, other, HEAD) for other in range(n)] for k in range(n)]
    if "head" in recorded and np.abs(recorded["head"][np.array(apart)]).max(initial=0.0) > 0:
        return "heads of different tasks were mixed"
    return ""


def _own_fault(own: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> str:
    """The fault of someone who is to start with the very model that it trained, or had."""
    changed = [key for key, tensor in own.items() if not tensor.equal(after[key])]
    return f"{changed[0]} is not that of its own model" if changed else ""


def _record_findings(
    run: Run, round: int, plan: AuditPlan, record: AuditRecord, held: Models, trained: Models, after: Models
) -> Iterator[Finding]:
    eta = run.eta(round)
    refused = {client for client, reason in record.refused.items() if reason != NO_ANSWER}
    faults = []
    if formula_of(run).steps and (record.eta is None or not _is_close(record.eta, eta)):
        faults.append(f"eta was {record.eta}, not {eta:g}")
    if set(record.without_edges) != refused:
        edges = sorted(record.without_edges)
        faults.append(f"the updates of {sorted(refused)} were refused, and without edges were {edges}")
    if absent := sorted(record.accepted_clients - trained.keys()):
        faults.append(f"no trained model of {', '.join(absent)}")
    if strange := sorted(trained.keys() - record.accepted_clients - record.refused.keys()):
        faults.append(f"trained models of {', '.join(strange)}, who took no part")
    if unplanned := sorted({*record.participants, *record.refused, *held, *after} - set(plan.clients)):
        faults.append(f"{unplanned} are not in the plan")
    yield Finding("record", "", "; ".join(faults))


def _loaded(plan: AuditPlan, record: AuditRecord, held: Models, frozen: Mapping[str, Tensor]) -> Iterator[Finding]:
    """A finding for each client that trained: what it says that it loaded is what the server sent."""
    for client in plan.clients:
        if client not in record.loaded and client not in record.accepted_clients:
            continue
        loaded, fault = record.loaded.get(client), ""
        if loaded is None or client not in held:
            fault = "what it loaded was not recorded" if loaded is None else "nothing was sent to it"
        else:
            sent = with_frozen(held[client], frozen)
            if loaded["keys"] != len(sent):
                fault = f"loaded {loaded['keys']} tensors, {len(sent)} were sent"
            elif loaded["digest"] != digest(sent):
                fault = f"loaded {str(loaded['digest'])[:12]}, sent was {digest(sent)[:12]}"
        yield Finding("loaded", client, fault)


def _difference(want: Mapping[str, Tensor], have: Mapping[str, Tensor], what: str) -> str:
    lost, new = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
    if lost or new:
        return f"{what} lacks {lost[:2]} and has unknown {new[:2]} ({len(lost)} and {len(new)} in all)"
    # what a client has kept to itself since is no longer here, and `mixed` holds that it was not to be shared
    emptied = {key for key in have if PRIVATE in have and not have[key].numel()}
    wrong = [key for key in want if want[key].shape != have[key].shape and key not in emptied]
    return f"{what} has {wrong[0]} of shape {tuple(have[wrong[0]].shape)}" if wrong else ""


def _names_fault(plan: AuditPlan, client: str, initial: Models, trained: Models, after: Models) -> str:
    """The fault of names and shapes, which stay, and of ranks, which are those of the plan."""
    if client not in initial:
        return "it has no model"
    fault = _difference(initial[client], trained[client], "what it trained") if client in trained else ""
    if fault := fault or _difference(initial[client], after.get(client, {}), "what it starts with"):
        return fault
    for key, tensor in after[client].items():
        if key.endswith(LORA_A):
            rank = plan.rank(client, key)
            if rank is None:
                return f"{key} is in no layer of the plan"
            if tensor.shape[0] != rank:
                return f"{key} has rank {tensor.shape[0]}, the plan says {rank}"
    return ""


def _number_fault(client: str, *models: Models) -> str:
    """The first tensor of this client that holds a NaN or an infinity, with which every comparison would be lost."""
    for one in models:
        for key, tensor in one.get(client, {}).items():
            if not bool(tensor.isfinite().all()):
                return f"{key} holds NaN or infinity"
    return ""


def _comparisons(truth: Recomputed) -> list[list[tuple[str, Comparison]]]:
    """For each client every tensor or module with its comparison; module by module, so that little is kept."""
    models = [truth.before[client] for client in truth.plan.clients]
    comparisons: list[list[tuple[str, Comparison]]] = [[] for _ in models]
    for key in dict.fromkeys(key for one in models for key in one):
        for k in (k for k, one in enumerate(models) if key in one):
            comparisons[k] += truth.compare(k, key)
    return comparisons


def _compared(client: str, comparisons: list[tuple[str, Comparison]]) -> Iterator[Finding]:
    """The fault of what a client starts with, and that of standing still."""
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
    yield Finding("mixed", client, mixed, largest.error)
    yield Finding("moved", client, moved)
