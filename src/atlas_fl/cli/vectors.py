"""`atlas vectors`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import RenderableType

from atlas_fl.cli.labels import labels_of
from atlas_fl.cli.live import show
from atlas_fl.cli.parse import parse
from atlas_fl.cli.settings import new_folder
from atlas_fl.cli.words import split
from atlas_fl.config.kinds import LARGEST
from atlas_fl.errors import AtlasError, ConfigError

if TYPE_CHECKING:
    from atlas_fl.arithmetic import ScaleRow, TrainedRun
    from atlas_fl.types import Params


@dataclass(frozen=True, kw_only=True)
class VectorsOptions:
    """Merge what finished runs on images have added to one model, and score the merged model on the tasks of all of
    them, at several scales. With --to the best one by validation is written, as stock transformers load it."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """Folders of runs, or their names in --runs-dir."""
    base: str | None = None
    """What is subtracted: a run, an alias, a hub name or a directory; the model that all runs began with by default."""
    merge: Literal["mean", "ties"] = "mean"
    """How task vectors become one: their mean, or TIES (trim, elect signs, merge)."""
    keep: float = 0.2
    """Share of each task vector that TIES keeps."""
    scales: str = "0,0.25,0.5,0.75,1"
    """Factors of the merged vector; 0 is the base with the runs' heads, below 0 the task is forgotten."""
    to: str | None = None
    """A new folder for the merged models, the table as CSV, and its figure."""
    runs_dir: str = "runs"
    """Where run folders lie."""


def vectors(words: Sequence[str]) -> int:
    """Merge, score and write what these words name; 0."""
    options = parse(VectorsOptions(runs=tyro.MISSING), split(words), command="atlas vectors")
    if not options.runs:
        raise ConfigError("no run is named; give the folders of finished runs; see `atlas vectors --help`")
    scales, to = _scales(options.scales), None if options.to is None else new_folder(options.to)

    from atlas_fl.arithmetic import best_of, open_trained, over_scales, vectors_of
    from atlas_fl.io.folder import find_run
    from atlas_fl.sparse.vectors import merge

    folders = [find_run(run, runs_dir=options.runs_dir) for run in dict.fromkeys(options.runs)]
    names = labels_of([folder.path for folder in folders])
    runs = {name: open_trained(folder) for name, folder in zip(names, folders, strict=True)}
    base = _base(options, list(runs.values()))
    vector = merge(vectors_of(runs, base), method=options.merge, keep=options.keep)
    rows = over_scales(runs, base, vector, scales=scales)
    title = f"Accuracy over scales: {options.merge} of {len(runs)}"
    show(_tables(rows, best=best_of(rows), title=title))
    if to is not None:
        show(_written(runs, base, vector, rows, to=to))
    return 0


def _scales(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(abs(scale) <= LARGEST for scale in found):
        raise ConfigError(f"--scales is {text!r}; allowed: numbers with commas between them; write --scales 0,0.5,1")
    return list(dict.fromkeys(found))


def _base(options: VectorsOptions, runs: "Sequence[TrainedRun]") -> "Params":
    from atlas_fl.arithmetic import base_of, open_trained
    from atlas_fl.io.folder import RunFolder

    named = options.base
    if named is None:
        return base_of(runs)
    for path in (Path(named), Path(options.runs_dir) / named):
        if RunFolder(path).is_run():
            return open_trained(RunFolder(path)).body
    try:
        return base_of(runs, model=named)
    except AtlasError as error:
        raise ConfigError(f"--base {named} is no run, here or in {options.runs_dir}; as a model: {error}") from error


def _tables(rows: "Sequence[ScaleRow]", *, best: "ScaleRow", title: str) -> Iterator[RenderableType]:
    from rich.markup import escape

    from atlas_fl.report.words import add_columns, new_table, number

    table = new_table(title)
    names = list(rows[0].test)
    add_columns(table, [], ["scale", "mean", *(str(place) for place in range(1, len(names) + 1))])
    for row in rows:
        cells = [f"{row.scale:g}", number(row.mean, 3), *(number(row.test[name], 3) for name in names)]
        table.add_row(*cells, style="bold" if row is best else "")
    lines = [escape(f"{place}: {name}") for place, name in enumerate(names, start=1)]
    table.caption = "\n".join(["test images; bold: the best mean on validation images", *lines])
    yield table


def _written(
    runs: "Mapping[str, TrainedRun]",
    base: "Params",
    vector: "Params",
    rows: "Sequence[ScaleRow]",
    *,
    to: Path,
) -> Iterator[str]:
    from atlas_fl.arithmetic import best_of, save_merged
    from atlas_fl.io.atomic import write_atomic
    from atlas_fl.report.scales import draw, to_csv
    from atlas_fl.report.style import save_figure
    from atlas_fl.sparse.vectors import apply

    best = best_of(rows)
    tested = {row.scale: row.test for row in rows}
    for folder in save_merged(list(runs.values()), apply(base, vector, scale=best.scale), to):
        yield f"wrote {folder}: scale {best.scale:g}, the best on validation images"
    write_atomic(to / "scales.csv", to_csv(tested, {row.scale: row.validation for row in rows}).encode())
    yield f"the table as CSV: {to / 'scales.csv'}"
    yield f"and as a figure: {save_figure(draw(tested), to / 'scales.png')}"
