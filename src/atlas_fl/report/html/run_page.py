"""The page of one run, in the order in which people ask."""

import shlex
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atlas_fl.config import config_hash, load_config, to_toml
from atlas_fl.errors import first_of
from atlas_fl.experiment.answers import read_evaluation
from atlas_fl.experiment.harness import read_harness
from atlas_fl.experiment.summary import MEASURED, attack_note, client_scores, gain_note, group_scores
from atlas_fl.report import figure_rows, figures, finished_runs, tables
from atlas_fl.report.answers import answers_table, harness_table, scores_table
from atlas_fl.report.format import MOST_SHOWN, evenly
from atlas_fl.report.html.charts import Chart, Row, chart, row_height
from atlas_fl.report.html.elements import Block, Command, Facts, Folded, Page, Section, Text
from atlas_fl.report.record import Record, read_record
from atlas_fl.report.table import Cell, Columns, Number, Table, cell_at, count, duration, plain, share, size, table_of
from atlas_fl.storage.digests import check_files
from atlas_fl.storage.run_folder import RunFolder, find_run

PRIVACY = ("privacy spent", "no bound", "no noise of differential privacy is in what was sent")


def run_page(run: Path | str) -> Page:
    """The page of a run; of one that is not complete, of its rounds up to the newest checkpoint.

    A section for which the run's files hold nothing is left out.

    Raises:
        CheckpointError: this is no run folder, or a file in it is damaged.
    """
    folder = find_run(run)
    record = read_record(folder.path)
    last = max((row["round"] for row in record.metrics), default=0)
    sections: dict[tuple[str, str], list[Block]] = {
        ("outcome", "What came out"): _outcome(record),
        ("answers", "What its models answer"): _answers(folder),
        ("convergence", "How it converged"): [*figures.charts_of(record, "convergence", "scores", "by-class")],
        ("clients", "Who the clients are"): _clients(record),
        ("plan", "Who was found alike, and what was planned"): [
            *figures.charts_of(record, "clusters", "adjacency", "ranks", "mask"),
            *tables.plan_tables(record.plan),
        ],
        ("sharing", "How personal each model is"): [*figures.charts_of(record, "sharing")],
        ("costs", "What it cost"): _costs(record),
        ("events", "Events of the rounds"): _events(record),
        ("plugins", "Figures of plug-ins"): [*figures.plugin_charts(record).values()],
        ("settings", "Settings, and how to make it again"): _settings(folder),
    }
    words = record.summary.get("run", {})
    named = "preset" if words.get("federation") in (None, words.get("preset")) else "federation"
    parts = [f"{name} {words[name]}" for name in (named, "strategy", "model", "seed") if words.get(name) is not None]
    done = f"Shown is what was saved after round {last}." if last else "No round has been saved yet."
    warnings = [attack_note(record.summary)] if record.summary else [f"This run is not complete. {done}"]
    if (clients := len(record.task_of)) > MOST_SHOWN:
        warnings.append(f"Charts and tables name {MOST_SHOWN} of {clients:,} clients. Means and CSV files are of all.")
    return Page(
        title=record.name,
        subtitle=", ".join(["one run", *parts, f"{last} round{'' if last == 1 else 's'}"]),
        sections=[
            Section(name=name, title=title, blocks=blocks) for (name, title), blocks in sections.items() if blocks
        ],
        warnings=[warning for warning in warnings if warning],
    )


def _outcome(record: Record) -> list[Block]:
    """Final scores against the majority class, by task and by client; nothing before the first test score."""
    summary = record.summary or {
        "tasks": {task: group_scores(members) for task, members in record.by_task.items() if members},
        "overall": group_scores(list(record.histories.values())),
    }
    clients = record.summary.get("clients") or {name: client_scores(h) for name, h in record.histories.items()}
    scored = {name: entry["final"]["test"] for name, entry in clients.items() if "test" in entry.get("final", {})}
    if not scored:
        return []
    mean, order = summary["overall"]["final"]["test"], sorted(scored, key=lambda name: -scored[name]["primary"])
    facts: list[tuple[str, Cell, str]] = [
        ("mean test score", plain(mean["primary"]), f"of {len(scored)} clients, at the end"),
        ("over the majority class", plain(mean.get("gain_over_majority"), sign=True), ""),
        ("best client", plain(scored[order[0]]["primary"]), order[0]),
        ("worst client", plain(scored[order[-1]]["primary"]), order[-1]),
        ("sent in all", size(record.totals.total), f"{size(record.totals.up).text} up"),
    ]
    full = (summary.get("bytes") or {}).get("full_model", {})
    if "reduction" in full and record.totals.total:
        facts.append(("less than the whole model in every round", share(full["reduction"]), ""))
    spent = [row["epsilon"] for row in record.metrics if row.get("epsilon") is not None]
    most = "largest epsilon of a client; noise from the seed of a simulation protects nobody"
    facts.append(("privacy spent", plain(max(spent)), most) if spent else PRIVACY)
    told = gain_note(record.summary)
    alone = record.summary["alone"]["clients"].items() if told else ()
    gains = sorted(({"client": name, **entry} for name, entry in alone), key=lambda entry: -entry["gain"])
    return [
        *([Text(lines=[told])] if told else []),
        Facts(facts=facts),
        _outcome_chart(record, clients, order),
        tables.closing_table(summary),
        *tables.site_tables(summary),
        _client_table(record, clients),
        *([table_of("Together and alone", GAINS, gains, note=GAINS_NOTE)] if told else []),
        *_class_tables(record),
    ]


GAINS: Columns = {
    "client": cell_at("client"),
    "together": cell_at("together", plain),
    "alone": cell_at("alone", plain),
    "gain": cell_at("gain", lambda gain: plain(gain, sign=True)),
    "95%": cell_at("interval", lambda ends: Number(value=ends[0], text=f"{ends[0]:+.3f} to {ends[1]:+.3f}")),
}
GAINS_NOTE = (
    "final test scores; alone: the same settings, and nothing is mixed; 95%: of the gain, over draws of the client's"
    " test examples; of one seed"
)


def _class_tables(record: Record) -> list[Block]:
    """Precision, recall and F1 of every class over all clients, and folded by client; nothing without classes."""
    rows = figure_rows.class_rows(record)
    pooled = [row for row in rows if row["client"] == figure_rows.ALL]
    if not pooled:
        return []
    columns = {name: cell for name, cell in CLASS_SCORES.items() if name != "client"}
    by_client = table_of("By class and client", CLASS_SCORES, [row for row in rows if row["client"] != figure_rows.ALL])
    return [
        table_of("By class", columns, pooled, note=CLASS_SCORES_NOTE),
        Folded(title="The same by client", blocks=[by_client]),
    ]


CLASS_SCORES: Columns = {
    "task": cell_at("task"),
    "client": cell_at("client"),
    "class": cell_at("class"),
    **{name: cell_at(name, plain) for name in ("precision", "recall", "f1")},
    "support": cell_at("examples", count),
}
CLASS_SCORES_NOTE = "of the last test of all clients, each by its own model; support: test examples of the class"


def _outcome_chart(record: Record, clients: Mapping[str, Any], scored: list[str]) -> Chart:
    order = evenly([name for task in record.tasks for name in scored if record.task_of[name] == task])
    rows: list[Row] = [
        {
            "client": name,
            "task": record.task_of[name],
            "majority": clients[name]["final"]["test"].get("majority"),
            "best": clients[name].get("best", {}).get("test", {}).get("primary"),
            "final": clients[name]["final"]["test"]["primary"],
        }
        for name in order
    ]
    return chart("outcome", rows, clients=order, tasks=record.tasks, height=row_height(len(order)))


def _client_table(record: Record, clients: Mapping[str, Any]) -> Table:
    devices = {client["name"]: client["device"] for client in record.plan["clients"]}
    sent = record.totals.by_client
    known = [
        {**entry, "name": name, "task": record.task_of[name], "device": devices[name], "sent": sent.get(name)}
        for name, entry in clients.items()
    ]
    return table_of("By client", CLIENT_SCORES, known, note=CLIENT_SCORES_NOTE)


CLIENT: Columns = {"client": cell_at("name"), **{name: cell_at(name) for name in ("task", "device")}}
CLIENT_SCORES: Columns = {
    **CLIENT,
    **{name: tables.SCORES[name] for name in ("majority", "final", "over majority", "best")},
    "in round": cell_at("best.round", count),
    "sent": cell_at("sent.up", lambda sent: size(sent or 0)),
    "received": cell_at("sent.down", lambda sent: size(sent or 0)),
    "busy": cell_at("utilisation.busy", share),
}
CLIENT_SCORES_NOTE = "busy: predicted seconds of training over those of the slowest client of each round"


def _clients(record: Record) -> list[Block]:
    """The clients and the differences of their data."""
    data = {row["client"]: row for row in record.plan["data"]}
    known = [{**client, "data": data.get(client["name"])} for client in record.plan["clients"]]
    table = table_of("Examples of every client", CLIENT_DATA, known, note=CLIENT_DATA_NOTE)
    notes = record.plan["notes"]
    folded = [Folded(title="What the plan noted", blocks=[Text(lines=notes)])] if notes else []
    return [*figures.charts_of(record, "classes"), table, *folded]


CLIENT_DATA: Columns = {
    **CLIENT,
    "training": cell_at("data.examples.train", count),
    "validation": cell_at("data.examples.validation", count),
    "test": cell_at("data.examples.test", count),
    "majority class": cell_at("data.majority.train", share),
    "labels from the task's": cell_at("data.distance", lambda distance: plain(distance, 2)),
}
CLIENT_DATA_NOTE = (
    "labels from the task's: half the L1 distance between a client's mix of labels and its task's, 0 to 1"
)


def _costs(record: Record) -> list[Block]:
    """Bytes by kind, and seconds by phase."""
    blocks: list[Block] = [*figures.charts_of(record, "bytes")]
    sums, seconds = record.totals, record.summary.get("seconds", {})
    if sums.total:
        rows: list[list[Cell]] = [
            [kind, size(ways["up"]), size(ways["down"]), share((ways["up"] + ways["down"]) / sums.total)]
            for kind, ways in sums.by_kind.items()
        ]
        footer: list[list[Cell]] = [["all", size(sums.up), size(sums.down), share(1.0)]]
        columns = ("kind", "up", "down", "share")
        blocks.append(Table(title="By kind of message", columns=columns, rows=rows, footer=footer))
    if seconds:
        phases: list[list[Cell]] = [[name, duration(taken)] for name, taken in seconds["phases"].items()]
        footer = [["all", duration(seconds["total"])], ["a round, mean", duration(seconds.get("round_mean"))]]
        blocks.append(Table(title="By phase", columns=("phase", "time here"), rows=phases, footer=footer))
    return blocks


def _events(record: Record) -> list[Block]:
    """Clients that were refused, missing, late or hosted, and secure sums; empty where there are none."""
    events: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for row in record.metrics:
        if "event" in row and row["event"] not in ("mixed", "timed", MEASURED):
            detail = str(row.get("reason") or row.get("host") or "")
            events[row.get("client", "all"), row["event"], detail].append(row["round"])
    rows: list[list[Cell]] = []
    for (client, event, detail), at in events.items():
        rows.append([client, event, count(len(at)), first_of(at), detail])
    columns = ("client", "event", "times", "rounds", "detail")
    return [Table(title="Events", columns=columns, rows=rows)] if rows else []


def _answers(folder: RunFolder) -> list[Block]:
    """Scores by kind of model and some answers; nothing where the run has not been evaluated."""
    scored, harness = read_evaluation(folder), read_harness(folder)
    blocks = [] if scored is None else [scores_table(scored), *([answers_table(scored)] if scored.answers else [])]
    return [*blocks, *([harness_table(harness)] if harness else [])]


def _settings(folder: RunFolder) -> list[Block]:
    """The commands that repeat the run, and all its settings."""
    check_files(folder, folder.config)
    config = load_config(folder.config, within=folder.path)
    again = f"atlas run --config {shlex.quote(f'{folder.path.name}/config.toml')} --name again"
    return [
        Command(words=finished_runs.run_command(config), what=f"With flags; settings {config_hash(config):.8}:"),
        Command(words=again, what="From the run's own file, in the folder in which the run lies:"),
        Folded(title="All settings", blocks=[Command(words=to_toml(config), what="config.toml")]),
    ]
