"""Readers of a run folder for the audit: plan, records, models, masks, last round.

How files are opened and JSON is read is shared with the rest (`storage`); what they say is not. Content that fits its
digests is not looked at again.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from atlas_fl.clustering.blocks import Matrix, from_plain
from atlas_fl.config import Config, load_config, validate
from atlas_fl.config.schema import MixingConfig
from atlas_fl.errors import CheckpointError, ConfigError, short_repr
from atlas_fl.frozen import Frozen
from atlas_fl.params import HEAD, LORA_A, LORA_B, Params, unflatten_by_client
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


class AuditPlan(Frozen, eq=False):
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
    adjacency: Matrix
    """(n, n) edge weights, sparse of very many clients."""
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


class AuditRecord(Frozen):
    """Record of one round."""

    participants: tuple[str, ...]
    """Clients that were asked to train."""
    refused: Mapping[str, str]
    """Reason by client whose update was refused."""
    eta: float | None
    """Step of the round."""
    plan: str
    """File of the plan in force."""
    loaded: Mapping[str, tuple[str, int]]
    """Digest and number of the tensors that each client says it loaded."""
    without_edges: tuple[str, ...]
    """Clients that were nobody's neighbour in the server's step, because their update was refused."""
    clipped: tuple[str, ...]
    """Clients whose update was scaled down."""
    restored: tuple[str, ...]
    """Clients that kept the model that they began with, because the mixed one was none."""

    @property
    def accepted_clients(self) -> frozenset[str]:
        """Clients whose update was mixed."""
        return frozenset(self.participants) - self.refused.keys()


class Run(Frozen):
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
    mask: Params | None = None
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

    def file(self, round: int, name: str, *, joined: bool = False) -> Path:
        """The path of a round's file, or of one about the clients that joined before it."""
        return self.path / "audit" / f"{'joined' if joined else 'round'}-{round:04d}" / name

    def plan(self, name: str) -> AuditPlan:
        """The plan of this file name inside the run folder; raises CheckpointError if it is missing or incomplete."""
        file = self.path / name
        if name not in self.plans:
            content = read_json(file, within=self.path)
            with reading(file, "plan"):
                self.plans[name] = _plan(content)
        return self.plans[name]

    def record(self, round: int) -> AuditRecord:
        """The record of a round; raises CheckpointError if it is missing or damaged."""
        path = self.file(round, "record.json")
        content = read_sealed(path, "plan", "refused", "eta", "loaded", within=self.path)
        with reading(path, "record of a round"):
            if not PLAN_FILE.fullmatch(str(content["plan"])):
                raise ValueError(f"{short_repr(content['plan'])} is no name of a plan's file")
            return AuditRecord(
                refused={client: str(reason) for client, reason in content["refused"].items()},
                eta=None if content["eta"] is None else float(content["eta"]),
                plan=content["plan"],
                loaded={client: (str(one["digest"]), int(one["keys"])) for client, one in content["loaded"].items()},
                **{name: tuple(map(str, content[name])) for name in ("participants", "clipped", "restored")},
                without_edges=tuple(map(str, content.get("without_edges", ()))),
            )

    def models(self, round: int, name: str, *, joined: bool = False) -> Models:
        """`start` or `trained` of a round, by client; raises CheckpointError if the file is missing or damaged."""
        return models_in(self.file(round, f"{name}.safetensors", joined=joined), within=self.path)

    def end(self) -> Models:
        """The models that clients ended with."""
        return self.models(self.rounds[-1], "start")

    def models_if_any(self, round: int, name: str) -> Models:
        """The same of a file that is written only where there is something in it."""
        return self.models(round, name) if self.file(round, f"{name}.safetensors").is_file() else {}

    def state_after(self, round: int, before: Flat, *, joined: bool = False) -> Flat:
        """The server state after this round; what it was before where the round wrote none."""
        path = self.file(round, "server.safetensors", joined=joined)
        return read_audited(path, within=self.path, by_client=False) if path.is_file() else before

    def mixing_rows(self, round: int) -> dict[str, np.ndarray]:
        """The mixing matrices that a plug-in's method recorded, `adapters` and `head`; empty where there are none."""
        path = self.file(round, "mixing.safetensors")
        flat = read_audited(path, within=self.path) if path.is_file() else {}
        return {part: tensor.double().numpy() for part, tensor in flat.items()}


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Make one line, with the file's name, of content that fits its digest and is not what a run writes."""
    try:
        yield
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no {what}: {error!r}; restore it from a copy, or run again") from error


def open_run(path: Path) -> Run:
    """The run at this path; raises CheckpointError if it is none or kept nothing for an audit."""
    config = path / "config.toml"
    if not config.is_file():
        raise CheckpointError(f"{path} is no run: it has no config.toml")
    try:
        recorded = load_config(config, within=path)
        load_plugins(recorded.run.plugin, outside=path)
        settings = validate(recorded, at_sites=True)
    except ConfigError as error:
        raise CheckpointError(f"{config} cannot be read: {error}") from error
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
        mask=read_audited(path / "mask.safetensors", within=path) if settings.sparse.has_mask else None,
    )


def _numbers(folder: Path, *, within: Path) -> list[int]:
    """The numbers of the folders `round-000N` in this one, rising."""
    names = [name for name in list_folder(folder, within=within) if is_inner_folder(folder / name)]
    matches = [re.fullmatch(r"round-(\d{4,})", name) for name in names]
    return sorted(int(match[1]) for match in matches if match)


def last_round(path: Path, config: Config) -> int:
    """The last round of a complete run: that of its settings, or where it was to stop early the one it stopped after.

    That one is what the validation scores say, not what the run says of itself.
    """
    training = config.training
    if not training.patience:
        return training.rounds
    file = path / "metrics.jsonl"
    rows = read_rows(file)
    scores: dict[int, list[float]] = {}
    with reading(file, "file of a run's rows"):
        for row in (row for row in rows if row.get("split") == "validation"):
            scores.setdefault(int(row["round"]), []).append(float(row["primary"]))
    best, best_round = -math.inf, 0
    for number in sorted(scores):
        mean = fmean(scores[number])
        if mean - best > training.min_delta:
            best, best_round = mean, number
        if number - best_round >= training.patience and number % config.mixing.aggregate_every == 0:
            return number
    return training.rounds


def _plan(content: Mapping[str, Any]) -> AuditPlan:
    clients = content["clients"]
    plan = AuditPlan(
        clients=tuple(str(client["name"]) for client in clients),
        tasks=tuple(str(client["task"]) for client in clients),
        examples=tuple(float(client["examples"]) for client in clients),
        clusters=tuple(int(client["cluster"]) for client in clients),
        ranks=tuple(tuple(map(int, client["ranks"])) for client in clients),
        adjacency=from_plain(content["adjacency"]).reshape(len(clients), len(clients)),
        importance=np.array(content["importance"], np.float64) if any(content.get("importance", [])) else None,
        layer_of={module: int(layer) for module, layer in content["layer_of"].items()},
        alpha=None if content["lora"]["alpha"] is None else float(content["lora"]["alpha"]),
        rslora=bool(content["lora"]["rslora"]),
    )
    num_layers = max(plan.layer_of.values(), default=-1) + 1
    importance = np.ones((1, num_layers)) if plan.importance is None else plan.importance
    edges = plan.adjacency.ravel() if isinstance(plan.adjacency, np.ndarray) else plan.adjacency.data
    numbers = np.concatenate([plan.examples, [plan.alpha or 1.0], edges, importance.ravel()])
    if not np.isfinite(numbers).all() or min(numbers) < 0 or not all(plan.examples):
        raise ValueError("a number of it is not finite or below 0, or a client has no examples")
    if importance.shape[1] < num_layers or any(len(ranks) < num_layers for ranks in plan.ranks):
        raise ValueError(f"a client has no rank or no importance in one of {num_layers} layers")
    return plan


def models_in(path: Path, *, within: Path | None = None) -> Models:
    """The models in this file, by client; raises CheckpointError if it is missing or damaged."""
    return unflatten_by_client(read_audited(path, within=within))


def read_audited(path: Path | str, *, within: Path | None = None, by_client: bool = True) -> dict[str, Tensor]:
    """The tensors in a file of the audit by `<client>/<parameter>`; what several clients hold is one tensor.

    The metadata's entry `same` says by the name under which a tensor stands which other clients hold it, or without
    `by_client` under which other names it stands. No part of the path below `within` is a link; without it the file is
    none. Raises CheckpointError if the file is missing or damaged.
    """
    try:
        payload = read_file(Path(path), max_bytes=memory_bytes(), within=within)
        tensors: dict[str, Tensor] = load(payload)
        header = from_json(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
        others = {
            f"{holder}/{lead.partition('/')[2]}" if by_client else holder: tensors[lead]
            for lead, holders in from_json(header.get("__metadata__", {}).get("same", "{}")).items()
            for holder in holders
        }
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; restore it from a copy, or run again") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); restore it, or run again") from None
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    if tensors.keys() & others.keys():
        raise CheckpointError(f"{path} is damaged: two tensors have one name")
    return dict(sorted({**tensors, **others}.items()))
