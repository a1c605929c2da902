"""The choice before a round: clients take other models than their own by their losses, where a method lets them.

The candidates that a client does not hold go down to it, and its losses come back (`methods.method.Method.choose`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite

from atlas_fl.client.job import Job
from atlas_fl.client.options import EvaluateOptions
from atlas_fl.experiment.state import FederationState
from atlas_fl.methods.method import RoundStart
from atlas_fl.params import HEAD, ByClient, Params
from atlas_fl.runtime.engine import Engine
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import strategy_of
from atlas_fl.storage.jsonl import to_json
from atlas_fl.storage.ledger import Kind, LedgerRow
from atlas_fl.storage.tensors import encoded_size


def choose_models(
    assembly: Assembly, engine: Engine, state: FederationState, start: RoundStart
) -> tuple[FederationState, list[LedgerRow] | None]:
    """(the state with which the round begins, the messages of the choice); None where nothing was to choose."""

    def losses(candidates: Mapping[int, ByClient]) -> dict[str, dict[int, float]]:
        return _losses(
            engine, candidates, round=start.round, prior_correction=assembly.config.training.prior_correction
        )

    choice = strategy_of(assembly.config).choose(start, losses)
    if choice is None:
        return state, None
    state = replace(
        state,
        client_models={**state.client_models, **choice.client_models},
        server_models={**state.server_models, **choice.client_models},
        server_state=choice.server_state,
    )
    return state, _messages(choice.sent, choice.losses, round=start.round)


def _losses(
    engine: Engine, candidates: Mapping[int, ByClient], *, round: int, prior_correction: bool
) -> dict[str, dict[int, float]]:
    """The finite losses of the candidates on the training examples of each client that answered for all."""
    options = EvaluateOptions(split="train", prior_correction=prior_correction)
    losses: dict[str, dict[int, float]] = {}
    for label, models in candidates.items():
        jobs = [Job(client=name, params=params, round=round, options=options) for name, params in models.items()]
        for update in engine.run("evaluate", jobs):
            losses.setdefault(update.client, {})[label] = update.metrics["loss"]
    return {
        name: {label: loss for label, loss in by_label.items() if isfinite(loss)}
        for name, by_label in losses.items()
        if by_label.keys() == candidates.keys()
    }


def _messages(
    sent: Mapping[str, Sequence[Params]], losses: Mapping[str, Mapping[int, float]], *, round: int
) -> list[LedgerRow]:
    """The candidates down, and each client's losses up."""
    rows = []
    for name, models in sent.items():
        kinds: tuple[tuple[bool, Kind], ...] = ((False, "adapter"), (True, "head"))
        for is_head, kind in kinds:
            size = sum(
                encoded_size({key: tensor for key, tensor in params.items() if key.startswith(HEAD) == is_head})
                for params in models
            )
            rows.append(LedgerRow(round=round, client=name, direction="down", kind=kind, bytes=size))
        told = len(to_json({str(label): loss for label, loss in losses[name].items()}).encode())
        rows.append(LedgerRow(round=round, client=name, direction="up", kind="control", bytes=told))
    return [row for row in rows if row.bytes]
