"""`atlas sweep` and `compare`: many runs."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Literal, TypeAlias

from atlas_fl.cli.arguments import Words, parse
from atlas_fl.cli.display import going_on, show, show_progress
from atlas_fl.cli.options import CompareOptions, SweepOptions
from atlas_fl.config import Config, differences, with_values
from atlas_fl.config.conflicts import check_read
from atlas_fl.config.presets import federation_name, preset_of
from atlas_fl.data.registry import find_tasks
from atlas_fl.errors import ConfigError
from atlas_fl.events import PhaseStarted
from atlas_fl.experiment.summary import histories, mean_series
from atlas_fl.experiment.sweep import (
    LAMBDA_SWEEP,
    Point,
    RunState,
    chosen_seeds,
    comparison_name,
    grid,
    parse_over,
    run_all,
    same_steps,
)
from atlas_fl.experiment.tuning import DEVELOPMENT_SEEDS, TunedMethod, has_settings, tune_methods, write_tuning
from atlas_fl.methods.registry import ALIASES as OLD_NAMES
from atlas_fl.report import comparison_tables, drawing, federation_ranks, finished_runs
from atlas_fl.report.federation_results import VARIED, FederationResults, federation_results, lines_in_one_place
from atlas_fl.report.format import seconds
from atlas_fl.report.html.comparison_page import federations_page
from atlas_fl.report.html.elements import markdown, render
from atlas_fl.report.method_comparison import comparison_sentence, describe_runs
from atlas_fl.report.sweep import sweep_chart
from atlas_fl.setup.options import learning_rate_of
from atlas_fl.storage.folder_access import write_atomic
from atlas_fl.storage.jsonl import read_json, read_rows
from atlas_fl.storage.run_folder import RunFolder

Runs: TypeAlias = Sequence[tuple[Point, Path]]
"""Runs of a comparison and their folders."""
WORDS: dict[RunState, str] = {"finished": "is finished", "unfinished": "goes on", "new": "starts"}


def sweep(options: SweepOptions) -> int:
    """Run the sweep that these words say; 0."""
    over = [*options.over, *([LAMBDA_SWEEP] if options.lambda_sweep else [])]
    if not over:
        raise ConfigError(
            "--over is missing; allowed: a setting and its values; write for example --over eta=0,0.1,0.5"
        )
    base = options.settings
    if options.lambda_sweep and base.mixing.strategy == "atlas":
        base = with_values(base, {"strategy": "atlas_laplacian"})  # `atlas` has no eta to be swept
    values = parse_over(over)
    rounds = same_steps(base, values)
    note = ""
    if rounds:
        first = next(iter(rounds))
        note = f"{int(first) * rounds[first]['rounds']} gradient steps in every run"
        counts = ", ".join(f"{scaled['rounds']} rounds of {steps}" for steps, scaled in rounds.items())
        show([f"{note}: {counts}; --over rounds={base.training.rounds} keeps those given"])
    points = grid(base, over=values, seeds=chosen_seeds(options.seeds), rounds=rounds)
    check_read([*values, *differences(base, preset_of(base))], configs=[point.config for point in points])
    path = Path(base.run.runs_dir) / comparison_name(points, preset=federation_name(base))
    finished, written = _write_runs(_run(points), path=path, note=note)
    groups: dict[str, list[finished_runs.RunScores]] = {}
    for point, run in zip(points, finished, strict=True):
        groups.setdefault(label_of(point), []).append(run.scores)
    described = describe_runs(groups)
    files = comparison_tables.statistics_files({federation_name(base): described})
    for name, text in files.items():
        write_atomic(path.with_suffix(f".{name}"), text.encode())
    tables = [*comparison_tables.method_tables(described.rows), comparison_tables.task_table(described.rows)]
    show([*tables, *written, f"the same in full: {path.with_suffix('')}.{{{','.join(files)}}}"])
    return 0


def compare(options: CompareOptions, groups: Sequence[Words]) -> int:
    """Run the comparison that these words say; 0."""
    options = _named(options)

    values = parse_over(options.over, presets=True)
    if "strategy" in values:
        raise ConfigError("--over sweeps strategy; name the strategies with --strategies, and sweep another setting")
    each = [with_values(options.settings, {"strategy": name}) for name in options.strategies]
    typed = differences(options.settings, preset_of(options.settings))
    check_read({} if values else typed, configs=each)  # before anything is tuned
    points: list[Point] = []
    tuned: dict[str, tuple[TunedMethod, ...]] = {}
    for preset, base in _federations(groups, options, values).items():
        tuned[preset] = _tune(base, options) if options.trials else ()
        chosen = {method.strategy: method.best.settings for method in tuned[preset]}
        for name in options.strategies:
            over = {"strategy": (name,), **values} | ({"preset": (preset,)} if "preset" in values else {})
            points += grid(with_values(base, chosen.get(name, {})), over=over, seeds=chosen_seeds(options.seeds))
    check_read([*values, *typed], configs=[point.config for point in points])
    if options.control in {point.changes["strategy"] for point in points if point.config.data.centralized}:
        raise ConfigError(
            f"--control is {options.control}, which has one client a task; allowed: a strategy of clients"
        )
    federations = dict.fromkeys(federation_name(point.config) for point in points)
    path = Path(options.settings.run.runs_dir) / comparison_name(points, preset="-".join(federations))
    runs = _run(points, jobs=options.jobs)
    _write_tuning(runs, tuned)
    show([*_ranks_note(runs), *_rising_note(runs)])
    finished, written = _write_runs(runs, path=path, score=options.score)
    # a swept setting that tells methods apart makes several rows of each, and `--control` names none of them
    named = None if VARIED & set(values) else options.control
    _show_comparison(federation_results(finished, control=named), score=options.score, path=path)
    show([*written, f"as a page to look at: {path.with_suffix('.html')}"])
    return 0


def _named(options: CompareOptions) -> CompareOptions:
    """The options with strategies by their names of today; raises `ConfigError` for one that is wrong."""
    if not options.strategies:
        raise ConfigError("--strategies is empty; name at least one; see `atlas list strategies`")
    names = tuple(OLD_NAMES.get(name, name) for name in options.strategies)
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--strategies has {twice[0]} twice; name each strategy once")
    control = OLD_NAMES.get(options.control or "", options.control)
    if control is not None and control not in names:
        raise ConfigError(f"--control is {control}; allowed: one of --strategies, {', '.join(names)}")
    if options.trials and (tuned_on := sorted({*chosen_seeds(options.seeds)} & {*DEVELOPMENT_SEEDS})):
        raise ConfigError(f"--seeds has {tuned_on[0]}, on which --trials chooses settings; compare on other seeds")
    return replace(options, strategies=names, control=control)


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


def _tune(base: Config, options: CompareOptions) -> tuple[TunedMethod, ...]:
    """Try settings of every strategy, and print what was tried."""
    images = any(task.images for task in find_tasks(base.data.tasks, base.data.task))
    tuned = tune_methods(
        base,
        options.strategies,
        number=options.trials,
        lr=learning_rate_of(base, with_images=images) / base.training.rate_factor,
        run_points=lambda points: [folder for _, folder in _run(points, jobs=options.jobs)],
        score=options.score,
    )
    show(f"{method.strategy}: {method}" for method in tuned)
    return tuned


def _write_tuning(runs: Runs, tuned: Mapping[str, Sequence[TunedMethod]]) -> None:
    """Write beside every run how its settings were chosen, for the pages that are made of runs (`atlas results`)."""
    by_name = {(preset, method.strategy): method for preset, methods in tuned.items() for method in methods}
    for point, folder in runs:
        method = by_name.get((point.config.run.preset, point.config.mixing.strategy))
        if method is not None and has_settings(point.config, method.best):  # `--over` may have set another value
            write_tuning(RunFolder(folder), method)


def _run(points: Sequence[Point], *, jobs: int = 1) -> Runs:
    """Run these points; each with the folder of its finished run."""
    began: list[float] = []
    with show_progress() as on_event, going_on("the same command"):

        def announce(index: int, point: Point, state: RunState) -> None:
            run = f"run {index + 1} of {len(points)}: {label_of(point)} seed={point.config.run.seed}"
            left = ""
            if state != "finished":
                began.append(time.monotonic())
                if jobs == 1 and len(began) > 1:
                    each = (began[-1] - began[0]) / (len(began) - 1)
                    left = f" (about {seconds(each * (len(points) - index))} left in all)"
            on_event(PhaseStarted(f"{run} {WORDS[state]}{left}"))

        folders = run_all(points, jobs=None if jobs == 1 else jobs, on_run=announce, on_event=on_event)
    return list(zip(points, folders, strict=True))


def _ranks_note(runs: Runs) -> list[str]:
    """A note where the clients of one seed and federation have other ranks under other methods."""
    found: dict[tuple[str, ...], set[str]] = {}
    for point, folder in runs:
        others = [value for name, value in point.changes.items() if name not in ("strategy", "ranks")]
        ranks = [entry.get("ranks") for entry in read_json(RunFolder(folder).summary)["clients"].values()]
        found.setdefault((str(point.config.run.seed), *others), set()).add(str(ranks))
    differing = sum(len(kinds) > 1 for kinds in found.values())
    words = f"note: clients have other ranks under some methods, in {differing} of {len(found)} comparisons by seed"
    return [f"{words}; --ranks 8 gives all the same"] if differing else []


RISE = 0.01
"""Rise of the mean validation score over the last quarter of the rounds, from which training was too short."""


def _rising_note(runs: Runs) -> list[str]:
    """A note on the methods whose validation scores still rise at the end, so that more rounds may reverse them."""
    rises: dict[str, float] = {}
    for point, folder in runs:
        scores = mean_series(list(histories(read_rows(RunFolder(folder).metrics)).values()), "validation")
        before = [score for round, score in scores.items() if round <= 0.75 * point.config.training.rounds]
        rise = scores[max(scores)] - before[-1] if before else 0.0
        if rise > RISE:
            name = point.config.mixing.strategy
            rises[name] = max(rise, rises.get(name, 0.0))
    if not rises:
        return []
    words = ", ".join(f"{name} by {rise:.3f}" for name, rise in rises.items())
    rounds = 2 * max(point.config.training.rounds for point, _ in runs)
    return [f"note: validation still rises in the last quarter of the rounds, {words}; compare with --rounds {rounds}"]


def _write_runs(
    runs: Runs, *, path: Path, score: Literal["final", "best"] = "final", note: str = ""
) -> tuple[list[finished_runs.FinishedRun], list[str]]:
    """Write the runs as rows, as `atlas results` reads them, and draw them; (the runs with these scores, the files)."""
    write_atomic(path, finished_runs.to_csv([finished_runs.read_finished_run(folder) for _, folder in runs]).encode())
    finished = [finished_runs.read_finished_run(folder, score=score) for _, folder in runs]
    means = [fmean(run.scores.scores.values()) for run in finished]
    drawn = drawing.draw([sweep_chart([point.changes for point, _ in runs], means, note=note)])
    drawing.save_pdf(drawn, path.with_suffix(".pdf"))
    return finished, [f"the runs: {path}", f"and as a figure: {drawing.save_png(drawn, path.with_suffix('.png'))}"]


def _show_comparison(results: Sequence[FederationResults], *, score: Literal["final", "best"], path: Path) -> None:
    """Print and write the comparison of the methods of every federation, and their ranks over all of them."""
    compared = {result.title: result.comparison for result in results if result.comparison is not None}
    show(["", *(f"{result.title}: {line}" for result in results if (line := comparison_sentence(result.comparison)))])
    for result in results:
        show([f"\n{result.title}"] if len(results) > 1 or not comparison_sentence(result.comparison) else [])
        show([] if result.comparison is None else comparison_tables.first_tables(result.comparison))
        show(lines_in_one_place(result))
    page = federations_page(results, score=score)
    write_atomic(path.with_suffix(".html"), render(page).encode())
    if not compared:
        return
    ranks = federation_ranks.rank_if_several(list(compared.values()))
    show([] if ranks is None else [federation_ranks.ranks_table(ranks, control=next(iter(compared.values())).control)])
    files = comparison_tables.statistics_files(compared) | {"md": markdown(page, folded=True)}
    for name, text in files.items():
        write_atomic(path.with_suffix(f".{name}"), text.encode())
    show([f"all statistics in full: {path.with_suffix('')}.{{{','.join(files)}}}"])


def label_of(point: Point) -> str:
    """Label of a point: its strategy, or the swept settings and their values."""
    if list(point.changes) == ["strategy"]:
        return point.changes["strategy"]
    return " ".join(f"{name}={value}" for name, value in point.changes.items())
