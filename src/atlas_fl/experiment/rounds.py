"""The round loop: sample clients, train, aggregate, evaluate, select models, stop early, record.

A run ends with its last round, or with `--patience` where validation scores no longer rise. After the last round a
client may keep its own model (`--keep best`), every client receives its newest model, and text is written for ROUGE.
Engines train and evaluate the clients; the recorder writes the files.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from types import MappingProxyType
from typing import Any

import numpy as np

from atlas_fl.aggregation.graph import Diversity, diversity
from atlas_fl.aggregation.matrices import Federation, share_warnings, without_edges
from atlas_fl.aggregation.mixing import sync_shared
from atlas_fl.aggregation.norm_bound import bound_updates, change_norms
from atlas_fl.aggregation.rules import Answers, RoundModels
from atlas_fl.aggregation.update_checks import LARGEST, check_finite, check_update, unusable_models
from atlas_fl.client.job import Job, Update, without_empty
from atlas_fl.client.options import EvaluateOptions
from atlas_fl.config import Config
from atlas_fl.config.methods import last_aggregation
from atlas_fl.errors import ProtocolError
from atlas_fl.events import Note, OnEvent, PhaseStarted, RoundFinished
from atlas_fl.experiment.choice import choose_models
from atlas_fl.experiment.early_stopping import best_rounds, should_stop
from atlas_fl.experiment.late_join import add_late_clients
from atlas_fl.experiment.recorder import Recorder
from atlas_fl.experiment.state import (
    MODELS,
    NO_FROZEN,
    FederationState,
    FrozenMessages,
    RoundRecord,
    mean_validation_score,
    sum_cut_traffic,
)
from atlas_fl.experiment.untrained import keep_untrained, unmoved_clients, unsent_names
from atlas_fl.methods.kriging import MeasuredSharing
from atlas_fl.methods.method import Method, Part, RoundStart
from atlas_fl.params import ByClient, Params, ServerState, Split, TreesByClient, flatten_state
from atlas_fl.partial_sharing import expected_update, has_hidden_factors
from atlas_fl.planning.host_assignment import attach_hosts, match_round_hosts
from atlas_fl.planning.plan import PlanResult
from atlas_fl.planning.planner import client_side_names, cuts_of, recluster, resize_adapters
from atlas_fl.runtime.engine import Engine, MissingAnswersError
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import (
    is_reclustered,
    parts_of_config,
    predicting_models,
    predicts_as_sent,
    strategy_of,
    train_options,
)
from atlas_fl.setup.participation import sample
from atlas_fl.sparse.masked_sgd import restore_frozen
from atlas_fl.sparse.masks import Mask
from atlas_fl.split.channel import Cut

Scores = Mapping[Split, Mapping[str, Update]]


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """The end of a round: models, scores, and whether the run is over."""

    client_models: ByClient
    """Models with which clients start the next round."""
    kept_local: tuple[str, ...]
    """Clients that keep their own model."""
    scores: Scores
    """Scores of these models; empty in a round without evaluation."""
    evaluations: tuple[Update, ...]
    """Every answer to an evaluation."""
    final: bool
    """True if the run is over."""
    stopped: bool = False
    """True if it is over before its last round."""


def finish_round(
    assembly: Assembly,
    engine: Engine,
    state: FederationState,
    mixed: ByClient,
    trained: ByClient,
    *,
    cuts: Mapping[str, Cut],
    is_mixed: bool,
) -> RoundOutcome:
    """Evaluate the mixed models, select models after the last round, and decide on early stopping.

    A run stops early only after an aggregation: between two aggregations the server holds older models.
    """
    config, round = assembly.config, state.round + 1
    last = round == config.training.rounds
    outcome = _evaluate_and_select(config, engine, mixed, trained, round=round, cuts=cuts, final=last)
    score = mean_validation_score(outcome.scores)
    if last or not is_mixed or score is None:
        return outcome
    training = config.training
    history = {**state.history, round: score}
    if not should_stop(history, patience=training.patience, min_delta=training.min_delta):
        return outcome
    if _selects_best(config) or any(client.task.writes for client in assembly.clients):
        earlier = outcome.evaluations
        outcome = _evaluate_and_select(config, engine, mixed, trained, round=round, cuts=cuts, final=True)
        outcome = replace(outcome, evaluations=(*earlier, *outcome.evaluations))
    return replace(outcome, final=True, stopped=True)


def early_stopping_message(history: Mapping[int, float], *, round: int, rounds: int) -> str:
    """One line: after which round the run stopped early, and which round was the best."""
    (best,) = best_rounds(history, 1)
    return f"stopped early after round {round} of {rounds}: validation {history[best]:.3f} in round {best} was the best"


def _evaluate_and_select(
    config: Config,
    engine: Engine,
    mixed: ByClient,
    trained: ByClient,
    *,
    round: int,
    cuts: Mapping[str, Cut],
    final: bool,
) -> RoundOutcome:
    comparison = (
        _compare_on_validation(
            engine, mixed, trained, round=round, cuts=cuts, prior_correction=config.training.prior_correction
        )
        if final and _selects_best(config)
        else ()
    )
    client_models, kept_local = select_models(mixed, trained, *comparison) if comparison else (mixed, ())
    scores: Scores = {}
    if final or round % config.training.eval_every == 0:
        # ROUGE is of what the clients end with: writing costs a pass a token
        new_tokens = config.data.new_tokens if final else 0
        scores = evaluate_models(
            engine,
            client_models,
            round=round,
            new_tokens=new_tokens,
            cuts=cuts,
            prior_correction=config.training.prior_correction,
        )
    evaluations = (*_flatten_scores(comparison), *_flatten_scores(tuple(scores.values())))
    return RoundOutcome(
        client_models=client_models, kept_local=kept_local, scores=scores, evaluations=evaluations, final=final
    )


def _selects_best(config: Config) -> bool:
    return config.mixing.keep == "best" and strategy_of(config).communicates


def evaluate_models(
    engine: Engine,
    models: ByClient,
    *,
    round: int,
    new_tokens: int = 0,
    cuts: Mapping[str, Cut] = MappingProxyType({}),
    prior_correction: bool = False,
) -> dict[Split, dict[str, Update]]:
    """Scores of these models on their own clients' validation and test examples; of text too, if it may be written."""
    splits: tuple[Split, ...] = ("validation", "test")
    return {
        split: _evaluate_split(
            engine,
            models,
            EvaluateOptions(split=split, new_tokens=new_tokens, prior_correction=prior_correction),
            round=round,
            cuts=cuts,
        )
        for split in splits
    }


def _evaluate_split(
    engine: Engine, models: ByClient, options: EvaluateOptions, *, round: int, cuts: Mapping[str, Cut]
) -> dict[str, Update]:
    jobs = make_jobs(models, options, round=round, cuts=cuts)
    return {update.client: update for update in engine.run("evaluate", jobs)}


def make_jobs(
    models: ByClient,
    options: Any,
    *,
    round: int,
    cuts: Mapping[str, Cut],
    mask: Mask | None = None,
    sent: TreesByClient = MappingProxyType({}),
    kept: TreesByClient = MappingProxyType({}),
) -> list[Job]:
    """A job for every model, with the tensors by kind and client that are `sent` beside it or were `kept`."""
    return [
        Job(
            client=name,
            params=params,
            round=round,
            options=options,
            cut=cuts.get(name),
            mask=mask,
            sent=without_empty({kind: by_client.get(name, {}) for kind, by_client in sent.items()}),
            kept=without_empty({kind: by_client.get(name, {}) for kind, by_client in kept.items()}),
        )
        for name, params in models.items()
    ]


def _flatten_scores(scores: Sequence[Mapping[str, Update]]) -> list[Update]:
    return [update for by_client in scores for update in by_client.values()]


def _compare_on_validation(
    engine: Engine,
    mixed: ByClient,
    trained: ByClient,
    *,
    round: int,
    cuts: Mapping[str, Cut],
    prior_correction: bool,
) -> tuple[dict[str, Update], dict[str, Update]]:
    """Validation scores of the clients that trained: of their own models, and of the mixed ones."""
    options = EvaluateOptions(split="validation", prior_correction=prior_correction)
    local = _evaluate_split(engine, trained, options, round=round, cuts=cuts)
    return local, _evaluate_split(engine, {name: mixed[name] for name in trained}, options, round=round, cuts=cuts)


def select_models(
    mixed: ByClient, trained: ByClient, local_scores: Mapping[str, Update], mixed_scores: Mapping[str, Update]
) -> tuple[dict[str, Params], tuple[str, ...]]:
    """(the mixed models, with the local one of a client where its validation loss is lower, these clients)."""
    # Who does not answer cannot say that its own is better.
    scored = [name for name in trained if name in local_scores and name in mixed_scores]
    kept_local = tuple(
        name for name in scored if _is_lower(local_scores[name].metrics["loss"], mixed_scores[name].metrics["loss"])
    )
    return {name: trained[name] if name in kept_local else params for name, params in mixed.items()}, kept_local


def _is_lower(loss: float, other: float) -> bool:
    """Return whether a loss is below another one; any number is below NaN and infinity."""
    return isfinite(loss) and not loss >= other


def check_updates(
    initial_models: ByClient, updates: Sequence[Update], share: Sequence[str]
) -> tuple[dict[str, Update], dict[str, str]]:
    """The updates that may be mixed, and why each other one was refused, by client."""
    accepted: dict[str, Update] = {}
    refused: dict[str, str] = {}
    for update in updates:
        try:
            check_update(expected_update(initial_models[update.client], update.params, share), update.params)
            check_finite(update.beside_model())
        except ProtocolError as error:
            refused[update.client] = str(error)
        else:
            accepted[update.client] = update
    return accepted, refused


@dataclass(frozen=True, kw_only=True)
class ReceivedUpdates:
    """The updates of a round after screening."""

    updates: dict[str, Update]
    """Updates that are mixed."""
    refused: dict[str, str]
    """Why each other one was refused, by client."""
    clipped: dict[str, str]
    """Clients whose update was scaled down to the norm bound, with the figures."""
    out_of_bound: dict[str, Params]
    """The updates as they came of those whom the norm bound refused or scaled down."""

    @property
    def models(self) -> dict[str, Params]:
        """The models that are mixed."""
        return {name: update.params for name, update in self.updates.items()}


def screen_updates(assembly: Assembly, state: FederationState, updates: Sequence[Update]) -> ReceivedUpdates:
    """Refuse malformed updates, and refuse or clip those whose norm is far above that of the others.

    A rule that sends nothing needs no norm bound.
    """
    config, tasks = assembly.config, {client.name: client.task.name for client in assembly.clients}
    usable, refused = check_updates(state.client_models, updates, config.mixing.share)
    robust, models = config.robust, {name: update.params for name, update in usable.items()}
    mode = robust.norm_bound if strategy_of(config).communicates else "off"
    bounded, reasons = bound_updates(
        state.client_models, models, tasks, strategy_of(config).options, mode=mode, ratio=robust.max_norm_ratio
    )
    return ReceivedUpdates(
        updates={name: replace(usable[name], params=params) for name, params in bounded.items()},
        refused=refused | {name: reason for name, reason in reasons.items() if name not in bounded},
        clipped={name: reason for name, reason in reasons.items() if name in bounded},
        out_of_bound={name: models[name] for name in reasons},
    )


def run_rounds(
    assembly: Assembly,
    planned: PlanResult,
    engine: Engine,
    state: FederationState,
    *,
    last: int,
    recorder: Recorder,
    on_event: OnEvent,
) -> tuple[Assembly, PlanResult, FederationState]:
    """Run rounds `state.round + 1 .. last`; each is recorded before the next begins.

    The assembly that comes back includes the clients that joined.
    """
    for line in _warnings(assembly.config, planned.plan.federation()):
        on_event(Note(line))
    for number in range(state.round + 1, last + 1):
        on_event(PhaseStarted(f"round {number}"))
        start_time = time.perf_counter()
        if (join := add_late_clients(assembly, planned, engine, state, on_event=on_event)) is not None:
            assembly, planned, state = join.assembly, join.planned, join.state
            recorder.record_join(join)
        if is_reclustered(assembly.config, number):
            planned, state = _recluster(assembly, planned, engine, state, recorder, on_event=on_event)
        state, messages = choose_models(assembly, engine, state, round_start(assembly, state))
        if messages is not None:
            recorder.record_choice(messages, state)
        state, record = one_round(assembly, planned, engine, state)
        rows = recorder.record_round(record, state, seconds=time.perf_counter() - start_time, is_last=number == last)
        for line in record.notes():
            on_event(Note(line))
        on_event(replace(_finished_event(record, assembly, seconds=time.perf_counter() - start_time), rows=rows))
        if record.stopped:
            on_event(Note(early_stopping_message(state.history, round=number, rounds=assembly.config.training.rounds)))
            break
    return assembly, planned, state


def round_participants(config: Config, names: Sequence[str], *, round: int) -> tuple[str, ...]:
    """The clients that train in this round: the same ones up to the next aggregation, so that all of them send.

    After the last aggregation everyone trains.
    """
    if round > last_aggregation(config):
        return tuple(names)
    first = round - (round - 1) % config.mixing.aggregate_every
    return sample(names, participation=config.training.participation, seed=config.run.seed, round=first)


def round_start(assembly: Assembly, state: FederationState) -> RoundStart:
    """Federation as the round after this state begins."""
    config, number = assembly.config, state.round + 1
    return RoundStart(
        round=number,
        clients=round_participants(config, assembly.names, round=number),
        tasks={client.name: client.task.name for client in assembly.clients},
        client_models=state.client_models,
        server_models=state.server_models,
        server_state=state.server_state,
        by_client=state.by_client,
        is_personal=number > last_aggregation(config),
        aggregates=is_aggregation_round(config, number),
    )


def is_aggregation_round(config: Config, round: int) -> bool:
    """Return whether the server aggregates after this round; after every round with a rule that sends nothing."""
    last = last_aggregation(config)
    is_due = round == last or (round < last and round % config.mixing.aggregate_every == 0)
    return is_due or not strategy_of(config).communicates


def _recluster(
    assembly: Assembly,
    planned: PlanResult,
    engine: Engine,
    state: FederationState,
    recorder: Recorder,
    *,
    on_event: OnEvent,
) -> tuple[PlanResult, FederationState]:
    """Cluster again: the plan from the next round on, and with `--rerank` every model resized to its ranks.

    The plan stays as it was where a client does not answer and the run goes on with fewer.
    """
    number, rerank = state.round + 1, assembly.config.ranks.rerank
    scores = np.array([state.validation_scores.get(name, 0.0) for name in assembly.names])
    models = state.client_models if rerank else None
    try:
        planned = recluster(planned, assembly, engine, round=number, performance=scores, models=models)
    except MissingAnswersError as error:
        on_event(Note(f"round {number}: the plan stays as it was, for want of answers of {', '.join(error.clients)}"))
        return planned, state
    if rerank:
        # The round before was aggregated (`config.validation`), so the server holds what the clients hold.
        resized = resize_adapters(state.client_models, planned.plan, assembly)
        state = replace(state, client_models=resized, server_models=resized)
    recorder.record_new_plan(planned, round=number, resized_models=state.client_models if rerank else None)
    return planned, state


def one_round(
    assembly: Assembly, planned: PlanResult, engine: Engine, state: FederationState
) -> tuple[FederationState, RoundRecord]:
    """Train, screen, aggregate and evaluate once: the state after the round, and its record."""
    config, number, strategy = assembly.config, state.round + 1, strategy_of(assembly.config)
    start, parts = round_start(assembly, state), parts_of_config(config)
    cuts = cuts_of(assembly, planned.plan)
    engine = attach_hosts(assembly, planned.plan.clients, engine)
    jobs = _train_jobs(assembly, planned, start, parts, cuts)
    updates = engine.run("train", jobs)
    state = _train_own_models(engine, jobs, state, start, parts)
    received, aggregated = screen_updates(assembly, state, updates), is_aggregation_round(config, number)
    trained, server_step = received.models, _aggregate(assembly, state, received, planned, apply=aggregated)
    models = predicting_models(
        config,
        state.with_newest(received.updates),
        server_step.server_state,
        client_models=server_step.client_models,
        server_models=server_step.server_models,
    )
    outcome = finish_round(assembly, engine, state, models, trained, cuts=cuts, is_mixed=aggregated)
    record = RoundRecord(
        round=number,
        sampled=tuple(job.client for job in jobs),
        updates=received.updates,
        refused=received.refused,
        clipped=received.clipped,
        out_of_bound=received.out_of_bound,
        restored=server_step.restored,
        unmoved=unmoved_clients(
            state.client_models, received.updates, jobs[0].options, has_mask=planned.mask is not None
        ),
        initial_models=state.client_models,
        client_models=outcome.client_models if predicts_as_sent(config) else server_step.client_models,
        scores=outcome.scores,
        eta=strategy.eta(number) if aggregated else 0.0,
        kept_local=outcome.kept_local,
        outdated=state.outdated,
        communicates=strategy.communicates,
        aggregated=aggregated,
        final=outcome.final,
        stopped=outcome.stopped,
        diversity=_diversity(assembly, planned, {**state.client_models, **trained}, outcome) if aggregated else None,
        mask=planned.mask,
        discarded=server_step.discarded,
        anchors=server_step.anchors if aggregated else {},
        sent=_sent_beside_models(jobs),
        sharing=server_step.sharing,
        rows=server_step.rows,
        state_changed=server_step.server_state is not state.server_state,
        frozen=_frozen_messages(strategy, state.server_state, server_step.server_state),
        unsent=unsent_names(config, jobs[0], state.client_models, server_step.client_models, cuts=cuts),
        **_beside_cuts(assembly, planned, updates, outcome),
        client_side_names=client_side_names(assembly, cuts, state.client_models),
    )
    return state.after(record, server_models=server_step.server_models, server_state=server_step.server_state), record


def _beside_cuts(
    assembly: Assembly, planned: PlanResult, updates: Sequence[Update], outcome: RoundOutcome
) -> dict[str, Any]:
    """Fields of a round's record about the halves of cut models on the server or on a host."""
    evaluations = outcome.evaluations
    return {
        "cut_traffic": sum_cut_traffic(updates),
        "evaluation_cut_traffic": sum_cut_traffic(evaluations),
        "hosting": match_round_hosts(assembly, planned.plan.clients, training=updates, evaluation=evaluations),
    }


def _sent_beside_models(jobs: Sequence[Job]) -> dict[str, dict[str, Params]]:
    """The tensors that go to clients beside their models, by kind and client; models of the ledger are left out."""
    sent: dict[str, dict[str, Params]] = {}
    for job in jobs:
        for kind, params in job.sent.items():
            if kind not in MODELS:
                sent.setdefault(kind, {})[job.client] = params
    return sent


@dataclass(frozen=True, kw_only=True)
class ServerStep:
    """The result of the server's step of a round."""

    server_state: ServerState
    """The state of the strategy."""
    server_models: ByClient
    """The model of every client as of the last aggregation."""
    client_models: ByClient
    """Models that clients go on with."""
    discarded: Mapping[str, float]
    """By client, the share of its mixed update's squared norm that its ranks could not hold."""
    anchors: ByClient = field(default_factory=dict)
    """Anchors of clients that keep models of their own."""
    restored: Mapping[str, str] = field(default_factory=dict)
    """By client whose mixed model was unusable, the reason why it keeps its initial one."""
    sharing: tuple[MeasuredSharing, ...] = ()
    """Share of its own that each client keeps, in a round that measured it."""
    rows: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The mixing matrices of a method that is a plug-in's."""


def _train_jobs(
    assembly: Assembly, planned: PlanResult, start: RoundStart, parts: Sequence[Part], cuts: Mapping[str, Cut]
) -> list[Job]:
    """The training jobs of the clients that take part in this round."""
    config, method = assembly.config, strategy_of(assembly.config)
    sent = [part.send(start) for part in parts]
    kept = [part.keep(start) for part in parts]
    jobs = make_jobs(
        {name: start.client_models[name] for name in start.clients},
        train_options(config, with_images=assembly.has_images),
        round=start.round,
        cuts=cuts,
        mask=planned.mask,
        sent={kind: by_client for trees in sent for kind, by_client in trees.items()},
        kept={"momentum": start.of("momentum"), **{kind: one for trees in kept for kind, one in trees.items()}},
    )
    asked = set(method.ask(start))
    return [
        replace(job, options=replace(job.options, report=method.report)) if job.client in asked else job for job in jobs
    ]


def _train_own_models(
    engine: Engine, jobs: Sequence[Job], state: FederationState, start: RoundStart, parts: Sequence[Part]
) -> FederationState:
    """The state with the models of their own that clients train beside the shared ones, on the same examples."""
    for part in parts:
        own = part.own_training(start)
        if own is None:
            continue
        own_jobs = [
            replace(
                job,
                params=own.models[job.client],
                sent=without_empty({kind: by_client.get(job.client, {}) for kind, by_client in own.sent.items()}),
                kept=without_empty({kind: by_client.get(job.client, {}) for kind, by_client in own.kept.items()}),
                options=replace(job.options, report="none", **own.options),
            )
            for job in jobs
        ]
        updates = {update.client: update for update in engine.run("train", own_jobs)}
        models = {**state.of("second"), **{name: update.params for name, update in updates.items()}}
        state = replace(state, by_client={**state.with_newest(updates), "second": models})
    return state


def _frozen_messages(method: Method, before: ServerState, after: ServerState) -> FrozenMessages:
    """Messages of a round between these server states about a part that everyone holds frozen."""
    if not method.holds_frozen:
        return NO_FROZEN
    return FrozenMessages(
        before=method.frozen_part(before),
        newest={} if after is before else method.newest_part(after),
        after=method.frozen_part(after),
        begins_again=method.begins_again,
    )


def _aggregate(
    assembly: Assembly, state: FederationState, received: ReceivedUpdates, planned: PlanResult, *, apply: bool
) -> ServerStep:
    """Apply the strategy; without `apply` the server keeps its state and clients go on with their own models.

    Weights that a mask freezes do not change. The old model of a client whose update was refused is nobody's neighbour;
    that of a client that sent none still is. Unusable models are replaced by those of before.
    """
    config, trained = assembly.config, received.models
    federation, mask = without_edges(planned.plan.federation(), received.refused), planned.mask
    if not apply:
        return ServerStep(
            server_state=state.server_state,
            server_models=state.server_models,
            client_models=sync_shared({**state.client_models, **trained}, federation, list(trained)),
            discarded={},
        )
    method, personal, server_state = strategy_of(config), config.mixing.personal_models, state.server_state
    reports = {
        name: update.reported[method.report]
        for name, update in received.updates.items()
        if method.report in update.reported
    }
    if reports:
        server_state = method.record_reports(server_state, reports)
    answers = Answers(
        metrics={name: update.metrics for name, update in received.updates.items()},
        validation=state.validation_scores,
        reports={method.report: reports} if reports else {},
    )
    result = method.aggregate(
        server_state, state.server_models, trained, federation, round=state.round + 1, answers=answers
    )
    models = result.client_models if mask is None else restore_frozen(result.client_models, state.client_models, mask)
    options = train_options(config, with_images=assembly.has_images)
    models = keep_untrained(config, options, state.client_models, models, round=state.round + 1)
    mixed = ServerStep(
        server_state=result.server_state,
        server_models=models,
        client_models={**state.client_models, **trained} if personal else models,
        discarded=result.discarded,
        anchors=models if personal else {},
        sharing=_measured(method, federation, state, server_state, trained) if reports else (),
        rows={} if _has_reference(method) else result.rows,
    )
    return _restore_unusable(mixed, state, trained, assembly)


def _has_reference(method: Method) -> bool:
    """Return whether the audit has a second formula for this method; of a plug-in's it reads the matrices."""
    return type(method).__module__.startswith("atlas_fl.")


def _measured(
    method: Method, federation: Federation, state: FederationState, server_state: ServerState, present: ByClient
) -> tuple[MeasuredSharing, ...]:
    """Findings of the reports of a round that follows this state and ends with the server state."""
    models = RoundModels(before=state.server_models, after=state.server_models, server_state=server_state)
    there = [client in present for client in federation.clients]
    matrices = method.matrices(federation, there, round=state.round + 1, models=models)
    return method.measured(state.server_state, server_state, federation, matrices)


def _warnings(config: Config, federation: Federation) -> list[str]:
    """Warnings about the method and these clients before the first round."""
    return [*share_warnings(federation, config.robust.max_share), *strategy_of(config).warnings(federation)]


def _diversity(assembly: Assembly, planned: PlanResult, before: ByClient, outcome: RoundOutcome) -> Diversity | None:
    """Change of the distances between clients by the server's step; None without evaluation or finite figures."""
    # distances between all pairs of a hundred whole models would cost more than the round, and where factors are at
    # the clients alone nobody has the updates of all; a gate has another update for every token
    is_stacked = assembly.config.server.second_gate != "none" or strategy_of(assembly.config).holds_frozen
    hidden = is_stacked or any(has_hidden_factors(params) for params in before.values())
    if not outcome.scores or assembly.is_full or hidden:
        return None
    adjacency = planned.plan.adjacency
    result = diversity(
        before, outcome.client_models, clients=assembly.names, adjacency=adjacency, scale=assembly.site.scale
    )
    return result if result.is_finite() else None


def _restore_unusable(server: ServerStep, state: FederationState, trained: ByClient, assembly: Assembly) -> ServerStep:
    """The server's step with unusable mixed models replaced by the initial ones, and the reason by client.

    A model with values that are NaN, infinite or very large is unusable. Clients that share adapters
    all keep their models where one is unusable, and so do all clients where the server state is.
    """
    mixed = {name: params for name, params in server.client_models.items() if params is not state.client_models[name]}
    is_finite = all(bool(tensor.isfinite().all()) for tensor in flatten_state(server.server_state).values())
    unusable = set(unusable_models(mixed)) if is_finite else set(mixed)
    if not unusable:
        return server
    has_frozen = strategy_of(assembly.config).holds_frozen
    if assembly.config.split.server_adapters != "per_client" or assembly.config.training.multitask or has_frozen:
        unusable = set(mixed)
    norms = {
        name: change_norms(state.client_models[name], params, strategy_of(assembly.config).options)
        for name, params in trained.items()
    }
    largest = {name: max(parts.values()) for name, parts in norms.items()}
    sender = max(largest, key=largest.__getitem__, default="nobody")
    reason = (
        f"the mixed model holds values that are NaN, infinite or beyond {LARGEST:g}; the largest change was that of"
        f" {sender}, of norm {largest.get(sender, 0.0):.3g}"
    )
    restored = {name: state.client_models[name] for name in mixed if name in unusable}
    return replace(
        server,
        server_state=server.server_state if is_finite and not has_frozen else state.server_state,
        server_models={**server.server_models, **restored},
        client_models={**server.client_models, **restored},
        restored=dict.fromkeys(restored, reason),
    )


def _finished_event(record: RoundRecord, assembly: Assembly, *, seconds: float) -> RoundFinished:
    losses = [update.metrics["loss"] for update in record.updates.values()]
    return RoundFinished(
        round=record.round,
        rounds=assembly.config.training.rounds,
        scores={name: score.metrics["primary"] for name, score in record.scores.get("validation", {}).items()},
        loss=float(np.mean(losses)) if losses else 0.0,
        seconds=seconds,
        bytes=sum(row.bytes for row in record.messages(assembly.config.mixing.share)),
    )
