"""The audit of a run, round by round and client by client (`audit_run`); that of its clients alone goes with it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from atlas_fl.audit import bounds, changes, dense, privacy, recompute, report, rules
from atlas_fl.audit.run_files import NO_ANSWER, AuditPlan, AuditRecord, Models, Run, open_run
from atlas_fl.audit.sent import check_kept, check_sent
from atlas_fl.audit.step import Formula, Step, compare_states
from atlas_fl.errors import CheckpointError
from atlas_fl.events import OnEvent, Progress, ignore
from atlas_fl.params import HEAD, PRIVATE, digest, with_frozen
from atlas_fl.storage.digests import find_faults
from atlas_fl.storage.run_folder import RunFolder

SHIFT = 1e-6
"""A recomputed move above this is more than rounding, so the tensor cannot have stayed as it was."""

OF_DAMAGE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors in which content may end that is known not to be what was written; of other content they are our own."""


def audit_run(run_dir: Path | str, *, on_event: OnEvent = ignore) -> report.AuditReport:
    """Every check of every round of this run, and of that of its clients alone where that has a plan.

    Raises CheckpointError where the folder is no run, kept nothing for an audit, or holds a file that cannot be read; a
    file that is known to be damaged is a row instead.
    """
    rows: list[report.AuditRow] = []
    unseen: list[str] = []
    unchecked: list[str] = []
    folder = RunFolder(Path(run_dir))
    for path in (folder.path, *([folder.alone] if RunFolder(folder.alone).is_run() else [])):
        damage = list(damaged_files(path))
        rows += damage
        try:
            run = open_run(path)
            rows += RunCheck(run).rows(on_event)
            unseen += [f"{path.name}: {client}" for client, params in run.end().items() if PRIVATE in params]
            unchecked += _unchecked(run)
        except (CheckpointError, *OF_DAMAGE) as error:
            if not damage:
                raise
            rows.append(report.AuditRow("files", "", str(error), run=path.name))
    return report.AuditReport(rows=tuple(rows), unseen=tuple(unseen), unchecked=tuple(unchecked))


def damaged_files(path: Path) -> Iterator[report.AuditRow]:
    """A row for every file of this run that is not what was written, by the digests that the run keeps."""
    for file, fault in find_faults(RunFolder(path)):
        name = file.relative_to(path).as_posix()
        detail = f"{name} is damaged: {fault}; restore it from a copy, or run again"
        yield report.AuditRow("files", "", detail, run=path.name)


def _unchecked(run: Run) -> Iterator[str]:
    """A line on what was not computed a second time, by a plug-in's method or in blocks of very many clients."""
    if not rules.formula_of(run).is_known:
        is_recorded = all(run.mixing_rows(round) for round in filter(run.is_aggregated, run.rounds))
        server_step = (
            "its weights were taken as recorded, and the models computed from them"
            if is_recorded
            else "its server step was not computed again"
        )
        why = "predicts very many clients in blocks" if rules.predicts_in_blocks(run) else "is a plug-in's"
        yield (
            f"{run.path.name}: --strategy {run.mixing.strategy} {why}, for which there is no second formula:"
            f" {server_step}; records, names, what clients loaded, norms and bytes were checked as ever"
        )


class RunCheck:
    """The checks of one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.formula = rules.formula_of(run)
        self.held = self.server_models = run.models(0, "start")
        """Models that clients begin the round with, and those of the last aggregation."""
        self.state = run.state_after(0, {})

    def rows(self, on_event: OnEvent) -> Iterator[report.AuditRow]:
        """A row for each check."""
        run = self.run
        missing = set(range(1, max(run.done, run.rounds[-1]) + 1)) - set(run.rounds)
        yield from self._named(0, self._whole_run(sorted(missing)))
        for index, round in enumerate(run.rounds):
            on_event(Progress(f"audit of {run.path.name}", index, len(run.rounds)))
            record, after = run.record(round), run.models(round, "start")
            yield from self._named(round, self._before_round(round, record))
            if not missing & {round - 1, round}:
                yield from self._named(round, self._round(round, record, after))
            self.held, self.state = after, run.state_after(round, self.state)
            if run.is_aggregated(round):
                self.server_models = run.models(round, "anchor") if run.mixing.personal_models else after
        yield from (row._replace(run=run.path.name) for row in privacy.check_privacy(run))

    def _named(self, round: int, rows: Iterable[report.AuditRow]) -> Iterator[report.AuditRow]:
        yield from (row._replace(run=self.run.path.name, round=round) for row in rows)

    def _whole_run(self, missing: Sequence[int]) -> Iterator[report.AuditRow]:
        """The rows on missing rounds, on rounds too many, and on the first state."""
        run = self.run
        if missing:
            yield report.AuditRow("record", "", f"no rounds {missing}")
        # a run that goes on keeps a round for the audit before the checkpoint by which it is complete
        if run.complete and run.rounds[-1] > run.done:
            yield report.AuditRow("record", "", f"it had to end after round {run.done} and went on")
        if self.formula.is_known:
            first = self.formula.initial(run, self.held) if self.formula.initial else {}
            yield from _server(compare_states(first, self.state, before=self.state))

    def _before_round(self, round: int, record: AuditRecord) -> Iterator[report.AuditRow]:
        """The rows on clients that join before this round, on new ranks, and on models that clients chose."""
        run, formula, plan = self.run, self.formula, self.run.plan(record.plan)
        if not set(plan.clients) <= self.held.keys() and run.file(round, "plan.json", joined=True).is_file():
            start = run.models(round, "start", joined=True)
            state = run.state_after(round, self.state, joined=True)
            yield from changes.check_joined(run, round, self.server_models, self.state, start, state)
            self.state = state
            self.held = {**self.held, **start}
            self.server_models = {**self.server_models, **start}
        if changes.is_reranked(run, record, round):
            starts = run.models(round, "begun")
            yield from changes.check_ranks(plan, self.held, starts)
            self.held = self.server_models = starts
        # once there is a state, clients choose before every aggregation
        is_kept = run.file(round, "begun.safetensors").is_file()
        if formula.begun_faults and (is_kept or (self.state and run.is_aggregated(round))):
            starts = run.models(round, "begun")
            faults = formula.begun_faults(run, round, plan, self.held, starts, self.state)
            yield from (report.AuditRow("chosen", *one) for one in faults)
            self.held = self.server_models = starts

    def _round(self, round: int, record: AuditRecord, after: Models) -> Iterator[report.AuditRow]:
        """The rows of one round, after which clients start with these models."""
        held, server_models, state = self.held, self.server_models, self.state
        run, formula = self.run, rules.formula_of(self.run, round)
        plan, trained = run.plan(record.plan), run.models(round, "trained")
        yield report.AuditRow("record", "", "; ".join(_record_faults(run, round, plan, record, held, trained, after)))
        frozen = {client: self.formula.frozen(plan, state, client) for client in held} if self.formula.frozen else {}
        yield from _loaded(plan, record, held, frozen)
        yield from check_sent(run, round, plan, record, state)
        yield from check_kept(run, round, plan, record)
        present = {client: trained[client] for client in record.accepted_clients if client in trained}
        wrong = {client: _model_fault(plan, client, held, server_models, present, after) for client in plan.clients}
        for client, fault in wrong.items():
            yield report.AuditRow("names", client, fault)
            if run.mask is not None and client in present and not fault:
                yield report.AuditRow("frozen", client, changes.frozen_fault(run.mask, held[client], present[client]))
        if any(wrong.values()):
            return  # what has other names or shapes, or no numbers, cannot be compared by value
        sent = run.models_if_any(round, "out_of_bound")
        yield from bounds.check_bounds(run, plan, record, initial=held, trained=present, sent=sent)
        if run.mixing.personal_models and formula.mixes:
            own = {**held, **present}
            for client in plan.clients:
                is_own = dense.same_tensors(own[client], after[client])
                yield report.AuditRow("own", client, "" if is_own else "it does not start with its own model")
            after = run.models(round, "anchor")
            if fault := max(_model_fault(plan, one, server_models, {}, {}, after) for one in plan.clients):
                yield report.AuditRow("mixed", "", f"of an anchor: {fault}")
                return
        summed = run.models_if_any(round, "summed")
        before = {**(server_models if formula.mixes else held), **present, **summed}
        step = Step(
            run=run,
            plan=plan,
            round=round,
            present=tuple(client in present for client in plan.clients),
            before=server_models,
            trained=before,
            without_edges=record.without_edges,
            state=state,
            told=run.state_after(round, state),
            is_undone=bool(record.restored),
        )
        yield from self._step(step, formula, record, present, after)

    def _step(
        self, step: Step, formula: Formula, record: AuditRecord, present: Models, after: Models
    ) -> Iterator[report.AuditRow]:
        """The rows of a server step: its state, and two for each client, on what it starts with."""
        run, plan = self.run, step.plan
        if formula.is_known:
            yield from _server(formula.state_fault(step))
        else:
            rows = run.mixing_rows(step.round)
            fault = _rows_fault(plan, rows)
            if rows:
                yield report.AuditRow("rows", "", fault)
            if fault or not rows:
                return
        truth = recompute.Recomputed(step=step, formula=formula, after=after)
        for client, comparisons in zip(plan.clients, truth.comparisons(), strict=True):
            mixed, error, moved = "", 0.0, ""
            if client in record.restored:
                mixed = bounds.restored_fault(run, plan, self.held[client], after[client], trained=present)
            else:
                mixed, error = recompute.farthest(comparisons, "changed, but should have stayed as it was")
                moved = _stillness_fault(comparisons)
            yield report.AuditRow("mixed", client, mixed, error)
            yield report.AuditRow("moved", client, moved)


def _server(found: tuple[str, float | None] | None) -> Iterator[report.AuditRow]:
    if found is not None:
        yield report.AuditRow("server", "", *found)


def _stillness_fault(comparisons: Sequence[tuple[str, recompute.Comparison]]) -> str:
    """The fault of tensors that are still, bit for bit, what was trained, and should have moved."""
    stuck = [(one.shift, name) for name, one in comparisons if one.still and one.shift > SHIFT]
    if not stuck:
        return ""
    shift, name = max(stuck)
    return f"{len(stuck)} of {len(comparisons)} were left as trained; {name} should move by {shift:.2g}"


def _rows_fault(plan: AuditPlan, recorded: Mapping[str, np.ndarray]) -> str:
    n = len(plan.clients)
    for part, matrix in recorded.items():
        if matrix.shape != (n, n) or not np.allclose(matrix.sum(axis=1), 1.0, atol=1e-9):
            return f"the matrix of {part} is {matrix.shape} or has a row that does not sum to 1"
    apart = [[not plan.may_meet(k, other, HEAD) for other in range(n)] for k in range(n)]
    if "head" in recorded and np.abs(recorded["head"][np.array(apart)]).max(initial=0.0) > 0:
        return "heads of different tasks were mixed"
    return ""


def _record_faults(
    run: Run, round: int, plan: AuditPlan, record: AuditRecord, held: Models, trained: Models, after: Models
) -> Iterator[str]:
    eta = run.eta(round)
    refused = {client for client, reason in record.refused.items() if reason != NO_ANSWER}
    if rules.formula_of(run).steps and (record.eta is None or abs(record.eta - eta) > 1e-9 * max(eta, 1.0)):
        yield f"eta was {record.eta}, not {eta:g}"
    if set(record.without_edges) != refused:
        edges = sorted(record.without_edges)
        yield f"the updates of {sorted(refused)} were refused, and without edges were {edges}"
    if absent := sorted(record.accepted_clients - trained.keys()):
        yield f"no trained model of {', '.join(absent)}"
    if strange := sorted(trained.keys() - record.accepted_clients - record.refused.keys()):
        yield f"trained models of {', '.join(strange)}, who took no part"
    if unplanned := sorted({*record.participants, *record.refused, *held, *after} - set(plan.clients)):
        yield f"{unplanned} are not in the plan"


def _loaded(plan: AuditPlan, record: AuditRecord, held: Models, frozen: Models) -> Iterator[report.AuditRow]:
    """A row for each client that trained: what it says that it loaded is what the server sent."""
    for client in plan.clients:
        if client not in record.loaded and client not in record.accepted_clients:
            continue
        fault = "nothing was sent to it"
        if client in held:
            sent = with_frozen(held[client], frozen.get(client, {}))
            wanted, loaded = (digest(sent), len(sent)), record.loaded.get(client, ("nothing", 0))
            is_same = wanted == loaded
            words = (f"{num} tensors of {sha256[:12]}" for sha256, num in (loaded, wanted))
            fault = "" if is_same else "it says that it loaded {}, and sent were {}".format(*words)
        yield report.AuditRow("loaded", client, fault)


def _model_fault(
    plan: AuditPlan, client: str, held: Models, server_models: Models, present: Models, after: Models
) -> str:
    """The fault of names and shapes, which stay, of ranks, which are those of the plan, and of numbers."""
    if client not in held:
        return "it has no model"
    fault = ""
    if client in present:
        fault = changes.names_fault(plan, client, held[client], present[client], "what it trained")
    fault = fault or changes.names_fault(plan, client, held[client], after.get(client, {}), "what it starts with")
    return fault or changes.number_fault(*(models.get(client, {}) for models in (held, present, after, server_models)))
