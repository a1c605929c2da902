"""`atlas masks` and `vectors`: masks and task vectors of runs on images."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import RenderableType

from atlas_fl.cli.arguments import check_target, new_folder, parse, split
from atlas_fl.cli.display import labels_of, show
from atlas_fl.config.values import LARGEST
from atlas_fl.errors import AtlasError, ConfigError

if TYPE_CHECKING:
    from atlas_fl.experiment.task_arithmetic import ScaleRow, TrainedRun
    from atlas_fl.params import Params


@dataclass(frozen=True, kw_only=True)
class MasksOptions:
    """Show and draw where masks let weights move, and how far several of them agree; with --merge write one mask for a
    run to come (`--mask-file`)."""

    masks: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN|FILE ...")]
    """Folders of runs, their names in --runs-dir, or files of masks."""
    clients: int | None = None
    """Instead of a run's one mask those that so many of its clients would make, each by its own scores alone; they are
    computed again."""
    merge: Literal["none", "union", "intersection"] = "none"
    """Make one mask: what at least one of them lets move, or what all do."""
    to: str | None = None
    """The file that the merged mask is written to."""
    figures: str | None = None
    """Folder for the figures; that of the run by default, and --runs-dir for several masks."""
    runs_dir: str = "runs"
    """Where run folders lie."""


def masks(words: Sequence[str]) -> int:
    """Show, draw and merge the masks that these words name; 0."""
    options = parse(MasksOptions(masks=tyro.MISSING), split(words), command="atlas masks")
    if not options.masks:
        raise ConfigError("no mask is named; give the folders of runs, or files of masks; see `atlas masks --help`")
    if (options.merge == "none") != (options.to is None):
        raise ConfigError("--merge says how masks become one and --to which file gets it; give both, or neither")
    check_target(options.to, example="mask.safetensors", is_own=_is_mask)

    from atlas_fl.params import num_values
    from atlas_fl.report.format import percent
    from atlas_fl.sparse.masks import check_same_model, merge_masks, num_kept, read_mask
    from atlas_fl.storage.tensors import write_tensors

    files = _files(options)
    if options.clients is None:
        names = labels_of(list(files))
        masks_by_name: dict[str, Any] = {
            name: read_mask(file) for name, file in zip(names, files.values(), strict=True)
        }
    else:
        masks_by_name = _of_clients(options, list(files), clients=options.clients)
    check_same_model(masks_by_name)
    mask = None if options.to is None else merge_masks(masks_by_name, method=options.merge)
    show([_table(masks_by_name, list(files))])
    show(f"figure: {path}" for path in _draw(masks_by_name, folder=_figures(options, files)))
    if mask is not None and options.to is not None:
        write_tensors(Path(options.to), mask)
        share = percent(num_kept(mask) / num_values(mask))
        counts = f"{num_kept(mask):,} of {num_values(mask):,} weights may move ({share})"
        show([f"{options.merge} of {len(masks_by_name)}: {counts}; train under it: --mask-file {options.to}"])
    return 0


def _is_mask(path: Path) -> bool:
    from atlas_fl.sparse.masks import read_mask

    try:
        return bool(read_mask(path))
    except AtlasError:
        return False


def _files(options: MasksOptions) -> dict[Path, Path]:
    """The file of every mask, by what was named: a run's folder, or the file itself."""
    from atlas_fl.storage.digests import check_files
    from atlas_fl.storage.run_folder import find_run

    mask_files: dict[Path, Path] = {}
    for name in options.masks:
        if Path(name).is_file():
            mask_files[Path(name)] = Path(name)
            continue
        folder = find_run(name, runs_dir=options.runs_dir)
        if not folder.mask.is_file():
            raise ConfigError(f"run {folder.path} was trained without a mask; give runs with --mask or --mask-file")
        check_files(folder, folder.mask)
        mask_files[folder.path] = folder.mask
    return mask_files


def _of_clients(options: MasksOptions, named: Sequence[Path], *, clients: int) -> dict[str, Any]:
    from atlas_fl.experiment.task_arithmetic import masks_by_client
    from atlas_fl.storage.run_folder import find_run

    if len(named) != 1:
        raise ConfigError(f"--clients is for the clients of one run, and {len(named)} masks are named; name one run")
    return dict(masks_by_client(find_run(named[0], runs_dir=options.runs_dir), clients=clients))


def _table(masks_by_name: Mapping[str, Mapping[str, Any]], named: Sequence[Path]) -> Any:
    from rich.markup import escape

    from atlas_fl.params import num_values
    from atlas_fl.report.format import add_columns, new_table, percent
    from atlas_fl.sparse.masks import num_kept, overlap

    table = new_table("Masks")
    numbers = [str(index) for index in range(1, len(masks_by_name) + 1)] if len(masks_by_name) > 1 else []
    add_columns(table, ["", "mask"], ["may move", "share", *numbers])
    shared = overlap(list(masks_by_name.values()))
    for index, (name, mask) in enumerate(masks_by_name.items()):
        movable, total = num_kept(mask), num_values(mask)
        agree = [f"{value:.3f}" for value in shared[index]] if numbers else []
        table.add_row(str(index + 1), escape(name), f"{movable:,}", percent(movable / total), *agree)
    lines = (
        [f"{index}: {path}" for index, path in enumerate(named, start=1)]
        if len(named) == len(masks_by_name)
        else [str(named[0])]
    )
    table.caption = "\n".join([*(["numbered columns: Jaccard index, both over either"] if numbers else []), *lines])
    return table


def _figures(options: MasksOptions, files: Mapping[Path, Path]) -> Path:
    if options.figures is not None:
        return Path(options.figures)
    if len(files) > 1:
        return Path(options.runs_dir)
    (named,) = files
    return named / "figures" if named.is_dir() else named.parent


def _draw(masks_by_name: Mapping[str, Mapping[str, Any]], *, folder: Path) -> list[Path]:
    from atlas_fl.params import num_values
    from atlas_fl.report.mask_figures import draw_density, draw_overlap
    from atlas_fl.report.style import save_beside, save_figure
    from atlas_fl.sparse.masks import density_by_layer, num_kept, overlap
    from atlas_fl.storage.run_folder import RunFolder

    save = save_figure if RunFolder(folder.parent).is_run() and folder.name == "figures" else save_beside
    shares = [num_kept(mask) / num_values(mask) for mask in masks_by_name.values()]
    common = shares[0] if max(shares) - min(shares) < 1e-3 else None
    density = draw_density({name: density_by_layer(mask) for name, mask in masks_by_name.items()}, share=common)
    paths = [save(density, folder / "masks-density.png")]
    if len(masks_by_name) > 1:
        figure = draw_overlap(list(masks_by_name), overlap(list(masks_by_name.values())), densities=shares)
        paths.append(save(figure, folder / "masks-overlap.png"))
    return paths


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

    from atlas_fl.experiment.task_arithmetic import best_scale, load_trained_run, score_scales, task_vectors
    from atlas_fl.sparse.task_vectors import merge_vectors
    from atlas_fl.storage.run_folder import find_run

    folders = [find_run(run, runs_dir=options.runs_dir) for run in dict.fromkeys(options.runs)]
    names = labels_of([folder.path for folder in folders])
    runs = {name: load_trained_run(folder) for name, folder in zip(names, folders, strict=True)}
    base = _base(options, list(runs.values()))
    vector = merge_vectors(task_vectors(runs, base), method=options.merge, keep=options.keep)
    rows = score_scales(runs, base, vector, scales=scales)
    title = f"Accuracy over scales: {options.merge} of {len(runs)}"
    show(_tables(rows, best=best_scale(rows), title=title))
    if to is not None:
        show(_write_model(runs, base, vector, rows, to=to))
    return 0


def _scales(text: str) -> list[float]:
    try:
        scales = [float(part) for part in text.split(",")]
    except ValueError:
        scales = []
    if not scales or not all(abs(scale) <= LARGEST for scale in scales):
        raise ConfigError(f"--scales is {text!r}; allowed: numbers with commas between them; write --scales 0,0.5,1")
    return list(dict.fromkeys(scales))


def _base(options: VectorsOptions, runs: "Sequence[TrainedRun]") -> "Params":
    from atlas_fl.experiment.task_arithmetic import base_weights, load_trained_run
    from atlas_fl.storage.run_folder import RunFolder

    named = options.base
    if named is None:
        return base_weights(runs)
    for path in (Path(named), Path(options.runs_dir) / named):
        if RunFolder(path).is_run():
            return load_trained_run(RunFolder(path)).body
    try:
        return base_weights(runs, model=named)
    except AtlasError as error:
        raise ConfigError(f"--base {named} is no run, here or in {options.runs_dir}; as a model: {error}") from error


def _tables(rows: "Sequence[ScaleRow]", *, best: "ScaleRow", title: str) -> Iterator[RenderableType]:
    from rich.markup import escape

    from atlas_fl.report.format import add_columns, new_table, number

    table = new_table(title)
    names = list(rows[0].test)
    add_columns(table, [], ["scale", "mean", *(str(index) for index in range(1, len(names) + 1))])
    for row in rows:
        cells = [f"{row.scale:g}", number(row.mean, 3), *(number(row.test[name], 3) for name in names)]
        table.add_row(*cells, style="bold" if row is best else "")
    lines = [escape(f"{index}: {name}") for index, name in enumerate(names, start=1)]
    table.caption = "\n".join(["test images; bold: the best mean on validation images", *lines])
    yield table


def _write_model(
    runs: "Mapping[str, TrainedRun]",
    base: "Params",
    vector: "Params",
    rows: "Sequence[ScaleRow]",
    *,
    to: Path,
) -> Iterator[str]:
    from atlas_fl.experiment.task_arithmetic import best_scale, save_merged
    from atlas_fl.report.mask_figures import draw_scales, scales_csv
    from atlas_fl.report.style import save_figure
    from atlas_fl.sparse.task_vectors import apply_vector
    from atlas_fl.storage.files import write_atomic

    best = best_scale(rows)
    tested = {row.scale: row.test for row in rows}
    for folder in save_merged(list(runs.values()), apply_vector(base, vector, scale=best.scale), to):
        yield f"wrote {folder}: scale {best.scale:g}, the best on validation images"
    write_atomic(to / "scales.csv", scales_csv(tested, {row.scale: row.validation for row in rows}).encode())
    yield f"the table as CSV: {to / 'scales.csv'}"
    yield f"and as a figure: {save_figure(draw_scales(tested), to / 'scales.png')}"
