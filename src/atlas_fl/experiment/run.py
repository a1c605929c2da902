"""Runs: run a config in its folder, resume from a checkpoint, export models, write the summary."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from atlas_fl.client.job import Update
from atlas_fl.clustering.result import Clustering
from atlas_fl.config import (
    Config,
    check_mask_file,
    config_hash,
    load_config,
    pin_mask_file,
    run_folder,
    to_toml,
    validate,
)
from atlas_fl.config.presets import federation_name
from atlas_fl.errors import AtlasError, CheckpointError, ConfigError
from atlas_fl.events import Note, OnEvent, PhaseStarted, Progress, RoundFinished, ignore, tell_notes
from atlas_fl.experiment.alone import reference_assembly, resample_clients, score_examples, summarise_gains
from atlas_fl.experiment.backends import BACKENDS, Backend
from atlas_fl.experiment.export import MOST_EXPORTED, export_clients
from atlas_fl.experiment.recorder import Recorder, check_provenance, check_run_files, check_same_settings, provenance_of
from atlas_fl.experiment.rounds import run_rounds
from atlas_fl.experiment.state import CurrentRun, FederationState
from atlas_fl.experiment.summary import attack_note, summarise
from atlas_fl.frozen import Frozen
from atlas_fl.models.identity import model_identity
from atlas_fl.models.lora import frozen_weight
from atlas_fl.params import plain_tensors
from atlas_fl.planning.plan import PlanResult, read_plan
from atlas_fl.planning.planner import cuts_of, plan_run
from atlas_fl.planning.ranks_and_cuts import cuts_for_planning
from atlas_fl.plugins import load_plugins, source_files
from atlas_fl.runtime.engine import Engine, MissingAnswersError
from atlas_fl.setup.assembly import Assembly, defer_late_clients, with_joined_clients, without_clients
from atlas_fl.setup.options import configured_attackers, strategy_of, with_attackers
from atlas_fl.storage import checkpoint, digests, folder_access, jsonl, tensors
from atlas_fl.storage.run_folder import RunFolder, check_folder_is_free, find_run, held_run, remove_aborted_run, run_log


class RunResult(Frozen):
    """The outcome of a run."""

    folder: Path
    rounds: int
    """Rounds that are complete."""
    complete: bool
    """True if these are all; else `resume_run` continues it."""
    summary: dict[str, Any]
    """The content of `summary.json`; of the rounds so far while the run is not complete."""


def run_config(
    config: Config,
    *,
    plugins: Sequence[object] = (),
    on_event: OnEvent = ignore,
    resume: bool = False,
    backend: Backend | None = None,
) -> RunResult:
    """Run this config in a folder of its own; without a `backend` on that of its `--engine`.

    `plugins` are classes and functions that `atlas_fl.plugins.register` decorates, or modules: the run loads the files
    that define them, in all its processes and when it is resumed.
    A folder that holds the same run is refused, or resumed with `resume=True` (a complete run is only read).
    Raises an `AtlasError` for whatever the user can mend; nothing is written before the config is valid.
    """
    config = replace(config, run=replace(config.run, plugin=(*config.run.plugin, *source_files(plugins))))
    config = pin_mask_file(validate(config, at_sites=backend is not None))
    backend = backend or BACKENDS[config.run.engine]
    folder = run_folder(config)
    check_folder_is_free(folder)
    is_new = not folder.path.exists()
    with held_run(folder.path):
        if folder.config.exists():
            if not resume:
                raise ConfigError(
                    f"run {folder.path} exists already; go on with `atlas resume {folder.path}` or --resume"
                    " (resume=True in Python), or choose another --name or --seed"
                )
            check_same_settings(config, folder)
            return _continue_run(config, folder, on_event, backend)
        folder_access.write_atomic(folder.config, to_toml(config).encode())
        try:
            return _continue_run(config, folder, on_event, backend)
        except AtlasError:
            # What could not even be planned leaves nothing behind that would stand in the way of the mended run.
            if not folder.checkpoints.exists():
                remove_aborted_run(folder.path, is_new=is_new)
            raise


def resume_run(folder: str | Path, *, max_rounds: int | None = None, on_event: OnEvent = ignore) -> RunResult:
    """Resume the run in this folder for at most `max_rounds` rounds; its result is that of an uninterrupted run.

    Raises `CheckpointError` where the folder holds no run.
    """
    existing = find_run(folder, allow_unplanned=True)
    recorded = load_config(existing.config, within=existing.path)
    load_plugins(recorded.run.plugin, outside=existing.path)
    config = validate(recorded, at_sites=True)  # it was begun; where, is told from its clients
    run_settings = replace(
        config.run, runs_dir=str(existing.path.parent), name=existing.path.name, max_rounds=max_rounds
    )
    with held_run(existing.path):
        return _continue_run(replace(config, run=run_settings), existing, on_event, BACKENDS[config.run.engine])


def _continue_run(config: Config, folder: RunFolder, on_event: OnEvent, backend: Backend) -> RunResult:
    """Plan or load the newest good checkpoint, train the remaining rounds, write the summary, in a locked folder."""
    with run_log(folder.log) as log:

        def emit(event: Any) -> None:
            if not hasattr(event, "done"):
                log(str(event))
            on_event(event)

        if folder.summary.exists():
            digests.check_files(folder, folder.config)
            result = _run_result(folder, digests.read_checked(folder, folder.summary, "run"))
            early = f"; it stopped early after round {result.rounds}" if "stopped" in result.summary else ""
            emit(Note(f"run {folder.path} is complete{early}"))
            return result
        check_mask_file(config)
        emit(PhaseStarted("loading"))
        start_time = time.perf_counter()
        with backend(config, emit) as (assembly, engine):
            assembly = defer_late_clients(assembly)
            recorder = _new_recorder(assembly, folder, asdict(model_identity(assembly.site.backbone)))
            recorder.phase_seconds["loading"] = time.perf_counter() - start_time
            return _train_remaining(assembly, engine, recorder, emit, at_sites=backend not in BACKENDS.values())


def _train_remaining(
    assembly: Assembly, engine: Engine, recorder: Recorder, emit: OnEvent, *, at_sites: bool
) -> RunResult:
    """Train the remaining rounds within `max_rounds`; after the last one train clients alone and write the summary."""
    config, folder = assembly.config, recorder.folder
    reference, line = reference_assembly(assembly, folder, at_sites=at_sites)
    tell_notes(emit, line)
    if not at_sites and config.training.dp != "none":
        emit(Note("a simulation is not private: it draws its noise from --seed"))
    assembly, planned, state = _run_to_end(assembly, with_attackers(engine, config, assembly.clients), recorder, emit)
    summary = _summarise_run(assembly, recorder)
    if state.is_over:
        whole = bool(config.data.task) and len(assembly.names) <= MOST_EXPORTED
        asked = frozenset(() if at_sites else assembly.names if whole else reference.names if reference else ())
        own = {name: params for name, params in state.predicting_models(config).items() if name in asked}
        scored = score_examples(engine, config, own, cuts_of(assembly, planned.plan), round=state.round)
        if asked and whole:
            recorder.record_resampled(resample_clients(assembly, scored))
        if reference is not None:
            emit(PhaseStarted("clients alone"))
            start_time = time.perf_counter()
            alone = _train_alone(reference, engine, recorder, emit)
            summary |= {"alone": summarise_gains(assembly, scored, alone, seconds=time.perf_counter() - start_time)}
        recorder.write_summary(summary)
        tell_notes(emit, attack_note(summary))
    return _run_result(folder, summary)


def _run_to_end(assembly: Assembly, engine: Engine, recorder: Recorder, emit: OnEvent) -> CurrentRun:
    """Plan or load, train the remaining rounds within `max_rounds`, and export the models after the last one."""
    config = assembly.config
    run = _load_or_plan(assembly, recorder, engine, emit)
    limit = config.run.max_rounds
    last = config.training.rounds if limit is None else min(config.training.rounds, run.state.round + limit)
    if not run.state.is_over:
        run = run_rounds(run, engine, last=last, recorder=recorder, on_event=emit)
    if run.state.is_over:
        emit(PhaseStarted("export"))
        export_clients(run.assembly, run.state.predicting_models(config), recorder.folder, on_event=emit)
    return run


def _train_alone(reference: Assembly, engine: Engine, recorder: Recorder, emit: OnEvent) -> dict[str, Update]:
    """Train the clients of the reference alone, or go on with that; their scores."""
    config = reference.config
    folder = RunFolder(recorder.folder.alone)

    def tell(event: Any) -> None:
        if isinstance(event, RoundFinished):
            emit(Progress("rounds alone", event.round, event.rounds))

    with held_run(folder.path):
        if not folder.config.exists():
            folder_access.write_atomic(folder.config, to_toml(config).encode())
        alone = _new_recorder(reference, folder, recorder.provenance["model"])
        reference, planned, state = _run_to_end(reference, engine, alone, tell)
        if not folder.summary.exists():
            alone.write_summary(_summarise_run(reference, alone))
    models, cuts = state.predicting_models(config), cuts_of(reference, planned.plan)
    return score_examples(engine, config, models, cuts, round=state.round)


def _new_recorder(assembly: Assembly, folder: RunFolder, model: Mapping[str, str | None]) -> Recorder:
    """The recorder of a run of this assembly, whose config lies in the folder."""
    config = assembly.config
    return Recorder(
        folder=folder,
        config=config,
        clients=assembly.clients,
        provenance=provenance_of(config, assembly.clients, model, assembly.site.secrets),
        file_digests={folder.config.name: digests.file_sha256(folder.config).hexdigest()},
    )


def _load_or_plan(assembly: Assembly, recorder: Recorder, engine: Engine, emit: OnEvent) -> CurrentRun:
    """The clients, the plan and the state to continue from: those of the newest good checkpoint, or new ones."""
    folder = recorder.folder
    saved, damage_notes = checkpoint.load_latest(
        folder.checkpoints, check=partial(check_run_files, folder), mapped=recorder.mapped
    )
    if saved is None and (intact := checkpoint.load_latest(folder.checkpoints)[0]) is not None:
        check_run_files(folder, intact)  # raises: to begin again would write over what can be restored
    for line in damage_notes:
        emit(Note(line if saved is not None else f"{line}; beginning again"))
    if saved is not None:
        return _restore_checkpoint(assembly, recorder, saved, emit)
    for leftover in (folder.metrics, folder.ledger, *folder.plans()[1:]):
        leftover.unlink(missing_ok=True)
    rounds = assembly.config.training.rounds
    if assembly.config.data.arrive:  # who could not take part is told before the first round
        late = [newcomer.client.name for newcomer in assembly.join_queue.waiting_clients(rounds)]
        cuts_for_planning(with_joined_clients(assembly, late, round=rounds))
    start_time = time.perf_counter()
    assembly, planned = _make_plan(assembly, engine, emit)
    recorder.set_clients(assembly.config, assembly.clients, assembly.site.secrets)
    recorder.phase_seconds["plan"] = time.perf_counter() - start_time
    strategy = strategy_of(assembly.config)
    # the same mapping twice: a checkpoint tells by it that everyone starts with what the server has
    weights = partial(frozen_weight, assembly.site.modules)
    begun, server_state = strategy.begin_in_weights(planned.initial_models, planned.plan.federation(), weights)
    models = dict(begun)
    strategy.check(models, planned.plan.federation())
    state = FederationState(round=0, server_models=models, server_state=server_state, client_models=models)
    recorder.record_plan(planned, state)
    return CurrentRun(assembly, planned, state)


def _make_plan(assembly: Assembly, engine: Any, emit: OnEvent) -> tuple[Assembly, PlanResult]:
    """(the assembly of the planned clients, their plan); who does not answer is left out where fewer suffice."""
    while True:
        try:
            return assembly, plan_run(assembly, engine, on_event=emit)
        except MissingAnswersError as error:
            if set(error.clients) >= set(assembly.names):
                raise
            for name in error.clients:
                assembly.join_queue.exclude_client(name, error)
            assembly = without_clients(assembly, error.clients)
            missing = ", ".join(error.clients)
            emit(Note(f"the plan is made without {missing}; others: {', '.join(assembly.names)}"))


def _restore_checkpoint(
    assembly: Assembly, recorder: Recorder, saved: checkpoint.Checkpoint, emit: OnEvent
) -> CurrentRun:
    """Restore the clients, the plan and the state of this checkpoint; truncate the logs to it."""
    folder = recorder.folder
    plan = read_plan(folder, folder.path / saved.state["plan"])
    assembly = with_joined_clients(assembly, [client.name for client in plan.clients], round=saved.round + 1)
    recorder.set_clients(assembly.config, assembly.clients, assembly.site.secrets)
    check_provenance(saved.state["origin"], recorder.provenance, folder=folder.path)
    recorder.rewind_to(saved)
    planned_tasks = {client.name: client.task for client in plan.clients}
    if list(planned_tasks.items()) != [(client.name, client.task.name) for client in assembly.clients]:
        raise CheckpointError(
            f"run {folder.path} was planned with the clients {', '.join(planned_tasks)}, and here are"
            f" {', '.join(assembly.names)}; a run across machines goes on with `atlas serve`"
        )
    emit(Note(f"resumed after round {saved.round}"))
    state = FederationState.from_checkpoint(saved, assembly.names)
    planned = PlanResult(
        plan=plan,
        initial_models=state.client_models,
        sketches=tensors.read_sketches(folder.sketches_of(recorder.plan_file)),
        clustering=Clustering.from_json(plan.clustering) if "similarity" in plan.clustering else None,
        mask=tensors.read_tensors(folder.mask) if plan.sparse else None,
    )
    return CurrentRun(assembly, planned, state)


def _summarise_run(assembly: Assembly, recorder: Recorder) -> dict[str, Any]:
    config, folder = assembly.config, recorder.folder
    return summarise(
        run={
            "name": folder.path.name,
            "federation": federation_name(config),
            "preset": config.run.preset,
            "strategy": config.mixing.strategy,
            "model": config.model.model,
            "seed": config.run.seed,
            "config_hash": config_hash(config),
        },
        metrics=jsonl.read_rows(folder.metrics),
        ledger=jsonl.read_rows(folder.ledger),
        plan=jsonl.read_json(folder.path / recorder.plan_file),
        phase_seconds=recorder.phase_seconds,
        round_seconds=recorder.round_seconds,
        memory=recorder.peak_memory(),
        full_model_bytes=tensors.encoded_size(plain_tensors(assembly.site.backbone.frozen)),
        attackers=configured_attackers(config, assembly.names),
    )


def _run_result(folder: RunFolder, summary: dict[str, Any]) -> RunResult:
    rounds = summary["run"]["rounds"]
    return RunResult(folder=folder.path, rounds=rounds, complete=folder.summary.exists(), summary=summary)
