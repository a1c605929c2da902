"""`atlas demo`: a first run that says what it does, how long it takes here and what came out, and writes its page."""

from collections.abc import Iterator
from dataclasses import replace

from atlas_fl.cli.display import going_on, show, show_progress
from atlas_fl.cli.doctor import measure
from atlas_fl.cli.options import DemoOptions
from atlas_fl.cli.tables import outcome
from atlas_fl.config import Config, run_folder, validate
from atlas_fl.config.presets import find_preset
from atlas_fl.experiment.run import run_config
from atlas_fl.experiment.run_time import RunTime
from atlas_fl.report.format import seconds
from atlas_fl.report.html.write import write_report
from atlas_fl.storage.run_folder import RunFolder


def demo(options: DemoOptions) -> int:
    """Run what these words name, write its page and print where it lies; 0."""
    base = find_preset(options.preset)
    config = validate(replace(base, run=replace(base.run, runs_dir=options.runs_dir)))
    folder = run_folder(config)
    show(introduction(config))
    if not folder.config.exists():
        show(["", "measuring some training steps ..."])
        show(time_lines(measure([options.preset]).runs[options.preset]))
    show([""])

    with show_progress() as on_event, going_on("the same command"):
        result = run_config(config, resume=True, on_event=on_event)
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


def time_lines(predicted: RunTime) -> Iterator[str]:
    """Time that a run takes, from what was measured."""
    before = predicted.loading + predicted.planning
    yield (
        f"about {seconds(predicted.total)} on this machine as busy as it is now: {seconds(before)} before round 1,"
        f" then {seconds(predicted.round)} for each of {predicted.rounds} rounds"
    )
    yield "Stop it with Ctrl-C whenever you like; the same command goes on after the last complete round."


def next_steps(config: Config, folder: RunFolder) -> Iterator[str]:
    """Next steps after this run."""
    preset = config.run.preset
    yield ""
    yield "What to look at next:"
    yield f"  atlas report {folder.path}    also draws each figure as PNG and PDF"
    yield f"  atlas run --preset {preset} --strategy local    everyone alone: what training together is worth"
    yield f"  atlas compare --preset {preset} --strategies local fedavg_cluster atlas --seeds 3    with intervals"
    yield "  docs/guides/your-own-data.md    a csv file of yours"
    yield "Open this page in a browser:"
