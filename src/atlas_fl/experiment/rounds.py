"""The round loop: sample clients, train, aggregate, evaluate, stop early, record.

A run ends with its last round, or with `--patience` where validation scores no longer rise. After the last round every
client receives its newest model, and text is written for ROUGE. Engines train and evaluate the clients; the recorder
writes the files.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, isfinite

import numpy as np
import torch

from atlas_fl.aggregation.distances import Diversity, diversity
from atlas_fl.aggregation.matrices import Federation, share_warnings, without_edges
from atlas_fl.aggregation.norm_bound import bound_updates
from atlas_fl.aggregation.rules import Answers, RoundModels
from atlas_fl.aggregation.secure_mean import NO_SUMS, SecureMeans, noisy_sum, norm_of, secure_means, sum_here
from atlas_fl.aggregation.update_checks import check_finite, check_update, unusable_models
from atlas_fl.client.job import Job, Update, make_jobs, without_empty
from atlas_fl.client.options import EvaluateOptions, TrainOptions
from atlas_fl.client.reports import with_extra_steps
from atlas_fl.config import Config
from atlas_fl.config.methods import last_aggregation
from atlas_fl.errors import ProtocolError
from atlas_fl.events import Note, OnEvent, PhaseStarted, RoundFinished, tell_notes
from atlas_fl.experiment.late_join import add_late_clients
from atlas_fl.experiment.recorder import Recorder
from atlas_fl.experiment.state import (
    MODELS,
    CurrentRun,
    FederationState,
    ReceivedUpdates,
    RoundOutcome,
    RoundRecord,
    ServerStep,
    mean_validation_score,
    sum_cut_traffic,
)
from atlas_fl.experiment.summary import best_rounds, should_stop
from atlas_fl.methods.kriging import MeasuredSharing
from atlas_fl.methods.method import Method, RoundStart, StepInputs
from atlas_fl.params import HEAD, PRIVATE, REPORT, ByClient, Params, ServerState, Split, TreesByClient, flatten_state
from atlas_fl.partial_sharing import expected_update, has_hidden_factors, is_fully_shared
from atlas_fl.planning import client_privacy
from atlas_fl.planning.host_assignment import match_round_hosts
from atlas_fl.planning.plan import PlanResult
from atlas_fl.planning.planner import cuts_of, recluster, resize_adapters
from atlas_fl.planning.round_costs import client_side
from atlas_fl.runtime.engine import Engine, MissingAnswersError
from atlas_fl.runtime.remote import RemoteEngine
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import is_reclustered, parts_of_config, sample_clients, share_of, strategy_of, train_options
from atlas_fl.sparse.masked_sgd import restore_frozen
from atlas_fl.split.channel import Cut
from atlas_fl.storage.jsonl import to_json
from atlas_fl.storage.ledger import Kind, LedgerRow
from atlas_fl.storage.tensors import encoded_size


def finish_round(
    assembly: Assembly, engine: Engine, state: FederationState, mixed: ByClient, *, cuts: Mapping[str, Cut]
) -> RoundOutcome:
    """Evaluate the mixed models, and decide on early stopping.

    A run stops early only after an aggregation: between two aggregations the server holds older models.
    """
    config, training, number = assembly.config, assembly.config.training, state.round + 1

    def finish(*, final: bool) -> RoundOutcome:
        if not final and number % training.eval_every:
            return RoundOutcome()
        # ROUGE is of what the clients end with, on test prompts alone: writing costs a pass a token
        new_tokens: dict[Split, int] = {"validation": 0, "test": config.data.new_tokens if final else 0}
        scores: dict[Split, Mapping[str, Update]] = {}
        for split, count in new_tokens.items():
            options = EvaluateOptions(split=split, new_tokens=count, prior_correction=training.prior_correction)
            updates = engine.run("evaluate", make_jobs(mixed, options, round=number, cuts=cuts))
            scores[split] = {update.client: update for update in updates}
        evaluations = tuple(update for by_client in scores.values() for update in by_client.values())
        return RoundOutcome(scores=scores, evaluations=evaluations, final=final)

    outcome = finish(final=number == training.rounds)
    score = mean_validation_score(outcome.scores)
    if outcome.final or score is None or not is_aggregation_round(config, number):
        return outcome
    if not should_stop({**state.history, number: score}, patience=training.patience, min_delta=training.min_delta):
        return outcome
    last = finish(final=True)
    return replace(last, evaluations=(*outcome.evaluations, *last.evaluations), stopped=True)


def _of_client(trees: TreesByClient, name: str) -> dict[str, Params]:
    """The tensors of one client by kind, without empty ones."""
    return without_empty({kind: by_client.get(name, {}) for kind, by_client in trees.items()})


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
            accepted[update.client] = update
        except ProtocolError as error:
            refused[update.client] = str(error)
    return accepted, refused


def screen_updates(assembly: Assembly, state: FederationState, updates: Sequence[Update]) -> ReceivedUpdates:
    """Refuse malformed updates, and refuse or clip those whose norm is far above that of the others.

    A rule that sends nothing needs no norm bound. Under secure sums nobody sees the norms, and under `--dp client` a
    bound by the norms of others would give these away.
    """
    config, tasks = assembly.config, {client.name: client.task.name for client in assembly.clients}
    share = share_of(config, train_options(config, with_images=assembly.has_images), round=state.round + 1)
    usable, refused = check_updates(state.client_models, updates, share)
    robust, models = config.robust, {name: update.params for name, update in usable.items()}
    mode = robust.norm_bound if strategy_of(config).communicates and not config.needs_sums else "off"
    bounded, reasons = bound_updates(
        state.client_models, models, tasks, strategy_of(config).options, mode=mode, ratio=robust.max_norm_ratio
    )
    return ReceivedUpdates(
        updates={name: replace(usable[name], params=params) for name, params in bounded.items()},
        refused=refused | {name: reason for name, reason in reasons.items() if name not in bounded},
        clipped={name: reason for name, reason in reasons.items() if name in bounded},
        out_of_bound={name: models[name] for name in reasons},
    )


def run_rounds(run: CurrentRun, engine: Engine, *, last: int, recorder: Recorder, on_event: OnEvent) -> CurrentRun:
    """Run rounds `state.round + 1 .. last`; each is recorded before the next begins.

    The assembly that comes back includes the clients that joined.
    """
    config, federation = run.assembly.config, run.planned.plan.federation()
    warnings = share_warnings(federation, config.robust.max_share)
    tell_notes(on_event, *warnings, *strategy_of(config).warnings(federation))
    for number in range(run.state.round + 1, last + 1):
        on_event(PhaseStarted(f"round {number}"))
        start_time = time.perf_counter()
        if (join := add_late_clients(run, engine, on_event=on_event)) is not None:
            run = join.run
            recorder.record_join(join)
        if is_reclustered(run.assembly.config, number):
            run = _recluster(run, engine, recorder, on_event=on_event)
        state, messages = choose_models(run, engine)
        if messages is not None:
            recorder.record_choice(messages, state)
        state, record = one_round(run._replace(state=state), engine)
        state = recorder.move_to_disk(state)
        run = run._replace(state=state)
        rows = recorder.record_round(record, state, seconds=time.perf_counter() - start_time, is_last=number == last)
        tell_notes(on_event, *record.notes())
        losses = [update.metrics["loss"] for update in record.received.updates.values()]
        validation = record.outcome.scores.get("validation", {})
        on_event(
            RoundFinished(
                round=record.round,
                rounds=config.training.rounds,
                scores={name: score.metrics["primary"] for name, score in validation.items()},
                loss=float(np.mean(losses)) if losses else 0.0,
                seconds=time.perf_counter() - start_time,
                bytes=sum(row.bytes for row in record.messages(config.mixing.share)),
                rows=rows,
            )
        )
        if record.outcome.stopped:
            (best,) = best_rounds(state.history, 1)
            on_event(Note(f"stopped early after round {number}: validation was best in round {best}"))
            break
        del record  # whose models would stay in memory while the next round trains
    return run


def round_participants(config: Config, names: Sequence[str], *, round: int) -> tuple[str, ...]:
    """The clients that train in this round: the same ones up to the next aggregation, so that all of them send.

    After the last aggregation everyone trains.
    """
    if round > last_aggregation(config):
        return tuple(names)
    first = round - (round - 1) % config.mixing.aggregate_every
    return sample_clients(config, names, round=first)


def round_start(run: CurrentRun, *, served: bool = False) -> RoundStart:
    """Federation as the round after this state begins."""
    assembly, planned, state = run
    config, number = assembly.config, state.round + 1
    drawn = round_participants(config, assembly.drawn_from or assembly.names, round=number)
    here = frozenset(assembly.names)
    clients = tuple(name for name in drawn if name in here)
    method, rounds = strategy_of(config), last_aggregation(config)
    seconds = {client.name: client.predicted["seconds"] for client in planned.plan.clients}
    wait = method.wait(round=number, rounds=rounds, seconds=seconds) if served else None
    length = 0.0
    if wait is None:
        clients, length = method.schedule(clients, round=number, rounds=rounds, seconds=seconds)
    return RoundStart(
        round=number,
        clients=clients,
        device_seconds=length,
        wait=wait,
        tasks={client.name: client.task.name for client in assembly.clients},
        examples={client.name: len(client.train) for client in assembly.clients},
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


def _recluster(run: CurrentRun, engine: Engine, recorder: Recorder, *, on_event: OnEvent) -> CurrentRun:
    """Cluster again: the plan from the next round on, and with `--rerank` every model resized to its ranks.

    The plan stays as it was where a client does not answer and the run goes on with fewer.
    """
    assembly, planned, state = run
    number, rerank = state.round + 1, assembly.config.ranks.rerank
    scores = np.array([state.validation_scores.get(name, 0.0) for name in assembly.names])
    models = state.client_models if rerank else None
    try:
        planned = recluster(planned, assembly, engine, round=number, performance=scores, models=models)
    except MissingAnswersError as error:
        on_event(Note(f"round {number}: the plan stays as it was, for want of answers of {', '.join(error.clients)}"))
        return run
    if rerank:
        # The round before was aggregated (`config.validation`), so the server holds what the clients hold.
        resized = resize_adapters(state.client_models, planned.plan, assembly)
        state = replace(state, client_models=resized, server_models=resized)
    recorder.record_new_plan(planned, round=number, resized_models=state.client_models if rerank else None)
    return CurrentRun(assembly, planned, state)


def one_round(run: CurrentRun, engine: Engine) -> tuple[FederationState, RoundRecord]:
    """Train, screen, aggregate and evaluate once: the state after the round, and its record."""
    assembly, planned, state = run
    config, start = assembly.config, round_start(run, served=isinstance(engine, RemoteEngine))
    parts = parts_of_config(config)
    cuts = cuts_of(assembly, planned.plan)
    method, sent = strategy_of(config), dict[str, ByClient]()
    kept = {kind: start.of(kind) for kind in ("momentum", "residual")}
    for part in parts:
        sent |= part.send(start)
        kept |= part.keep(start)
    options = train_options(config, with_images=assembly.has_images)
    asked = set(method.ask(start))
    jobs = [
        Job(
            client=name,
            params=start.client_models[name],
            round=method.began(start, name),
            options=replace(options, report=method.report) if name in asked else options,
            cut=cuts.get(name),
            mask=planned.mask,
            sent=_of_client(sent, name),
            kept=_of_client(kept, name),
        )
        for name in start.clients
    ]
    updates, start = _train(engine, jobs, start)
    extra_steps = Counter[str]()
    for part in parts:
        own = part.own_training(start)  # models of their own, on the same examples
        if own is None:
            continue
        own_jobs = [
            replace(
                job,
                params=own.models[job.client],
                sent=_of_client(own.sent, job.client),
                kept=_of_client(own.kept, job.client),
                options=replace(job.options, **own.options),
            )
            for job in jobs
        ]
        trained = {update.client: update for update in engine.run("train", own_jobs)}
        extra_steps.update({name: int(update.metrics["steps"]) for name, update in trained.items()})
        models = {**state.of("second"), **{name: update.params for name, update in trained.items()}}
        state = replace(state, by_client={**state.with_newest(trained), "second": models})
    updates = [
        replace(update, metrics=with_extra_steps(update.metrics, extra_steps[update.client])) for update in updates
    ]
    received, secure = screen_updates(assembly, state, updates), NO_SUMS
    if config.needs_sums and start.aggregates:
        received, secure = _sums(assembly, planned, engine, state, received)
    if start.aggregates:
        step = _aggregate(assembly, state, received, planned, secure)
    else:  # clients go on with their own models
        step = ServerStep(
            server_state=state.server_state,
            server_models=state.server_models,
            client_models={**state.client_models, **received.models},
        )
    mixed = replace(
        state,
        by_client=state.with_newest(received.updates),
        server_state=step.server_state,
        server_models=step.server_models,
        client_models=step.client_models,
    )
    predicting = mixed.predicting_models(config)
    outcome = finish_round(assembly, engine, state, predicting, cuts=cuts)
    untrained = untrained_names(config, jobs[0], state.client_models, cuts=cuts) if jobs else frozenset()
    record = RoundRecord(
        round=start.round,
        sampled=start.clients,
        device_seconds=start.device_seconds,
        before=state,
        received=received,
        step=step,
        outcome=outcome,
        method=method,
        aggregated=start.aggregates,
        diversity=_diversity(assembly, {**state.client_models, **received.models}, predicting)
        if start.aggregates and outcome.scores
        else None,
        cut_traffic=sum_cut_traffic(updates),
        hosting=match_round_hosts(assembly, planned.plan.clients, training=updates, evaluation=outcome.evaluations),
        client_side_names={name: client_side(assembly, cut, state.client_models[name]) for name, cut in cuts.items()},
        mask=planned.mask,
        sent={
            kind: {job.client: job.sent[kind] for job in jobs if kind in job.sent}
            for kind in dict.fromkeys(kind for job in jobs for kind in job.sent if kind not in MODELS)
        },
        unsent=_unchanged(untrained, state.client_models, step.client_models),
        unsent_up=untrained if method.moves_untrained else frozenset(),
        compressed=config.compresses_updates and planned.mask is None,
    )
    return mixed.after(record), record


def _train(engine: Engine, jobs: Sequence[Job], start: RoundStart) -> tuple[list[Update], RoundStart]:
    """The trained models, and the round with the clients that sent them, where it does not wait for all."""
    if start.wait is None or not isinstance(engine, RemoteEngine):
        return engine.run("train", jobs), start
    start_time = time.perf_counter()
    updates = engine.first_updates(jobs, start.wait, round=start.round)
    clients = start.clients if start.wait.updates >= len(jobs) else tuple(update.client for update in updates)
    return updates, replace(start, clients=clients, device_seconds=time.perf_counter() - start_time)


def _sums(
    assembly: Assembly, planned: PlanResult, engine: Engine, state: FederationState, received: ReceivedUpdates
) -> tuple[ReceivedUpdates, SecureMeans]:
    """The updates, with what their clients have spent under `--dp client`, and the means of the rule's groups."""
    config, number = assembly.config, state.round + 1
    groups = strategy_of(config).sum_groups(planned.plan.federation(), state.server_models, round=number)
    settings = client_privacy.noisy_settings(config, assembly.names, state.clip, round=number)
    remote = engine if isinstance(engine, RemoteEngine) else None
    normals = partial(client_privacy.seeded_normals, config) if remote is None else client_privacy.drawn_normals
    examples = {client.name: client.examples for client in planned.plan.clients}
    kind = strategy_of(config).report
    said = {
        name: {f"{REPORT}{kind}/{key}": one for key, one in report.items()}
        for name, report in received.reports(kind).items()
    }
    models = {name: {**params, **said.get(name, {})} for name, params in received.models.items()}
    sum_of = partial(sum_here, models, examples) if remote is None else remote.sum_of
    if config.training.dp == "client":
        # a site's noise follows from the round, and one that is done again gives out the same sum
        is_secure = config.mixing.secure
        done = range(1, number + 1) if remote is None or is_secure else remote.release(number)
        spent = client_privacy.spending(config, assembly.names, done)
        updates = {name: replace(one, metrics={**one.metrics, **spent[name]}) for name, one in received.updates.items()}
        received = replace(received, updates=updates)
        if not (is_secure and remote):
            before, clip = state.server_models, state.clip or client_privacy.clip_of(config)
            changes = client_privacy.clip_changes(before, received.models, config, clip)
            shares = partial(sum_here, before, examples, changes=changes, seed=config.run.seed)
            sum_of = shares if is_secure else partial(noisy_sum, before, changes, normals)
    means = secure_means(groups, settings, state.server_models, received.models, sum_of, round=number)
    if config.training.clip_quantile is not None and received.models:
        whole = client_privacy.clip_changes(state.server_models, received.models, config, inf)
        norms = [norm_of(change) for change in whole.values()]
        clip = state.clip or client_privacy.clip_of(config)
        then = client_privacy.next_clip(
            config, assembly.names, norms, clip, float(normals(client_privacy.COUNT, number, 1)[0])
        )
        means = replace(means, clip=then, sums=(*means.sums, f"clipped to {clip:.4g}, and to {then:.4g} from now on"))
    return received, means


def _aggregate(
    assembly: Assembly, state: FederationState, received: ReceivedUpdates, planned: PlanResult, secure: SecureMeans
) -> ServerStep:
    """Apply the strategy, to the means by secure sums where there are any.

    Weights that a mask freezes do not change. The old model of a client whose update was refused is nobody's neighbour;
    that of a client that sent none still is. Unusable models are replaced by those of before.
    """
    config, trained = assembly.config, received.models
    federation, mask = without_edges(planned.plan.federation(), received.refused), planned.mask
    method, server_state = strategy_of(config), state.server_state
    reports = received.reports(method.report)
    if secure.reports:
        reports = {
            name: {key.rpartition("/")[2]: one for key, one in said.items()} for name, said in secure.reports.items()
        }
    if reports:
        server_state = method.record_reports(server_state, reports)
    answers = Answers(
        metrics={name: update.metrics for name, update in received.updates.items()},
        validation=state.validation_scores,
        reports={method.report: reports} if reports else {},
    )
    result = method.aggregate(
        StepInputs(
            server_state=server_state,
            client_models=state.server_models,
            updates=secure.updates or trained,
            federation=federation,
            round=state.round + 1,
            answers=answers,
            shares=secure.shares if secure.updates else None,
        )
    )
    models = result.client_models if mask is None else restore_frozen(result.client_models, state.client_models, mask)
    options = train_options(config, with_images=assembly.has_images)
    models = keep_untrained(config, options, state.client_models, models, round=state.round + 1)
    is_personal = config.mixing.personal_models
    mixed = ServerStep(
        server_state=result.server_state,
        server_models=models,
        client_models={**state.client_models, **trained} if is_personal else models,
        discarded=result.discarded,
        anchors=models if is_personal else {},
        sharing=_measured(method, federation, state, server_state, trained) if reports else (),
        # the audit has a second formula for our methods; of a plug-in's it reads the matrices
        rows={} if type(method).__module__.startswith("atlas_fl.") else result.rows,
        secure=secure,
    )
    return _restore_unusable(mixed, state, assembly)


def _measured(
    method: Method, federation: Federation, state: FederationState, server_state: ServerState, present: ByClient
) -> tuple[MeasuredSharing, ...]:
    """Findings of the reports of a round that follows this state and ends with the server state."""
    models = RoundModels(before=state.server_models, after=state.server_models, server_state=server_state)
    there = [client in present for client in federation.clients]
    matrices = method.matrices(federation, there, round=state.round + 1, models=models)
    return method.measured(state.server_state, server_state, federation, matrices)


def _diversity(assembly: Assembly, before: ByClient, after: ByClient) -> Diversity | None:
    """Change of the distances between clients by the server's step; None without finite figures."""
    # distances between all pairs of a hundred whole models would cost more than the round, and where factors are at
    # the clients alone nobody has the updates of all; a gate has another update for every token
    is_stacked = assembly.config.server.second_gate != "none" or strategy_of(assembly.config).holds_frozen
    hidden = is_stacked or any(has_hidden_factors(params) for params in (*before.values(), *after.values()))
    if assembly.is_full or hidden:
        return None
    result = diversity(before, after, clients=assembly.names, scale=assembly.site.scale)
    return result if result.is_finite() else None


def _restore_unusable(step: ServerStep, state: FederationState, assembly: Assembly) -> ServerStep:
    """The server's step with unusable mixed models replaced by the initial ones, and the reason by client.

    A model with values that are NaN, infinite or very large is unusable. All clients keep their models where the server
    state is, and with a rule that holds factors frozen where one model is.
    """
    mixed = {name: params for name, params in step.client_models.items() if params is not state.client_models[name]}
    is_finite = all(bool(tensor.isfinite().all()) for tensor in flatten_state(step.server_state).values())
    unusable = set(unusable_models(mixed)) if is_finite else set(mixed)
    if not unusable:
        return step
    has_frozen = strategy_of(assembly.config).holds_frozen
    if has_frozen:
        unusable = set(mixed)
    restored = {name: state.client_models[name] for name in mixed if name in unusable}
    return replace(
        step,
        server_state=step.server_state if is_finite and not has_frozen else state.server_state,
        server_models={**step.server_models, **restored},
        client_models={**step.client_models, **restored},
        restored=tuple(restored),
    )


def choose_models(run: CurrentRun, engine: Engine) -> tuple[FederationState, list[LedgerRow] | None]:
    """(the state with which the round begins, the messages of the choice); None where nothing was to choose.

    Clients take other models than their own by their losses, where a method lets them: the candidates that a client
    does not hold go down to it, and its losses come back (`methods.method.Method.choose`).
    """
    assembly, state, start = run.assembly, run.state, round_start(run)

    def losses(candidates: Mapping[int, ByClient]) -> dict[str, dict[int, float]]:
        options = EvaluateOptions(split="validation", prior_correction=assembly.config.training.prior_correction)
        losses: dict[str, dict[int, float]] = {}
        for label, models in candidates.items():
            for update in engine.run("evaluate", make_jobs(models, options, round=start.round)):
                losses.setdefault(update.client, {})[label] = update.metrics["loss"]
        return {
            name: {label: loss for label, loss in by_label.items() if isfinite(loss)}
            for name, by_label in losses.items()
            if by_label.keys() == candidates.keys()
        }

    choice = strategy_of(assembly.config).choose(start, losses)
    if choice is None:
        return state, None
    state = replace(
        state,
        client_models={**state.client_models, **choice.client_models},
        server_models={**state.server_models, **choice.client_models},
        server_state=choice.server_state,
    )
    rows = []
    for name, sent in choice.sent.items():  # the candidates down, and each client's losses up
        kinds: tuple[tuple[bool, Kind], ...] = ((False, "adapter"), (True, "head"))
        for is_head, kind in kinds:
            size = sum(
                encoded_size({key: tensor for key, tensor in params.items() if key.startswith(HEAD) == is_head})
                for params in sent
            )
            rows.append(LedgerRow(round=start.round, client=name, direction="down", kind=kind, bytes=size))
        told = len(to_json({str(label): loss for label, loss in choice.losses[name].items()}).encode())
        rows.append(LedgerRow(round=start.round, client=name, direction="up", kind="control", bytes=told))
    return state, [row for row in rows if row.bytes]


def keep_untrained(
    config: Config, options: TrainOptions, before: ByClient, mixed: ByClient, *, round: int
) -> dict[str, Params]:
    """The mixed models, in which what did not train in this round and was equal at all clients is what it was.

    The average of equal values may differ from them in the last bit, and would have to be sent. Only under FedAvg in
    the space of factors; a server optimizer, for one, goes on moving what does not train.
    """
    if not strategy_of(config).is_average or config.mixing.space != "factors" or config.mixing.personal_models:
        return dict(mixed)
    names = {
        key
        for key in _untrained_keys(options, before, round=round)
        if _are_equal([params[key] for params in before.values() if key in params])
    }
    return {
        client: {key: before[client][key] if key in names else tensor for key, tensor in params.items()}
        if names & params.keys() and params is not before[client]
        else params
        for client, params in mixed.items()
    }


def _unchanged(names: Iterable[str], before: ByClient, after: ByClient) -> frozenset[str]:
    """The names, of these, whose values are equal before and after at every client that has them."""
    return frozenset(
        key
        for key in names
        if all(_are_equal([params[key], after[client][key]]) for client, params in before.items() if key in params)
    )


def untrained_names(config: Config, job: Job, before: ByClient, *, cuts: Mapping[str, Cut]) -> frozenset[str]:
    """The names of what does not train in the round of this job, and is not sent where it did not change either.

    Empty where clients keep parts or models to themselves or have cuts, whose messages are made of other parts, and
    where several rounds are sent at once.
    """
    mixing = config.mixing
    if cuts or mixing.personal_models or mixing.aggregate_every > 1 or not is_fully_shared(mixing.share):
        return frozenset()
    return frozenset(_untrained_keys(job.options, before, round=job.round))


def _untrained_keys(options: TrainOptions, models: ByClient, *, round: int) -> set[str]:
    keys = {key for params in models.values() for key in params if key != PRIVATE}
    return {key for key in keys if not options.trains(key, round=round)}


def _are_equal(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor is tensors[0] or torch.equal(tensors[0], tensor) for tensor in tensors)
