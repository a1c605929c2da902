"""An image client that joins between two rounds and trains the whole model: its head, its costs, the run's mask.

Whole models have no clusters, ranks or cuts. It begins with what the rule gives it: under FedAvg the weights that all
hold, with the head of its task. Where nobody has that task its head is fitted as the others' were, by its own images.
"""

from dataclasses import replace

import numpy as np

from atlas_fl.arrivals import with_newcomer
from atlas_fl.assemble_images import ImageAssembly
from atlas_fl.door import Newcomer
from atlas_fl.engines.base import Engine
from atlas_fl.io.ledger import LedgerRow
from atlas_fl.options import strategy_of
from atlas_fl.phases.whole import Prepared, check_heads, mask_brought, with_heads
from atlas_fl.planning import Planned
from atlas_fl.planning_images import client_plans
from atlas_fl.state import State
from atlas_fl.tasks.heterogeneity import label_statistics
from atlas_fl.tree import HEAD
from atlas_fl.types import ByClient, Params


def join_whole(
    newcomer: Newcomer, assembly: ImageAssembly, planned: Planned, engine: Engine, state: State
) -> tuple[ImageAssembly, Planned, Params]:
    """(the assembly, the plan with this client, its own model before the rule gave it one).

    Raises `ConfigError` where the run's mask does not fit the head of its task.
    """
    grown: ImageAssembly = with_newcomer(assembly, newcomer)
    check_heads(grown)
    alone = replace(grown, clients=grown.clients[-1:], devices=grown.devices[-1:])
    start: ByClient = alone.start()
    number, sent = state.round + 1, list[LedgerRow]()
    if assembly.config.images.head_first == "ridge" and not _given_a_head(newcomer, assembly):
        start, sent = with_heads(alone, engine, start)
    if planned.mask is not None:
        body = {key: own for key, own in planned.mask.items() if not key.startswith(HEAD)}
        sent += mask_brought(alone, body)
    clients = (*planned.plan.clients, *client_plans(alone, Prepared(start=start, mask=planned.mask, messages=())))
    size, name = len(clients), newcomer.client.name
    plan = replace(
        planned.plan,
        clients=clients,
        adjacency=np.zeros((size, size)),
        importance=np.zeros((size, 0)),
        clustering={"method": "none", "labels": [0] * size},
        data=label_statistics(grown.clients),
        notes=(*planned.plan.notes, f"{name} joins before round {number}"),
    )
    messages = (*planned.messages, *(replace(row, round=number) for row in sent))
    return grown, replace(planned, plan=plan, messages=messages), start[name]


def _given_a_head(newcomer: Newcomer, assembly: ImageAssembly) -> bool:
    """Whether the rule gives it the head of others, who have its task."""
    config = assembly.config
    fellows = any(client.task.name == newcomer.client.task.name for client in assembly.clients)
    return fellows and strategy_of(config).communicates and "head" in config.mixing.share
