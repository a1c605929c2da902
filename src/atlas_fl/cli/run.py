"""`atlas run`, `plan`, `resume`, `fetch` and `list`, and the flag of experiment trackers."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TypeAlias

from rich.table import Table

from atlas_fl.cli import options as cli
from atlas_fl.cli.arguments import check_target, holds_json
from atlas_fl.cli.display import going_on, show, show_progress
from atlas_fl.cli.tables import outcome
from atlas_fl.config import Config, load_config, pin_mask_file, run_folder, settings, validate, value_of
from atlas_fl.config.conflicts import conflicts, flag_of
from atlas_fl.config.methods import knobs_of, method_class, published_methods, with_method_settings
from atlas_fl.config.presets import presets
from atlas_fl.config.settings import replace_settings
from atlas_fl.config.values import describe, to_words
from atlas_fl.data.registry import TASKS
from atlas_fl.errors import ConfigError, unknown_name
from atlas_fl.events import OnEvent
from atlas_fl.experiment.run import RunResult, resume_run, run_config
from atlas_fl.methods.laws import LAWS, check_method
from atlas_fl.methods.registry import ALIASES, METHODS, RULES
from atlas_fl.models.registry import MODELS
from atlas_fl.planning.planner import make_plan
from atlas_fl.plugins import load_plugins, registrations
from atlas_fl.ranks.devices import DEVICES, PROFILES, REQUIRED
from atlas_fl.report.format import human_bytes
from atlas_fl.report.tables import plan_tables
from atlas_fl.report.trackers import TRACKERS, Tracker, track_run
from atlas_fl.setup.options import parts_of_config
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


Lines: TypeAlias = Iterable[tuple[str, ...]]

WRAPPED = ("note", "what it does", "what it is", "reason and remedy")
"""Columns of sentences; every other one keeps its words on one line."""


def catalogue(options: cli.ListOptions) -> int:
    """Print the registry that these words name; 0."""
    if options.plugin:
        load_plugins(options.plugin)
    if options.name is not None and options.what != "strategies":
        raise ConfigError(f"unexpected words: {options.name}; a strategy alone can be named; see `atlas list --help`")
    if options.name is not None:
        show([_listing(_strategies(options.name)), _listing(_knobs(options.name))])
    else:
        kinds = (("atlas list", "what it is"), *((name, about) for name, (about, _) in CATALOGUES.items()))
        show([_listing(kinds if options.what is None else CATALOGUES[options.what][1]())])
    return 0


def _listing(rows: Lines) -> Table:
    header, *lines = rows
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in header:
        table.add_column(title, overflow="fold", no_wrap=title not in WRAPPED)
    for line in lines:
        table.add_row(*line)
    return table


def _knobs(name: str) -> Lines:
    """The settings that a strategy has an effect on, or fixes, with their values under it."""
    name = ALIASES.get(name, name)
    method = published_methods().get(name)
    config = with_method_settings(replace_settings({"strategy": name}, base=Config()))
    fixed = {} if method is None else method.settings
    suggested = {} if method is None else method.suggested
    knobs = {*method_class(config).uses, *(one.name for part in parts_of_config(config) for one in fields(part))}
    yield "flag", "value", "what it is"
    for setting in settings().values():
        is_own = setting.name in {*suggested, *knobs}
        if is_own or setting.name in fixed:
            note = "" if setting.name not in fixed else " Fixed by the strategy."
            yield setting.flag, " ".join(to_words(value_of(config, setting.name))), setting.help + note
    for knob in knobs_of(method_class(config)).values():
        allowed = describe(knob.kind) if knob.range is None else knob.range.describe()
        yield knob.flag, " ".join(to_words(knob.default)), f"{knob.help} ({allowed})"


def _conflicts() -> Lines:
    yield "setting", "with", "reason and remedy"
    for row in conflicts():
        flags = [flag_of(name) for name, _ in row.values]
        first, *others = [f"{flag} {words}" for flag, (_, words) in zip(flags, row.values, strict=True)]
        yield first, " and ".join(others), f"{row.reason}; {row.remedy}".format(*flags, candidates="--candidates")


def _tasks() -> Lines:

    yield "task", "labels", "metric", "length", "note"
    for task in TASKS.values():
        labels = str(task.num_labels) if task.num_labels > 1 else "text" if task.writes else "number"
        yield task.name, labels, task.metric_name, "-" if task.images else str(task.max_length), task.note


def _strategies(alone: str | None = None) -> Lines:

    yield "strategy", "what it does"
    names = [*RULES, *METHODS] if alone is None else [ALIASES.get(alone, alone)]
    if unknown := {*names} - {*RULES, *METHODS}:
        raise unknown_name("strategy", unknown.pop(), [*RULES, *METHODS, *ALIASES])
    for name in names:
        method = METHODS.get(name)
        rule = RULES[name if method is None else method.rule]
        aliases = [alias for alias, target in ALIASES.items() if target == name]
        summary = (rule.__doc__ or "").strip().partition("\n")[0] if method is None else method.summary
        also = f" Also {', '.join(aliases)}." if aliases else ""
        has_equal_ranks = rule.equal_ranks or (method is not None and method.equal_ranks)
        needs = ["equal ranks"] if has_equal_ranks else [rule.needs] if rule.needs else []
        own = {} if method is None else {**method.settings, **method.suggested}
        needs += ["twice the training"] if "second_model" in own and "personal_models" not in own else []
        needs += [rule.extra_passes] if rule.extra_passes else []
        sets = " ".join(f"{setting}={' '.join(to_words(value))}" for setting, value in own.items())
        lines = [f"{summary}{also}", f"needs: {'; '.join(needs) or 'nothing'}"]
        lines += [] if method is None else [f"rule: {rule.name}"]
        lines += [f"differs from its paper: {differs}"] if (differs := (method or rule).differs) else []
        yield name, "\n".join([*lines, *([f"sets: {sets}"] if sets else [])])


def _devices() -> Lines:

    # the words of --device, so that a line can be copied into a profile of one's own
    yield "device", *REQUIRED, "upload"
    for name, values in PROFILES.items():
        yield name, *(f"{values[key]:g}" for key in REQUIRED), human_bytes(DEVICES[name].adapter_bytes)


CATALOGUES: Mapping[cli.What, tuple[str, Callable[[], Lines]]] = {
    "tasks": ("data sets, their labels and metrics", _tasks),
    "models": (
        "pretrained models by their alias",
        lambda: (
            ("model", "size", "lr", "from", "note"),
            *((one.alias, one.parameters, f"{one.lr:g}", one.path, one.note) for one in MODELS.values()),
        ),
    ),
    "strategies": ("the server's rules and published methods; with a name, the settings of that one", _strategies),
    "devices": ("profiles of the clients' machines", _devices),
    "presets": (
        "recipes that all defaults come from",
        lambda: (("preset", "what it is"), *((name, preset.about) for name, preset in presets().items())),
    ),
    "conflicts": ("settings that contradict each other", _conflicts),
}
"""Summary and table of each list."""
