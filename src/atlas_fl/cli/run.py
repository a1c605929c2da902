"""`atlas run`, `atlas plan` and `atlas resume`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from atlas_fl.cli.live import going_on, show, show_progress
from atlas_fl.cli.parse import parse
from atlas_fl.cli.settings import base_config, check_target, holds_json
from atlas_fl.cli.words import split
from atlas_fl.config import Config, load_config, pinned, run_folder, validate
from atlas_fl.errors import ConfigError
from atlas_fl.events import OnEvent

if TYPE_CHECKING:
    from atlas_fl.run import RunResult


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Train a federation and leave a run folder. The defaults below are those of --preset and, over it, of --config."""

    config: str | None = None
    """A TOML or YAML file of settings, such as the config.toml of a run."""
    resume: bool = False
    """Go on with the run of these settings, if it was begun."""
    lambda_sweep: bool = False
    """Sweep eta as `atlas sweep --lambda-sweep` does, with one seed."""
    wandb: str | None = None
    """Log to this project of Weights & Biases too (`pip install 'atlas-fl[wandb]'`); with WANDB_MODE=offline to files
    alone."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Show clusters, the k table, ranks, and predicted bytes, memory and seconds of a run; trains nothing and writes
    nothing but with --to."""

    config: str | None = None
    """A TOML or YAML file of settings, such as the config.toml of a run."""
    to: str | None = None
    """Write the plan as JSON to this file as well."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Go on with a run where its last checkpoint is; it ends with the same bits as one that was never stopped."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run, or its name in --runs-dir."""
    max_rounds: int | None = None
    """Stop after this many rounds."""
    runs_dir: str = "runs"
    """Where run folders lie."""
    wandb: str | None = None
    """Log to this project of Weights & Biases too, as the same run as before."""


def run(words: Sequence[str]) -> int:
    """Run what these words say; 0."""
    groups = split(words)
    options = parse(RunOptions(settings=base_config(groups)), groups, command="atlas run")
    if options.lambda_sweep and options.wandb is not None:
        raise ConfigError("--wandb logs one run, and --lambda-sweep makes several; leave one of them out")
    if options.lambda_sweep:
        from atlas_fl.cli.sweep import run_grid
        from atlas_fl.sweep import LAMBDA_SWEEP

        return run_grid(options.settings, over=[LAMBDA_SWEEP], seeds=[options.settings.run.seed])
    config = validate(options.settings)

    from atlas_fl.run import run as run_config

    _carry_out(
        config,
        run_folder(config).path,
        project=options.wandb,
        work=lambda on_event: run_config(config, on_event=on_event, resume=options.resume),
    )
    return 0


def plan(words: Sequence[str]) -> int:
    """Print the plan of what these words say; 0."""
    groups = split(words)
    options = parse(PlanOptions(settings=base_config(groups)), groups, command="atlas plan")
    config = pinned(validate(options.settings))
    check_target(
        options.to, example="plan.json", is_own=lambda path: holds_json(path, keys=("clients", "adjacency", "data"))
    )

    from atlas_fl.io.results import write_json
    from atlas_fl.lines import make_plan
    from atlas_fl.report.plan_tables import plan_tables

    with show_progress(notes=False) as on_event:
        found = make_plan(config, on_event=on_event).to_json()
    show(plan_tables(found))
    # the table of clusters has these below it
    told = (found.get("clustering") or {}).get("warnings") or ()
    show(f"note: {line}" for line in found["notes"] if line not in told)
    show([f"the run would be {run_folder(config).path}"])
    if options.to is not None:
        write_json(Path(options.to), found)
    return 0


def resume(words: Sequence[str]) -> int:
    """Go on with the run that these words name; 0."""
    options = parse(ResumeOptions(run=tyro.MISSING), split(words), command="atlas resume")

    from atlas_fl.io.folder import find_run
    from atlas_fl.run import resume as resume_run

    if options.max_rounds is not None and options.max_rounds < 1:
        raise ConfigError(f"--max-rounds is {options.max_rounds}; allowed: at least 1; give more, or leave it out")
    found = find_run(options.run, runs_dir=options.runs_dir, begun=True)
    _carry_out(
        load_config(found.config),
        found.path,
        project=options.wandb,
        work=lambda on_event: resume_run(found.path, max_rounds=options.max_rounds, on_event=on_event),
    )
    return 0


def _carry_out(config: Config, folder: Path, *, project: str | None, work: Callable[[OnEvent], "RunResult"]) -> None:
    """Do this work, show what goes on and what came out, and log it to a project where there is one."""
    from atlas_fl.cli.tables import outcome

    with show_progress() as on_event, going_on(f"`atlas resume {folder}`"):
        if project is None:
            result = work(on_event)
        else:
            from atlas_fl.report.tracking import tracked

            with tracked(project, config, folder, on_event) as tracker:
                result = work(tracker.tell)
                if result.complete:
                    tracker.summary(result.summary)
    show(outcome(result.folder, result.summary, complete=result.complete))
