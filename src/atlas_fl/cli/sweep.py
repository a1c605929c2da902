"""`atlas sweep`, `compare` and `search`: many runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from atlas_fl.cli.arguments import ALIASES, Positional, SettingsOptions, Words, base_config, parse, split
from atlas_fl.cli.display import going_on, show, show_progress
from atlas_fl.config import Config, validate, with_values
from atlas_fl.errors import MAX_REPR_CHARACTERS, ConfigError
from atlas_fl.events import PhaseStarted
from atlas_fl.experiment.sweep import (
    LAMBDA_SWEEP,
    Point,
    RunState,
    chosen_seeds,
    comparison_name,
    grid,
    parse_over,
    same_steps,
    with_eta,
    write_planned_runs,
)
from atlas_fl.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from atlas_fl.experiment.tuning import TunedMethod
    from atlas_fl.report.method_comparison import MethodComparison

STRATEGIES = ("local", "fedavg_cluster", "atlas")
COMPARED = {flag: "--strategies" if name == "--strategy" else name for flag, name in ALIASES.items()} | {
    "--methods": "--strategies",
    "--algorithms": "--strategies",
}
"""Flags of other programs, and their names in a comparison."""
MOST_TRIALS = 20
"""Most settings of a method that are tried; with more, learning rates reach a thousand times the default."""
Runs: TypeAlias = Sequence[tuple[Point, Path]]
"""Runs of a comparison and their folders."""
WORDS: dict[RunState, str] = {"finished": "is finished", "unfinished": "goes on", "new": "starts"}


@dataclass(frozen=True, kw_only=True)
class SweepOptions(SettingsOptions):
    """Run every combination of the swept values with several seeds; finished runs are left alone, begun ones go on.
    Ends in a table, its CSV and LaTeX files, and a figure."""

    over: tuple[str, ...] = ()
    """A setting and its values, `eta=0,0.01,0.1`; may be repeated. Parts of a list are joined by +: `share=A+B,B`."""
    lambda_sweep: bool = False
    """The same as `--over eta=0,0.01,0.1,0.5,1` with the strategy atlas_laplacian."""
    seeds: tuple[int, ...] = (1,)
    """Number of seeds of each combination: 42, 123, 456, 789, 1024, then 2001 and on. Several numbers are the seeds."""
    same_rounds: bool = False
    """Keep the rounds in a sweep over local_steps; by default they are scaled, and all runs take equally many gradient
    steps."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SettingsOptions):
    """Run several strategies with several seeds; finished runs are left alone, begun ones go on. Ends in a table, its
    CSV and LaTeX files, a figure and a page."""

    names: Annotated[tuple[str, ...], Positional("STRATEGY ...")] = ()
    """The strategies (`atlas list strategies`)."""
    strategies: tuple[str, ...] = STRATEGIES
    """The same as a flag; `--ablation` is the same flag."""
    over: tuple[str, ...] = ()
    """A setting and its values beside the strategies, `dial=1,3`, `eta=0,0.5` or `preset=null,label-skew`; may be
    repeated. Strategies are compared for each value, and ranked over all of them."""
    lambda_sweep: bool = False
    """The same as `--over eta=0,0.01,0.1,0.5,1`."""
    seeds: tuple[int, ...] = (3,)
    """Number of seeds of each strategy: 42, 123, 456, 789, 1024, then 2001 and on. Several numbers are the seeds."""
    control: str | None = None
    """The strategy that the others are tested against; by default the first of fedavg_cluster, fedavg and local."""
    score: Literal["final", "best"] = "final"
    """Test scores of the models that clients end with, or of the best round by validation."""
    trials: int = 0
    """Settings of each strategy that are tried beforehand on development seeds; the best by validation is compared."""
    jobs: int = 1
    """Runs at once, as many as fit into the free memory, each in a process of its own with its share of the cores."""


def sweep(words: Sequence[str]) -> int:
    """Run the sweep that these words say; 0."""
    groups = split(words)
    _refuse(groups, "--seed", "how many seeds there are is --seeds, and which they are `atlas sweep --help` says")
    options = parse(SweepOptions, groups, command="atlas sweep")
    over = [*options.over, *([LAMBDA_SWEEP] if options.lambda_sweep else [])]
    if not over:
        raise ConfigError(
            "--over is missing; allowed: a setting and its values; write for example --over eta=0,0.1,0.5"
        )
    base = with_eta(options.settings) if options.lambda_sweep else options.settings
    return run_grid(base, over=over, seeds=chosen_seeds(options.seeds), same_rounds=options.same_rounds)


def compare(words: Sequence[str]) -> int:
    """Run the comparison that these words say; 0."""
    groups = split(words, aliases=COMPARED)
    _refuse(groups, "--seed", "how many seeds there are is --seeds, and which they are `atlas compare --help` says")
    _refuse(groups, "--strategy", "name all that are compared with --strategies")
    options = _parse_comparison(groups)

    from atlas_fl.report.federation_results import VARIED
    from atlas_fl.report.html.write import write_report

    values = parse_over([*options.over, *([LAMBDA_SWEEP] if options.lambda_sweep else [])], presets=True)
    if "strategy" in values:
        raise ConfigError("--over sweeps strategy; name the strategies with --strategies, and sweep another setting")
    points: list[Point] = []
    tuned: dict[str, tuple[TunedMethod, ...]] = {}
    for preset, base in _federations(groups, options, values).items():
        tuned[preset] = _tune(base, options) if options.trials else ()
        chosen = {method.strategy: method.best.settings for method in tuned[preset]}
        for name in options.strategies:
            over = {"strategy": (name,), **values} | ({"preset": (preset,)} if "preset" in values else {})
            points += grid(with_values(base, chosen.get(name, {})), over=over, seeds=chosen_seeds(options.seeds))
    path = Path(options.settings.run.runs_dir) / comparison_name(points, preset="-".join(tuned))
    write_planned_runs(points, path)
    runs = _run(points, jobs=options.jobs)
    _write_tuning(runs, tuned)
    _show_comparison(runs, path=path, note="")
    _show_all_statistics(runs, options, tuned, path=path)
    # A swept setting that tells methods apart makes several rows of each, and --control names none of them.
    control = None if VARIED & set(values) else options.control
    page = write_report(
        [folder for _, folder in runs], to=path.with_suffix(".html"), control=control, score=options.score
    )
    show([f"as a page to look at: {page}"])
    return 0


def _parse_comparison(groups: Sequence[Words]) -> CompareOptions:
    """The options of these words, strategies by their names of today; raises `ConfigError` for one that is wrong."""
    from atlas_fl.experiment.tuning import DEVELOPMENT_SEEDS
    from atlas_fl.methods.registry import ALIASES as OLD_NAMES

    options = parse(CompareOptions, groups, command="atlas compare", config=base_config(_with_preset(groups)))
    if options.names:
        if any(group.flag == "--strategies" for group in groups):
            raise ConfigError(f"{options.names[0]} is named beside --strategies; name all strategies in one place")
        options = replace(options, strategies=options.names)
    if not options.strategies:
        raise ConfigError("--strategies is empty; name at least one; see `atlas list strategies`")
    names = tuple(OLD_NAMES.get(name, name) for name in options.strategies)
    if options.lambda_sweep and options.strategies == STRATEGIES:  # nobody has named `atlas`, which has no eta
        names = tuple("atlas_laplacian" if name == "atlas" else name for name in names)
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--strategies has {twice[0]} twice; name each strategy once")
    control = OLD_NAMES.get(options.control or "", options.control)
    if control is not None and control not in names:
        raise ConfigError(f"--control is {control}; allowed: one of --strategies, {', '.join(names)}")
    if options.jobs < 1:
        raise ConfigError(f"--jobs is {options.jobs}; allowed: at least 1")
    if not 0 <= options.trials <= MOST_TRIALS:
        raise ConfigError(f"--trials is {options.trials}; allowed: 1 to {MOST_TRIALS}, or 0 for none")
    if options.trials and (tuned_on := sorted({*chosen_seeds(options.seeds)} & {*DEVELOPMENT_SEEDS})):
        raise ConfigError(f"--seeds has {tuned_on[0]}, on which --trials chooses settings; compare on other seeds")
    return replace(options, strategies=names, control=control)


def _with_preset(groups: Sequence[Words]) -> list[Words]:
    """The words, with the first preset of `--over preset=...` as theirs, so that `--dial` has one to be of."""
    over = [value for group in groups if group.flag == "--over" for value in group.values]
    presets = [value.partition("=")[2].split(",")[0].strip() for value in over if value.startswith("preset=")]
    return [Words("--preset", (presets[0],)), *groups] if presets and presets[0] else list(groups)


def _federations(
    groups: Sequence[Words], options: CompareOptions, values: Mapping[str, Sequence[str]]
) -> dict[str, Config]:
    """The settings of every preset that is compared in, by its name: the flags on top of what the preset says."""
    if "preset" not in values:
        return {options.settings.run.preset: options.settings}
    for group in groups:
        if group.flag in ("--preset", "--config"):
            raise ConfigError(f"{group.flag} is given beside --over preset=...; leave one of them out")
    each = {preset: [*groups, Words("--preset", (preset,))] for preset in values["preset"]}
    return {preset: parse(CompareOptions, words, command="atlas compare").settings for preset, words in each.items()}


def _show_all_statistics(
    runs: Runs, options: CompareOptions, tuned: "Mapping[str, Sequence[TunedMethod]]", *, path: Path
) -> None:
    """Compare the methods, with `--over` for each swept value by itself, and then rank them over all values."""
    from atlas_fl.report.federation_ranks import rank_comparisons, ranks_json, ranks_table
    from atlas_fl.storage.folder_access import write_atomic

    groups = _group_runs(
        runs, by=lambda point: " ".join(f"{name}={value}" for name, value in _beside_strategy(point).items())
    )
    comparisons = {}
    for beside, group in groups.items():
        points = [point for point, _ in group]
        preset = points[0].config.run.preset
        own_path = path if len(groups) == 1 else path.with_name(comparison_name(points, preset=preset))
        show([f"\n{beside}"] if beside else [])
        comparisons[beside] = _show_statistics(group, options, tuned[preset], path=own_path)
    if len(groups) > 1 and len(options.strategies) > 1:
        ranks, control = rank_comparisons(list(comparisons.values())), next(iter(comparisons.values())).control
        write_atomic(path.with_suffix(".json"), ranks_json(ranks, over=list(comparisons)).encode())
        show([ranks_table(ranks, control=control), f"the ranks: {path.with_suffix('.json')}"])


def _group_runs(runs: Runs, *, by: Callable[[Point], str]) -> dict[str, list[tuple[Point, Path]]]:
    groups: dict[str, list[tuple[Point, Path]]] = {}
    for point, folder in runs:
        groups.setdefault(by(point), []).append((point, folder))
    return groups


def _folders_by(runs: Runs, *, by: Callable[[Point], str]) -> dict[str, list[Path]]:
    return {label: [folder for _, folder in group] for label, group in _group_runs(runs, by=by).items()}


def _tune(base: Config, options: CompareOptions) -> "tuple[TunedMethod, ...]":
    """Try settings of every strategy, and print what was tried."""
    from atlas_fl.data.registry import find_tasks
    from atlas_fl.experiment.tuning import tune_methods, value_words
    from atlas_fl.setup.options import learning_rate_of

    images = any(task.images for task in find_tasks(base.data.tasks, base.data.task))
    tuned = tune_methods(
        base,
        options.strategies,
        number=options.trials,
        lr=learning_rate_of(base, with_images=images),
        run_points=lambda points: [folder for _, folder in _run(points, jobs=options.jobs)],
        score=options.score,
    )
    for method in tuned:
        values = " ".join(f"{name}={value_words(value)}" for name, value in method.best.settings.items())
        show([f"{method.strategy}: {values} (validation {method.best.validation:.3f}, best of {len(method.trials)})"])
    return tuned


def _write_tuning(runs: Runs, tuned: "Mapping[str, Sequence[TunedMethod]]") -> None:
    """Write beside every run how its settings were chosen, for the pages that are made of runs (`atlas results`)."""
    from atlas_fl.experiment.tuning import has_settings, write_tuning

    by_name = {(preset, method.strategy): method for preset, methods in tuned.items() for method in methods}
    for point, folder in runs:
        method = by_name.get((point.config.run.preset, point.config.mixing.strategy))
        if method is not None and has_settings(point.config, method.best):  # `--over` may have set another value
            write_tuning(RunFolder(folder), method)


def _refuse(groups: Sequence[Words], flag: str, remedy: str) -> None:
    """Raise `ConfigError` for a flag of `atlas run` that many runs would each overwrite."""
    for group in groups:
        if group.flag == flag:
            given = " ".join(group.values)[:MAX_REPR_CHARACTERS]
            raise ConfigError(f"{flag} {given} is for one run, and these are several; {remedy}")


def run_grid(base: Config, *, over: Sequence[str], seeds: Sequence[int], same_rounds: bool = False) -> int:
    """Run every point and print the comparison; 0."""
    values = parse_over(over)
    scaled = None if same_rounds else same_steps(base, values)
    show([] if scaled is None else [str(scaled)])
    points = grid(base, over=values, seeds=seeds, scaled=scaled)
    path = Path(base.run.runs_dir) / comparison_name(points, preset=base.run.preset)
    write_planned_runs(points, path)
    note = "" if scaled is None else f"{scaled.steps} gradient steps in every run"
    _show_comparison(_run(points), path=path, note=note)
    return 0


def _run(points: Sequence[Point], *, jobs: int = 1) -> Runs:
    """Run these points; each with the folder of its finished run."""
    from atlas_fl.experiment.parallel_runs import run_all

    with show_progress() as on_event, going_on("the same command"):

        def announce(index: int, point: Point, state: RunState) -> None:
            run = f"run {index + 1} of {len(points)}: {label_of(point)} seed={point.config.run.seed}"
            on_event(PhaseStarted(f"{run} {WORDS[state]}"))

        folders = run_all(points, jobs=None if jobs == 1 else jobs, on_run=announce, on_event=on_event)
    return list(zip(points, folders, strict=True))


def _show_statistics(
    runs: Runs, options: CompareOptions, tuned: "Sequence[TunedMethod]", *, path: Path
) -> "MethodComparison":
    """Print the statistics of the methods, and write all of them beside the comparison."""
    from atlas_fl.report.comparison_tables import (
        comparison_json,
        latex,
        markdown,
        methods_csv,
        pairs_csv,
        terminal_tables,
    )
    from atlas_fl.report.method_comparison import compare_methods
    from atlas_fl.storage.folder_access import write_atomic

    central = _in_one_place([point for point, _ in runs])
    by_strategy = _folders_by(runs, by=lambda point: point.changes["strategy"])
    groups = {name: folders for name, folders in by_strategy.items() if name not in central}
    if central:
        show([f"{', '.join(central)}: one client a task, and so not in the statistics by client"])
    comparison = compare_methods(groups, control=options.control, score=options.score)
    by_federation = {_federation_name(runs[0][0]): comparison}
    files = {
        ".methods.csv": methods_csv(by_federation),
        ".pairs.csv": pairs_csv(by_federation),
        ".json": comparison_json(comparison, tuned),
        ".md": markdown(comparison, tuned),
        ".methods.tex": latex(comparison),
    }
    for suffix, text in files.items():
        write_atomic(path.with_suffix(suffix), text.encode())
    show(terminal_tables(comparison))
    show([f"all statistics, with differences by seed, in full: {path.with_suffix('')}{{{','.join(files)}}}"])
    return comparison


def _federation_name(point: Point) -> str:
    """`contradiction, dial 2`, with what is swept beside."""
    run = point.config.run
    beside = [f"{name}={value}" for name, value in _beside_strategy(point).items() if name not in ("preset", "dial")]
    return ", ".join([run.preset, *([] if run.dial is None else [f"dial {run.dial}"]), *beside])


def _in_one_place(points: Sequence[Point]) -> list[str]:
    """The strategies without clients of their own; none where all are, which compare with each other."""
    strategies = {point.changes["strategy"]: point.config.data.centralized for point in points}
    return [] if all(strategies.values()) else [name for name, is_central in strategies.items() if is_central]


def _show_comparison(runs: Runs, *, path: Path, note: str) -> None:
    from atlas_fl.report.drawing import draw, save_pdf, save_png
    from atlas_fl.report.score_table import comparison_rows, comparison_table, tasks_table, to_csv, to_latex
    from atlas_fl.report.sweep import read_sweep_scores, sweep_chart
    from atlas_fl.storage.folder_access import write_atomic

    rows = comparison_rows(_folders_by(runs, by=label_of), local=local_runs(runs))
    latex = path.with_suffix(".tex")
    write_atomic(path, to_csv(rows).encode())
    write_atomic(latex, to_latex(rows).encode())
    scores = read_sweep_scores([point.changes for point, _ in runs], [folder for _, folder in runs])
    chart = sweep_chart(scores, note=note)
    drawn = draw([] if chart is None else [chart], empty="no run of this sweep has test scores")
    save_pdf(drawn, path.with_suffix(".pdf"))
    figure = save_png(drawn, path.with_suffix(".png"))
    show([comparison_table(rows), tasks_table(rows)])
    show([f"the same as CSV: {path}", f"as LaTeX: {latex}", f"and as a figure: {figure}"])


def local_runs(runs: Runs) -> dict[str, list[Path]]:
    """The runs of strategy local that differ from a point in strategy and seed alone, by the label of the point."""
    return {
        label_of(point): [
            folder
            for other, folder in runs
            if other.config.mixing.strategy == "local" and _beside_strategy(other) == _beside_strategy(point)
        ]
        for point, _ in runs
    }


def _beside_strategy(point: Point) -> dict[str, str]:
    return {name: value for name, value in point.changes.items() if name != "strategy"}


def label_of(point: Point) -> str:
    """Label of a point: its strategy, or the swept settings and their values."""
    if list(point.changes) == ["strategy"]:
        return point.changes["strategy"]
    return " ".join(f"{name}={value}" for name, value in point.changes.items())


@dataclass(frozen=True, kw_only=True)
class SearchOptions(SettingsOptions):
    """Search for the settings with the best validation score by tree-structured Parzen estimators; each trial is a run.
    The same command goes on where it was stopped. Ends in a table, a CSV file and best.toml."""

    over: tuple[str, ...] = ()
    """A setting and its range, `lr=1e-4..1e-2:log` or `local-steps=4..16`, or its values, `weight-decay=0,1e-4`; may be
    repeated."""
    trials: int = 20
    """Trials of the whole search, those of before among them."""
    pruner: Literal["none", "median"] = "none"
    """`median` gives up a run whose best validation score so far is below the median of the others at that round."""


def search(words: Sequence[str]) -> int:
    """Run the search that these words say; 0."""
    groups = split(words)
    options = parse(SearchOptions, groups, command="atlas search")
    if not options.over:
        raise ConfigError("--over is missing; allowed: a setting and its range; write --over lr=1e-4..1e-2:log")
    validate(options.settings)

    from atlas_fl.experiment.search import BEST, TABLE, parse_space
    from atlas_fl.experiment.search import run_search as run_search
    from atlas_fl.report.sweep import search_csv, search_table
    from atlas_fl.storage.folder_access import write_atomic

    with show_progress() as on_event, going_on("the same command"):

        def announce(number: int, point: Point, state: RunState) -> None:
            trial = f"trial {number} ({number + 1} of {options.trials}): {label_of(point)}"
            on_event(PhaseStarted(f"{trial} {WORDS[state]}"))

        study = run_search(
            options.settings,
            space=parse_space(options.over),
            trials=options.trials,
            pruner=options.pruner,
            on_trial=announce,
            on_event=on_event,
        )
    write_atomic(study.folder / TABLE, search_csv(study.trials).encode())
    show([search_table(study), f"the same as CSV: {study.folder / 'trials.csv'}"])
    show([f"the best settings: atlas run --config {study.folder / BEST}"])
    return 0
