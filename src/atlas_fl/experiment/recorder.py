"""The run recorder: plans, `metrics.jsonl`, ledger, audit files and checkpoints, and a run's provenance.

Provenance is the settings, the data and the secrets that a run was started with; a run resumes with no others. Of
secrets it holds digests alone.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atlas_fl.client.job import Update
from atlas_fl.config import Config, differences, identity_settings, load_config
from atlas_fl.data.clients import ClientData, group_by, majority
from atlas_fl.errors import CheckpointError
from atlas_fl.experiment.state import FederationState, JoinResult, RoundRecord, distinct_tensors, plan_messages
from atlas_fl.experiment.summary import MEASURED, STOPPED, best_rounds, peak_memory
from atlas_fl.params import ByClient, ServerState, Split
from atlas_fl.planning.plan import PlanResult
from atlas_fl.setup.options import strategy_of
from atlas_fl.storage import checkpoint, digests, folder_access, jsonl
from atlas_fl.storage.files import secret_digest
from atlas_fl.storage.ledger import LedgerRow
from atlas_fl.storage.mapped import MappedTensors
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import write_models, write_sketches, write_tensors


def provenance_of(
    config: Config, clients: Sequence[ClientData], model: Mapping[str, str | None], secrets: Mapping[str, bytes]
) -> dict[str, Any]:
    """The settings that identify the run, and digests of each client's rows, of the model and of given secrets.

    `model` is a `models.identity.ModelIdentity` as a mapping. All of it is JSON data.
    """
    data = {client.name: client.digest() for client in clients}
    content = {"settings": identity_settings(config), "data": data, "model": dict(model)}
    kept = {
        client.name: f"the secret {secret_digest(secrets[client.name])}" for client in clients if client.name in secrets
    }
    return _as_json(content | ({"secrets": kept} if kept else {}))


def _as_json(content: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = jsonl.from_json(jsonl.to_json(content))
    return plain


def check_provenance(recorded: Mapping[str, Any], current: Mapping[str, Any], *, folder: Path) -> None:
    """Check that a run resumes with the settings, the data, the model and the secrets that it was started with.

    A setting that a later version has added counts as recorded at its default.

    Raises:
        CheckpointError: a setting, a client's rows, a part of the model or a secret is another; the message names the
            first.
    """
    added = {"settings": _as_json(identity_settings(Config()))}
    for part, template in _CHANGED.items():
        before, now = {**added.get(part, {}), **recorded.get(part, {})}, current.get(part, {})
        # clients and parts of the model that are new are no change of what the run has used
        names = before if part in ("data", "model") else {**before, **now}
        absent = "no secret" if part == "secrets" else None
        for name in names:
            old, new = before.get(name, absent), now.get(name, absent)
            if old != new:
                line = template.format(
                    run=f"run {folder} was begun", name=name, old=old, new=new, model=current["settings"]["model"]
                )
                raise CheckpointError(f"{line}, or begin another run")


_CHANGED: Mapping[str, str] = {
    "settings": "{run} with {name} = {old!r}, and its config.toml now says {new!r}; restore the file",
    "data": "the data of client {name} are not those that {run} with (rows that were trained on could now be tested"
    " on); restore them",
    "model": "the {name} of the model {model!r} is not the one that {run} with; restore its files",
    "secrets": "{run} with {old} of client {name}, and now it is {new}; give as --secrets the folder of those that it"
    " had, or leave --secrets out where it had none",
}
"""Line on what a run was begun with and does not have any more, by part of the provenance."""


def check_same_settings(config: Config, folder: RunFolder) -> None:
    """Check that the run in this folder has these settings.

    Raises:
        CheckpointError: it has others; the message names the first and says how many more.
    """
    changed = differences(load_config(folder.config, within=folder.path), config)
    if changed:
        name, (there, here) = next(iter(changed.items()))
        more = f" (and {len(changed) - 1} more settings differ)" if len(changed) > 1 else ""
        raise CheckpointError(
            f"run {folder.path} was begun with {name} = {there!r}, not {here!r}{more}; a run goes on with its own"
            " config: leave the flags away, or choose another --name or --runs-dir"
        )


def check_run_files(folder: RunFolder, saved: checkpoint.Checkpoint) -> None:
    """Check the digests of the files that a run needs to resume from this checkpoint.

    The settings are not looked at: `check_provenance` names the one that differs.

    Raises:
        CheckpointError: a plan, sketches, mask or rows before the checkpoint are damaged; the message names the file.
    """
    recorded = digests.digests_in_state(saved.state)
    recorded.check(folder, *(folder.path / name for name in recorded.sha256 if name != folder.config.name))


SERVER_STATE_FILE = "server.safetensors"
"""The file of the server state of an audited round."""


@dataclass(kw_only=True)
class Recorder:
    """Writes the files of a run's folder; nothing else does."""

    folder: RunFolder
    config: Config
    clients: tuple[ClientData, ...]
    provenance: Mapping[str, Any]
    """The settings, the data and digests of the secrets that the run was begun with (`provenance_of`)."""
    plan_file: str = "plan.json"
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """By phase, over all sessions."""
    round_seconds: dict[int, float] = field(default_factory=dict)
    earlier_peak: dict[str, int] = field(default_factory=dict)
    """Most memory of the sessions before this one, by kind."""
    file_digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the settings, the plans, their sketches and the mask, by name."""
    row_hashes: dict[str, Any] = field(default_factory=lambda: {"metrics.jsonl": sha256(), "ledger.jsonl": sha256()})
    """SHA-256 of the files of rows as far as they were written, by name."""
    audit_digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the files of the round that is being audited, by name."""
    written: list[checkpoint.TensorFile] = field(default_factory=list)
    """The files of tensors of the last checkpoint of this session."""
    mapped: MappedTensors = field(init=False)
    """The state's tensors that are on the disk."""

    def __post_init__(self) -> None:
        self.mapped = MappedTensors(folder=self.folder.path)

    def move_to_disk(self, state: FederationState) -> FederationState:
        """The same state, with its tensors on the disk where they take too much memory."""
        moved = self.mapped.move(state.tensors())
        self.written = [
            replace(file, tensors={name: moved.get(id(tensor), tensor) for name, tensor in file.tensors.items()})
            for file in self.written
        ]
        return state.with_tensors(moved) if moved else state

    def peak_memory(self) -> dict[str, int]:
        """The most memory of all sessions, in bytes by kind."""
        return {kind: max(size, self.earlier_peak.get(kind, 0)) for kind, size in peak_memory().items()}

    def record_plan(self, planned: PlanResult, state: FederationState) -> None:
        """Write the plan, its messages, and the checkpoint from which round one starts."""
        self._write_plan(planned)
        self._append_rows(self.folder.metrics, [])
        self._append_messages(planned)
        if self.config.run.audit:
            self._write_audit_models(self.folder.audit_round(0), "start", state.client_models)
            self._write_server_state(self.folder.audit_round(0), state.server_state)
            self._write_audit_record(self.folder.audit_round(0), {"round": 0})
        self._save_checkpoint(state)

    def record_join(self, join: JoinResult) -> None:
        """Write the plan with the newcomers, what placing them sent, and a checkpoint that they are part of.

        For an audit also their own models, what became of them, and the plan that this followed from.
        """
        assembly, planned, state = join.run
        self.set_clients(assembly.config, assembly.clients, assembly.site.secrets)
        self.plan_file = f"plan-{state.round + 1:04d}.json"
        self._write_plan(planned)
        clients = [client for client in planned.plan.clients if client.name in join.newcomer_models]
        common = {"round": state.round + 1, "event": "joined"}
        events = [{**common, "client": client.name, "cluster": client.cluster} for client in clients]
        self._append_rows(self.folder.metrics, events)
        self._append_messages(planned, round=state.round + 1, only=join.newcomer_models)
        if self.config.run.audit:
            self._write_join_audit(join)
        self._save_checkpoint(state)

    def _append_messages(self, planned: PlanResult, *, round: int = 0, only: Collection[str] | None = None) -> None:
        """Append what planning sent, `only` of these clients; of a rule that sends nothing, what crossed cuts."""
        rows: Sequence[LedgerRow] = planned.cut_traffic
        if strategy_of(self.config).communicates:
            # whole models have no layers whose importance could be measured
            has_importance = self.config.measures_importance and planned.plan.importance.size > 0
            rows = plan_messages(planned, with_importance=has_importance, round=round, only=only)
        self._append_rows(self.folder.ledger, [row.to_json() for row in rows])

    def _write_join_audit(self, join: JoinResult) -> None:
        state, folder = join.run.state, self.folder.audit_arrival(join.run.state.round + 1)
        initial_models = {name: state.client_models[name] for name in join.newcomer_models}
        self._write_audit_models(folder, "fresh", join.newcomer_models)
        self._write_audit_models(folder, "start", initial_models)
        if join.state_changed:
            self._write_server_state(folder, state.server_state)
        plan = join.run.planned.plan.to_json()
        self.audit_digests["plan.json"] = jsonl.write_json(folder / "plan.json", plan, within=self.folder.path)
        self._write_audit_record(folder, {"round": state.round + 1})

    def set_clients(self, config: Config, clients: tuple[ClientData, ...], secrets: Mapping[str, bytes]) -> None:
        """Set the clients of the run, and the provenance with their data and secrets; the model stays."""
        self.clients = clients
        self.provenance = provenance_of(config, clients, self.provenance["model"], secrets)

    def record_new_plan(self, planned: PlanResult, *, round: int, resized_models: ByClient | None) -> None:
        """Write a plan that holds from this round on, and for the audit the models resized to its ranks."""
        self.plan_file = f"plan-{round:04d}.json"
        self._write_plan(planned)
        measured = self.config.measures_importance and resized_models is not None
        rows = plan_messages(planned, with_importance=measured, round=round)
        self._append_rows(self.folder.ledger, [row.to_json() for row in rows])
        if self.config.run.audit and resized_models is not None:
            self._write_audit_models(self.folder.audit_round(round), "begun", resized_models)

    def record_choice(self, messages: Sequence[LedgerRow], state: FederationState) -> None:
        """Write what the choice of clusters before a round cost, and for the audit what the round begins with."""
        self._append_rows(self.folder.ledger, [row.to_json() for row in messages])
        if self.config.run.audit:
            self._write_audit_models(self.folder.audit_round(state.round + 1), "begun", state.client_models)
            self._write_server_state(self.folder.audit_round(state.round + 1), state.server_state)

    def record_round(
        self, record: RoundRecord, state: FederationState, *, seconds: float, is_last: bool = False
    ) -> list[dict[str, Any]]:
        """Write the rows of the round, its audit files, and a checkpoint where one is due; the rows of metrics."""
        self.phase_seconds["rounds"] = self.phase_seconds.get("rounds", 0.0) + seconds
        self.round_seconds[record.round] = seconds
        rows = self._metric_rows(record)
        if record.outcome.stopped:
            (best,) = best_rounds(state.history, 1)
            rows.append({"round": state.round, "event": STOPPED, "best_round": best, "validation": state.history[best]})
        self._append_rows(self.folder.metrics, rows)
        self._append_rows(self.folder.ledger, [row.to_json() for row in record.messages(self.config.mixing.share)])
        if self.config.run.audit:
            self._write_audit(record, state)
        is_due = record.round % self.config.run.checkpoint_every == 0 or record.round in self._best_rounds(state)
        if is_due or record.outcome.final or is_last:
            self._save_checkpoint(state)
        return rows

    def _write_plan(self, planned: PlanResult) -> None:
        """Write a plan with its mask and its sketches, which figures show and late clients are compared to."""
        sketches = self.folder.sketches_of(self.plan_file)
        if planned.sketches is not None:
            self.file_digests[sketches.name] = write_sketches(sketches, planned.sketches)
        if planned.mask is not None:
            self.file_digests[self.folder.mask.name] = write_tensors(self.folder.mask, planned.mask)
        path = self.folder.path / self.plan_file
        self.file_digests[self.plan_file] = jsonl.write_json(path, planned.plan.to_json())

    def _append_rows(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        jsonl.append_rows(path, rows, running=self.row_hashes[path.name])

    def _all_digests(self) -> dict[str, str]:
        return {**self.file_digests, **{name: row_hash.hexdigest() for name, row_hash in self.row_hashes.items()}}

    def _metric_rows(self, record: RoundRecord) -> list[dict[str, Any]]:
        rows = record.events()
        common = {"round": record.round}
        rows.append({**common, "event": "timed", "device_seconds": record.device_seconds})
        if record.diversity is not None:
            discarded = {"discarded": dict(record.step.discarded)}
            rows.append({**common, "event": "mixed", **asdict(record.diversity), **discarded})
        rows += [jsonl.drop_undefined({**common, "event": MEASURED, **asdict(row)}) for row in record.step.sharing]
        by_split: dict[Split, Mapping[str, Update]] = {"train": record.received.updates, **record.outcome.scores}
        for split, updates in by_split.items():
            for client in self.clients:
                if client.name in updates:
                    rows.append(self._metric_row(client, split, updates[client.name], round=record.round))
        return rows

    def _metric_row(self, client: ClientData, split: Split, update: Update, *, round: int) -> dict[str, Any]:
        header = {"round": round, "client": client.name, "task": client.task.name, "split": split}
        share = majority(client.splits[split]) if client.task.has_classes else None
        counts = {"majority": share, "classes": update.classes or None, "examples": update.examples}
        # a metric does not take the place of what the server knows by itself
        return jsonl.drop_undefined({**header, **update.metrics, **counts, **header})

    def _write_audit(self, record: RoundRecord, state: FederationState) -> None:
        received, step, folder = record.received, record.step, self.folder.audit_round(record.round)
        self._write_audit_models(folder, "trained", received.models)
        self._write_audit_models(folder, "start", record.step.client_models)
        beside = {"out_of_bound": received.out_of_bound, "summed": step.secure.updates}
        others = {"anchor": step.anchors, **state.by_client, **record.sent, **beside}
        for name, models in others.items():
            if models and name != "momentum":  # nothing that is audited follows from it
                self._write_audit_models(folder, name, models)
        if step.rows:
            rows = {part: torch.from_numpy(np.ascontiguousarray(matrix)) for part, matrix in step.rows.items()}
            file = folder / "mixing.safetensors"
            self.audit_digests[file.name] = write_tensors(file, rows, within=self.folder.path)
        if record.state_changed:
            self._write_server_state(folder, state.server_state)
        loaded = {name: {"digest": update.loaded, "keys": update.keys} for name, update in received.updates.items()}
        content = {
            "round": record.round,
            "participants": list(record.sampled),
            "refused": {**received.refused, **dict.fromkeys(record.missing, "it did not answer")},
            "eta": record.method.eta(record.round) if record.aggregated else 0.0,
            "plan": self.plan_file,
            "loaded": loaded,
            "clipped": list(received.clipped),
            "restored": list(step.restored),
        }
        if received.refused:
            content["without_edges"] = list(received.refused)
        self._write_audit_record(folder, content)

    def _write_audit_models(self, folder: Path, name: str, models: ByClient) -> None:
        file = folder / f"{name}.safetensors"
        self.audit_digests[file.name] = write_models(file, models, within=self.folder.path)

    def _write_server_state(self, folder: Path, server_state: ServerState) -> None:
        """Write the server state for the audit; no file where the strategy has no state but the models."""
        distinct, same = distinct_tensors(server_state)
        if distinct:
            repeats = group_by(same, lambda path: same[path])
            note = ("same", json.dumps(repeats, sort_keys=True)) if repeats else None
            self.audit_digests[SERVER_STATE_FILE] = write_tensors(
                folder / SERVER_STATE_FILE, distinct, metadata=note, within=self.folder.path
            )

    def _write_audit_record(self, folder: Path, content: Mapping[str, Any]) -> None:
        """Write the record of an audited round, with the digests of its files."""
        record = {**content, "files": dict(self.audit_digests)}
        jsonl.write_sealed(folder / "record.json", record, within=self.folder.path)
        self.audit_digests.clear()

    def _save_checkpoint(self, state: FederationState) -> None:
        tensors, content = state.to_checkpoint()
        content |= {
            "origin": self.provenance,
            "metrics_bytes": self.folder.metrics.stat().st_size,
            "ledger_bytes": self.folder.ledger.stat().st_size,
            "plan": self.plan_file,
            "seconds": self.phase_seconds,
            "peak": self.peak_memory(),
            "round_seconds": {str(round): seconds for round, seconds in self.round_seconds.items()},
            digests.STATE_ENTRY: self._all_digests(),
        }
        checkpoint.save(
            self.folder.checkpoints, round=state.round, tensors=tensors, state=content, written=self.written
        )
        checkpoint.prune(
            self.folder.checkpoints, keep=self.config.run.keep_checkpoints, keep_rounds=self._best_rounds(state)
        )

    def _best_rounds(self, state: FederationState) -> tuple[int, ...]:
        return best_rounds(state.history, self.config.run.keep_best)

    def record_resampled(self, scores: Mapping[str, np.ndarray]) -> None:
        """Write test scores over draws of each client's examples, from which comparisons make intervals."""
        tensors = {name: torch.from_numpy(values) for name, values in scores.items()}
        self.file_digests[self.folder.resampled.name] = write_tensors(self.folder.resampled, tensors)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the digests of all files of a complete run, and then the summary, which marks it as complete."""
        content = jsonl.encode_json(summary)
        digest = sha256(content).hexdigest()
        digests.write_digests(self.folder, {**self._all_digests(), self.folder.summary.name: digest})
        folder_access.write_atomic(self.folder.summary, content)

    def rewind_to(self, saved: checkpoint.Checkpoint) -> None:
        """Truncate the logs to a checkpoint and remove later plans, so that no round is recorded twice."""
        jsonl.truncate_to(self.folder.metrics, saved.state["metrics_bytes"])
        jsonl.truncate_to(self.folder.ledger, saved.state["ledger_bytes"])
        self.row_hashes = {file.name: digests.file_sha256(file) for file in (self.folder.metrics, self.folder.ledger)}
        self.plan_file = saved.state["plan"]
        plans = self.folder.plans()
        for later in plans[plans.index(self.folder.path / self.plan_file) + 1 :]:
            later.unlink()
            self.folder.sketches_of(later.name).unlink(missing_ok=True)
        recorded = digests.digests_in_state(saved.state).sha256
        kept = {name: digest for name, digest in recorded.items() if name not in self.row_hashes}
        self.file_digests = {**kept, **self.file_digests}  # the settings are those of this session
        for phase, seconds in saved.state["seconds"].items():
            self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + seconds
        self.earlier_peak = dict(saved.state["peak"])
        self.round_seconds = {int(round): seconds for round, seconds in saved.state["round_seconds"].items()}
