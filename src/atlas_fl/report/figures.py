"""draw_all: all figures of a run as files, each made of charts and tables of its page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from atlas_fl.report.drawing import draw, save_pdf, save_png
from atlas_fl.report.figure_rows import ROWS, to_csv
from atlas_fl.report.html.elements import Chart, Section
from atlas_fl.report.html.run_clients import data_of_clients, likeness, moving_weights, ranks, sharing
from atlas_fl.report.html.run_costs import leakage, traffic
from atlas_fl.report.html.run_page import plugin_charts
from atlas_fl.report.html.run_scores import convergence
from atlas_fl.report.record import Record, read_record
from atlas_fl.report.table import Table
from atlas_fl.storage.folder_access import write_atomic
from atlas_fl.storage.run_folder import find_run


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of a run: the blocks of one section of its page whose names begin like this."""

    section: Callable[[Record], Section | None]
    charts: tuple[str, ...]
    """Names of charts up to their number, and titles of tables."""
    empty: str
    """Sentence of the figure if the run has nothing to show."""
    columns: int = 1

    def draw(self, section: Section | None) -> str:
        """The figure as SVG, from its section of the page."""
        blocks = [] if section is None else section.blocks
        shown = [block for block in blocks if isinstance(block, Chart | Table) and _name(block) in self.charts]
        return draw(shown, columns=self.columns, empty=self.empty)


def _name(block: Chart | Table) -> str:
    return block.title if isinstance(block, Table) else block.name.rstrip("-0123456789")


def _traffic(record: Record) -> Section | None:
    return traffic(record, None)


FIGURES: dict[str, Figure] = {
    "convergence": Figure(
        section=convergence, charts=("score", "loss"), columns=2, empty="no round has been evaluated yet"
    ),
    "scores": Figure(section=convergence, charts=("scores",), empty="no round has been evaluated yet"),
    "adjacency": Figure(section=likeness, charts=("weight",), empty="the plan holds no graph"),
    "clusters": Figure(
        section=likeness,
        charts=("clusters", "Numbers of clusters that were weighed"),
        empty="no sketches were clustered in this run",
    ),
    "ranks": Figure(section=ranks, charts=("ranks",), empty="the plan holds no ranks"),
    "bytes": Figure(section=_traffic, charts=("bytes", "By kind of message"), empty="this run sent nothing"),
    "classes": Figure(section=data_of_clients, charts=("classes",), empty="no task of this run has classes"),
}
"""A figure by the name of its file; where a run lacks what it shows, the file holds a sentence that says so."""

OF_ADAPTERS = frozenset({"adjacency", "clusters", "ranks"})
"""Figures that whole models have nothing for: they are not fingerprinted and have no ranks."""

MEASURED: dict[str, Figure] = {
    "leakage": Figure(section=leakage, charts=("leakage",), empty=""),
    "sharing": Figure(section=sharing, charts=("sharing", "By group of parameters"), empty=""),
    "mask": Figure(section=moving_weights, charts=("mask",), empty=""),
    "by-class": Figure(section=convergence, charts=("by-class",), empty="no test images have been scored yet"),
}
"""Figures of what only some runs measure, by the name of their file: drawn where `ROWS` has numbers for them."""


def draw_all(run_dir: Path | str) -> list[Path]:
    """Draw every figure of a run into its `figures/` folder, PNG at 300 DPI, and return the paths.

    Beside each lie the same figure as PDF and its numbers as CSV, which is empty where the run has none. A run that
    lacks what one of `FIGURES` shows gets the figure with a sentence that says so; those of `MEASURED` are drawn where
    there is something to show, `OF_ADAPTERS` where adapters were trained, and those of plug-ins that are loaded.

    Raises:
        CheckpointError: this is no run folder, or a file in it is damaged.
    """
    folder = find_run(run_dir)
    record = read_record(folder.path)
    sections = cache(lambda section: section(record))
    drawn = [
        _save(
            figure.draw(sections(figure.section)),
            folder.figures / f"{name}.png",
            rows=ROWS[name](record),
            within=folder.path,
        )
        for name, figure in figures_of(record).items()
    ]
    for name, chart in plugin_charts(record).items():
        rows = [row for part in chart.data.values() for row in part]
        drawn.append(_save(draw([chart]), folder.figures / f"{name}.png", rows=rows, within=folder.path))
    return drawn


def figures_of(record: Record) -> dict[str, Figure]:
    """The figures that this run has."""
    always = {name: figure for name, figure in FIGURES.items() if record.has_adapters or name not in OF_ADAPTERS}
    return always | {name: figure for name, figure in MEASURED.items() if ROWS[name](record)}


def _save(svg: str, path: Path, *, rows: Sequence[Mapping[str, Any]], within: Path) -> Path:
    """Write a figure as PNG and PDF, and its numbers as CSV, in the folder of a run; the path of the PNG."""
    save_pdf(svg, path.with_suffix(".pdf"), within=within)
    write_atomic(path.with_suffix(".csv"), to_csv(rows).encode(), within=within)
    return save_png(svg, path, within=within)
