"""The plan of a run as a value: what was decided for each client; saved, printed and audited."""

from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

import numpy as np

from atlas_fl.aggregation.matrices import Federation
from atlas_fl.clustering.blocks import Matrix, from_plain, to_plain
from atlas_fl.clustering.result import Clustering
from atlas_fl.frozen import Frozen
from atlas_fl.params import Params
from atlas_fl.sparse.masks import Mask
from atlas_fl.storage.digests import read_checked
from atlas_fl.storage.ledger import LedgerRow
from atlas_fl.storage.run_folder import RunFolder

ARRAYS = ("adjacency", "importance")
TUPLES = ("notes", "data")
"""Fields of a plan that are lists in JSON."""


class ClientPlan(Frozen):
    """Decisions for one client."""

    name: str
    task: str
    device: str
    examples: int
    cluster: int
    """-1: it is in none."""
    ranks: tuple[int, ...] = ()
    """LoRA rank of every block; none where all weights train."""
    cut: int | None = None
    """Blocks on the client when the model is split; None: the whole model is on the client."""
    budget_bytes: int = 0
    largest_rank: int = 0
    """The rank that every layer could have within the budget, or the profile's own largest if that is less."""
    memory: Mapping[str, int]
    """Bytes on the device by part."""
    predicted: Mapping[str, float]
    """Per round: `up_bytes`, `down_bytes`, `memory_bytes`, `seconds`."""
    split: Mapping[str, Any] = field(default_factory=dict)
    """The reason for a cut or none (`reason`), and the costs of a cut by part on both sides."""


class Plan(Frozen, eq=False):
    """A frozen plan; `to_json` and `from_json` are inverse."""

    clients: tuple[ClientPlan, ...]
    adjacency: Matrix  # (n, n) float64
    importance: np.ndarray  # (n, layers) float64, rows sum to one
    layer_of: Mapping[str, int]
    lora: Mapping[str, Any]
    """`alpha` (null: twice the rank) and `rslora`."""
    clustering: Mapping[str, Any] = field(default_factory=dict)
    """Report on the clustering: method, k table, similarity, reliability, verdict, agreement with the tasks."""
    data: tuple[Mapping[str, Any], ...] = ()
    """Statistics of each client: examples per split, labels, and distance of its mix of labels from its task's."""
    notes: tuple[str, ...] = ()
    sparse: Mapping[str, Any] = field(default_factory=dict)
    """Report on the mask: strategy, sparsity, how many weights it keeps, and the share kept of every tensor."""

    def federation(self) -> Federation:
        """The clients as the server's rule takes them: weights, clusters, graph, heads, importance."""
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
        clients = [{**asdict(client), "ranks": list(client.ranks)} for client in self.clients]
        arrays = {name: to_plain(getattr(self, name)) for name in ARRAYS}
        return vars(self) | {"clients": clients} | arrays | {name: list(getattr(self, name)) for name in TUPLES}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Plan":
        """The plan that `to_json` wrote."""
        clients = tuple(ClientPlan(**{**entry, "ranks": tuple(entry["ranks"])}) for entry in data["clients"])
        arrays = {name: from_plain(data[name]) for name in ARRAYS}
        return Plan(**{**data, **arrays, **{name: tuple(data[name]) for name in TUPLES}, "clients": clients})


def read_plan(folder: RunFolder, file: Path) -> Plan:
    """The plan in this file of a run; raises `CheckpointError` where it is not what was written."""
    return Plan.from_json(read_checked(folder, file, *Plan.__dataclass_fields__))


class PlanResult(Frozen):
    """A plan with what only a run needs: initial models, sketches, mask, messages."""

    plan: Plan
    initial_models: Mapping[str, Params]
    """Every client's model at the start of round one."""
    sketches: np.ndarray | None
    """(2, n, dim) float32: both sketches of every client."""
    clustering: Clustering | None
    """The `Clustering` itself, or None for a rule that uses no clusters."""
    mask: Mask | None = None
    """The weights of a whole model that may move; None for all, and for adapters."""
    messages: tuple[LedgerRow, ...] = ()
    """Ledger rows of fitting heads and sending the mask, at first or for clients that have just joined."""
    cut_traffic: tuple[LedgerRow, ...] = ()
    """Ledger rows of what went through the cuts of clients while they were planned."""
