"""The federation's state between rounds, the record of a round, and its messages in the ledger."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from math import isfinite
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atlas_fl.aggregation.distances import Diversity
from atlas_fl.aggregation.secure_mean import NO_SUMS, SecureMeans
from atlas_fl.aggregation.update_checks import LARGEST
from atlas_fl.client.importance import IMPORTANCE
from atlas_fl.client.job import Update
from atlas_fl.clustering.labels import UNDECIDED
from atlas_fl.config import Config
from atlas_fl.frozen import Frozen
from atlas_fl.methods.kriging import MeasuredSharing
from atlas_fl.methods.method import Method, RoundStart
from atlas_fl.params import (
    HEAD,
    LORA_A,
    LORA_B,
    LORA_PARTS,
    ByClient,
    Params,
    ServerState,
    Split,
    TreesByClient,
    flatten_by_client,
    flatten_state,
    shared_params,
    unflatten_by_client,
    unflatten_state,
)
from atlas_fl.partial_sharing import transmitted_params
from atlas_fl.planning.host_assignment import HostAssignment
from atlas_fl.planning.plan import PlanResult
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import parts_of_config
from atlas_fl.sparse import compression, masks
from atlas_fl.sparse.codec import message_size
from atlas_fl.split.channel import CutTraffic
from atlas_fl.storage.checkpoint import Checkpoint
from atlas_fl.storage.jsonl import drop_undefined, to_json
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
UNUSABLE = f"the mixed model holds values that are NaN, infinite or beyond {LARGEST:g}"
"""The reason why a client keeps its initial model."""
EVENT_WORDS: Mapping[str, str] = {
    "refused": "the update of {} was refused",
    "clipped": "the update of {} was scaled down",
    "restored": "{} keeps the model that it began with",
}
"""Events that are notes too, by name."""
NEXT_ROUND = frozenset({"momentum", "gate", "control", "residual"})
"""The kinds of an update's tensors that the client's next round begins with."""


class ReceivedUpdates(Frozen):
    """The updates of a round after screening."""

    updates: Mapping[str, Update]
    """Updates of clients that trained and were not refused."""
    refused: Mapping[str, str]
    """Why each other one was refused, by client."""
    clipped: Mapping[str, str] = field(default_factory=dict)
    """Clients whose update was scaled down to the norm bound, with the figures."""
    out_of_bound: ByClient = field(default_factory=dict)
    """The updates as they came of those whom the norm bound refused or scaled down."""

    @property
    def models(self) -> dict[str, Params]:
        """The models that are mixed."""
        return {name: update.params for name, update in self.updates.items()}

    def reports(self, kind: str) -> dict[str, Params]:
        """The reports of this kind, by client."""
        return {name: update.reported[kind] for name, update in self.updates.items() if kind in update.reported}


class ServerStep(Frozen):
    """The result of the server's step of a round."""

    server_state: ServerState
    """The state of the strategy."""
    server_models: ByClient
    """The model of every client as of the last aggregation."""
    client_models: ByClient
    """Models that clients go on with."""
    discarded: Mapping[str, float] = field(default_factory=dict)
    """By client, the share of its mixed update's squared norm that its ranks could not hold."""
    anchors: ByClient = field(default_factory=dict)
    """Anchors of clients that keep models of their own, after an aggregation."""
    restored: tuple[str, ...] = ()
    """Clients that keep their initial model because the mixed one was unusable."""
    sharing: tuple[MeasuredSharing, ...] = ()
    """Share of its own that each client keeps, in a round that measured it (`methods.kriging`)."""
    rows: Mapping[str, Any] = field(default_factory=dict)
    """The mixing matrices of a method that is a plug-in's, `adapters` and `head`, for the audit."""
    secure: SecureMeans = NO_SUMS
    """Means in the place of the updates, under `--secure` and `--dp client`."""


class RoundOutcome(Frozen):
    """The end of a round: models, scores, and whether the run is over."""

    scores: Mapping[Split, Mapping[str, Update]] = field(default_factory=dict)
    """Scores of the models that clients predict with; empty in a round without evaluation."""
    evaluations: tuple[Update, ...] = ()
    """Every answer to an evaluation."""
    final: bool = False
    """True if the run is over."""
    stopped: bool = False
    """True if early stopping ended it before its last round."""


class RoundRecord(Frozen):
    """Everything that happened in one round."""

    round: int
    sampled: tuple[str, ...]
    device_seconds: float
    """How long the round takes on the devices' profiles."""
    before: "FederationState"
    """The federation as the round began."""
    received: ReceivedUpdates
    step: ServerStep
    outcome: RoundOutcome
    method: Method
    aggregated: bool
    """True if updates were sent and mixed, or everyone goes on with its own model."""
    diversity: Diversity | None = None
    """Change of the distances between clients by the server's step, in a round with evaluation."""
    cut_traffic: Mapping[str, CutTraffic] = field(default_factory=dict)
    """By client with a cut, the bytes of all messages through it in training, refused or not."""
    hosting: HostAssignment = field(default_factory=HostAssignment)
    """Which clients computed the server halves of which others, where the server did not."""
    client_side_names: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By client with a cut, the names of its client-side tensors; the others never leave the server."""
    mask: masks.Mask | None = None
    """The mask of trainable weights; every client has it, so that only their values are sent."""
    sent: TreesByClient = field(default_factory=dict)
    """The tensors that went to clients beside their models, by kind and client."""
    unsent: frozenset[str] = frozenset()
    """The names of what neither trained nor changed in the round; it goes to nobody but those who were outdated."""
    unsent_up: frozenset[str] = frozenset()
    """The names of what did not train, and goes down because the server moves it."""
    compressed: bool = False
    """Trained tensors come as their change in few bytes (`sparse.compression`)."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Clients that did not answer in time; they keep their initial model."""
        answered = self.received.updates.keys() | self.received.refused.keys()
        return tuple(name for name in self.sampled if name not in answered)

    @property
    def state_changed(self) -> bool:
        """Return whether the server state changed in the round."""
        return self.step.server_state is not self.before.server_state

    def events(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl` on single clients, such as those whose update was refused, and on secure sums."""
        reasons: Mapping[str, Mapping[str, str | None]] = {
            "refused": self.received.refused,
            "missing": dict.fromkeys(self.missing),
            "clipped": self.received.clipped,
            "restored": dict.fromkeys(self.step.restored, UNUSABLE),
        }
        rows: list[dict[str, Any]] = [
            {"round": self.round, "client": client, "event": event, "reason": reason}
            for event, by_client in reasons.items()
            for client, reason in by_client.items()
        ]
        for work, pairs in (("training", self.hosting.training), ("evaluation", self.hosting.evaluation)):
            for client, match in pairs.items():
                row = {"round": self.round, "client": client, "event": "hosted", "work": work}
                rows.append(row | {"host": match.host or "server", "reason": match.reason})
        rows += [{"round": self.round, "event": "summed", "reason": line} for line in self.step.secure.sums]
        return [drop_undefined(row) for row in rows]

    def notes(self) -> list[str]:
        """Notes on refused, scaled and unusable models, on those that give no numbers, and on measurements."""
        lines = [
            f"{EVENT_WORDS[row['event']].format(row['client'])}: {row['reason']}"
            for row in self.events()
            if row["event"] in EVENT_WORDS
        ]
        for split, scores in self.outcome.scores.items():
            if names := ", ".join(name for name, score in scores.items() if not isfinite(score.metrics["loss"])):
                lines.append(
                    f"the models of {names} give outputs that are NaN or infinite for {split} examples, which count as"
                    " wrong; lower the learning rate or clip"
                )
        lines += self.step.secure.lost
        return [f"round {self.round}: {line}" for line in lines]

    def messages(self, share: tuple[str, ...]) -> list[LedgerRow]:
        """Every message of the round: outdated models down, updates up, mixed models down; of a cut the sums by kind.

        A host receives its guests' server halves before training and again before evaluation, and returns the trained.
        """
        return [
            *self._cut_messages(),
            *self._hosting_messages(),
            *(self._model_messages(share) if self.method.communicates else ()),
            *self._messages_beside_models(),
        ]

    def _row(self, client: str, direction: Direction, kind: Kind, size: int) -> LedgerRow:
        return LedgerRow(round=self.round, client=client, direction=direction, kind=kind, bytes=size)

    def _messages_beside_models(self) -> Iterator[LedgerRow]:
        for kind, by_client in self.sent.items():
            for name, params in by_client.items():
                if name not in self.missing:
                    yield self._row(name, "down", LEDGER_KINDS.get(kind, "report"), encoded_size(params))
        for name, update in self.received.updates.items():
            for kind, params in update.reported.items():
                yield self._row(name, "up", LEDGER_KINDS.get(kind, "report"), encoded_size(params))
        for name, (up, down) in self.step.secure.sent_bytes.items():
            yield self._row(name, "up", "control", up)
            yield self._row(name, "down", "control", down)

    def _cut_messages(self) -> Iterator[LedgerRow]:
        sums: dict[str, Counter[tuple[Kind, Direction, str]]] = {}
        evaluated = sum_cut_traffic(self.outcome.evaluations)
        for traffic, pairs in ((self.cut_traffic, self.hosting.training), (evaluated, self.hosting.evaluation)):
            for name, sizes in traffic.items():
                peer = (pairs[name].host if name in pairs else None) or ""
                sums.setdefault(name, Counter()).update({(*way, peer): size for way, size in sizes.items()})
        for name, sized in sums.items():
            for (kind, direction, peer), size in sized.items():
                yield replace(self._row(name, direction, kind, size), peer=peer)

    def _hosting_messages(self) -> Iterator[LedgerRow]:
        ways: tuple[Direction, ...] = ("down", "up")
        for pairs, models, directions in (
            (self.hosting.training, self.before.client_models, ways),
            (self.hosting.evaluation, self.step.client_models, ways[:1]),
        ):
            for name, match in pairs.items():
                upper = {key: tensor for key, tensor in models[name].items() if key not in self.client_side_names[name]}
                for direction in directions if match.host else ():
                    for row in self._rows_by_kind(str(match.host), direction, upper):
                        yield replace(row, guest=name)

    def _model_messages(self, share: tuple[str, ...]) -> Iterator[LedgerRow]:
        outdated = self.before.outdated
        updated = [name for name in self.sampled if name in outdated and name not in self.missing]
        for name in updated:
            yield from self._model_rows(name, "down", self.before.client_models[name], share)
            yield from self._frozen_rows(name, self.method.frozen_part(self.before.server_state, name))
        for name, update in self.received.updates.items():
            if self.aggregated or update.travelled:
                sent = self.step.secure.updates.get(name, update.params)
                trained = {key: tensor for key, tensor in sent.items() if key not in self.unsent_up}
                trained = compression.compress(trained, self.before.client_models[name]) if self.compressed else trained
                yield from self._model_rows(name, "up", self._sent_part(trained), share)
        after = self.step.server_state
        for name in self._receivers() if self.aggregated else ():
            model = self.step.anchors.get(name, self.step.client_models[name])
            is_outdated = name in outdated and name not in updated
            yield from self._model_rows(name, "down", model if is_outdated else self._sent_part(model), share)
            part_of = self.method.frozen_part if is_outdated else self.method.newest_part
            yield from self._frozen_rows(name, part_of(after, name) if is_outdated or self.state_changed else {})

    def _sent_part(self, params: Params) -> Params:
        """Part of a model that is sent to or from who held its client's model when the round began."""
        return {key: tensor for key, tensor in params.items() if key not in self.unsent}

    def _frozen_rows(self, name: str, part: Params) -> list[LedgerRow]:
        """The row of a part that everyone holds frozen: who took part gets what the round added, others the whole."""
        return [self._row(name, "down", "frozen", encoded_size(part))] if part and not self.method.makes_frozen else []

    def outdated_after(self) -> frozenset[str]:
        """Clients that have not received their newest model after the round, because they did not take part."""
        return (self.before.outdated | self._changed()) - set(self._receivers())

    def _changed(self) -> frozenset[str]:
        before = self.before.client_models
        return frozenset(name for name, params in self.step.client_models.items() if params is not before[name])

    def _receivers(self) -> tuple[str, ...]:
        """Clients that receive a model at the end of the round: those that took part, and at the end of the run all."""
        if not self.outcome.final:
            missing = set(self.missing)
            return tuple(name for name in self.sampled if name not in missing)
        receivers = self._changed() | self.before.outdated | set(self.sampled)
        return tuple(name for name in self.step.client_models if name in receivers)

    def _model_rows(
        self, name: str, direction: Direction, model: Params, share: tuple[str, ...]
    ) -> Iterator[LedgerRow]:
        names = self.client_side_names.get(name, model.keys())
        params = {
            key: tensor for key, tensor in shared_params(transmitted_params(model), share).items() if key in names
        }
        if direction == "down" and self.method.begins_again:  # everybody draws the adapters alike
            params = {key: tensor for key, tensor in params.items() if not key.endswith((LORA_A, LORA_B))}
        return self._rows_by_kind(name, direction, params)

    def _rows_by_kind(self, name: str, direction: Direction, params: Params) -> Iterator[LedgerRow]:
        """A row for the adapters, one for whole weights and one for the head, each where there are any."""
        parts: dict[Kind, dict[str, Tensor]] = {"adapter": {}, "weights": {}, "head": {}}
        for key, tensor in params.items():
            kind: Kind = "head" if key.startswith(HEAD) else "adapter" if key.endswith(LORA_PARTS) else "weights"
            parts[kind][key] = tensor
        for kind, part in parts.items():
            size = message_size(part, self.mask)
            if size:
                yield self._row(name, direction, kind, size)


def mean_validation_score(scores: Mapping[Split, Mapping[str, Update]]) -> float | None:
    """The mean primary validation score over the clients that have one; None without any."""
    values = [score.metrics["primary"] for score in scores.get("validation", {}).values()]
    return fmean(values) if values else None


class FederationState(Frozen):
    """The whole federation between two rounds; all of it is in a checkpoint."""

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
    clip: float = 0.0
    """The clip of the next round where it follows the norms (`--clip-quantile`); 0 for that of the settings."""
    by_client: TreesByClient = field(default_factory=dict)
    """Tensors that outlive a round, by kind and client: `momentum` of its optimizer, the `residual` of its filters, its
    `second` model and the `gate` between that and the shared one, which never leave it, and `control`, the mean
    gradient of its last round."""

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

    def predicting_models(self, config: Config) -> ByClient:
        """Models that clients predict with in this state; their very own where no part says otherwise."""
        start = RoundStart(
            round=0,
            clients=(),
            tasks={},
            client_models=self.client_models,
            server_models=self.server_models,
            server_state=self.server_state,
            by_client=self.by_client,
        )
        predictions = (part.predict(start) for part in parts_of_config(config))
        return next((models for models in predictions if models), self.client_models)

    def after(self, record: RoundRecord) -> "FederationState":
        """The state after this round, of one with its models and what its updates brought."""
        scores = record.outcome.scores
        mean = mean_validation_score(scores)
        newest_scores = {name: score.metrics["primary"] for name, score in scores.get("validation", {}).items()}
        return replace(
            self,
            round=record.round,
            outdated=record.outdated_after(),
            validation_scores=newest_scores or self.validation_scores,
            history=self.history if mean is None else {**self.history, record.round: mean},
            is_over=record.outcome.final,
            clip=record.step.secure.clip or self.clip,
        )

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the federation, of models that clients share once a client."""
        for models in (self.server_models, self.client_models, *self.by_client.values()):
            for params in models.values():
                yield from params.values()
        yield from flatten_state(self.server_state).values()

    def with_tensors(self, others: Mapping[int, Tensor]) -> "FederationState":
        """This state with other tensors in the place of those of these `id`; what was one mapping stays one."""
        mappings: dict[int, Params] = {}

        def models(before: ByClient) -> ByClient:
            for params in before.values():
                if id(params) not in mappings:
                    mappings[id(params)] = {key: others.get(id(one), one) for key, one in params.items()}
            return {name: mappings[id(params)] for name, params in before.items()}

        flat = flatten_state(self.server_state)
        return replace(
            self,
            server_models=models(self.server_models),
            client_models=models(self.client_models),
            by_client={kind: models(by_client) for kind, by_client in self.by_client.items()},
            server_state=unflatten_state({path: others.get(id(one), one) for path, one in flat.items()}),
        )

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors by name, everything else as JSON) of which `from_checkpoint` makes this state again.

        An average is stored once. Who starts with what the server has is told by the absence of a second copy.
        """
        representatives = deduplicate_models(self.server_models)
        distinct, server_same = distinct_tensors(self.server_state)
        trees = {
            "strategy": {name: self.server_models[name] for name in dict.fromkeys(representatives.values())},
            "start": {
                name: params for name, params in self.client_models.items() if params is not self.server_models[name]
            },
            **{f"by client/{kind}": by_client for kind, by_client in self.by_client.items()},
        }
        tensors = {
            f"{kind}/{name}": tensor
            for kind, by_client in trees.items()
            for name, tensor in flatten_by_client(by_client).items()
        }
        tensors |= {f"server/{path}": tensor for path, tensor in distinct.items()}
        content = {
            "same": {name: first for name, first in representatives.items() if name != first},
            "server_same": server_same,
            "stale": sorted(self.outdated),
            "validation": dict(self.validation_scores),
            "history": {str(round): score for round, score in self.history.items()},
            "over": self.is_over,
            "clip": self.clip,
        }
        return tensors, content

    @staticmethod
    def from_checkpoint(saved: Checkpoint, names: Sequence[str]) -> "FederationState":
        """The state of this checkpoint, of clients in this order."""
        kinds, content = unflatten_by_client(saved.tensors), saved.state
        stored, diverged = (unflatten_by_client(kinds.get(kind, {})) for kind in ("strategy", "start"))
        # A file holds its tensors sorted by name; packs follow the order of the clients, and so do their last bits.
        server_models = {name: stored[content["same"].get(name, name)] for name in names}
        server_state = dict(kinds.get("server", {}))
        server_state |= {path: server_state[first] for path, first in content["server_same"].items()}
        by_client = unflatten_by_client(kinds.get("by client", {}))
        return FederationState(
            round=saved.round,
            server_models=server_models,
            server_state=unflatten_state(server_state),
            client_models={name: diverged.get(name, server_models[name]) for name in names},
            outdated=frozenset(content["stale"]),
            validation_scores=content["validation"],
            history={int(round): score for round, score in content["history"].items()},
            is_over=content["over"],
            clip=content["clip"],
            by_client={kind: unflatten_by_client(flat) for kind, flat in by_client.items()},
        )


def deduplicate_models(models: ByClient) -> dict[str, str]:
    """By client, the first client whose model has the same tensors (the same objects): an average is stored once."""
    first: dict[tuple[tuple[str, int], ...], str] = {}
    return {
        # sorted, because a model that comes from a checkpoint has its keys in another order
        name: first.setdefault(tuple((key, id(params[key])) for key in sorted(params)), name)
        for name, params in models.items()
    }


def distinct_tensors(server_state: ServerState) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(every distinct tensor of this state under its first path, the first path of each repeated tensor)."""
    first: dict[int, str] = {}
    flat = flatten_state(server_state)
    first_paths = {path: first.setdefault(id(tensor), path) for path, tensor in flat.items()}
    distinct = {path: tensor for path, tensor in flat.items() if first_paths[path] == path}
    return distinct, {path: first_path for path, first_path in first_paths.items() if path != first_path}


def plan_messages(
    planned: PlanResult, *, with_importance: bool, round: int = 0, only: Collection[str] | None = None
) -> list[LedgerRow]:
    """The messages of planning: each client's sketches and layer importance up, its ranks and cluster down.

    With `only` (late clients), a client whose cluster has an importance sends none. The server computes what a client
    that is planned over its cut measures; that traffic is among the cut's.
    """
    rows: list[LedgerRow] = [*planned.messages, *planned.cut_traffic]
    planned_over_cut = {row.client for row in rows if row.phase}
    first = {client.cluster: client.name for client in reversed(planned.plan.clients)}

    def add(client: str, direction: Direction, kind: Kind, size: int) -> None:
        rows.append(LedgerRow(round=round, client=client, direction=direction, kind=kind, bytes=size))

    for index, client in enumerate(planned.plan.clients):
        if only is not None and client.name not in only:
            continue
        measures = client.name not in planned_over_cut
        if planned.sketches is not None and measures:
            halves = zip(("first", "second"), planned.sketches[:, index], strict=True)
            sketches = {half: torch.from_numpy(sketch) for half, sketch in halves}
            add(client.name, "up", "fingerprint", encoded_size(sketches))
        is_first = only is None or client.cluster == UNDECIDED or first[client.cluster] == client.name
        if with_importance and measures and is_first:
            importance = torch.from_numpy(planned.plan.importance[index])
            add(client.name, "up", "importance", encoded_size({IMPORTANCE: importance}))
        told = {"client": client.name, "cluster": client.cluster, "ranks": list(client.ranks), "cut": client.cut}
        add(client.name, "down", "control", len(to_json(told).encode()))
    return rows


class CurrentRun(NamedTuple):
    """A run between two rounds: its clients, their plan, and the state of the federation."""

    assembly: Assembly
    planned: PlanResult
    state: FederationState


class JoinResult(Frozen):
    """The run with the clients that joined it."""

    run: CurrentRun
    newcomer_models: ByClient
    """The newcomers' models after the warm-up, at their ranks, before the first aggregation."""
    state_changed: bool
    """True if the server state changed with them."""
