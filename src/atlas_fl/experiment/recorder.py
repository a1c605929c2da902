"""The run recorder: plans, `metrics.jsonl`, ledger, audit files and checkpoints, and a run's provenance.

Provenance is the settings, the data and the secrets that a run was started with; a run resumes with no others. Of
secrets it holds digests alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_fl.client.job import Update
from atlas_fl.config import Config, differences, identity_settings
from atlas_fl.data.clients import ClientData, majority
from atlas_fl.errors import CheckpointError
from atlas_fl.experiment.early_stopping import best_rounds
from atlas_fl.experiment.state import FederationState, JoinResult, RoundRecord, plan_messages
from atlas_fl.experiment.summary import MEASURED, STOPPED, peak_memory
from atlas_fl.params import (
    ByClient,
    ServerState,
    Split,
    TreesByClient,
    flatten_by_client,
    flatten_state,
    unflatten_by_client,
    unflatten_state,
)
from atlas_fl.planning.plan import PlanResult
from atlas_fl.runtime.reuse import REUSED_RESULTS
from atlas_fl.storage import checkpoint, digests
from atlas_fl.storage.checkpoint import Checkpoint
from atlas_fl.storage.files import secret_digest
from atlas_fl.storage.jsonl import (
    append_rows,
    drop_undefined,
    encode_json,
    from_json,
    to_json,
    truncate_to,
    write_json,
    write_sealed,
)
from atlas_fl.storage.ledger import LedgerRow
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import write_models, write_sketches, write_tensors


def provenance_of(
    config: Config,
    clients: Sequence[ClientData],
    model: Mapping[str, str | None],
    secrets: Mapping[str, bytes],
) -> dict[str, Any]:
    """The settings that identify the run, and digests of each client's rows, of the model and of given secrets.

    `model` is a `models.identity.ModelIdentity` as a mapping. All of it is JSON data.
    """
    data = {client.name: client.digest() for client in clients}
    content = {"settings": identity_settings(config), "data": data, "model": dict(model)}
    kept = {client.name: secret_digest(secrets[client.name]) for client in clients if client.name in secrets}
    plain: dict[str, Any] = from_json(to_json(content | ({"secrets": kept} if kept else {})))
    return plain


def check_provenance(recorded: Mapping[str, Any], current: Mapping[str, Any], *, folder: Path) -> None:
    """Check that a run resumes with the settings, the data, the model and the secrets that it was started with.

    Raises:
        CheckpointError: a setting, a client's rows, a part of the model or a secret is another; the message names the
            first.
    """
    for name in dict.fromkeys([*recorded["settings"], *sorted(current["settings"])]):
        old, new = recorded["settings"].get(name), current["settings"].get(name)
        if new != old:
            raise CheckpointError(
                f"run {folder} was begun with {name} = {old!r}, and its config.toml now says {new!r}; restore the file,"
                " or begin another run"
            )
    for name, digest in recorded["data"].items():
        if current["data"].get(name) != digest:
            raise CheckpointError(
                f"the data of client {name} are not those that run {folder} was begun with; restore them, or begin"
                " another run: rows that were trained on could now be tested on"
            )
    for part, digest in recorded["model"].items():
        if current["model"].get(part) != digest:
            raise CheckpointError(
                f"the {part} of the model {current['settings']['model']!r} is not the one that run {folder} was begun"
                " with; restore its files, or begin another run"
            )
    _check_secrets(recorded.get("secrets", {}), current.get("secrets", {}), folder=folder)


def _check_secrets(recorded: Mapping[str, str], current: Mapping[str, str], *, folder: Path) -> None:
    for name in sorted(recorded.keys() | current.keys()):
        old, new = recorded.get(name), current.get(name)
        if old != new:
            remedy = "leave --secrets out" if old is None else "give the folder of those that it had as --secrets"
            raise CheckpointError(
                f"run {folder} was begun with {_named(old)} of client {name}, and now has {_named(new)}; {remedy}"
            )


def _named(digest: str | None) -> str:
    return "no secret" if digest is None else f"the secret with digest {digest}"


def check_same_settings(config: Config, recorded: Config, *, folder: Path) -> None:
    """Check that these are the settings of the run in this folder.

    Raises:
        CheckpointError: they differ; the message names the first and says how many more.
    """
    changed = differences(recorded, config)
    if changed:
        name, (old, new) = next(iter(changed.items()))
        raise CheckpointError(
            f"run {folder} was begun with {name} = {old!r}, not {new!r}"
            f"{f' (and {len(changed) - 1} more settings differ)' if len(changed) > 1 else ''};"
            " a run goes on with its own config: leave the flags away, or choose another --name"
        )


def check_run_files(folder: RunFolder, saved: Checkpoint) -> None:
    """Check the digests of the files that a run needs to resume from this checkpoint.

    The settings are not looked at: `check_provenance` names the one that differs.

    Raises:
        CheckpointError: a plan, sketches, mask or rows before the checkpoint are damaged; the message names the file.
    """
    recorded = digests.digests_in_state(saved.state)
    recorded.check(folder, *(folder.path / name for name in recorded.sha256 if name != folder.config.name))


def config_change_note(folder: RunFolder, saved: Checkpoint) -> str:
    """A note where `config.toml` was changed in settings that do not identify the run; else empty."""
    if not digests.digests_in_state(saved.state).fault(folder, folder.config):
        return ""
    return f"{folder.config} is not what it was at {saved.path.name}; no setting that the run depends on differs"


SERVER_STATE_FILE = "server.safetensors"
"""The file of the server state of an audited round."""


@dataclass(kw_only=True)
class Recorder:
    """Writes the files of a run's folder; nothing else does."""

    folder: RunFolder
    clients: tuple[ClientData, ...]
    share: tuple[str, ...]
    audit: bool
    checkpoint_every: int
    keep_checkpoints: int
    keep_best: int
    """Best rounds by mean validation score whose checkpoints stay beside the newest."""
    provenance: Mapping[str, Any]
    """The settings, the data and digests of the secrets that the run was begun with (`provenance_of`)."""
    plan_file: str = "plan.json"
    phase_seconds: dict[str, float] = field(default_factory=dict)
    saved_before: float = field(default_factory=lambda: REUSED_RESULTS.saved_seconds)
    """Seconds of results that runs of this process reused before this one."""
    earlier_reused: float = 0.0
    """`reused_seconds` of the sessions before this one."""
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

    def peak_memory(self) -> dict[str, int]:
        """The most memory of all sessions, in bytes by kind."""
        now = peak_memory()
        return {kind: max(size, self.earlier_peak.get(kind, 0)) for kind, size in now.items()}

    def record_plan(self, planned: PlanResult, state: FederationState, *, communicates: bool) -> None:
        """Write the plan, its messages, and the checkpoint from which round one starts."""
        self._write_plan(planned)
        rows = [row.to_json() for row in (plan_messages(planned) if communicates else planned.cut_traffic)]
        self._append_rows(self.folder.metrics, [])
        self._append_rows(self.folder.ledger, rows)
        if self.audit:
            self._write_audit_models("start", state.client_models, round=0)
            self._write_server_state(self.folder.audit_round(0), state.server_state)
            self._write_audit_record(self.folder.audit_round(0), {"round": 0})
        self._save_checkpoint(state)

    def record_join(self, join: JoinResult) -> None:
        """Write the plan with the newcomers, what placing them sent, and a checkpoint that they are part of.

        For an audit also their own models, what became of them, and the plan that this followed from.
        """
        state, assembly = join.state, join.assembly
        self.set_clients(assembly.config, assembly.clients, assembly.site.secrets)
        self.plan_file = f"plan-{state.round + 1:04d}.json"
        self._write_plan(join.planned)
        clients = [client for client in join.planned.plan.clients if client.name in join.newcomer_models]
        common = {"round": state.round + 1, "event": "joined"}
        self._append_rows(
            self.folder.metrics,
            [{**common, "client": client_plan.name, "cluster": client_plan.cluster} for client_plan in clients],
        )
        rows: Sequence[LedgerRow] = join.planned.cut_traffic
        if join.communicates:
            rows = plan_messages(join.planned, round=state.round + 1, only=join.newcomer_models)
        self._append_rows(self.folder.ledger, [row.to_json() for row in rows])
        if self.audit:
            self._write_join_audit(join)
        self._save_checkpoint(state)

    def _write_join_audit(self, join: JoinResult) -> None:
        state, folder = join.state, self.folder.audit_arrival(join.state.round + 1)
        initial_models = {name: state.client_models[name] for name in join.newcomer_models}
        self.audit_digests["fresh.safetensors"] = self._write_models(folder / "fresh.safetensors", join.newcomer_models)
        self.audit_digests["start.safetensors"] = self._write_models(folder / "start.safetensors", initial_models)
        if join.state_changed:
            self._write_server_state(folder, state.server_state)
        plan = join.planned.plan.to_json()
        self.audit_digests["plan.json"] = write_json(folder / "plan.json", plan, within=self.folder.path)
        self._write_audit_record(folder, {"round": state.round + 1})

    def set_clients(self, config: Config, clients: tuple[ClientData, ...], secrets: Mapping[str, bytes]) -> None:
        """Set the clients of the run, and the provenance with their data and secrets; the model stays."""
        self.clients = clients
        self.provenance = provenance_of(config, clients, self.provenance["model"], secrets)

    def record_new_plan(self, planned: PlanResult, *, round: int, resized_models: ByClient | None) -> None:
        """Write a plan that holds from this round on, and for the audit the models resized to its ranks."""
        self.plan_file = f"plan-{round:04d}.json"
        self._write_plan(planned)
        self._append_rows(self.folder.ledger, [row.to_json() for row in plan_messages(planned, round=round)])
        if self.audit and resized_models is not None:
            self._write_audit_models("begun", resized_models, round=round)

    def record_choice(self, messages: Sequence[LedgerRow], state: FederationState) -> None:
        """Write what the choice of clusters before a round cost, and for the audit what the round begins with."""
        self._append_rows(self.folder.ledger, [row.to_json() for row in messages])
        if self.audit:
            self._write_audit_models("begun", state.client_models, round=state.round + 1)
            self._write_server_state(self.folder.audit_round(state.round + 1), state.server_state)

    def record_round(
        self, record: RoundRecord, state: FederationState, *, seconds: float, is_last: bool = False
    ) -> list[dict[str, Any]]:
        """Write the rows of the round, its audit files, and a checkpoint where one is due; the rows of metrics."""
        self.phase_seconds["rounds"] = self.phase_seconds.get("rounds", 0.0) + seconds
        self.round_seconds[record.round] = seconds
        stopped = [_early_stopping_row(state)] if record.stopped else []
        rows = [*self._metric_rows(record), *stopped]
        self._append_rows(self.folder.metrics, rows)
        self._append_rows(self.folder.ledger, [row.to_json() for row in record.messages(self.share)])
        if self.audit:
            self._write_audit(record, state)
        is_due = record.round % self.checkpoint_every == 0 or record.round in self._best_rounds(state)
        if is_due or record.final or is_last:
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
        self.file_digests[self.plan_file] = write_json(path, planned.plan.to_json())

    def _append_rows(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        append_rows(path, rows, running=self.row_hashes[path.name])

    def _all_digests(self) -> dict[str, str]:
        return {**self.file_digests, **{name: row_hash.hexdigest() for name, row_hash in self.row_hashes.items()}}

    def _metric_rows(self, record: RoundRecord) -> list[dict[str, Any]]:
        rows = [
            {"round": record.round, "client": name, "event": "refused", "reason": reason}
            for name, reason in record.refused.items()
        ]
        rows += [{"round": record.round, "client": name, "event": "missing"} for name in record.missing]
        for event, reasons in (("clipped", record.clipped), ("restored", record.restored), ("unmoved", record.unmoved)):
            common = {"round": record.round, "event": event}
            rows += [{**common, "client": name, "reason": reason} for name, reason in reasons.items()]
        rows += [{"round": record.round, "client": name, "event": "kept own model"} for name in record.kept_local]
        rows += _hosting_rows(record)
        if record.diversity is not None:
            discarded = {"discarded": dict(record.discarded)}
            rows.append({"round": record.round, "event": "mixed", **asdict(record.diversity), **discarded})
        rows += [drop_undefined({"round": record.round, "event": MEASURED, **asdict(row)}) for row in record.sharing]
        by_split: dict[Split, Mapping[str, Update]] = {"train": record.updates, **record.scores}
        for split, updates in by_split.items():
            for client in self.clients:
                if client.name in updates:
                    rows.append(self._metric_row(client, split, updates[client.name], round=record.round))
        return rows

    def _metric_row(self, client: ClientData, split: Split, update: Update, *, round: int) -> dict[str, Any]:
        labels = {"train": client.train, "validation": client.validation, "test": client.test}[split]
        header = {"round": round, "client": client.name, "task": client.task.name, "split": split}
        share = majority(labels) if client.task.has_classes else None
        counts = {"majority": share, "classes": update.classes or None, "examples": update.examples}
        # a metric does not take the place of what the server knows by itself
        return drop_undefined({**header, **update.metrics, **counts, **header})

    def _write_audit(self, record: RoundRecord, state: FederationState) -> None:
        trained = {name: update.params for name, update in record.updates.items()}
        self._write_audit_models("trained", trained, round=record.round)
        self._write_audit_models("start", record.client_models, round=record.round)
        if record.anchors:
            self._write_audit_models("anchor", record.anchors, round=record.round)
        momentum = {"momentum"}  # nothing that is audited follows from it
        kept = {kind: models for kind, models in state.by_client.items() if kind not in momentum}
        for kind, models in {**kept, **record.sent}.items():
            if models:
                self._write_audit_models(kind, models, round=record.round)
        if record.rows:
            file = self.folder.audit_round(record.round) / "mixing.safetensors"
            rows = {part: torch.from_numpy(np.ascontiguousarray(matrix)) for part, matrix in record.rows.items()}
            self.audit_digests[file.name] = write_tensors(file, rows, within=self.folder.path)
        if record.state_changed:
            self._write_server_state(self.folder.audit_round(record.round), state.server_state)
        if record.out_of_bound:
            self._write_audit_models("out_of_bound", record.out_of_bound, round=record.round)
        loaded = {name: {"digest": update.loaded, "keys": update.keys} for name, update in record.updates.items()}
        content = {
            "round": record.round,
            "participants": list(record.sampled),
            "refused": {**record.refused, **dict.fromkeys(record.missing, "it did not answer")},
            "eta": record.eta,
            "plan": self.plan_file,
            "loaded": loaded,
            "kept": list(record.kept_local),
            "clipped": dict(record.clipped),
            "restored": dict(record.restored),
        }
        if record.refused:
            content["without_edges"] = list(record.refused)
        self._write_audit_record(self.folder.audit_round(record.round), content)

    def _write_audit_models(self, name: str, models: ByClient, *, round: int) -> None:
        file = self.folder.audit_round(round) / f"{name}.safetensors"
        self.audit_digests[file.name] = self._write_models(file, models)

    def _write_models(self, file: Path, models: ByClient) -> str:
        """Write models for the audit, in a folder of the run; the file's SHA-256."""
        return write_models(file, models, within=self.folder.path)

    def _write_server_state(self, folder: Path, server_state: ServerState) -> None:
        """Write the server state for the audit; no file where the strategy has no state but the models."""
        distinct, same = distinct_tensors(server_state)
        if distinct:
            repeats: dict[str, list[str]] = {}
            for path, first in same.items():
                repeats.setdefault(first, []).append(path)
            note = ("same", json.dumps(repeats, sort_keys=True)) if repeats else None
            self.audit_digests[SERVER_STATE_FILE] = write_tensors(
                folder / SERVER_STATE_FILE, distinct, metadata=note, within=self.folder.path
            )

    def _write_audit_record(self, folder: Path, content: Mapping[str, Any]) -> None:
        """Write the record of an audited round, with the digests of its files."""
        record = {**content, "files": dict(self.audit_digests)}
        write_sealed(folder / "record.json", record, within=self.folder.path)
        self.audit_digests.clear()

    def _save_checkpoint(self, state: FederationState) -> None:
        representatives = deduplicate_models(state.server_models)
        models = {name: state.server_models[name] for name in dict.fromkeys(representatives.values())}
        tensors = {f"strategy/{name}": tensor for name, tensor in flatten_by_client(models).items()}
        # Who starts with what the server has is told by the absence of a second copy, also after a resume.
        diverged = {
            name: params for name, params in state.client_models.items() if params is not state.server_models[name]
        }
        tensors |= {f"start/{name}": tensor for name, tensor in flatten_by_client(diverged).items()}
        for kind, by_client in state.by_client.items():
            tensors |= {f"by client/{kind}/{name}": tensor for name, tensor in flatten_by_client(by_client).items()}
        distinct, same = distinct_tensors(state.server_state)
        tensors |= {f"server/{path}": tensor for path, tensor in distinct.items()}
        content = {
            "origin": self.provenance,
            "same": {
                name: representative for name, representative in representatives.items() if name != representative
            },
            "metrics_bytes": self.folder.metrics.stat().st_size,
            "ledger_bytes": self.folder.ledger.stat().st_size,
            "stale": sorted(state.outdated),
            "validation": dict(state.validation_scores),
            "history": {str(round): score for round, score in state.history.items()},
            "over": state.is_over,
            "plan": self.plan_file,
            "seconds": self.phase_seconds,
            "reused_seconds": self.reused_seconds,
            "peak": self.peak_memory(),
            "round_seconds": {str(round): seconds for round, seconds in self.round_seconds.items()},
            digests.STATE_ENTRY: self._all_digests(),
        }
        if same:
            content["server_same"] = same
        checkpoint.save(self.folder.checkpoints, round=state.round, tensors=tensors, state=content)
        checkpoint.prune(self.folder.checkpoints, keep=self.keep_checkpoints, keep_rounds=self._best_rounds(state))

    @property
    def reused_seconds(self) -> float:
        """Seconds of results that this run reused from earlier runs of its process, over all its sessions."""
        return self.earlier_reused + REUSED_RESULTS.saved_seconds - self.saved_before

    def _best_rounds(self, state: FederationState) -> tuple[int, ...]:
        return best_rounds(state.history, self.keep_best)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the digests of all files of a complete run, and then the summary, which marks it as complete."""
        digest = sha256(encode_json(summary)).hexdigest()
        digests.write_digests(self.folder, {**self._all_digests(), self.folder.summary.name: digest})
        write_json(self.folder.summary, summary)

    def rewind_to(self, saved: checkpoint.Checkpoint) -> None:
        """Truncate the logs to a checkpoint and remove later plans, so that no round is recorded twice."""
        truncate_to(self.folder.metrics, saved.state["metrics_bytes"])
        truncate_to(self.folder.ledger, saved.state["ledger_bytes"])
        self.row_hashes = {file.name: digests.file_sha256(file) for file in (self.folder.metrics, self.folder.ledger)}
        self.plan_file = saved.state["plan"]
        plans = self.folder.plans()
        for later in plans[plans.index(self.folder.path / self.plan_file) + 1 :]:
            later.unlink()
            self.folder.sketches_of(later.name).unlink(missing_ok=True)
        plan_files = [(plan, self.folder.sketches_of(plan.name)) for plan in self.folder.plans()]
        files = [self.folder.mask, *(file for pair in plan_files for file in pair)]
        self.file_digests |= {file.name: digests.file_sha256(file).hexdigest() for file in files if file.is_file()}
        for phase, seconds in saved.state["seconds"].items():
            self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + seconds
        self.earlier_peak = dict(saved.state["peak"])
        self.earlier_reused = saved.state["reused_seconds"]
        self.round_seconds = {int(round): seconds for round, seconds in saved.state["round_seconds"].items()}


def deduplicate_models(models: ByClient) -> dict[str, str]:
    """By client, the first client whose model has the same tensors (the same objects): an average is stored once."""
    first: dict[tuple[tuple[str, int], ...], str] = {}
    return {
        # sorted, because a model that comes from a checkpoint has its keys in another order
        name: first.setdefault(tuple((key, id(params[key])) for key in sorted(params)), name)
        for name, params in models.items()
    }


def distinct_tensors(server_state: ServerState) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(every distinct tensor of this state under its first path, the first path of each repeated tensor)."""
    first: dict[int, str] = {}
    flat = flatten_state(server_state)
    first_paths = {path: first.setdefault(id(tensor), path) for path, tensor in flat.items()}
    distinct = {path: tensor for path, tensor in flat.items() if first_paths[path] == path}
    return distinct, {path: first_path for path, first_path in first_paths.items() if path != first_path}


def checkpoint_server_state(saved: checkpoint.Checkpoint) -> ServerState:
    """The server state of a checkpoint; empty where the strategy has no state but the models."""
    flat = dict(unflatten_by_client(saved.tensors).get("server", {}))
    try:
        flat |= {path: flat[first] for path, first in saved.state.get("server_same", {}).items()}
    except (AttributeError, KeyError) as error:
        raise CheckpointError(
            f"checkpoint {saved.path} lacks a part of the server state ({error}); restore it, or run again"
        ) from error
    return unflatten_state(flat)


def checkpoint_models(saved: checkpoint.Checkpoint, names: Sequence[str]) -> tuple[ByClient, ByClient]:
    """(server models, client models) of a checkpoint, in the clients' order (`FederationState`)."""
    try:
        kinds = unflatten_by_client(saved.tensors)
        server_models, diverged = (unflatten_by_client(kinds.get(kind, {})) for kind in ("strategy", "start"))
        same = saved.state["same"]
        # A file holds its tensors sorted by name; packs follow the order of the clients, and so do their last bits.
        server_models = {name: server_models[same.get(name, name)] for name in names}
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {saved.path} lacks the model of a client of its plan ({error}); restore it, or run again"
        ) from error
    return server_models, {name: diverged.get(name, server_models[name]) for name in names}


def checkpoint_by_client(saved: checkpoint.Checkpoint) -> TreesByClient:
    """The tensors that clients keep beside their models, by kind and client, of a checkpoint."""
    kinds = unflatten_by_client(unflatten_by_client(saved.tensors).get("by client", {}))
    return {kind: unflatten_by_client(flat) for kind, flat in kinds.items()}


def _early_stopping_row(state: FederationState) -> dict[str, Any]:
    (best,) = best_rounds(state.history, 1)
    return {"round": state.round, "event": STOPPED, "best_round": best, "validation": state.history[best]}


def _hosting_rows(record: RoundRecord) -> list[dict[str, Any]]:
    """Which host computed the server half of which client, and why; none where the server did so for all."""
    return [
        {"round": record.round, "client": name, "event": "hosted", "work": work, "host": match.host or "server"}
        | {"reason": match.reason}
        for work, pairs in (("training", record.hosting.training), ("evaluation", record.hosting.evaluation))
        for name, match in pairs.items()
    ]
