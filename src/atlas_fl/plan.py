"""The plan of a run: clusters, graph, ranks and predictions, computed before anything is trained federally.

`make_plan` is phases 1 and 2 and the graph of phase 4, in this order; the result can be printed, saved and audited.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from atlas_fl.assemble import Assembly, assemble
from atlas_fl.clustering import Clustering
from atlas_fl.config import Config
from atlas_fl.engines.base import Engine
from atlas_fl.engines.local import LocalEngine
from atlas_fl.errors import CheckpointError
from atlas_fl.events import Note, OnEvent, PhaseStarted, Progress, ignore
from atlas_fl.mixing.matrices import Federation
from atlas_fl.options import strategy_of
from atlas_fl.phases import connect, fit_ranks, identify, measure_layers, warm_start
from atlas_fl.types import Params


@dataclass(frozen=True, kw_only=True)
class ClientPlan:
    """What was decided for one client."""

    name: str
    task: str
    device: str
    examples: int
    cluster: int
    """-1: it trains alone."""
    ranks: tuple[int, ...]
    """LoRA rank of every block."""
    cut: int | None
    """Blocks on the client when the model is split; None: the whole model is on the client."""
    budget_bytes: int
    memory: Mapping[str, int]
    """Bytes on the device by part."""
    predicted: Mapping[str, float]
    """Per round: `up_bytes`, `down_bytes`, `memory_bytes`, `seconds`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """A frozen plan; `to_json` and `from_json` are inverse."""

    clients: tuple[ClientPlan, ...]
    adjacency: np.ndarray  # (n, n) float64
    importance: np.ndarray  # (n, layers) float64, rows sum to one
    layer_of: Mapping[str, int]
    lora: Mapping[str, Any]
    """`alpha` (null: twice the rank) and `rslora`."""
    clustering: Mapping[str, Any] = field(default_factory=dict)
    """How the clusters came about: method, k table, similarity, reliability, verdict, agreement with the tasks."""
    warmup: Mapping[str, Any] = field(default_factory=dict)
    """What the fingerprints cost: steps by client, agreement of the halves, seconds, bytes of one."""
    notes: tuple[str, ...] = ()

    def federation(self) -> Federation:
        """What the server's rule needs to know of the clients."""
        return Federation(
            clients=tuple(client.name for client in self.clients),
            weights=np.array([client.examples for client in self.clients], dtype=np.float64),
            clusters=np.array([client.cluster for client in self.clients], dtype=np.int64),
            adjacency=self.adjacency,
            head_groups=tuple(client.task for client in self.clients),
            importance=self.importance,
            layer_of=dict(self.layer_of),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data for strict JSON."""
        return {
            "clients": [{**asdict(client), "ranks": list(client.ranks)} for client in self.clients],
            "adjacency": self.adjacency.tolist(),
            "importance": self.importance.tolist(),
            "layer_of": dict(self.layer_of),
            "lora": dict(self.lora),
            "clustering": dict(self.clustering),
            "warmup": dict(self.warmup),
            "notes": list(self.notes),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Plan":
        """The plan that `to_json` wrote; raises `CheckpointError` where a part is missing."""
        missing = [name for name in Plan.__dataclass_fields__ if name not in data]
        if missing:
            raise CheckpointError(f"the plan lacks {missing[0]!r}; it was not written by this version, run again")
        clients = tuple(ClientPlan(**{**entry, "ranks": tuple(entry["ranks"])}) for entry in data["clients"])
        arrays = {name: np.array(data[name], dtype=np.float64) for name in ("adjacency", "importance")}
        return Plan(**{**data, **arrays, "clients": clients, "notes": tuple(data["notes"])})


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan with what only a run needs of it."""

    plan: Plan
    start: Mapping[str, Params]
    """The model that every client begins round one with."""
    sketches: np.ndarray | None
    """(2, n, dim) float32: both sketches of every client."""
    clustering: Clustering | None
    """The `Clustering` itself, or None for a rule that uses no clusters."""


def make_plan(config: Config, *, on_event: OnEvent = ignore) -> Plan:
    """The plan of this config. Warms the clients up for their fingerprints; trains nothing federally."""
    on_event(PhaseStarted("loading"))
    assembly = assemble(config)
    return plan_for(assembly, local_engine(assembly, on_event), on_event=on_event).plan


def local_engine(assembly: Assembly, on_event: OnEvent) -> LocalEngine:
    """The engine that holds every client in this process and tells its progress."""
    return LocalEngine(
        site=assembly.site, on_progress=lambda action, done, total: on_event(Progress(action, done, total))
    )


def plan_for(assembly: Assembly, engine: Engine, *, on_event: OnEvent = ignore) -> Planned:
    """Phases 1 and 2 and the graph, over any engine."""
    config = assembly.config
    strategy = strategy_of(config)
    on_event(PhaseStarted("fingerprints"))
    found = identify(assembly, engine, clustered=strategy.clustered)
    on_event(PhaseStarted("ranks"))
    layers = measure_layers(assembly, engine, found)
    fitted = fit_ranks(assembly, found, layers, communicates=strategy.communicates)
    graph = connect(assembly, engine, found)
    clients = tuple(
        ClientPlan(
            name=client.name,
            task=client.task.name,
            device=device.name,
            examples=assembly.site.data[client.name].examples,
            cluster=cluster,
            cut=None,
            **fit,
        )
        for client, device, cluster, fit in zip(
            assembly.clients, assembly.devices, found.labels, fitted.by_client, strict=True
        )
    )
    plan = Plan(
        clients=clients,
        adjacency=graph.adjacency,
        importance=layers,
        layer_of=assembly.layer_of,
        lora={"alpha": config.model.lora_alpha, "rslora": config.model.rslora},
        clustering=found.report,
        warmup=found.warmup,
        notes=(*found.notes, *fitted.notes, *graph.warnings),
    )
    for note in plan.notes:
        on_event(Note(note))
    start = warm_start(assembly, found, [client.ranks for client in clients])
    return Planned(plan=plan, start=start, sketches=found.sketches, clustering=found.clustering)


def regraphed(planned: Planned, assembly: Assembly, engine: Engine, *, round: int, performance: np.ndarray) -> Planned:
    """The plan with clusters and graph measured again before this round; labels keep their meaning, ranks stay."""
    found = identify(assembly, engine, clustered=True, previous=planned.clustering, round=round)
    graph = connect(assembly, engine, found, previous=planned.plan.adjacency, performance=performance)
    clients = tuple(
        replace(client, cluster=cluster) for client, cluster in zip(planned.plan.clients, found.labels, strict=True)
    )
    plan = replace(
        planned.plan,
        clients=clients,
        adjacency=graph.adjacency,
        clustering=found.report,
        notes=(*found.notes, *graph.warnings),
    )
    return replace(planned, plan=plan, sketches=found.sketches, clustering=found.clustering)
