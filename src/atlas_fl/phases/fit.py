"""Phase 2: how much each layer matters to each client, and the ranks that fit its device."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from atlas_fl.assemble import Assembly
from atlas_fl.clients.base import Job
from atlas_fl.clients.importance import IMPORTANCE, ImportanceOptions
from atlas_fl.engines.base import Engine, run_all
from atlas_fl.io.ledger import payload_bytes
from atlas_fl.models.tokens import Encoded
from atlas_fl.options import warmup_options
from atlas_fl.phases.identify import Identified
from atlas_fl.ranks.assign import Assignment, assign_ranks
from atlas_fl.ranks.devices import Device
from atlas_fl.ranks.importance import cluster_importance, complexity_factors
from atlas_fl.ranks.memory import Fractions, Step
from atlas_fl.ranks.predict import message_bytes, predict_round
from atlas_fl.tasks.clients import ClientData, majority
from atlas_fl.tree import head_keys, num_values, shared_part
from atlas_fl.types import ByClient

BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The ranks of all clients with what they were chosen from."""

    by_client: tuple[dict[str, Any], ...]
    """`ranks`, `budget_bytes`, `largest_rank`, `memory` and `predicted` of each client."""
    notes: tuple[str, ...]


def measure_layers(
    assembly: Assembly, engine: Engine, found: Identified, *, models: ByClient | None = None
) -> np.ndarray:
    """Importance of every layer, (n, layers) float64; clients of one cluster get their mean.

    Measured at these models, or at the warmed-up ones.
    A rule without clusters keeps every client's own: nothing may be shared that it does not share.
    """
    own = own_importance(assembly, engine, found.warmed if models is None else models)
    return own if found.clustering is None else cluster_importance(own, found.labels)


def own_importance(assembly: Assembly, engine: Engine, models: ByClient) -> np.ndarray:
    """Importance of every layer as each client measures it at its model, (n, layers) float64; rows sum to one."""
    config = assembly.config
    options = ImportanceOptions(kind=config.ranks.importance, train=warmup_options(config), batches=BATCHES)
    jobs = [Job(client=name, params=models[name], round=0, options=options) for name in assembly.names]
    return np.stack([update.params[IMPORTANCE].numpy() for update in run_all(engine, "importance", jobs)])


def check_budgets(assembly: Assembly) -> None:
    """Raise `BudgetError` for a device that not even the smallest ranks fit, before anything is measured."""
    layers = np.full((len(assembly.clients), assembly.shape.num_layers), 1.0 / assembly.shape.num_layers)
    for client, device, importance in zip(assembly.clients, assembly.devices, layers, strict=True):
        assign(assembly, client, device, importance)


def fit_ranks(assembly: Assembly, found: Identified, layers: np.ndarray, *, communicates: bool) -> Fitted:
    """Ranks per layer and client under each device's memory and upload, and what a round will cost there."""
    config = assembly.config.ranks
    factors = np.ones(len(assembly.clients))
    if config.complexity_scaling:
        factors = complexity_factors(np.array([_difficulty(client) for client in assembly.clients]), found.labels)
    fits, notes = [], []
    for client, device, importance, factor in zip(assembly.clients, assembly.devices, layers, factors, strict=True):
        assignment = assign(assembly, client, device, importance, factor=float(factor))
        fits.append(_fit(assembly, client, device, assignment, _step(assembly, client), communicates=communicates))
        notes += [note for note in assignment.notes if note not in notes]
    return Fitted(by_client=tuple(fits), notes=tuple(notes))


def assign(
    assembly: Assembly, client: ClientData, device: Device, importance: np.ndarray, *, factor: float = 1.0
) -> Assignment:
    """The ranks of one client on its device under this config, from its importance (layers,) by layer.

    `factor` scales the budget; raises `BudgetError` where nothing fits.
    """
    config = assembly.config.ranks
    return assign_ranks(
        assembly.shape,
        device,
        importance=importance,
        rule=config.ranks,
        candidates=config.candidates,
        step=_step(assembly, client),
        own_bytes=config.adapter_bytes,
        fractions=_fractions(assembly),
        factor=factor,
    )


def _difficulty(client: ClientData) -> float:
    """How far guessing is from right: one less the share of the most frequent label; one without classes."""
    return 1.0 - (majority(client.train) or 0.0)


def _fractions(assembly: Assembly) -> Fractions | None:
    config = assembly.config.ranks
    if config.budget == "memory":
        return None
    return Fractions(base=config.alpha_base, activations=config.alpha_act, optimizer=config.alpha_opt)


def _step(assembly: Assembly, client: ClientData) -> Step:
    """The client's heaviest step: as many of its longest examples as a batch holds."""
    size, data = assembly.config.training.batch_size, _train(assembly, client)
    lengths, written = (np.sort(counts)[::-1] for counts in (data.lengths, data.predictions))
    head = assembly.start(client, (1,) * assembly.shape.num_layers)
    return Step(
        tokens=int(lengths[:size].sum()),
        head_params=num_values({key: head[key] for key in head_keys(head)}),
        checkpointing=assembly.config.model.gradient_checkpointing,
        logits=int(written[:size].sum()) * assembly.shape.vocabulary,
    )


def _train(assembly: Assembly, client: ClientData) -> Encoded:
    return assembly.site.data[client.name].splits["train"]


def _fit(
    assembly: Assembly, client: ClientData, device: Device, assignment: Assignment, step: Step, *, communicates: bool
) -> dict[str, Any]:
    share = assembly.config.mixing.share if communicates else ()
    epochs, data = assembly.config.training.local_epochs, _train(assembly, client)
    lengths = data.lengths.astype(np.float64)
    prediction = predict_round(
        assembly.shape,
        device,
        ranks=assignment.ranks,
        step=step,
        tokens=int(lengths.sum()) * epochs,
        length=float((lengths**2).sum() / lengths.sum()),
        share=share,
        overhead_bytes=_overhead(assembly, client, assignment, share),
        logits=int(data.predictions.sum()) * assembly.shape.vocabulary * epochs,
    )
    return {
        "ranks": assignment.ranks,
        "budget_bytes": assignment.budget_bytes,
        "largest_rank": min(assignment.largest_rank, device.max_rank),
        "memory": {"total": prediction.memory.total_bytes, **dict(prediction.memory.parts())},
        "predicted": {
            "up_bytes": prediction.up_bytes,
            "down_bytes": prediction.down_bytes,
            "memory_bytes": prediction.memory.used_bytes,
            "seconds": prediction.seconds,
        },
    }


def _overhead(assembly: Assembly, client: ClientData, assignment: Assignment, share: tuple[str, ...]) -> int:
    """Bytes that names and shapes add to a message of these ranks; nothing where nothing is sent."""
    if not share:
        return 0
    start = assembly.start(client, assignment.ranks)
    sent = shared_part(start, share)
    head = num_values({key: start[key] for key in head_keys(start)})
    return payload_bytes(sent) - message_bytes(assembly.shape, assignment.ranks, share=share, head_params=head)
