"""The federation's state between rounds, the record of a round, and its messages in the ledger."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atlas_fl.aggregation.graph import Diversity
from atlas_fl.client.importance import IMPORTANCE
from atlas_fl.client.job import Update
from atlas_fl.clustering.labels import UNDECIDED
from atlas_fl.methods.kriging import MeasuredSharing, sharing_words
from atlas_fl.params import (
    HEAD,
    LORA_A,
    LORA_B,
    ByClient,
    Params,
    ServerState,
    Split,
    TreesByClient,
    shared_params,
)
from atlas_fl.planning.host_assignment import HostAssignment
from atlas_fl.planning.plan import Plan, PlanResult
from atlas_fl.setup.assembly import Assembly
from atlas_fl.sparse.codec import values_size
from atlas_fl.sparse.masks import Mask, num_kept
from atlas_fl.split.channel import CutTraffic
from atlas_fl.storage.jsonl import to_json
from atlas_fl.storage.ledger import Direction, Kind, LedgerRow
from atlas_fl.storage.tensors import encoded_size


def sum_cut_traffic(updates: Iterable[Update]) -> dict[str, CutTraffic]:
    """By client with a cut, the bytes through it, summed over these updates."""
    sums: dict[str, Counter[tuple[Kind, Direction]]] = {}
    for update in updates:
        if update.crossed:
            sums.setdefault(update.client, Counter()).update(update.crossed)
    return {name: dict(sizes) for name, sizes in sums.items()}


LEDGER_KINDS: Mapping[str, Kind] = {
    "correction": "correction",
    "control": "correction",
    "centroids": "features",
    "class_features": "features",
    "halves": "halves",
}
"""By kind of the tensors beside a model that are sent, their kind in the ledger; `report` of others."""
MODELS = frozenset({"anchor", "companion"})
"""The kinds of what is sent beside a model that are models of the ledger already."""
NEXT_ROUND = frozenset({"momentum", "gate", "control"})
"""The kinds of an update's tensors that the client's next round begins with."""


@dataclass(frozen=True, kw_only=True)
class FrozenMessages:
    """Messages of a round about a part that everyone holds frozen, by receiver.

    Who takes part in every round is sent what each round adds. Who has missed some is sent the whole, with its model.
    """

    before: Params = field(default_factory=dict)
    """The whole as the round began, for those who had missed some."""
    newest: Params = field(default_factory=dict)
    """Addition of the round, for those who took part."""
    after: Params = field(default_factory=dict)
    """The whole as the round ended, for those who had missed some and took no part."""
    begins_again: bool = False
    """Adapters are as they were drawn after every aggregation, so that nobody has to be sent any."""


NO_FROZEN = FrozenMessages()
"""Messages of a method without a frozen part."""


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """Everything that happened in one round."""

    round: int
    sampled: tuple[str, ...]
    updates: Mapping[str, Update]
    """Updates of clients that trained and were not refused."""
    refused: Mapping[str, str]
    initial_models: ByClient
    """Models with which clients started this round."""
    client_models: ByClient
    """Models with which clients start the next round."""
    scores: Mapping[Split, Mapping[str, Update]]
    eta: float
    kept_local: tuple[str, ...]
    """Clients that keep their own model at the end of the run."""
    outdated: frozenset[str]
    """Clients that had not received their newest model when the round began."""
    communicates: bool
    aggregated: bool
    """True if updates were sent and mixed, or everyone goes on with its own model."""
    final: bool
    """True if the run is over."""
    stopped: bool = False
    """True if early stopping ended it before its last round."""
    diversity: Diversity | None = None
    """Change of the distances between clients by the server's step, in a round with evaluation."""
    discarded: Mapping[str, float] = field(default_factory=dict)
    """By client, the share of its mixed update's squared norm that its ranks could not hold."""
    cut_traffic: Mapping[str, CutTraffic] = field(default_factory=dict)
    """By client with a cut, the bytes of all messages through it in training, refused or not."""
    evaluation_cut_traffic: Mapping[str, CutTraffic] = field(default_factory=dict)
    """The same in evaluation."""
    hosting: HostAssignment = field(default_factory=HostAssignment)
    """Which clients computed the server halves of which others, where the server did not."""
    client_side_names: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By client with a cut, the names of its client-side tensors; the others never leave the server."""
    mask: Mask | None = None
    """The mask of trainable weights; every client has it, so that only their values are sent."""
    clipped: Mapping[str, str] = field(default_factory=dict)
    """By client whose update was scaled down to the norm bound, the reason."""
    out_of_bound: ByClient = field(default_factory=dict)
    """The updates as they came of those whom the norm bound refused or scaled down."""
    restored: Mapping[str, str] = field(default_factory=dict)
    """By client that keeps its initial model because the mixed one was unusable, the reason."""
    unmoved: Mapping[str, str] = field(default_factory=dict)
    """By client none of whose parameters moved beyond rounding, the likely reasons."""
    anchors: ByClient = field(default_factory=dict)
    """Anchors of the clients from here on, with `--personal-models` after an aggregation."""
    sharing: Sequence[MeasuredSharing] = ()
    """Share of its own that each client keeps, in a round that measured it (`methods.kriging`)."""
    sent: TreesByClient = field(default_factory=dict)
    """The tensors that went to clients beside their models, by kind and client."""
    state_changed: bool = False
    """True if the server state changed in the round."""
    frozen: FrozenMessages = NO_FROZEN
    """Messages about the part that everyone holds frozen."""
    rows: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The mixing matrices of a method that is a plug-in's, `adapters` and `head`, for the audit."""
    unsent: frozenset[str] = frozenset()
    """The names of what neither trained nor changed in the round; it goes to nobody but those who were outdated."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Clients that did not answer in time; they keep their initial model."""
        answered = self.updates.keys() | self.refused.keys()
        return tuple(name for name in self.sampled if name not in answered)

    def notes(self) -> list[str]:
        """Notes on refused and scaled updates, on who keeps the model it started with, and on what was measured.

        Others say whose training changed nothing, and whose model gives no numbers.
        """
        prefix = f"round {self.round}: "
        lines = [f"{prefix}the update of {name} was refused: {reason}" for name, reason in self.refused.items()]
        lines += [f"{prefix}the update of {name} was scaled down: {reason}" for name, reason in self.clipped.items()]
        for reason in dict.fromkeys(self.restored.values()):
            names = ", ".join(name for name, client_reason in self.restored.items() if client_reason == reason)
            lines.append(f"{prefix}{names} keep the models that they began with: {reason}")
        for reason in dict.fromkeys(self.unmoved.values()):
            names = ", ".join(name for name, client_reason in self.unmoved.items() if client_reason == reason)
            lines.append(f"{prefix}no parameter of {names} moved beyond rounding: {reason}")
        for split, scores in self.scores.items():
            if names := ", ".join(name for name, score in scores.items() if not isfinite(score.metrics["loss"])):
                lines.append(
                    f"{prefix}the models of {names} give outputs that are NaN or infinite for {split} examples, which"
                    " count as wrong; lower the learning rate or clip"
                )
        return lines + [f"{prefix}{line}" for line in sharing_words(self.sharing)]

    def messages(self, share: tuple[str, ...]) -> list[LedgerRow]:
        """Every message of the round: outdated models down, updates up, mixed models down; of a cut the sums by kind.

        A host receives its guests' server halves before training and again before evaluation, and returns the trained.
        """
        return [
            *self._cut_messages(),
            *self._hosting_messages(),
            *(self._model_messages(share) if self.communicates else ()),
            *self._messages_beside_models(),
        ]

    def _messages_beside_models(self) -> Iterator[LedgerRow]:
        missing = set(self.missing)
        down = [
            (name, kind, params)
            for kind, by_client in self.sent.items()
            for name, params in by_client.items()
            if name not in missing
        ]
        up = [(name, kind, params) for name, update in self.updates.items() for kind, params in update.reported.items()]
        ways: tuple[tuple[Direction, list[tuple[str, str, Params]]], ...] = (("down", down), ("up", up))
        for direction, trees in ways:
            for name, kind, params in trees:
                yield LedgerRow(
                    round=self.round,
                    client=name,
                    direction=direction,
                    kind=LEDGER_KINDS.get(kind, "report"),
                    bytes=encoded_size(params),
                )

    def _cut_messages(self) -> Iterator[LedgerRow]:
        sums: dict[str, Counter[tuple[Kind, Direction, str]]] = {}
        phases = ((self.cut_traffic, self.hosting.training), (self.evaluation_cut_traffic, self.hosting.evaluation))
        for traffic, pairs in phases:
            for name, sizes in traffic.items():
                peer = (pairs[name].host if name in pairs else None) or ""
                sums.setdefault(name, Counter()).update({(*way, peer): size for way, size in sizes.items()})
        for name, sized in sums.items():
            for (kind, direction, peer), size in sized.items():
                row = LedgerRow(round=self.round, client=name, direction=direction, kind=kind, bytes=size, peer=peer)
                yield replace(row, relayed=self.hosting.relayed and peer != "")

    def _hosting_messages(self) -> Iterator[LedgerRow]:
        ways: tuple[Direction, ...] = ("down", "up")
        for pairs, models, directions in (
            (self.hosting.training, self.initial_models, ways),
            (self.hosting.evaluation, self.client_models, ways[:1]),
        ):
            for name, match in pairs.items():
                upper = {key: tensor for key, tensor in models[name].items() if key not in self.client_side_names[name]}
                for direction in directions if match.host else ():
                    yield from (
                        replace(row, guest=name) for row in self._rows_by_kind(str(match.host), direction, upper)
                    )

    def _model_messages(self, share: tuple[str, ...]) -> list[LedgerRow]:
        updated = [name for name in self.sampled if name in self.outdated and name not in self.missing]
        messages = [
            [
                *self._model_rows(name, "down", self._without_drawn(self.initial_models[name]), share),
                *self._frozen_rows(name, self.frozen.before),
            ]
            for name in updated
        ]
        up = {name: update for name, update in self.updates.items() if self.aggregated or update.travelled}
        messages += [self._model_rows(name, "up", self._sent_part(update.params), share) for name, update in up.items()]
        if self.aggregated:
            outdated = self.outdated - set(updated)
            models = {name: self.client_models[name] for name in self._receivers()}
            models = {name: params if name in outdated else self._sent_part(params) for name, params in models.items()}
            messages += [
                [
                    *self._model_rows(name, "down", self._without_drawn(params), share),
                    *self._frozen_rows(name, self.frozen.after if name in outdated else self.frozen.newest),
                ]
                for name, params in models.items()
            ]
        return [row for rows in messages for row in rows]

    def _sent_part(self, params: Params) -> Params:
        """Part of a model that is sent to or from who held its client's model when the round began."""
        return {key: tensor for key, tensor in params.items() if key not in self.unsent}

    def _without_drawn(self, params: Params) -> Params:
        """Part of a model that goes down: no adapters that everybody draws alike."""
        if not self.frozen.begins_again:
            return params
        return {key: tensor for key, tensor in params.items() if not key.endswith((LORA_A, LORA_B))}

    def _frozen_rows(self, name: str, part: Params) -> list[LedgerRow]:
        if not part:
            return []
        return [LedgerRow(round=self.round, client=name, direction="down", kind="frozen", bytes=encoded_size(part))]

    def outdated_after(self) -> frozenset[str]:
        """Clients that have not received their newest model after the round, because they did not take part."""
        changed = {name for name, params in self.client_models.items() if params is not self.initial_models[name]}
        return frozenset((self.outdated | changed) - set(self._receivers()))

    def _receivers(self) -> tuple[str, ...]:
        """Clients that receive a model at the end of the round: those that took part, and at the end of the run all."""
        if not self.final:
            missing = set(self.missing)
            return tuple(name for name in self.sampled if name not in missing)
        changed = {name for name, params in self.client_models.items() if params is not self.initial_models[name]}
        receivers = changed | self.outdated | set(self.sampled)
        return tuple(name for name in self.client_models if name in receivers)

    def _model_rows(self, name: str, direction: Direction, model: Params, share: tuple[str, ...]) -> list[LedgerRow]:
        names = self.client_side_names.get(name, model.keys())
        params = {key: tensor for key, tensor in shared_params(model, share).items() if key in names}
        return self._rows_by_kind(name, direction, params)

    def _rows_by_kind(self, name: str, direction: Direction, params: Params) -> list[LedgerRow]:
        """A row for the adapters, one for whole weights and one for the head, each where there are any."""
        parts: dict[Kind, dict[str, Tensor]] = {"adapter": {}, "weights": {}, "head": {}}
        for key, tensor in params.items():
            parts[_kind_of(key)][key] = tensor
        sizes = {kind: self._message_size(part) for kind, part in parts.items() if part}
        return [
            LedgerRow(round=self.round, client=name, direction=direction, kind=kind, bytes=size)
            for kind, size in sizes.items()
            if size
        ]

    def _message_size(self, part: Params) -> int:
        """Bytes of these tensors as a message; under a mask only the trainable values are sent."""
        if self.mask is None:
            return encoded_size(part)
        num_values = num_kept({key: self.mask[key] for key in part})
        return values_size(num_values) if num_values else 0


def mean_validation_score(scores: Mapping[Split, Mapping[str, Update]]) -> float | None:
    """The mean primary validation score over the clients that have one; None without any."""
    values = [score.metrics["primary"] for score in scores.get("validation", {}).values()]
    return fmean(values) if values else None


def _kind_of(key: str) -> Kind:
    if key.startswith(HEAD):
        return "head"
    return "adapter" if key.endswith((LORA_A, LORA_B)) else "weights"


@dataclass(frozen=True, kw_only=True)
class FederationState:
    """The whole federation between two rounds."""

    round: int
    """Rounds that are complete."""
    server_models: ByClient
    """The model of every client as of the last aggregation."""
    server_state: ServerState = field(default_factory=dict)
    """The state of the strategy besides the models."""
    client_models: ByClient
    """Models with which clients start the next round: the only road from server to client."""
    outdated: frozenset[str] = frozenset()
    """Clients that have not received their newest model yet."""
    validation_scores: Mapping[str, float] = field(default_factory=dict)
    """The last validation score of every client."""
    history: Mapping[int, float] = field(default_factory=dict)
    """The mean validation score of every evaluated round, over the clients that answered."""
    is_over: bool = False
    """True if the run has ended, with its last round or before it."""
    by_client: TreesByClient = field(default_factory=dict)
    """Tensors that outlive a round, by kind and client: `momentum` of its optimizer, its `second` model and the `gate`
    between that and the shared one, which never leave it, and `control`, the mean gradient of its last round."""

    def of(self, kind: str) -> ByClient:
        """The tensors of this kind by client; empty where nobody has any."""
        return self.by_client.get(kind, {})

    def with_newest(self, updates: Mapping[str, Update]) -> TreesByClient:
        """The tensors by kind and client, with those that these updates bring (`NEXT_ROUND`)."""
        newest = {kind: dict(by_client) for kind, by_client in self.by_client.items()}
        for name, update in updates.items():
            for kind, params in {**update.reported, **update.kept}.items():
                if kind in NEXT_ROUND:
                    newest.setdefault(kind, {})[name] = params
        return newest

    def after(self, record: RoundRecord, *, server_models: ByClient, server_state: ServerState) -> "FederationState":
        """The state after this round, with the server's models and state."""
        scores, mean = record.scores.get("validation", {}), mean_validation_score(record.scores)
        return FederationState(
            round=record.round,
            server_models=server_models,
            server_state=server_state,
            client_models=record.client_models,
            outdated=record.outdated_after(),
            validation_scores={name: score.metrics["primary"] for name, score in scores.items()}
            or self.validation_scores,
            history=self.history if mean is None else {**self.history, record.round: mean},
            is_over=record.final,
            by_client=self.with_newest(record.updates),
        )


def plan_messages(planned: PlanResult, *, round: int = 0, only: Collection[str] | None = None) -> list[LedgerRow]:
    """The messages of planning: each client's sketches and layer importance up, its ranks and cluster down.

    With `only` (late clients), a client whose cluster has an importance sends none. The server computes the sketches of
    a client that is planned over its cut; that traffic is among the cut's.
    """
    rows: list[LedgerRow] = [*planned.messages, *planned.cut_traffic]
    planned_over_cut = {row.client for row in rows if row.phase}
    first = {client.cluster: client.name for client in reversed(planned.plan.clients)}
    for index, client in enumerate(planned.plan.clients):
        if only is not None and client.name not in only:
            continue
        if planned.sketches is not None and client.name not in planned_over_cut:
            payload = {
                "first": torch.from_numpy(planned.sketches[0, index]),
                "second": torch.from_numpy(planned.sketches[1, index]),
            }
            if only is None or client.cluster == UNDECIDED or first[client.cluster] == client.name:
                payload[IMPORTANCE] = torch.from_numpy(planned.plan.importance[index])
            size = encoded_size(payload)
            rows.append(LedgerRow(round=round, client=client.name, direction="up", kind="fingerprint", bytes=size))
        size = len(to_json(_control_payload(planned.plan, index)).encode())
        rows.append(LedgerRow(round=round, client=client.name, direction="down", kind="control", bytes=size))
    return rows


def _control_payload(plan: Plan, index: int) -> dict[str, Any]:
    client = plan.clients[index]
    return {"client": client.name, "cluster": client.cluster, "ranks": list(client.ranks), "cut": client.cut}


@dataclass(frozen=True, kw_only=True)
class JoinResult:
    """The federation with the clients that joined it."""

    assembly: Assembly
    planned: PlanResult
    state: FederationState
    newcomer_models: ByClient
    """The newcomers' models after the warm-up, at their ranks, before the first aggregation."""
    communicates: bool
    """True if the strategy sends models at all."""
    state_changed: bool
    """True if the server state changed with them."""
