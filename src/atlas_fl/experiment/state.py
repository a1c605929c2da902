"""The state of a federation between two rounds, and the record of what happened in one."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from atlas_fl.aggregation.graph import Diversity
from atlas_fl.client.importance import IMPORTANCE
from atlas_fl.client.job import Update
from atlas_fl.clustering.labels import UNDECIDED
from atlas_fl.params import HEAD, LORA_A, LORA_B, ByClient, Params, ServerState, Split, shared_params
from atlas_fl.planning.host_assignment import Hosting
from atlas_fl.planning.plan import Plan, Planned
from atlas_fl.setup.assembly import Assembly
from atlas_fl.sparse.codec import values_size
from atlas_fl.sparse.masks import Mask, num_kept
from atlas_fl.split.channel import CutTraffic
from atlas_fl.storage.jsonl import to_json
from atlas_fl.storage.ledger import Direction, Kind, LedgerRow, payload_bytes


def sum_cut_traffic(updates: Iterable[Update]) -> dict[str, CutTraffic]:
    """Bytes through every client's cut over all of these answers; clients without one are not there."""
    sums: dict[str, Counter[tuple[Kind, Direction]]] = {}
    for update in updates:
        if update.crossed:
            sums.setdefault(update.client, Counter()).update(update.crossed)
    return {name: dict(sizes) for name, sizes in sums.items()}


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """Everything that happened in one round."""

    round: int
    sampled: tuple[str, ...]
    updates: Mapping[str, Update]
    """Of those who trained and were not refused."""
    refused: Mapping[str, str]
    initial_models: ByClient
    """What the clients began this round with."""
    client_models: ByClient
    """What they begin the next one with."""
    scores: Mapping[Split, Mapping[str, Update]]
    eta: float
    kept_local: tuple[str, ...]
    """Clients that keep their own model at the end of the run."""
    outdated: frozenset[str]
    """Clients whose newest model had not reached them when the round began."""
    communicates: bool
    aggregated: bool
    """Whether updates were sent and mixed, or everyone goes on with its own model."""
    final: bool
    """Whether the run is over."""
    stopped: bool = False
    """Whether it is over before its last round, because validation scores rose no more."""
    diversity: Diversity | None = None
    """What the server's step did to the differences between clients, in a round with evaluation."""
    missing: tuple[str, ...] = ()
    """Clients that were asked and did not answer in time; they keep what they began with."""
    discarded: Mapping[str, float] = field(default_factory=dict)
    """By client, the share of its mixed update's squared norm that its ranks could not hold."""
    cut_traffic: Mapping[str, CutTraffic] = field(default_factory=dict)
    """By client with a cut, the bytes of all messages through it in training, refused or not."""
    evaluation_cut_traffic: Mapping[str, CutTraffic] = field(default_factory=dict)
    """The same in evaluation."""
    hosting: Hosting = field(default_factory=Hosting)
    """Who computed the upper parts of cut models, where that was not the server."""
    client_side_names: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By client with a cut, the names of the tensors that are on it; the others never leave the server."""
    mask: Mask | None = None
    """Which weights may move; everyone holds it, so that only their values travel."""
    clipped: Mapping[str, str] = field(default_factory=dict)
    """Whose update was scaled down to the norm bound, with the figures."""
    out_of_bound: ByClient = field(default_factory=dict)
    """The updates as they came of those whom the norm bound refused or scaled down."""
    restored: Mapping[str, str] = field(default_factory=dict)
    """Who keeps the model that it began with, because the mixed one was none, and whose update was the largest."""
    state_changed: bool = False
    """Whether the strategy remembers something else than before the round."""

    def messages(self, share: tuple[str, ...]) -> list[LedgerRow]:
        """Every message of the round: late models down, updates up, mixed models down; all of a cut's as one a kind.

        A host gets its guests' upper parts before they train and again before they are evaluated, and returns them.
        """
        return [
            *self._cut_messages(),
            *self._hosting_messages(),
            *(self._model_messages(share) if self.communicates else ()),
        ]

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
        present = [name for name in self.sampled if name not in self.missing]
        messages = [
            self._model_rows(name, "down", self.initial_models[name], share)
            for name in present
            if name in self.outdated
        ]
        up = {name: update for name, update in self.updates.items() if self.aggregated or update.travelled}
        messages += [self._model_rows(name, "up", update.params, share) for name, update in up.items()]
        if self.aggregated:
            messages += [self._model_rows(name, "down", self.client_models[name], share) for name in self._receivers()]
        return [row for rows in messages for row in rows]

    def outdated_after(self) -> frozenset[str]:
        """Clients whose model has changed and that have not received it, because they did not take part."""
        changed = {name for name, params in self.client_models.items() if params is not self.initial_models[name]}
        return frozenset((self.outdated | changed) - set(self._receivers()))

    def _receivers(self) -> tuple[str, ...]:
        """Who gets a model at the end of the round: who took part, and at the end of the run everyone."""
        if not self.final:
            return tuple(name for name in self.sampled if name not in self.missing)
        changed = {name for name, params in self.client_models.items() if params is not self.initial_models[name]}
        return tuple(name for name in self.client_models if name in self.sampled or name in changed | self.outdated)

    def _model_rows(self, name: str, direction: Direction, model: Params, share: tuple[str, ...]) -> list[LedgerRow]:
        names = self.client_side_names.get(name, model.keys())
        params = {key: tensor for key, tensor in shared_params(model, share).items() if key in names}
        return self._rows_by_kind(name, direction, params)

    def _rows_by_kind(self, name: str, direction: Direction, params: Params) -> list[LedgerRow]:
        """A row for the adapters, one for whole weights and one for the head, where there is anything of them."""
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
        """Bytes of these tensors as a message; under a mask of the kept values alone, nothing where none is."""
        if self.mask is None:
            return payload_bytes(part)
        num_values = num_kept({key: self.mask[key] for key in part})
        return values_size(num_values) if num_values else 0


def mean_validation_score(scores: Mapping[Split, Mapping[str, Update]]) -> float | None:
    """The mean primary validation score over the clients that have one; None where there is none."""
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
    """What the strategy remembers besides the models."""
    client_models: ByClient
    """What every client begins the next round with: the only road from server to client."""
    outdated: frozenset[str] = frozenset()
    """Clients that have not received their newest model yet."""
    validation_scores: Mapping[str, float] = field(default_factory=dict)
    """The last validation score of every client."""
    history: Mapping[int, float] = field(default_factory=dict)
    """The mean validation score of every evaluated round, over the clients that answered."""
    is_over: bool = False
    """Whether the run has ended, with its last round or before it."""
    momentum: ByClient = field(default_factory=dict)
    """What each client keeps of its optimizer for its next round, where it is asked to; the server never sees it."""

    def after(self, record: RoundRecord, *, server_models: ByClient, server_state: ServerState) -> "FederationState":
        """The federation once this round is complete, with what the server has of it."""
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
            momentum={
                **self.momentum,
                **{name: update.momentum for name, update in record.updates.items() if update.momentum},
            },
        )


def plan_messages(planned: Planned, *, round: int = 0, only: Collection[str] | None = None) -> list[LedgerRow]:
    """What planning sends: each client's sketches and layer importance up, its ranks and cluster down.

    Of newcomers (`only`) those send no importance whose cluster has one. The sketches of a client that was planned over
    its cut are the server's, and its part of them is among what crossed.
    """
    rows: list[LedgerRow] = [*planned.messages, *planned.crossed]
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
            size = payload_bytes(payload)
            rows.append(LedgerRow(round=round, client=client.name, direction="up", kind="fingerprint", bytes=size))
        size = len(to_json(_control_payload(planned.plan, index)).encode())
        rows.append(LedgerRow(round=round, client=client.name, direction="down", kind="control", bytes=size))
    return rows


def _control_payload(plan: Plan, index: int) -> dict[str, Any]:
    client = plan.clients[index]
    return {"client": client.name, "cluster": client.cluster, "ranks": list(client.ranks), "cut": client.cut}


@dataclass(frozen=True, kw_only=True)
class JoinResult:
    """A federation with those who joined it."""

    assembly: Assembly
    planned: Planned
    state: FederationState
    newcomer_models: ByClient
    """The newcomers' own models after their warm-up, at their ranks, before anything was mixed into them."""
    communicates: bool
    """Whether anything of them was sent."""
    state_changed: bool
    """Whether the strategy remembers something of them."""
