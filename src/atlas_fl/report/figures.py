"""draw_all: all figures of a run. It loads matplotlib; import it where figures are wanted and nowhere else."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from atlas_fl.report import graph_figures, mask_figures, run_figures
from atlas_fl.report.figure_rows import ROWS, to_csv
from atlas_fl.report.record import Record, read_record
from atlas_fl.report.style import save_figure, save_vector
from atlas_fl.storage.folder_access import write_atomic
from atlas_fl.storage.run_folder import find_run

FIGURES: dict[str, Callable[[Record], Figure]] = {
    "convergence": run_figures.draw_convergence,
    "scores": run_figures.draw_scores,
    "adjacency": graph_figures.draw_adjacency,
    "clusters": graph_figures.draw_clusters,
    "ranks": run_figures.draw_ranks,
    "bytes": run_figures.draw_traffic,
    "classes": run_figures.draw_label_distribution,
}
"""A figure by the name of its file."""

OF_ADAPTERS = frozenset({"adjacency", "clusters", "ranks"})
"""Those of `FIGURES` that whole models have nothing for: they are not fingerprinted and have no ranks."""

MEASURED: dict[str, tuple[Callable[[Record], bool], Callable[[Record], Figure]]] = {
    "leakage": (lambda record: bool(record.plan.get("leakage")), mask_figures.draw_leakage),
    "sharing": (lambda record: bool(record.sharing), graph_figures.draw_sharing),
    "mask": (lambda record: bool((record.plan.get("sparse") or {}).get("layers")), mask_figures.draw_mask),
    "by-class": (lambda record: any("classes" in row for row in record.metrics), run_figures.draw_accuracy_by_class),
}
"""Figures of what only some runs measure, by the name of their file: whether this one does, and the figure."""


def draw_all(run_dir: Path | str) -> list[Path]:
    """Draw every figure of a run into its `figures/` folder, PNG at 300 DPI, and return the paths.

    Beside each lie the same figure as PDF and its numbers as CSV, which is empty where the run has none. A run that
    lacks what one of `FIGURES` shows gets the figure with a sentence that says so; those of `MEASURED` are drawn where
    there is something to show, and `OF_ADAPTERS` where adapters were trained.

    Raises:
        CheckpointError: this is no run folder, or a file in it is damaged.
    """
    folder = find_run(run_dir)
    record = read_record(folder.path)
    figures = {name: draw for name, draw in FIGURES.items() if record.has_adapters or name not in OF_ADAPTERS}
    figures |= {name: draw for name, (holds, draw) in MEASURED.items() if holds(record)}
    return [
        _save(draw(record), folder.figures / f"{name}.png", rows=ROWS[name](record), within=folder.path)
        for name, draw in figures.items()
    ]


def _save(figure: Figure, path: Path, *, rows: Sequence[Mapping[str, Any]], within: Path) -> Path:
    """Write a figure as PNG and PDF, and its numbers as CSV, in the folder of a run; the path of the PNG."""
    save_figure(figure, path, within=within)
    save_vector(figure, path.with_suffix(".pdf"), within=within)
    write_atomic(path.with_suffix(".csv"), to_csv(rows).encode(), within=within)
    return path
