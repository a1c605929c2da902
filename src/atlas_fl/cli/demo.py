"""`atlas demo`: a first run that says what it does, how long it takes here and what came out, and writes its page."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from atlas_fl.cli.arguments import parse, split
from atlas_fl.cli.display import going_on, show, show_progress
from atlas_fl.cli.doctor import measure
from atlas_fl.config import Config, run_folder, validate
from atlas_fl.config.presets import find_preset
from atlas_fl.events import Event, Note, OnEvent, PhaseStarted, RoundFinished
from atlas_fl.report.format import cluster_name, number, seconds

if TYPE_CHECKING:
    from atlas_fl.experiment.run_time import RunTime
    from atlas_fl.storage.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Train a first federation and write its page: says what happens, how long it takes on this machine, and what to
    look at. The run is that of `atlas run --preset quick`; given again, the command goes on where it was stopped."""

    preset: Literal["quick", "smoke"] = "quick"
    """Preset of the run: smoke takes a tenth of the time and only shows that everything works."""
    runs_dir: str = "runs"
    """Where run folders lie."""


def demo(words: Sequence[str]) -> int:
    """Run what these words name, write its page and print where it lies; 0."""
    options = parse(DemoOptions, split(words), command="atlas demo")
    base = find_preset(options.preset)
    config = validate(replace(base, run=replace(base.run, runs_dir=options.runs_dir)))
    folder = run_folder(config)
    show(introduction(config))
    if not folder.config.exists():
        show(["", "measuring some training steps ..."])
        show(time_lines(measure([options.preset]).runs[options.preset]))
    show([""])

    from atlas_fl.cli.tables import outcome
    from atlas_fl.experiment.run import run_config
    from atlas_fl.report.html.write import write_report

    with show_progress() as on_event, going_on("the same command"):
        result = run_config(config, resume=True, on_event=with_first_results(on_event, folder))
    show(outcome(result.folder, result.summary, complete=result.complete))
    page = write_report([result.folder])
    show([*next_steps(config, folder), str(page)])
    return 0


def introduction(config: Config) -> Iterator[str]:
    """Description of a run of this config, in the words of a newcomer."""
    data, rounds = config.data, config.training.rounds
    tasks = ", ".join(data.tasks)
    clients = len(data.tasks) * data.clients_per_task
    yield f"{clients} clients train together on this machine, {data.clients_per_task} for each task: {tasks}."
    yield "Each keeps its own texts and ends with its own model, a small adapter on one frozen encoder."
    yield "  1. fingerprints: which clients are alike, from what each computes on its own texts"
    yield "  2. ranks: how large an adapter each client's device can hold"
    yield f"  3. {rounds} rounds of training and mixing: a line each, with the mean score and the worst client's"
    yield "  4. report.html: what came out, on one page"
    yield f"It is `atlas run --preset {config.run.preset}`, which repeats to the bit on this machine."


def time_lines(predicted: "RunTime") -> Iterator[str]:
    """Time that a run takes, from what was measured."""
    before = predicted.loading + predicted.planning
    yield (
        f"about {seconds(predicted.total)} on this machine as busy as it is now: {seconds(before)} before round 1,"
        f" then {seconds(predicted.round)} for each of {predicted.rounds} rounds"
    )
    yield "Stop it with Ctrl-C whenever you like; the same command goes on after the last complete round."


def with_first_results(
    on_event: OnEvent, folder: "RunFolder", *, clock: Callable[[], float] = time.perf_counter
) -> OnEvent:
    """A callback that adds notes at the first results: who is alike before training, and after a round the time left.

    In a run that goes on the first round is the first one of now.
    """
    round_start: list[float] = []
    finished: list[int] = []

    def tell(event: Event) -> None:
        on_event(event)
        if isinstance(event, PhaseStarted) and event.name.startswith("round ") and not round_start:
            round_start.append(clock())
            on_event(Note(alike_line(folder)))
        elif isinstance(event, RoundFinished) and not finished:
            finished.append(event.round)
            on_event(Note(first_result(event, seconds_of_training=clock() - round_start[0])))

    return tell


def alike_line(folder: "RunFolder") -> str:
    """The clients of each cluster, from the run's plan."""
    from atlas_fl.storage.jsonl import read_json

    members = defaultdict[int, list[str]](list)
    for client in read_json(folder.plan)["clients"]:
        members[client["cluster"]].append(client["name"])
    groups = (f"{cluster_name(cluster)}: {' '.join(names)}" for cluster, names in sorted(members.items()))
    return f"found alike, before any training together: {'; '.join(groups)}"


def first_result(event: RoundFinished, *, seconds_of_training: float) -> str:
    """Result of the first round, and the time of the others at its pace."""
    scores = list(event.scores.values())
    mean = number(sum(scores) / len(scores) if scores else None, 3)
    left, rest = event.rounds - event.round, (event.rounds - event.round) * event.seconds
    more = f"; {left} more {'round' if left == 1 else 'rounds'}, about {seconds(rest)} at this pace" if left else ""
    return f"first result after {seconds(seconds_of_training)} of training: mean validation score {mean}{more}"


def next_steps(config: Config, folder: "RunFolder") -> Iterator[str]:
    """Next steps after this run."""
    preset = config.run.preset
    yield ""
    yield "What to look at next:"
    yield f"  atlas report {folder.path}    also draws each figure as PNG and PDF"
    yield f"  atlas run --preset {preset} --strategy local    everyone alone: what training together is worth"
    yield f"  atlas compare --preset {preset} --strategies local fedavg_cluster atlas --seeds 3    with intervals"
    yield "  docs/guides/your-own-data.md    a csv file of yours"
    yield "Open this page in a browser:"
