"""A run from its config to its folder: begin, go on, export."""

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

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
from atlas_fl.errors import AtlasError, CheckpointError, ConfigError
from atlas_fl.events import Note, OnEvent, PhaseStarted, ignore
from atlas_fl.experiment.backends import ENGINES, Workplace
from atlas_fl.experiment.export import export_clients
from atlas_fl.experiment.recorder import (
    Recorder,
    check_origin,
    check_settings,
    check_written,
    config_note,
    models_of,
    momentum_in,
    origin_of,
    server_state_in,
)
from atlas_fl.experiment.rounds import train
from atlas_fl.experiment.state import State
from atlas_fl.experiment.summary import honest_line, summarise, versions
from atlas_fl.planning.plan import Plan, Planned
from atlas_fl.planning.planner import check_clients, plan_for
from atlas_fl.runtime.engine import Engine, MissingAnswersError
from atlas_fl.setup.assembly import Assembly, put_off, with_planned, without_clients
from atlas_fl.setup.options import attackers_in, strategy_of, with_attackers
from atlas_fl.storage import checkpoint, digests
from atlas_fl.storage.files import run_lock, write_atomic
from atlas_fl.storage.json_shapes import SUMMARY, check_shape, ledger_row, list_of, metrics_row, require_fields
from atlas_fl.storage.jsonl import read_json, read_rows
from atlas_fl.storage.ledger import payload_bytes
from atlas_fl.storage.run_folder import RunFolder, check_folder_is_free, find_run, remove_aborted_run, run_log
from atlas_fl.storage.tensors import read_sketches, read_tensors


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run has come to."""

    folder: Path
    rounds: int
    """Rounds that are complete."""
    complete: bool
    """Whether these are all; else `resume` goes on."""
    summary: dict[str, Any]
    """The content of `summary.json`; of the rounds so far while the run is not complete."""


def run(
    config: Config, *, on_event: OnEvent = ignore, resume: bool = False, workplace: Workplace | None = None
) -> RunResult:
    """Carry out this config in a folder of its own and say what came out; at the workplace of its `--engine`.

    A folder that holds the same run is refused, or with `resume` gone on with (a complete one is just read).
    Raises an `AtlasError` for whatever the user can mend; nothing is written before the config is valid.
    """
    config = pin_mask_file(validate(config, at_sites=workplace is not None))
    workplace = workplace or ENGINES[config.run.engine]
    folder = run_folder(config)
    check_folder_is_free(folder)
    made = not folder.path.exists()
    with run_lock(folder.path):
        if folder.config.exists():
            if not resume:
                raise ConfigError(
                    f"run {folder.path} exists already; go on with `atlas resume {folder.path}` or --resume"
                    " (resume=True in Python), or choose another --name or --seed"
                )
            check_settings(config, load_config(folder.config), folder=folder.path)
            return _go_on(config, folder, on_event, workplace)
        write_atomic(folder.config, to_toml(config).encode())
        try:
            return _go_on(config, folder, on_event, workplace)
        except AtlasError:
            # What could not even be planned leaves nothing behind that would stand in the way of the mended run.
            if not folder.checkpoints.exists():
                remove_aborted_run(folder.path, is_new=made)
            raise


def resume(folder: str | Path, *, max_rounds: int | None = None, on_event: OnEvent = ignore) -> RunResult:
    """Go on with the run in this folder, for at most `max_rounds` rounds; the outcome is that of an undisturbed run.

    Raises `CheckpointError` where the folder holds no run.
    """
    found = find_run(folder, allow_unplanned=True)
    config = validate(load_config(found.config), at_sites=True)  # it was begun; where, is told from its clients
    at_home = replace(config.run, runs_dir=str(found.path.parent), name=found.path.name, max_rounds=max_rounds)
    with run_lock(found.path):
        return _go_on(replace(config, run=at_home), found, on_event, ENGINES[config.run.engine])


def _go_on(config: Config, folder: RunFolder, on_event: OnEvent, workplace: Workplace) -> RunResult:
    """Plan, or load the newest good checkpoint; train what is left; write the summary. The folder is locked."""
    with run_log(folder.log) as log:

        def tell(event: Any) -> None:
            if not hasattr(event, "done"):
                log.info("%s", event)
            on_event(event)

        if folder.summary.exists():
            digests.check_files(folder, folder.summary, folder.config)
            result = _result(folder, config=config)
            early = f"; it stopped early after round {result.rounds}" if "stopped" in result.summary else ""
            tell(Note(f"run {folder.path} is complete{early}"))
            return result
        check_mask_file(config)
        tell(PhaseStarted("loading"))
        began = time.perf_counter()
        with workplace(config, tell) as (assembly, engine):
            assembly = put_off(assembly)
            recorder = _recorder(config, assembly, folder)
            recorder.seconds["loading"] = time.perf_counter() - began
            return _trained(assembly, engine, recorder, folder, tell)


def _trained(assembly: Assembly, engine: Engine, recorder: Recorder, folder: RunFolder, tell: OnEvent) -> RunResult:
    """What is left of the run, within its limit of rounds."""
    config = assembly.config
    engine = with_attackers(engine, config, assembly.clients)
    assembly, planned, state = _begin(assembly, recorder, folder, engine, tell)
    limit = config.run.max_rounds
    last = config.training.rounds if limit is None else min(config.training.rounds, state.round + limit)
    if not state.over:
        assembly, planned, state = train(assembly, planned, engine, state, last=last, recorder=recorder, on_event=tell)
    if state.over:
        tell(PhaseStarted("export"))
        export_clients(assembly, state.start, folder)
        summary = _summary(config, folder, assembly, recorder)
        recorder.completed(summary)
        if line := honest_line(summary):
            tell(Note(line))
    return _result(folder, config=config, assembly=assembly, recorder=recorder)


def _recorder(config: Config, assembly: Assembly, folder: RunFolder) -> Recorder:
    return Recorder(
        folder=folder,
        clients=assembly.clients,
        share=config.mixing.share,
        audit=config.run.audit,
        checkpoint_every=config.run.checkpoint_every,
        keep_checkpoints=config.run.keep_checkpoints,
        keep_best=config.run.keep_best,
        origin=origin_of(config, assembly.clients),
        files={folder.config.name: digests.file_sha256(folder.config).hexdigest()},
    )


def _begin(
    assembly: Assembly, recorder: Recorder, folder: RunFolder, engine: Any, tell: OnEvent
) -> tuple[Assembly, Planned, State]:
    """The clients, the plan and the state to go on from: of the newest good checkpoint, or fresh ones."""
    found, damaged = checkpoint.load_latest(folder.checkpoints, check=partial(check_written, folder))
    if found is None and (intact := checkpoint.load_latest(folder.checkpoints)[0]) is not None:
        check_written(folder, intact)  # raises: to begin again would write over what can be restored
    for line in damaged:
        tell(Note(line if found is not None else f"{line}; beginning again"))
    if found is not None:
        return _resumed(assembly, recorder, folder, found, tell)
    for leftover in (folder.metrics, folder.ledger, *folder.plans()[1:]):
        leftover.unlink(missing_ok=True)
    _check_late(assembly)
    began = time.perf_counter()
    assembly, planned = _planned(assembly, engine, tell)
    recorder.enlarge(assembly.config, assembly.clients)
    recorder.seconds["plan"] = time.perf_counter() - began
    strategy = strategy_of(assembly.config)
    # the same mapping twice: a checkpoint tells by it that everyone starts with what the server has
    models = dict(planned.start)
    strategy.check(models, planned.plan.federation())
    state = State(round=0, server_models=models, server_state=strategy.init(models), start=models)
    recorder.planned(planned, state, communicates=strategy.communicates)
    return assembly, planned, state


def _planned(assembly: Assembly, engine: Any, tell: OnEvent) -> tuple[Assembly, Planned]:
    """The plan, and the assembly of those who are in it: who does not answer is left out where fewer suffice."""
    while True:
        try:
            return assembly, plan_for(assembly, engine, on_event=tell)
        except MissingAnswersError as error:
            if set(error.clients) >= set(assembly.names):
                raise
            for name in error.clients:
                assembly.door.leave_out(name, error)
            assembly = without_clients(assembly, error.clients)
            left = ", ".join(error.clients)
            tell(Note(f"the plan is made without {left}; others: {', '.join(assembly.names)}"))


def _check_late(assembly: Assembly) -> None:
    """Raise an `AtlasError` for who comes later and cannot take part, before the rounds until then."""
    rounds = assembly.config.training.rounds
    if assembly.config.data.arrive:
        late = [one.client.name for one in assembly.door.waiting(rounds)]
        check_clients(with_planned(assembly, late, round=rounds))


def _resumed(
    assembly: Assembly, recorder: Recorder, folder: RunFolder, found: checkpoint.Checkpoint, tell: OnEvent
) -> tuple[Assembly, Planned, State]:
    """The clients, the plan and the state of this checkpoint."""
    plan = Plan.from_json(read_json(folder.path / found.state["plan"]))
    assembly = with_planned(assembly, [client.name for client in plan.clients], round=found.round + 1)
    recorder.enlarge(assembly.config, assembly.clients)
    check_origin(found.state["origin"], recorder.origin, folder=folder.path)
    if note := config_note(folder, found):
        tell(Note(note))
    recorder.go_back_to(found)
    _check_clients(plan, assembly, folder)
    server_models, start = models_of(found, assembly.names)
    tell(Note(f"resumed after round {found.round}"))
    clustering = Clustering.from_json(plan.clustering) if "similarity" in plan.clustering else None
    state = State(
        round=found.round,
        server_models=server_models,
        server_state=server_state_in(found),
        start=start,
        stale=frozenset(found.state["stale"]),
        validation=found.state["validation"],
        history={int(at): score for at, score in found.state.get("history", {}).items()},
        # checkpoints older than early stopping know no other end than the last round
        over=found.state.get("over", found.round == assembly.config.training.rounds),
        momentum=momentum_in(found),
    )
    mask = read_tensors(folder.mask) if plan.sparse else None
    sketches = read_sketches(folder.sketches_of(recorder.plan_file))
    return assembly, Planned(plan=plan, start=start, sketches=sketches, clustering=clustering, mask=mask), state


def _check_clients(plan: Plan, assembly: Assembly, folder: RunFolder) -> None:
    planned, found = ([(one.name, one.task) for one in plan.clients], [(c.name, c.task.name) for c in assembly.clients])
    if planned != found:
        raise CheckpointError(
            f"run {folder.path} was planned with the clients {', '.join(name for name, _ in planned)}, and here are"
            f" {', '.join(name for name, _ in found)}; a run across machines goes on with `atlas serve`"
        )


def _summary(config: Config, folder: RunFolder, assembly: Assembly, recorder: Recorder) -> dict[str, Any]:
    metrics = read_rows(folder.metrics)
    check_shape(metrics, list_of(metrics_row), file=folder.metrics)
    ledger = read_rows(folder.ledger)
    check_shape(ledger, list_of(ledger_row), file=folder.ledger)
    return summarise(
        run={
            "name": folder.path.name,
            "preset": config.run.preset,
            "strategy": config.mixing.strategy,
            "model": config.model.model,
            "seed": config.run.seed,
            "config_hash": config_hash(config),
        },
        metrics=metrics,
        ledger=ledger,
        plan=read_json(folder.path / recorder.plan_file),
        phase_seconds=recorder.seconds,
        memory=recorder.memory(),
        versions=versions(),
        full_model_bytes=payload_bytes(assembly.site.backbone.frozen),
        round_seconds=recorder.round_seconds,
        attackers=attackers_in(config, assembly.names),
    )


def _result(
    folder: RunFolder,
    *,
    config: Config,
    assembly: Assembly | None = None,
    recorder: Recorder | None = None,
) -> RunResult:
    complete = folder.summary.exists()
    if complete:
        summary = read_json(folder.summary)
        check_shape(summary, SUMMARY, file=folder.summary)
        require_fields(summary, "run", file=folder.summary)
    else:
        assert assembly is not None and recorder is not None, "a run without a summary has just been trained"
        summary = _summary(config, folder, assembly, recorder)
    rounds = summary["run"]["rounds"]
    return RunResult(folder=folder.path, rounds=rounds, complete=complete, summary=summary)
