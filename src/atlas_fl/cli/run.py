"""`atlas run`, `plan`, `resume`, `fetch` and `check-method`, and the flag of experiment trackers."""

from collections.abc import Callable
from pathlib import Path

from atlas_fl.cli import options as cli
from atlas_fl.cli.arguments import check_target, holds_json
from atlas_fl.cli.display import going_on, show, show_progress
from atlas_fl.cli.tables import outcome
from atlas_fl.config import Config, load_config, pin_mask_file, run_folder, validate
from atlas_fl.errors import ConfigError
from atlas_fl.events import OnEvent
from atlas_fl.experiment.run import RunResult, resume_run, run_config
from atlas_fl.methods.laws import LAWS, check_method
from atlas_fl.planning.planner import make_plan
from atlas_fl.plugins import load_plugins, registrations
from atlas_fl.report.tables import plan_tables
from atlas_fl.report.trackers import TRACKERS, Tracker, track_run
from atlas_fl.storage.assets import assets, embedded_dir
from atlas_fl.storage.downloads import fetch_assets
from atlas_fl.storage.jsonl import write_json
from atlas_fl.storage.run_folder import find_run


def run(options: cli.RunOptions) -> int:
    """Run what these words say; 0."""
    config = validate(options.settings)

    _carry_out(
        config,
        run_folder(config).path,
        trackers=_trackers(options),
        work=lambda on_event: run_config(config, on_event=on_event, resume=options.resume),
    )
    return 0


def plan(options: cli.PlanOptions) -> int:
    """Print the plan of what these words say; 0."""
    config = pin_mask_file(validate(options.settings))
    check_target(
        options.to, example="plan.json", is_own=lambda path: holds_json(path, keys=("clients", "adjacency", "data"))
    )

    with show_progress(notes=False) as on_event:
        plan_json = make_plan(config, on_event=on_event).to_json()
    show(plan_tables(plan_json))
    # the table of clusters has these below it
    warnings = (plan_json.get("clustering") or {}).get("warnings") or ()
    show(f"note: {line}" for line in plan_json["notes"] if line not in warnings)
    show([f"the run would be {run_folder(config).path}"])
    if options.to is not None:
        write_json(Path(options.to), plan_json)
    return 0


def resume(options: cli.ResumeOptions) -> int:
    """Go on with the run that these words name; 0."""
    folder = find_run(options.run, runs_dir=options.runs_dir, allow_unplanned=True)
    config = load_config(folder.config, within=folder.path)
    if options.tracker:
        load_plugins(config.run.plugin, outside=folder.path)
    _carry_out(
        config,
        folder.path,
        trackers=_trackers(options),
        work=lambda on_event: resume_run(folder.path, max_rounds=options.max_rounds, on_event=on_event),
    )
    return 0


def _trackers(options: cli.TrackerOptions) -> tuple[Tracker, ...]:
    """A tracker for each that is named, with a place to log to; those of plug-ins once these are loaded."""
    named = [word.partition("=") for word in options.tracker]
    for name, sign, place in named:
        if not sign or name not in TRACKERS:
            raise ConfigError(
                f"--tracker is {name}{sign}{place}; allowed: NAME=PLACE of a plug-in,"
                f" {', '.join(TRACKERS) or 'and --plugin names none'}; add --plugin FILE (docs/guides/trackers.md)"
            )
    return tuple(TRACKERS[name](place) for name, _, place in named)


def _carry_out(
    config: Config, folder: Path, *, trackers: tuple[Tracker, ...], work: Callable[[OnEvent], RunResult]
) -> None:
    """Do this work, show what goes on and what came out, and log it to the trackers that are named."""
    with (
        show_progress() as on_event,
        going_on(f"`atlas resume {folder}`"),
        track_run(trackers, config, folder, on_event) as logging,
    ):
        result = work(logging.tell)
        if result.complete:
            logging.summary(result.summary)
    show(outcome(result.folder, result.summary, complete=result.complete))


def fetch(options: cli.FetchOptions) -> int:
    """Fetch what these words name; 0."""
    wanted = [asset for asset in assets().values() if asset.group == options.what]
    fetch_assets(wanted, embedded_dir(), report=lambda line: show([line]))
    return 0


def check_methods(options: cli.CheckMethodOptions) -> int:
    """Check every method of this plug-in; 0 where all laws hold, 1 where one does not."""
    (pinned,) = load_plugins((options.plugin,))
    methods = registrations(pinned, "method")
    if not methods:
        raise ConfigError(f"{options.plugin} registers no method; give it @register('method') from atlas_fl.plugins")
    lines, failed = [], False
    for name, method in methods.items():
        faults = check_method(method)
        failed = failed or bool(faults)
        lines += [f"{name}: {fault}" for fault in faults] or [f"{name}: all {len(LAWS)} laws hold ({', '.join(LAWS)})"]
    show(lines)
    return int(failed)
