"""Readers of a run folder for the audit: plan, records, models, masks, last round.

How files are opened and JSON is read is shared with the rest (`storage`); what they say is not.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from atlas_fl.config import MixingConfig, load_config, validate
from atlas_fl.config.files import read_tables
from atlas_fl.errors import CheckpointError, ConfigError, short_repr
from atlas_fl.plugins import load_plugins
from atlas_fl.storage.folder_access import (
    MOST_JSON_BYTES,
    MOST_ROWS_BYTES,
    is_inner_folder,
    list_folder,
    memory_bytes,
    read_file,
)
from atlas_fl.storage.jsonl import from_json


def read_run_mask(path: Path) -> dict[str, Tensor]:
    """The mask of a run folder, bool by name.

    Raises `CheckpointError` where the file is missing or damaged.
    """
    file = path / "mask.safetensors"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing, and the run was trained under a mask; restore it, or run again")
    try:
        mask: dict[str, Tensor] = load(read_file(file, max_bytes=memory_bytes(), within=path))
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}; restore it, or run again") from error
    return mask


def frozen_fault(mask: Mapping[str, Tensor], initial: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> str:
    """The first tensor of which a frozen weight moved in training, or that has no mask; empty where there is none."""
    for key, before in initial.items():
        if key not in mask:
            return f"{key} has no mask"
        moved = int(((before != trained[key]) & ~mask[key]).sum())
        if moved:
            return f"{moved} frozen weights of {key} moved"
    return ""


Models = dict[str, dict[str, Tensor]]
"""Tensors by client and parameter name."""


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
    flat, note = read_with_note(Path(path), within=within)
    return flat if note is None else _for_all(flat, note, path)


def read_with_note(path: Path, *, within: Path | None = None) -> tuple[dict[str, Tensor], str | None]:
    """(the tensors in a file, by names that rise, and what its metadata say of those that are the same)."""
    try:
        payload = read_file(path, max_bytes=memory_bytes(), within=within)
        tensors: dict[str, Tensor] = load(payload)
        header = from_json(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
        note: str | None = header.get("__metadata__", {}).get("same")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); restore it, or run again") from None
    except (SafetensorError, AttributeError, ValueError, RuntimeError) as error:  # torch refuses what a header may say
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return {name: tensors[name] for name in sorted(tensors)}, note


def _for_all(stored: Mapping[str, Tensor], note: str, path: Path | str) -> dict[str, Tensor]:
    """Every tensor under the names of all its holders: whole models stand in a file once, and its metadata name them.

    Raises CheckpointError where they name a tensor that is not there, or two for one name.
    """
    flat = dict(stored)
    try:
        same = [(lead, client) for lead, clients in from_json(note).items() for client in clients]
        for lead, client in same:
            name = f"{client}/{lead.partition('/')[2]}"
            if name in flat:
                raise CheckpointError(f"{path} is damaged: it holds {name} twice")
            flat[name] = stored[lead]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: its metadata say not who holds what ({error!r})") from error
    return {name: flat[name] for name in sorted(flat)}


def last_round(path: Path, config: Mapping[str, Any]) -> int:
    """The last round of a complete run: that of its settings, or where it was to stop early the one it stopped after.

    That one is what the validation scores say, not what the run says of itself. Only with `keep = "best"` are the rows
    of the last round those of other models than the ones that decided, and the run is believed.
    """
    training, mixing = config["training"], config["mixing"]
    if not training.get("patience"):
        return int(training["rounds"])
    try:
        return _last_round(read_rows(path / "metrics.jsonl"), training, mixing)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path / 'metrics.jsonl'} holds a row without its scores ({error!r}); restore it from a copy, or run again"
        ) from error


def _last_round(rows: list[dict[str, Any]], training: Mapping[str, Any], mixing: Mapping[str, Any]) -> int:
    scores: dict[int, list[float]] = {}
    for row in rows:
        if row.get("split") == "validation":
            scores.setdefault(row["round"], []).append(float(row["primary"]))
    stopped_at = {row["round"] for row in rows if row.get("event") == "stopped early" and mixing["keep"] == "best"}
    best, best_round = -math.inf, 0
    for number in sorted(scores):
        mean = fmean(scores[number])
        if mean - best > training["min_delta"]:
            best, best_round = mean, number
        waited = number - best_round >= training["patience"] or number in stopped_at
        if waited and number % mixing["aggregate_every"] == 0:
            return number
    return int(training["rounds"])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of lines of JSON; raises CheckpointError if it is missing or damaged."""
    try:
        return [from_json(line) for line in read_file(path, max_bytes=MOST_ROWS_BYTES).decode().splitlines()]
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


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
    shared: tuple[int | None, ...] = ()
    """First block that a client shares with its cluster, that above its cut or 0; None for who shares none."""

    def owners(self, k: int, layer: int) -> tuple[int, ...]:
        """Everyone with whom client k has the adapters of this layer in common, itself with them; else nobody."""
        both = [n for n, start in enumerate(self.shared) if start is not None and start <= layer]
        return tuple(n for n in both if k in both and self.clusters[n] == self.clusters[k])

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

    @property
    def accepted_clients(self) -> frozenset[str]:
        """Clients whose update was mixed."""
        return frozenset(self.participants) - self.refused.keys()


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder."""

    path: Path
    """Where it lies."""
    config: Mapping[str, Any]
    """config.toml as it stands."""
    mixing: MixingConfig
    """Its mixing group."""
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


def open_run(path: Path) -> Run:
    """The run at this path; raises CheckpointError if it is none or kept nothing for an audit."""
    if not (path / "config.toml").is_file():
        raise CheckpointError(f"{path} is no run: it has no config.toml")
    try:
        config = read_tables(path / "config.toml", within=path)
        recorded = load_config(path / "config.toml", within=path)
        load_plugins(recorded.run.plugin, outside=path)
        settings = validate(recorded, at_sites=True)
    except ConfigError as error:
        raise CheckpointError(f"{path / 'config.toml'} cannot be read: {error}") from error
    if "rounds" not in config.get("training", {}) or "mixing" not in config:
        raise CheckpointError(
            f"{path / 'config.toml'} lacks the settings of its run ([training] rounds, [mixing]); restore it from a"
            " copy, or run again"
        )
    numbers = _numbers(path / "audit", within=path)
    if 0 not in numbers or len(numbers) < 2:
        raise CheckpointError(f"{path} holds no audited round; run it again with --audit")
    complete = (path / "summary.json").is_file()
    done = last_round(path, config) if complete else max(_numbers(path / "checkpoints", within=path), default=0)
    mask = read_run_mask(path) if settings.sparse.has_mask else None
    return Run(
        path=path,
        config=config,
        mixing=settings.mixing,
        rounds=tuple(numbers[1:]),
        done=done,
        complete=complete,
        mask=mask,
    )


def _numbers(folder: Path, *, within: Path) -> list[int]:
    """The numbers of the folders `round-000N` in this one, rising."""
    names = [name for name in list_folder(folder, within=within) if is_inner_folder(folder / name)]
    matches = [re.fullmatch(r"round-(\d{4,})", name) for name in names]
    return sorted(int(match[1]) for match in matches if match)


def is_aggregated(run: Run, round: int) -> bool:
    """Return whether the server aggregates after this round: every `aggregate_every` rounds, and after the last."""
    shared = run.config.get("training", {}).get("rounds") - run.mixing.personal_rounds
    return round <= shared and (round % run.mixing.aggregate_every == 0 or round == shared)


def read_json(path: Path, *, within: Path) -> Any:
    """Content of a run's JSON file; raises CheckpointError if it is missing or damaged."""
    try:
        return from_json(read_file(path, max_bytes=MOST_JSON_BYTES, within=within))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; restore it from a copy, or run again") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{short_repr(value)} is no name")
    return value


def _names(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{short_repr(values)} is no list of names")
    return tuple(_text(value) for value in values)


def read_plan(run: Run, name: str) -> AuditPlan:
    """The plan of this file name inside the run folder; raises CheckpointError if it is missing or incomplete."""
    if name not in run.plans:
        content = read_json(run.path / name, within=run.path)
        try:
            run.plans[name] = _plan(content)
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{run.path / name} is no plan: {shown_error(error)}; restore it from a copy, or run again"
            ) from error
    return run.plans[name]


def shown_error(error: Exception) -> str:
    """The error's kind and what it says, on one short line."""
    return f"{type(error).__name__}({short_repr(str(error))})"


def _plan(content: Mapping[str, Any]) -> AuditPlan:
    clients, lora = content["clients"], content["lora"]
    importance = _finite_array(content.get("importance") or [])
    layer_of = {module: _count(layer) for module, layer in content["layer_of"].items()}
    names = tuple(_text(one["name"]) for one in clients)
    if len(set(names)) < len(names):
        raise ValueError("two clients have one name")
    for one in clients:
        if len(one["ranks"]) <= max(layer_of.values(), default=-1):
            raise ValueError(f"client {one['name']} has {len(one['ranks'])} ranks, too few for its layers")
    if importance.size and importance.shape[:1] != (len(names),):
        raise ValueError(f"importance is of {len(importance)} clients, and there are {len(names)}")
    if importance.size and (importance.ndim != 2 or importance.shape[1] <= max(layer_of.values(), default=-1)):
        raise ValueError("importance lacks layers")
    return AuditPlan(
        clients=names,
        tasks=tuple(_text(one["task"]) for one in clients),
        examples=tuple(_finite(one["examples"]) for one in clients),
        clusters=tuple(int(one["cluster"]) for one in clients),
        ranks=tuple(tuple(_count(rank) for rank in one["ranks"]) for one in clients),
        adjacency=_finite_array(content["adjacency"]).reshape(len(clients), len(clients)),
        importance=importance if importance.size else None,
        layer_of=layer_of,
        shared=tuple(_shared_from(one) for one in clients),
        alpha=None if lora["alpha"] is None else _finite(lora["alpha"]),
        rslora=bool(lora["rslora"]),
    )


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{short_repr(value)} is no whole number from 0")
    return value


def _shared_from(client: Mapping[str, Any]) -> int | None:
    return _count(client["cut"] or 0) if client.get("split", {}).get("shared") is not None else None


def _finite_array(value: Any) -> np.ndarray:
    array = np.array(value, np.float64)
    if not np.isfinite(array).all():
        raise ValueError("a number of a matrix is none")
    return array


def round_folder(run: Run, round: int) -> Path:
    """Where a round's files lie."""
    return run.path / "audit" / f"round-{round:04d}"


def recorded_rows(run: Run, round: int) -> dict[str, np.ndarray]:
    """The mixing matrices of a plug-in's method in this round, `adapters` and `head`; empty where none are recorded."""
    path = round_folder(run, round) / "mixing.safetensors"
    if not path.is_file():
        return {}
    return {part: tensor.double().numpy() for part, tensor in read_audited(path, within=run.path).items()}


def read_audit_record(run: Run, round: int) -> AuditRecord:
    """The record of a round; raises CheckpointError if it is missing or incomplete."""
    path = round_folder(run, round) / "record.json"
    content = read_json(path, within=run.path)
    try:
        if not PLAN_FILE.fullmatch(content["plan"]):
            raise ValueError(f"{short_repr(content['plan'])} is no name of a plan's file")
        return AuditRecord(
            participants=_names(content["participants"]),
            refused={client: str(why) for client, why in dict(content["refused"]).items()},
            eta=None if content["eta"] is None else _finite(content["eta"]),
            plan=content["plan"],
            loaded={client: dict(one.items()) for client, one in content["loaded"].items()},
            kept=_names(content["kept"]),
            without_edges=_names(content.get("without_edges", [])),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no record of a round: {shown_error(error)}; restore it from a copy, or run again"
        ) from error


def _finite(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{short_repr(value)} is no finite number")
    return float(value)


def read_models(run: Run, round: int, name: str) -> Models:
    """`start` or `trained` of a round, by client; raises CheckpointError if the file is missing or damaged."""
    return models_in(round_folder(run, round) / f"{name}.safetensors", within=run.path)
