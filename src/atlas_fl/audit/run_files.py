"""Readers of a run folder for the audit: plan, records, models, masks, last round.

How files are opened and JSON is read is shared with the rest (`storage`); what they say is not. Content that fits its
digests is not looked at again.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from atlas_fl.config import Config, MixingConfig, load_config, validate
from atlas_fl.config.files import read_tables
from atlas_fl.errors import CheckpointError, ConfigError, short_repr
from atlas_fl.params import HEAD, LORA_A, LORA_B
from atlas_fl.plugins import load_plugins
from atlas_fl.storage.folder_access import is_inner_folder, list_folder, memory_bytes, read_file
from atlas_fl.storage.jsonl import from_json, read_json, read_rows, read_sealed

Models = dict[str, dict[str, Tensor]]
"""Tensors by client and parameter name."""
Flat = Mapping[str, Tensor]
"""A server state: tensors by their paths."""
NO_ANSWER = "it did not answer"
"""The reason that is recorded of who sent no update."""
PLAN_FILE = re.compile(r"plan(-\d{4,})?\.json")
"""The names that a record may give for the plan in force: of a file in the run's own folder."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditPlan:
    """The parts of a plan that the server's step depends on."""

    clients: tuple[str, ...]
    """Names, in order."""
    tasks: tuple[str, ...]
    """Task of each client."""
    examples: tuple[float, ...]
    """Training examples of each client."""
    clusters: tuple[int, ...]
    """Cluster of each client, -1 for undecided."""
    ranks: tuple[tuple[int, ...], ...]
    """Rank of every layer, for each client."""
    adjacency: np.ndarray
    """(n, n) edge weights."""
    importance: np.ndarray | None
    """(n, layers) importance, if it was measured."""
    layer_of: Mapping[str, int]
    """Layer of every adapted module."""
    alpha: float | None
    """LoRA alpha; None is twice the rank."""
    rslora: bool
    """True if alpha is divided by the root of the rank."""

    def layer(self, key: str) -> int | None:
        """The layer of a parameter; None of what is in none."""
        return self.layer_of.get(key.removesuffix(LORA_A).removesuffix(LORA_B))

    def may_meet(self, k: int, other: int, key: str) -> bool:
        """Return whether this parameter of two clients may be mixed: heads are of one task."""
        return not key.startswith(HEAD) or self.tasks[k] == self.tasks[other]

    def rank(self, client: str, key: str) -> int | None:
        """The rank that a client is to have at this A; None in no layer."""
        layer = self.layer(key)
        return None if layer is None else self.ranks[self.clients.index(client)][layer]

    def scale(self, rank: int) -> float:
        """The factor s of the update s B A."""
        alpha = 2.0 * rank if self.alpha is None else self.alpha
        return alpha / (rank**0.5 if self.rslora else rank)


@dataclass(frozen=True, kw_only=True)
class AuditRecord:
    """Record of one round."""

    participants: tuple[str, ...]
    """Clients that were asked to train."""
    refused: Mapping[str, str]
    """Reason by client whose update was refused."""
    eta: float | None
    """Step of the round."""
    plan: str
    """File of the plan in force."""
    loaded: Mapping[str, Mapping[str, Any]]
    """Digest and number of keys that each client says it loaded."""
    kept: tuple[str, ...] = ()
    """Clients that kept their own model because it was better on validation."""
    without_edges: tuple[str, ...] = ()
    """Clients that were nobody's neighbour in the server's step, because their update was refused."""
    clipped: tuple[str, ...] = ()
    """Clients whose update was scaled down."""
    restored: tuple[str, ...] = ()
    """Clients that kept the model that they began with, because the mixed one was none."""

    @property
    def accepted_clients(self) -> frozenset[str]:
        """Clients whose update was mixed."""
        return frozenset(self.participants) - self.refused.keys()


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder."""

    path: Path
    """Where it lies."""
    settings: Config
    """Its settings, those that its strategy fixes set."""
    rounds: tuple[int, ...]
    """Rounds with an audit folder, without round 0."""
    done: int
    """Rounds that are complete: of a finished run all that there should be, else those up to the newest checkpoint."""
    complete: bool = False
    """True if the run is finished."""
    mask: Mapping[str, Tensor] | None = None
    """Which weights may move, where not all may."""
    plans: dict[str, AuditPlan] = field(default_factory=dict)
    """Plans that were read already."""

    @property
    def mixing(self) -> MixingConfig:
        """Its settings of the server's rule."""
        return self.settings.mixing

    def is_personal(self, round: int) -> bool:
        """Return whether clients train on their own in this round, at the end of the run."""
        return round > self.settings.training.rounds - self.mixing.personal_rounds

    def is_aggregated(self, round: int) -> bool:
        """Return whether the server aggregates after this round: every `aggregate_every` rounds, and after the last."""
        is_last = self.is_personal(round + 1)
        return not self.is_personal(round) and (round % self.mixing.aggregate_every == 0 or is_last)

    def eta(self, round: int) -> float:
        """The step that the settings say of this round."""
        return self.mixing.eta * self.mixing.eta_decay ** (round - 1) if self.is_aggregated(round) else 0.0

    def folder(self, round: int) -> Path:
        """Where a round's files lie."""
        return self.path / "audit" / f"round-{round:04d}"

    def plan(self, name: str) -> AuditPlan:
        """The plan of this file name inside the run folder; raises CheckpointError if it is missing or incomplete."""
        file = self.path / name
        if name not in self.plans:
            content = read_json(file, within=self.path)
            try:
                self.plans[name] = _plan(content)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{file} is no plan: {error!r}; restore it from a copy, or run again") from error
        return self.plans[name]

    def record(self, round: int) -> AuditRecord:
        """The record of a round; raises CheckpointError if it is missing or damaged."""
        path = self.folder(round) / "record.json"
        content = read_sealed(path, "plan", "refused", "eta", "loaded", within=self.path)
        if not PLAN_FILE.fullmatch(str(content["plan"])):
            fault = f"{short_repr(content['plan'])} is no name of a plan's file"
            raise CheckpointError(f"{path} is no record of a round: {fault}; restore it from a copy, or run again")
        return AuditRecord(
            refused=content["refused"],
            eta=content["eta"],
            plan=content["plan"],
            loaded=content["loaded"],
            without_edges=tuple(content.get("without_edges", ())),
            **{name: tuple(content[name]) for name in ("participants", "kept", "clipped", "restored")},
        )

    def models(self, round: int, name: str) -> Models:
        """`start` or `trained` of a round, by client; raises CheckpointError if the file is missing or damaged."""
        return models_in(self.folder(round) / f"{name}.safetensors", within=self.path)

    def models_if_any(self, round: int, name: str) -> Models:
        """The same of a file that is written only where there is something in it."""
        return self.models(round, name) if (self.folder(round) / f"{name}.safetensors").is_file() else {}

    def server_state(self, folder: Path) -> Flat | None:
        """The server state that was written in this folder; None where there is none."""
        path = folder / "server.safetensors"
        return read_shared(path, within=self.path, holder_name=lambda _, name: name) if path.is_file() else None

    def state_after(self, round: int, before: Flat) -> Flat:
        """The server state after this round; what it was before where the round wrote none."""
        state = self.server_state(self.folder(round))
        return before if state is None else state

    def mixing_rows(self, round: int) -> dict[str, np.ndarray]:
        """The mixing matrices that a plug-in's method recorded, `adapters` and `head`; empty where there are none."""
        path = self.folder(round) / "mixing.safetensors"
        flat = read_audited(path, within=self.path) if path.is_file() else {}
        return {part: tensor.double().numpy() for part, tensor in flat.items()}


def open_run(path: Path) -> Run:
    """The run at this path; raises CheckpointError if it is none or kept nothing for an audit."""
    config = path / "config.toml"
    if not config.is_file():
        raise CheckpointError(f"{path} is no run: it has no config.toml")
    try:
        tables = read_tables(config, within=path)
        recorded = load_config(config, within=path)
        load_plugins(recorded.run.plugin, outside=path)
        settings = validate(recorded, at_sites=True)
    except ConfigError as error:
        raise CheckpointError(f"{config} cannot be read: {error}") from error
    if "rounds" not in tables.get("training", {}) or "mixing" not in tables:
        raise CheckpointError(
            f"{config} lacks the settings of its run ([training] rounds, [mixing]); restore it from a copy, or run"
            " again"
        )
    numbers = _numbers(path / "audit", within=path)
    if 0 not in numbers or len(numbers) < 2:
        raise CheckpointError(f"{path} holds no audited round; run it again with --audit")
    complete = (path / "summary.json").is_file()
    return Run(
        path=path,
        settings=settings,
        rounds=tuple(numbers[1:]),
        done=last_round(path, settings) if complete else max(_numbers(path / "checkpoints", within=path), default=0),
        complete=complete,
        mask=_mask(path) if settings.sparse.has_mask else None,
    )


def _numbers(folder: Path, *, within: Path) -> list[int]:
    """The numbers of the folders `round-000N` in this one, rising."""
    names = [name for name in list_folder(folder, within=within) if is_inner_folder(folder / name)]
    matches = [re.fullmatch(r"round-(\d{4,})", name) for name in names]
    return sorted(int(match[1]) for match in matches if match)


def _mask(path: Path) -> dict[str, Tensor]:
    file = path / "mask.safetensors"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing, and the run was trained under a mask; restore it, or run again")
    return read_audited(file, within=path)


def last_round(path: Path, config: Config) -> int:
    """The last round of a complete run: that of its settings, or where it was to stop early the one it stopped after.

    That one is what the validation scores say, not what the run says of itself. Only with `keep = "best"` are the rows
    of the last round those of other models than the ones that decided, and the run is believed.
    """
    training, mixing = config.training, config.mixing
    if not training.patience:
        return training.rounds
    rows = read_rows(path / "metrics.jsonl")
    scores: dict[int, list[float]] = {}
    for row in rows:
        if row.get("split") == "validation":
            scores.setdefault(row["round"], []).append(row["primary"])
    stopped_at = {row["round"] for row in rows if row.get("event") == "stopped early" and mixing.keep == "best"}
    best, best_round = -math.inf, 0
    for number in sorted(scores):
        mean = fmean(scores[number])
        if mean - best > training.min_delta:
            best, best_round = mean, number
        waited = number - best_round >= training.patience or number in stopped_at
        if waited and number % mixing.aggregate_every == 0:
            return number
    return training.rounds


def _plan(content: Mapping[str, Any]) -> AuditPlan:
    clients = content["clients"]
    return AuditPlan(
        clients=tuple(client["name"] for client in clients),
        tasks=tuple(client["task"] for client in clients),
        examples=tuple(client["examples"] for client in clients),
        clusters=tuple(client["cluster"] for client in clients),
        ranks=tuple(tuple(client["ranks"]) for client in clients),
        adjacency=np.array(content["adjacency"], np.float64).reshape(len(clients), len(clients)),
        importance=np.array(content["importance"], np.float64) if any(content.get("importance", [])) else None,
        layer_of=content["layer_of"],
        alpha=content["lora"]["alpha"],
        rslora=content["lora"]["rslora"],
    )


def models_in(path: Path, *, within: Path | None = None) -> Models:
    """The models in this file, by client; raises CheckpointError if it is missing or damaged."""
    models: Models = {}
    for key, tensor in read_audited(path, within=within).items():
        client, _, parameter = key.partition("/")
        models.setdefault(client, {})[parameter] = tensor
    return models


def read_audited(path: Path | str, *, within: Path | None = None) -> dict[str, Tensor]:
    """The tensors in a file of the audit by `<client>/<parameter>`; what several clients hold is one tensor.

    No part of the path below `within` is a link; without it the file is none.
    Raises CheckpointError if the file is missing or damaged.
    """

    def holder_name(lead: str, client: str) -> str:
        return f"{client}/{lead.partition('/')[2]}"

    return read_shared(Path(path), within=within, holder_name=holder_name)


def read_shared(path: Path, *, within: Path | None, holder_name: Callable[[str, str], str]) -> dict[str, Tensor]:
    """The tensors in a file, by names that rise, each under all its names.

    The metadata's entry `same` says by the name under which a tensor stands who else holds it; `holder_name` makes a
    name of both.
    """
    try:
        payload = read_file(path, max_bytes=memory_bytes(), within=within)
        tensors: dict[str, Tensor] = load(payload)
        header = from_json(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
        same = from_json(header.get("__metadata__", {}).get("same", "{}"))
        others = {holder_name(lead, holder): tensors[lead] for lead, holders in same.items() for holder in holders}
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); restore it, or run again") from None
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    flat = {**tensors, **others}
    if len(flat) < len(tensors) + len(others):
        raise CheckpointError(f"{path} is damaged: two tensors have one name")
    return {name: flat[name] for name in sorted(flat)}


def frozen_fault(mask: Mapping[str, Tensor], initial: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> str:
    """The first tensor of which a frozen weight moved in training, or that has no mask; empty where there is none."""
    for key, before in initial.items():
        if key not in mask:
            return f"{key} has no mask"
        moved = int(((before != trained[key]) & ~mask[key]).sum())
        if moved:
            return f"{moved} frozen weights of {key} moved"
    return ""
