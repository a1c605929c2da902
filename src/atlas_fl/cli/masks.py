"""`atlas masks`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from atlas_fl.cli.labels import labels_of
from atlas_fl.cli.live import show
from atlas_fl.cli.parse import parse
from atlas_fl.cli.settings import check_target
from atlas_fl.cli.words import split
from atlas_fl.errors import AtlasError, ConfigError


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

    from atlas_fl.io.tensors import write_tensors
    from atlas_fl.report.words import percent
    from atlas_fl.sparse.algebra import num_kept
    from atlas_fl.sparse.stored import check_alike, merged, read_mask
    from atlas_fl.tree import num_values

    files = _files(options)
    if options.clients is None:
        names = labels_of(list(files))
        found: dict[str, Any] = {name: read_mask(file) for name, file in zip(names, files.values(), strict=True)}
    else:
        found = _of_clients(options, list(files), clients=options.clients)
    check_alike(found)
    mask = None if options.to is None else merged(found, method=options.merge)
    show([_table(found, list(files))])
    show(f"figure: {path}" for path in _draw(found, folder=_figures(options, files)))
    if mask is not None and options.to is not None:
        write_tensors(Path(options.to), mask)
        share = percent(num_kept(mask) / num_values(mask))
        counts = f"{num_kept(mask):,} of {num_values(mask):,} weights may move ({share})"
        show([f"{options.merge} of {len(found)}: {counts}; train under it: --mask-file {options.to}"])
    return 0


def _is_mask(path: Path) -> bool:
    from atlas_fl.sparse.stored import read_mask

    try:
        return bool(read_mask(path))
    except AtlasError:
        return False


def _files(options: MasksOptions) -> dict[Path, Path]:
    """The file of every mask, by what was named: a run's folder, or the file itself."""
    from atlas_fl.io.digests import check_files
    from atlas_fl.io.folder import find_run

    found: dict[Path, Path] = {}
    for name in options.masks:
        if Path(name).is_file():
            found[Path(name)] = Path(name)
            continue
        folder = find_run(name, runs_dir=options.runs_dir)
        if not folder.mask.is_file():
            raise ConfigError(f"run {folder.path} was trained without a mask; give runs with --mask or --mask-file")
        check_files(folder, folder.mask)
        found[folder.path] = folder.mask
    return found


def _of_clients(options: MasksOptions, named: Sequence[Path], *, clients: int) -> dict[str, Any]:
    from atlas_fl.arithmetic import masks_of_clients
    from atlas_fl.io.folder import find_run

    if len(named) != 1:
        raise ConfigError(f"--clients is for the clients of one run, and {len(named)} masks are named; name one run")
    return dict(masks_of_clients(find_run(named[0], runs_dir=options.runs_dir), clients=clients))


def _table(found: Mapping[str, Mapping[str, Any]], named: Sequence[Path]) -> Any:
    from rich.markup import escape

    from atlas_fl.report.words import add_columns, new_table, percent
    from atlas_fl.sparse.algebra import num_kept, overlap
    from atlas_fl.tree import num_values

    table = new_table("Masks")
    numbers = [str(place) for place in range(1, len(found) + 1)] if len(found) > 1 else []
    add_columns(table, ["", "mask"], ["may move", "share", *numbers])
    shared = overlap(list(found.values()))
    for place, (name, mask) in enumerate(found.items()):
        kept, total = num_kept(mask), num_values(mask)
        agree = [f"{value:.3f}" for value in shared[place]] if numbers else []
        table.add_row(str(place + 1), escape(name), f"{kept:,}", percent(kept / total), *agree)
    lines = (
        [f"{place}: {path}" for place, path in enumerate(named, start=1)]
        if len(named) == len(found)
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


def _draw(found: Mapping[str, Mapping[str, Any]], *, folder: Path) -> list[Path]:
    from atlas_fl.io.folder import RunFolder
    from atlas_fl.report.masks import draw_density, draw_overlap
    from atlas_fl.report.style import save_beside, save_figure
    from atlas_fl.sparse.algebra import layers, num_kept, overlap
    from atlas_fl.tree import num_values

    save = save_figure if RunFolder(folder.parent).is_run() and folder.name == "figures" else save_beside
    shares = [num_kept(mask) / num_values(mask) for mask in found.values()]
    common = shares[0] if max(shares) - min(shares) < 1e-3 else None
    density = draw_density({name: layers(mask) for name, mask in found.items()}, share=common)
    paths = [save(density, folder / "masks-density.png")]
    if len(found) > 1:
        figure = draw_overlap(list(found), overlap(list(found.values())), densities=shares)
        paths.append(save(figure, folder / "masks-overlap.png"))
    return paths
