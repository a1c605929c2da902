"""FIGURES: the figures of a run, each with its rows and its charts; the page shows them, `draw_all` writes files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

from atlas_fl.frozen import Frozen
from atlas_fl.report import csv_text, drawing, figure_rows, mask_charts
from atlas_fl.report.figure_rows import EVERY_CLIENT, Row
from atlas_fl.report.format import evenly, isolate
from atlas_fl.report.html.charts import Chart, chart, colour, heat_map
from atlas_fl.report.record import Record, read_record
from atlas_fl.storage.folder_access import write_atomic
from atlas_fl.storage.ledger import KINDS
from atlas_fl.storage.run_folder import find_run

FigureOf: TypeAlias = Callable[[Record], Chart | None]
"""(what a run has recorded) -> a chart of it; None where the run has nothing to show."""
PLUGIN_FIGURES: dict[str, FigureOf] = {}
"""Figures of plug-ins, by the name of their file."""


class Figure(Frozen):
    """A figure of a run: the page, its PNG and PDF have its charts, its CSV file has its rows."""

    rows: Callable[[Record], list[Row]]
    """None where the run has nothing to show."""
    charts: Callable[[Record, list[Row]], list[Chart]]
    columns: int = 1
    """Charts beside each other in a file."""


def _convergence(record: Record, rows: list[Row]) -> list[Chart]:
    charts = []
    for index, task in enumerate(record.tasks):
        of_task = [row for row in rows if row["task"] == task]
        means = [row for row in of_task if row["client"] == EVERY_CLIENT]
        losses = [row for row in means if row["series"].endswith("loss")]
        scores = [row for row in of_task if row["series"] == "validation score"]
        beside = [row for row in means if not row["series"].endswith(("score", "loss"))]
        if not scores:
            continue
        clients = [name for name in dict.fromkeys(row["client"] for row in scores) if name != EVERY_CLIENT]
        charts += [
            chart(
                "score",
                scores + beside,
                name=f"score-{index}",
                task=isolate(task),
                colour=colour(index),
                faded=max(0.2, min(0.75, 6 / len(clients))),
                options=[None, *clients],
                labels=["all clients", *clients],
            ),
            chart("loss", losses, name=f"loss-{index}", task=isolate(task), colour=colour(index)),
        ]
    return charts


def _scores(_: Record, rows: list[Row]) -> list[Chart]:
    return [heat_map("scores", rows, columns=sorted({row["round"] for row in rows}))]


def _adjacency(record: Record, rows: list[Row]) -> list[Chart]:
    clients = record.sorted_clients
    pairs = {frozenset((row["client"], row["other"])) for row in rows if row["client"] != row["other"]}
    alone = len(clients) - len(frozenset[str]().union(*pairs))
    lone = f", {alone} of {len(clients)} clients without any" if alone else ""
    is_wide = len(clients) > 12
    return [heat_map("adjacency", rows, edges=len(pairs), lone=lone, columns=clients, lines=clients, is_wide=is_wide)]


def _clusters(record: Record, rows: list[Row]) -> list[Chart]:
    assert record.sketches is not None
    shares = figure_rows.principal_components(record.sketches)[2]
    reason = (record.plan["clustering"].get("structure") or {}).get("reason")
    components = chart(
        "noisy_scatter",
        rows,
        name="clusters",
        reason=f"{reason}; " if reason else "",
        x=f"first component, {shares[0]:.0%} of the variance",
        y=f"second component, {shares[1]:.0%} of the variance",
        tasks=record.tasks,
    )
    if "tsne_x" not in rows[0]:
        return [components]
    names = ("client", "task", "cluster")
    places = [{name: row[name] for name in names} | {"x": row["tsne_x"], "y": row["tsne_y"]} for row in rows]
    return [components, chart("scatter", places, name="tsne", x="first", y="second", tasks=record.tasks)]


def _ranks(_: Record, rows: list[Row]) -> list[Chart]:
    layers = sorted({row["layer"] for row in rows})
    return [heat_map("ranks", rows, columns=list(range(layers[0], layers[-1] + 1)))]


def _bytes(_: Record, rows: list[Row]) -> list[Chart]:
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    rounds = list(range(rows[0]["round"], rows[-1]["round"] + 1))
    return [chart("bytes", rows, rounds=rounds, kinds=kinds, colours=[f"var(--kind-{kind})" for kind in kinds])]


def _classes(record: Record, rows: list[Row]) -> list[Chart]:
    charts = []
    for index, task in enumerate(record.tasks):
        of_task = [row for row in rows if row["task"] == task]
        classes = list(dict.fromkeys(row["class"] for row in of_task))
        if not classes:
            continue
        charts.append(
            heat_map(
                "classes",
                [row for row in of_task if row["examples"]],
                name=f"classes-{index}",
                task=isolate(task),
                apart=fmean(data["distance"] for data in record.plan["data"] if data["task"] == task),
                domain=(0.0, max(row["share"] for row in of_task)),
                columns=classes,
                is_wide=len(classes) > 8,
            )
        )
    return charts


def _sharing(record: Record, rows: list[Row]) -> list[Chart]:
    groups = sorted({row["parameters"] for row in rows}, key=figure_rows.group_order)
    return [heat_map("sharing", rows, domain=(0.0, 1.0), columns=groups, lines=evenly(record.sorted_clients))]


def _mask(record: Record, rows: list[Row]) -> list[Chart]:
    shares = {rows[0]["mask"]: {row["tensor"]: row["moving"] for row in rows}}
    return [mask_charts.density_chart(shares, share=1 - record.plan["sparse"]["sparsity"])]


def _by_class(record: Record, rows: list[Row]) -> list[Chart]:
    return [
        heat_map("by-class", of_task, name=f"by-class-{index}", task=isolate(task), domain=(0.0, 1.0))
        for index, task in enumerate(record.tasks)
        if (of_task := [row for row in rows if row["task"] == task])
    ]


FIGURES: dict[str, Figure] = {
    "convergence": Figure(rows=figure_rows.convergence_rows, charts=_convergence, columns=2),
    "scores": Figure(rows=figure_rows.score_rows, charts=_scores),
    "by-class": Figure(rows=figure_rows.class_rows, charts=_by_class),
    "classes": Figure(rows=figure_rows.label_rows, charts=_classes),
    "clusters": Figure(rows=figure_rows.sketch_rows, charts=_clusters, columns=2),
    "adjacency": Figure(rows=figure_rows.adjacency_rows, charts=_adjacency),
    "ranks": Figure(rows=figure_rows.rank_rows, charts=_ranks),
    "sharing": Figure(rows=figure_rows.sharing_rows, charts=_sharing),
    "mask": Figure(rows=figure_rows.mask_rows, charts=_mask),
    "bytes": Figure(rows=figure_rows.traffic_rows, charts=_bytes),
}
"""A figure by the name of its files."""


def charts_of(record: Record, *names: str) -> list[Chart]:
    """The charts of these figures, of those for which the run has rows."""
    return [made for name in names for made in _charts(record, name, FIGURES[name].rows(record))]


def _charts(record: Record, name: str, rows: Sequence[Row]) -> list[Chart]:
    """The charts of a figure with these rows, of many clients for some; none without rows."""
    hidden = record.task_of.keys() - set(evenly(record.sorted_clients))
    shown = [row for row in rows if row.get("client") not in hidden]
    return FIGURES[name].charts(record, shown) if shown else []


def plugin_charts(record: Record) -> dict[str, Chart]:
    """The charts that plug-ins make of a run, by the name of their file."""
    charts = {name: figure(record) for name, figure in PLUGIN_FIGURES.items()}
    return {name: made for name, made in charts.items() if made is not None}


def draw_all(run_dir: Path | str) -> list[Path]:
    """Draw every figure for which a run has rows, and those of plug-ins that are loaded, and return their paths.

    They lie in its `figures/` folder, each as PNG at 300 DPI and as PDF, with its numbers as CSV.

    Raises:
        CheckpointError: this is no run folder, or a file in it is damaged.
    """
    folder = find_run(run_dir)
    record = read_record(folder.path)
    drawn: dict[str, tuple[str, Sequence[Mapping[str, Any]]]] = {}
    for name, figure in FIGURES.items():
        rows = figure.rows(record)
        if charts := _charts(record, name, rows):
            drawn[name] = drawing.draw(charts, columns=min(figure.columns, len(charts))), rows
    for name, made in plugin_charts(record).items():
        drawn[name] = drawing.draw([made]), made.rows
    paths = []
    for name, (svg, numbers) in drawn.items():
        path = folder.figures / f"{name}.png"
        drawing.save_pdf(svg, path.with_suffix(".pdf"), within=folder.path)
        write_atomic(path.with_suffix(".csv"), csv_text.format_csv(numbers).encode(), within=folder.path)
        paths.append(drawing.save_png(svg, path, within=folder.path))
    return paths
