"""The one writer of a run's folder, and the provenance of a run.

What a run was begun with, settings and data, and what it has written: with others it would not be one run.

What a round leaves behind: rows of metrics and ledger, checkpoints, and the files of the audit.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from atlas_fl.client.job import Update
from atlas_fl.config import Config, differences, identity_settings
from atlas_fl.data.clients import ClientData, majority
from atlas_fl.errors import CheckpointError
from atlas_fl.experiment.early_stopping import best_rounds
from atlas_fl.experiment.state import Admitted, RoundRecord, State, plan_messages
from atlas_fl.experiment.summary import STOPPED, peak_memory
from atlas_fl.params import (
    ByClient,
    ServerState,
    Split,
    flatten_by_client,
    flatten_state,
    unflatten_by_client,
    unflatten_state,
)
from atlas_fl.planning.plan import Planned
from atlas_fl.storage import checkpoint, digests
from atlas_fl.storage.checkpoint import Checkpoint
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


def origin_of(config: Config, clients: Sequence[ClientData]) -> dict[str, Any]:
    """The settings that make the run what it is, and a SHA-256 of each client's rows; plain data for JSON."""
    data = {client.name: client.digest() for client in clients}
    plain: dict[str, Any] = from_json(to_json({"settings": identity_settings(config), "data": data}))
    return plain


def check_origin(begun: Mapping[str, Any], now: Mapping[str, Any], *, folder: Path) -> None:
    """Nothing where the run goes on with what it was begun with.

    Raises:
        CheckpointError: a setting or a client's rows are others; the message names the first.
    """
    # A setting younger than runs (`config.identity.ADDED_LATER`) is not among those of a run begun with its default.
    for name in dict.fromkeys([*begun["settings"], *sorted(now["settings"])]):
        old, new = begun["settings"].get(name), now["settings"].get(name)
        if new != old:
            raise CheckpointError(
                f"run {folder} was begun with {name} = {old!r}, and its config.toml now says {new!r}; restore the file,"
                " or begin another run"
            )
    for name, digest in begun["data"].items():
        if now["data"].get(name) != digest:
            raise CheckpointError(
                f"the data of client {name} are not those that run {folder} was begun with; restore them, or begin"
                " another run: rows that were trained on could now be tested on"
            )


def check_settings(wanted: Config, found: Config, *, folder: Path) -> None:
    """Nothing where these are the settings of the run in this folder.

    Raises:
        CheckpointError: they differ; the message names the first and says how many more.
    """
    changed = differences(found, wanted)
    if changed:
        name, (old, new) = next(iter(changed.items()))
        raise CheckpointError(
            f"run {folder} was begun with {name} = {old!r}, not {new!r}"
            f"{f' (and {len(changed) - 1} more settings differ)' if len(changed) > 1 else ''};"
            " a run goes on with its own config: leave the flags away, or choose another --name"
        )


def check_written(folder: RunFolder, found: Checkpoint) -> None:
    """Nothing where all that a run goes on from beside this checkpoint is what was written with it.

    The settings are not looked at: `check_origin` names the one that differs.

    Raises:
        CheckpointError: a plan, sketches, mask or rows before the checkpoint are damaged; the message names the file.
    """
    digests.check_state(found)
    written = digests.digests_in_state(found.state)
    if written is not None:
        written.check(folder, *(folder.path / name for name in written.sha256 if name != folder.config.name))


def config_note(folder: RunFolder, found: Checkpoint) -> str:
    """What is to be said of a `config.toml` that was changed where nothing depends on it; empty where it was not."""
    written = digests.digests_in_state(found.state)
    if written is None:
        return f"checkpoint {found.path.name} has no digests: an earlier version wrote it; the next one will have them"
    if not written.fault(folder, folder.config):
        return ""
    return f"{folder.config} is not what it was at {found.path.name}; no setting that the run depends on differs"


SERVER_STATE = "server.safetensors"
"""What the strategy remembers, among the files of an audited round."""


@dataclass(kw_only=True)
class Recorder:
    """The one writer of a run's folder."""

    folder: RunFolder
    clients: tuple[ClientData, ...]
    share: tuple[str, ...]
    audit: bool
    checkpoint_every: int
    keep_checkpoints: int
    keep_best: int
    """Best rounds by mean validation score whose checkpoints stay beside the newest."""
    origin: Mapping[str, Any]
    """What the run was begun with (`origin`)."""
    plan_file: str = "plan.json"
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase, over all sessions."""
    round_seconds: dict[int, float] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    """Most memory of the sessions before this one, by kind."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the settings, the plans, their sketches and the mask, by name."""
    running: dict[str, Any] = field(default_factory=lambda: {"metrics.jsonl": sha256(), "ledger.jsonl": sha256()})
    """SHA-256 of the files of rows as far as they were written, by name."""
    audited: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the files of the round that is being audited, by name."""

    def memory(self) -> dict[str, int]:
        """The most memory of all sessions, in bytes by kind."""
        now = peak_memory()
        return {kind: max(size, self.peak.get(kind, 0)) for kind, size in now.items()}

    def planned(self, planned: Planned, state: State, *, communicates: bool) -> None:
        """Write the plan, its messages, and the checkpoint from which round one starts."""
        self._write_plan(planned)
        rows = [row.to_json() for row in (plan_messages(planned) if communicates else planned.crossed)]
        self._append(self.folder.metrics, [])
        self._append(self.folder.ledger, rows)
        if self.audit:
            self._write_audited("start", state.start, round=0)
            self._write_state(self.folder.audit_round(0), state.server_state)
            self._write_record(self.folder.audit_round(0), {"round": 0})
        self._checkpoint(state)

    def joined(self, arrived: Admitted) -> None:
        """Write the plan with the newcomers, what placing them sent, and a checkpoint that they are part of.

        For an audit also their own models, what became of them, and the plan that this followed from.
        """
        state, assembly = arrived.state, arrived.assembly
        self.enlarge(assembly.config, assembly.clients)
        self.plan_file = f"plan-{state.round + 1:04d}.json"
        self._write_plan(arrived.planned)
        clients = [client for client in arrived.planned.plan.clients if client.name in arrived.fresh]
        told = {"round": state.round + 1, "event": "joined"}
        self._append(self.folder.metrics, [{**told, "client": one.name, "cluster": one.cluster} for one in clients])
        rows: Sequence[LedgerRow] = arrived.planned.crossed
        if arrived.communicates:
            rows = plan_messages(arrived.planned, round=state.round + 1, only=arrived.fresh)
        self._append(self.folder.ledger, [row.to_json() for row in rows])
        if self.audit:
            self._write_arrival(arrived)
        self._checkpoint(state)

    def _write_arrival(self, arrived: Admitted) -> None:
        state, place = arrived.state, self.folder.audit_arrival(arrived.state.round + 1)
        start = {name: state.start[name] for name in arrived.fresh}
        self.audited["fresh.safetensors"] = write_models(place / "fresh.safetensors", arrived.fresh)
        self.audited["start.safetensors"] = write_models(place / "start.safetensors", start)
        if arrived.state_changed:
            self._write_state(place, state.server_state)
        self.audited["plan.json"] = write_json(place / "plan.json", arrived.planned.plan.to_json())
        self._write_record(place, {"round": state.round + 1})

    def enlarge(self, config: Config, clients: tuple[ClientData, ...]) -> None:
        """These are the clients from now on."""
        self.clients, self.origin = clients, origin_of(config, clients)

    def replanned(self, planned: Planned, *, round: int, begun: ByClient | None) -> None:
        """Write the plan that holds from this round on, beside the first one, and the models at their new ranks."""
        self.plan_file = f"plan-{round:04d}.json"
        self._write_plan(planned)
        self._append(self.folder.ledger, [row.to_json() for row in plan_messages(planned, round=round)])
        if self.audit and begun is not None:
            self._write_audited("begun", begun, round=round)

    def round(self, record: RoundRecord, state: State, *, seconds: float, ends: bool = False) -> list[dict[str, Any]]:
        """The round's rows, which are written, as are the audit's files, and a checkpoint where one is due."""
        self.seconds["rounds"] = self.seconds.get("rounds", 0.0) + seconds
        self.round_seconds[record.round] = seconds
        stopped = [_stopped_row(state)] if record.stopped else []
        rows = [*self._metric_rows(record), *stopped]
        self._append(self.folder.metrics, rows)
        self._append(self.folder.ledger, [row.to_json() for row in record.messages(self.share)])
        if self.audit:
            self._write_audit(record, state)
        due = record.round % self.checkpoint_every == 0 or record.round in self._best(state)
        if due or record.final or ends:
            self._checkpoint(state)
        return rows

    def _write_plan(self, planned: Planned) -> None:
        """A plan with its sketches, which the figures draw and newcomers are compared with; later ones stand beside."""
        sketches = self.folder.sketches_of(self.plan_file)
        if planned.sketches is not None:
            self.files[sketches.name] = write_sketches(sketches, planned.sketches)
        if planned.mask is not None:
            self.files[self.folder.mask.name] = write_tensors(self.folder.mask, planned.mask)
        self.files[self.plan_file] = write_json(self.folder.path / self.plan_file, planned.plan.to_json())

    def _append(self, path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        append_rows(path, rows, running=self.running[path.name])

    def _digests(self) -> dict[str, str]:
        return {**self.files, **{name: running.hexdigest() for name, running in self.running.items()}}

    def _metric_rows(self, record: RoundRecord) -> list[dict[str, Any]]:
        rows = [
            {"round": record.round, "client": name, "event": "refused", "reason": reason}
            for name, reason in record.refused.items()
        ]
        rows += [{"round": record.round, "client": name, "event": "missing"} for name in record.missing]
        for event, reasons in (("clipped", record.clipped), ("restored", record.restored)):
            told = {"round": record.round, "event": event}
            rows += [{**told, "client": name, "reason": reason} for name, reason in reasons.items()]
        rows += [{"round": record.round, "client": name, "event": "kept own model"} for name in record.kept]
        rows += _hosting_rows(record)
        if record.diversity is not None:
            lost = {"discarded": dict(record.discarded)}
            rows.append({"round": record.round, "event": "mixed", **asdict(record.diversity), **lost})
        by_split: dict[Split, Mapping[str, Update]] = {"train": record.updates, **record.scores}
        for split, updates in by_split.items():
            for client in self.clients:
                if client.name in updates:
                    rows.append(self._metric_row(client, split, updates[client.name], round=record.round))
        return rows

    def _metric_row(self, client: ClientData, split: Split, update: Update, *, round: int) -> dict[str, Any]:
        labels = {"train": client.train, "validation": client.validation, "test": client.test}[split]
        known = {"round": round, "client": client.name, "task": client.task.name, "split": split}
        share = majority(labels) if client.task.has_classes else None
        counted = {"majority": share, "classes": update.classes or None, "examples": update.examples}
        # a metric does not take the place of what the server knows by itself
        return drop_undefined({**known, **update.metrics, **counted, **known})

    def _write_audit(self, record: RoundRecord, state: State) -> None:
        trained = {name: update.params for name, update in record.updates.items()}
        self._write_audited("trained", trained, round=record.round)
        self._write_audited("start", record.start, round=record.round)
        if record.state_changed:
            self._write_state(self.folder.audit_round(record.round), state.server_state)
        if record.out_of_bound:
            self._write_audited("out_of_bound", record.out_of_bound, round=record.round)
        loaded = {name: {"digest": update.loaded, "keys": update.keys} for name, update in record.updates.items()}
        content = {
            "round": record.round,
            "participants": list(record.sampled),
            "refused": {**record.refused, **dict.fromkeys(record.missing, "it did not answer")},
            "eta": record.eta,
            "plan": self.plan_file,
            "loaded": loaded,
            "kept": list(record.kept),
            "clipped": dict(record.clipped),
            "restored": dict(record.restored),
        }
        if record.refused:
            content["without_edges"] = list(record.refused)
        self._write_record(self.folder.audit_round(record.round), content)

    def _write_audited(self, name: str, models: ByClient, *, round: int) -> None:
        file = self.folder.audit_round(round) / f"{name}.safetensors"
        self.audited[file.name] = write_models(file, models)

    def _write_state(self, folder: Path, server_state: ServerState) -> None:
        """What the strategy remembers, for an audit; nothing of a strategy that remembers nothing but the models."""
        distinct, same = distinct_tensors(server_state)
        if distinct:
            others: dict[str, list[str]] = {}
            for path, lead in same.items():
                others.setdefault(lead, []).append(path)
            note = ("same", json.dumps(others, sort_keys=True)) if others else None
            self.audited[SERVER_STATE] = write_tensors(folder / SERVER_STATE, distinct, metadata=note)

    def _write_record(self, place: Path, content: Mapping[str, Any]) -> None:
        """The record of an audited round, with the digests of the files beside it."""
        write_sealed(place / "record.json", {**content, "files": dict(self.audited)})
        self.audited.clear()

    def _checkpoint(self, state: State) -> None:
        leads = leads_of(state.server_models)
        models = {name: state.server_models[name] for name in dict.fromkeys(leads.values())}
        tensors = {f"strategy/{name}": tensor for name, tensor in flatten_by_client(models).items()}
        # Who starts with what the server has is told by the absence of a second copy, also after a resume.
        apart = {name: params for name, params in state.start.items() if params is not state.server_models[name]}
        tensors |= {f"start/{name}": tensor for name, tensor in flatten_by_client(apart).items()}
        tensors |= {f"momentum/{name}": tensor for name, tensor in flatten_by_client(state.momentum).items()}
        distinct, same = distinct_tensors(state.server_state)
        tensors |= {f"server/{path}": tensor for path, tensor in distinct.items()}
        content = {
            "origin": self.origin,
            "same": {name: lead for name, lead in leads.items() if name != lead},
            "metrics_bytes": self.folder.metrics.stat().st_size,
            "ledger_bytes": self.folder.ledger.stat().st_size,
            "stale": sorted(state.stale),
            "validation": dict(state.validation),
            "history": {str(at): score for at, score in state.history.items()},
            "over": state.over,
            "plan": self.plan_file,
            "seconds": self.seconds,
            "peak": self.memory(),
            "round_seconds": {str(at): taken for at, taken in self.round_seconds.items()},
            digests.STATE_ENTRY: self._digests(),
        }
        if same:
            content["server_same"] = same
        checkpoint.save(self.folder.checkpoints, round=state.round, tensors=tensors, state=content)
        checkpoint.prune(self.folder.checkpoints, keep=self.keep_checkpoints, keep_rounds=self._best(state))

    def _best(self, state: State) -> tuple[int, ...]:
        return best_rounds(state.history, self.keep_best)

    def completed(self, summary: Mapping[str, Any]) -> None:
        """Write the digests of all that a complete run holds, and then the summary, by which it is complete."""
        written = sha256(encode_json(summary)).hexdigest()
        digests.write_digests(self.folder, {**self._digests(), self.folder.summary.name: written})
        write_json(self.folder.summary, summary)

    def go_back_to(self, found: checkpoint.Checkpoint) -> None:
        """Cut the files of rows back to a checkpoint, so that repeated rounds are not there twice."""
        truncate_to(self.folder.metrics, found.state["metrics_bytes"])
        truncate_to(self.folder.ledger, found.state["ledger_bytes"])
        self.running = {file.name: digests.file_sha256(file) for file in (self.folder.metrics, self.folder.ledger)}
        self.plan_file = found.state["plan"]
        plans = self.folder.plans()
        for later in plans[plans.index(self.folder.path / self.plan_file) + 1 :]:
            later.unlink()
            self.folder.sketches_of(later.name).unlink(missing_ok=True)
        kept = [(plan, self.folder.sketches_of(plan.name)) for plan in self.folder.plans()]
        known = [self.folder.mask, *(file for both in kept for file in both)]
        self.files |= {file.name: digests.file_sha256(file).hexdigest() for file in known if file.is_file()}
        for phase, taken in found.state["seconds"].items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + taken
        self.peak = dict(found.state["peak"])
        self.round_seconds = {int(at): taken for at, taken in found.state["round_seconds"].items()}


def leads_of(models: ByClient) -> dict[str, str]:
    """For every client the first one whose model holds the very same tensors: an average over many is stored once."""
    first: dict[tuple[tuple[str, int], ...], str] = {}
    return {
        # sorted, because a model that comes from a checkpoint has its keys in another order
        name: first.setdefault(tuple((key, id(params[key])) for key in sorted(params)), name)
        for name, params in models.items()
    }


def distinct_tensors(server_state: ServerState) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(every different tensor of this state under its first path, that path for each other one)."""
    first: dict[int, str] = {}
    flat = flatten_state(server_state)
    leads = {path: first.setdefault(id(tensor), path) for path, tensor in flat.items()}
    distinct = {path: tensor for path, tensor in flat.items() if leads[path] == path}
    return distinct, {path: lead for path, lead in leads.items() if path != lead}


def server_state_in(found: checkpoint.Checkpoint) -> ServerState:
    """What the strategy remembers, of a checkpoint; empty where it remembers nothing but the models."""
    flat = dict(unflatten_by_client(found.tensors).get("server", {}))
    try:
        flat |= {path: flat[lead] for path, lead in found.state.get("server_same", {}).items()}
    except (AttributeError, KeyError) as error:
        raise CheckpointError(
            f"checkpoint {found.path} lacks a part of the server state ({error}); restore it, or run again"
        ) from error
    return unflatten_state(flat)


def models_of(found: checkpoint.Checkpoint, names: Sequence[str]) -> tuple[ByClient, ByClient]:
    """(the models of the last aggregation, what clients start with) of a checkpoint, in the clients' order."""
    try:
        kinds = unflatten_by_client(found.tensors)
        memory, apart = (unflatten_by_client(kinds.get(kind, {})) for kind in ("strategy", "start"))
        same = found.state["same"]
        # A file holds its tensors sorted by name; packs follow the order of the clients, and so do their last bits.
        memory = {name: memory[same.get(name, name)] for name in names}
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {found.path} lacks the model of a client of its plan ({error}); restore it, or run again"
        ) from error
    return memory, {name: apart.get(name, memory[name]) for name in names}


def momentum_in(found: checkpoint.Checkpoint) -> ByClient:
    """What each client keeps of its optimizer, of a checkpoint."""
    return unflatten_by_client(unflatten_by_client(found.tensors).get("momentum", {}))


def _stopped_row(state: State) -> dict[str, Any]:
    (best,) = best_rounds(state.history, 1)
    return {"round": state.round, "event": STOPPED, "best_round": best, "validation": state.history[best]}


def _hosting_rows(record: RoundRecord) -> list[dict[str, Any]]:
    """Who computed the upper part of whose model, and why; nothing where the server did so for everyone."""
    return [
        {"round": record.round, "client": name, "event": "hosted", "work": work, "host": own.host or "server"}
        | {"reason": own.reason}
        for work, pairs in (("training", record.hosting.training), ("evaluation", record.hosting.evaluation))
        for name, own in pairs.items()
    ]
