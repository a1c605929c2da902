"""Federations as rules know them, of which a test says what matters to it."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_fl.aggregation.matrices import Federation
from atlas_fl.methods.method import Aggregated, Method, StepInputs
from atlas_fl.params import ByClient, ServerState


def federation_of(
    clients: Iterable[str], *, weights: Any = None, clusters: Any = None, tasks: Iterable[str] = (), **fields: Any
) -> Federation:
    """Clients of one task and one cluster without edges, each of one example, unless told otherwise."""
    names = tuple(clients)
    n = len(names)
    return Federation(
        clients=names,
        weights=np.ones(n) if weights is None else np.array(weights, dtype=np.float64),
        clusters=np.zeros(n, np.int64) if clusters is None else np.array(clusters),
        head_groups=tuple(tasks) or ("t",) * n,
        **{"adjacency": np.zeros((n, n)), **fields},
    )


def adapters_of(clients: Iterable[str], ranks: Iterable[int], *, seed: int = 0) -> dict[str, dict[str, Tensor]]:
    """Drawn models of an adapted layer of 12 to 10 values and a head of two classes."""
    draw = torch.Generator().manual_seed(seed)
    return {
        client: {
            "q.lora_A": torch.randn(rank, 12, generator=draw),
            "q.lora_B": torch.randn(10, rank, generator=draw),
            "head.weight": torch.randn(2, 12, generator=draw),
        }
        for client, rank in zip(clients, ranks)
    }


def dense_update(params: Mapping[str, Tensor]) -> Tensor:
    """s B A with s = 2, in float64."""
    return 2 * params["q.lora_B"].double() @ params["q.lora_A"].double()


def server_step(
    method: Method, state: ServerState, models: ByClient, updates: ByClient, federation: Federation, **others: Any
) -> Aggregated:
    """What a method makes of these updates; `others` are the round, and answers where there are any."""
    return method.aggregate(
        StepInputs(server_state=state, client_models=models, updates=updates, federation=federation, **others)
    )
