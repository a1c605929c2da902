"""`atlas report`, `results`, `audit`, `export`, `place`, `attack`, `masks` and `vectors`: commands on runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atlas_fl.audit.check import audit_run
from atlas_fl.cli import options as cli
from atlas_fl.cli.arguments import check_target, holds_json, new_folder
from atlas_fl.cli.display import labels_of, show, show_progress
from atlas_fl.cli.tables import audit_table, failure_lines, placement
from atlas_fl.config import validate
from atlas_fl.config.values import LARGEST
from atlas_fl.errors import AtlasError, ConfigError
from atlas_fl.experiment import task_arithmetic as arithmetic
from atlas_fl.experiment.export import export_client, publish
from atlas_fl.params import Params, num_values
from atlas_fl.planning.place_client import place_client
from atlas_fl.plugins import load_plugins
from atlas_fl.privacy_attacks.registry import CUTS, SHADOWS, run_attack
from atlas_fl.report.drawing import draw, save_png
from atlas_fl.report.federation_results import federation_results
from atlas_fl.report.figures import draw_all
from atlas_fl.report.finished_runs import begins_with, find_finished_runs, to_csv
from atlas_fl.report.format import percent
from atlas_fl.report.html import comparison_page, elements, write
from atlas_fl.report.mask_charts import density_chart, overlap_chart, scales_chart, scales_csv
from atlas_fl.report.table import Cell, Number, Table, count, plain, share
from atlas_fl.report.tables import attack_table, leakage_table
from atlas_fl.sparse.masks import check_same_model, density_by_layer, merge_masks, num_kept, overlap, read_mask
from atlas_fl.sparse.task_vectors import apply_vector, merge_vectors
from atlas_fl.storage import digests, jsonl, tensors
from atlas_fl.storage.folder_access import write_atomic
from atlas_fl.storage.run_folder import RunFolder, find_run


def report(options: cli.ReportOptions) -> int:
    """Write the page and draw the figures of the runs that these words name; 0."""
    check_target(options.to, example="report.html", is_own=write.is_page)
    if options.control is not None and len(options.runs) == 1:
        raise ConfigError(f"--control is {options.control}, and one run is compared with nothing; name more runs")
    folders = [find_run(name, runs_dir=options.runs_dir).path for name in options.runs]
    load_plugins(options.plugin)
    show([str(write.write_report(folders, to=options.to, control=options.control))])
    for folder in folders if not options.page_only else ():
        show(str(path) for path in draw_all(folder))
    return 0


def page_of_results(options: cli.ResultsOptions) -> int:
    """Write the page that these words ask for; 0."""
    is_html = Path(options.to or "").suffix == ".html"
    is_own = write.is_page if is_html else lambda path: begins_with(path, text=elements.BEGINNING)
    check_target(options.to, example="results.md", is_own=is_own)
    check_target(options.csv, example="results.csv", is_own=begins_with, flag="--csv")
    if None not in (options.to, options.csv) and Path(str(options.to)).resolve() == Path(str(options.csv)).resolve():
        raise ConfigError(f"--to and --csv are both {options.to}; name a file for each")
    runs = find_finished_runs(options.folders)
    results = federation_results(runs, control=options.control)
    if all(result.comparison is None for result in results):
        seeds = "; ".join(f"{result.title} has {result.seed_words}" for result in results)
        raise ConfigError(
            f"no method has the seeds of {options.control or 'the others'}: {seeds}; run the missing ones with"
            " `atlas compare`"
        )
    made = comparison_page.federations_page(results)
    page = elements.render(made) if is_html else elements.markdown(made, folded=options.all)
    if options.csv is not None:
        write_atomic(Path(options.csv), to_csv(runs).encode())
        show([f"wrote {options.csv}"])
    if options.to is None:
        print(page, end="")
    else:
        write_atomic(Path(options.to), page.encode())
        show([f"wrote {options.to}"])
    return 0


def audit(options: cli.AuditOptions) -> int:
    """Audit the run that these words name; 0 if all is well, 1 if not."""
    run = find_run(options.run, runs_dir=options.runs_dir).path
    with show_progress() as tell:
        report = audit_run(run, on_event=tell)
    show([audit_table(report.rounds()), *failure_lines(report.failures)])
    verdict = "audit passed" if report.ok else f"audit FAILED: {len(report.failures)} checks did not hold"
    if report.unseen:
        show(
            [
                f"{len(report.unseen)} clients keep what they do not share at their sites; of that part the audit sees"
                " the digest alone, and what trained it is the clients' own word"
            ]
        )
    show(list(report.unchecked))
    show([f"{verdict} ({len(report.rows)} checks)"])
    return int(not report.ok)


def export(options: cli.ExportOptions) -> int:
    """Export what these words name; 0."""
    if options.global_ == (options.client is not None):
        given = "both" if options.global_ else "neither"
        raise ConfigError(f"`atlas export` was given {given} of --client NAME and --global; give one of them")
    to, folder = new_folder(options.to), find_run(options.run, runs_dir=options.runs_dir).path
    notes: list[str] = []
    if options.public and options.push_to is None:
        raise ConfigError("`atlas export` was given --public without --push-to OWNER/NAME; give both, or neither")
    written = export_client(
        folder,
        client=options.client,
        to=to,
        round=options.round,
        form=options.form,
        on_event=lambda event: notes.append(str(event)),
    )
    show([f"wrote {written}", *notes])
    if options.push_to is not None:
        show([f"uploaded to {publish(written, options.push_to, public=options.public)}"])
    return 0


def place(options: cli.PlaceOptions) -> int:
    """Print the place of the newcomer that these words describe; 0."""
    folder = find_run(options.run, runs_dir=options.runs_dir).path
    with show_progress() as on_event:
        newcomer = place_client(folder, task=options.task, samples=options.samples, on_event=on_event)
    show(placement(newcomer))
    return 0


def attack(options: cli.AttackOptions) -> int:
    """Print what the attack of these words learns; 0."""
    config = validate(options.settings)
    key = "read_averaged" if options.what == CUTS else "client"
    check_target(options.to, example="attack.json", is_own=lambda path: holds_json(path, keys=(key,)))
    given = {"--cuts": options.cuts or None, "--shadows": options.shadows, "--client": options.client}
    for flag in FLAGS_OF_NO_USE[options.what]:
        if given[flag] is not None:
            raise ConfigError(f"{flag} says nothing of the attack {options.what}; leave it out")
    with show_progress() as on_event:
        rows = run_attack(
            config,
            options.what,
            client=options.client,
            shadows=SHADOWS if options.shadows is None else options.shadows,
            cuts=options.cuts or None,
            on_event=on_event,
        )
    show([leakage_table(rows) if options.what == CUTS else attack_table(options.what, rows)])
    if options.to is not None:
        jsonl.write_json(Path(options.to), list(rows))
    return 0


FLAGS_OF_NO_USE: Mapping[str, Sequence[str]] = {
    "membership": ("--cuts",),
    "tokens": ("--cuts", "--shadows"),
    "canaries": ("--cuts",),
    "properties": ("--cuts",),
    "cuts": ("--shadows", "--client"),
}
"""Flags that are of other attacks."""


def masks(options: cli.MasksOptions) -> int:
    """Show, draw and merge the masks that these words name; 0."""
    if (options.merge == "none") != (options.to is None):
        raise ConfigError("--merge says how masks become one and --to which file gets it; give both, or neither")
    check_target(options.to, example="mask.safetensors", is_own=_is_mask)

    files = _files(options)
    labels = labels_of(list(files))
    own: dict[str, Any] = {name: read_mask(file) for name, file in zip(labels, files.values(), strict=True)}
    check_same_model(own)
    mask = None if options.to is None else merge_masks(own, method=options.merge)
    show([_mask_table(own, list(files))])
    (first, *others) = files  # of one run the figures lie in its folder, of one file beside it
    folder = Path(options.runs_dir) if others else first / "figures" if first.is_dir() else first.parent
    show(f"figure: {path}" for path in _draw(own, folder=folder))
    if mask is not None and options.to is not None:
        tensors.write_tensors(Path(options.to), mask)
        share = percent(num_kept(mask) / num_values(mask))
        counts = f"{num_kept(mask):,} of {num_values(mask):,} weights may move ({share})"
        show([f"{options.merge} of {len(own)}: {counts}; train under it: --mask-file {options.to}"])
    return 0


def _is_mask(path: Path) -> bool:
    try:
        return bool(read_mask(path))
    except AtlasError:
        return False


def _files(options: cli.MasksOptions) -> dict[Path, Path]:
    """The file of every mask, by what was named: a run's folder, or the file itself."""
    mask_files: dict[Path, Path] = {}
    for name in options.masks:
        if Path(name).is_file():
            mask_files[Path(name)] = Path(name)
            continue
        folder = find_run(name, runs_dir=options.runs_dir)
        if not folder.mask.is_file():
            raise ConfigError(f"run {folder.path} was trained without a mask; give runs with --mask or --mask-file")
        digests.check_files(folder, folder.mask)
        mask_files[folder.path] = folder.mask
    return mask_files


def _mask_table(masks: Mapping[str, Mapping[str, Any]], named: Sequence[Path]) -> Table:

    numbers = [str(index) for index in range(1, len(masks) + 1)] if len(masks) > 1 else []
    rows: list[list[Cell]] = []
    for number, ((name, mask), shared) in enumerate(zip(masks.items(), overlap(list(masks.values()))), start=1):
        movable = num_kept(mask)
        agree = [plain(value) for value in shared] if numbers else []
        rows.append([str(number), name, count(movable), share(movable / num_values(mask)), *agree])
    lines = ["numbered columns: Jaccard index, both over either"] if numbers else []
    lines += [f"{number}: {path}" for number, path in enumerate(named, start=1)]
    return Table(title="Masks", columns=("", "mask", "may move", "share", *numbers), rows=rows, note="\n".join(lines))


def _draw(masks: Mapping[str, Mapping[str, Any]], *, folder: Path) -> list[Path]:

    within = folder.parent if folder.name == "figures" else folder
    shares = [num_kept(mask) / num_values(mask) for mask in masks.values()]
    common = shares[0] if max(shares) - min(shares) < 1e-3 else None
    density = density_chart({name: density_by_layer(mask) for name, mask in masks.items()}, share=common)
    paths = [save_png(draw([density]), folder / "masks-density.png", within=within)]
    if len(masks) > 1:
        chart = overlap_chart(list(masks), overlap(list(masks.values())), densities=shares)
        paths.append(save_png(draw([chart]), folder / "masks-overlap.png", within=within))
    return paths


def vectors(options: cli.VectorsOptions) -> int:
    """Merge, score and write what these words name; 0."""
    scales, to = _scales(options.scales), None if options.to is None else new_folder(options.to)

    folders = [find_run(run, runs_dir=options.runs_dir) for run in dict.fromkeys(options.runs)]
    names = labels_of([folder.path for folder in folders])
    runs = {name: arithmetic.load_trained_run(folder) for name, folder in zip(names, folders, strict=True)}
    base = _base(options, list(runs.values()))
    vector = merge_vectors(arithmetic.task_vectors(runs, base), method=options.merge, keep=options.keep)
    rows = arithmetic.score_scales(runs, base, vector, scales=scales)
    title = f"Accuracy over scales: {options.merge} of {len(runs)}"
    show([_scale_table(rows, best=arithmetic.best_scale(rows), title=title)])
    if to is not None:
        best = arithmetic.best_scale(rows)
        tested = {row.scale: row.test for row in rows}
        written = arithmetic.save_merged(list(runs.values()), apply_vector(base, vector, scale=best.scale), to)
        show(f"wrote {folder}: scale {best.scale:g}, the best on validation images" for folder in written)
        write_atomic(to / "scales.csv", scales_csv(tested, {row.scale: row.validation for row in rows}).encode())
        drawn = save_png(draw([scales_chart(tested)]), to / "scales.png")
        show([f"the table as CSV: {to / 'scales.csv'}", f"and as a figure: {drawn}"])
    return 0


def _scales(text: str) -> list[float]:
    try:
        scales = [float(part) for part in text.split(",")]
    except ValueError:
        scales = []
    if not scales or not all(abs(scale) <= LARGEST for scale in scales):
        raise ConfigError(f"--scales is {text!r}; allowed: numbers with commas between them; write --scales 0,0.5,1")
    return list(dict.fromkeys(scales))


def _base(options: cli.VectorsOptions, runs: Sequence[arithmetic.TrainedRun]) -> Params:

    named = options.base
    if named is None:
        return arithmetic.base_weights(runs)
    for path in (Path(named), Path(options.runs_dir) / named):
        if RunFolder(path).is_run():
            return arithmetic.load_trained_run(RunFolder(path)).body
    try:
        return arithmetic.base_weights(runs, model=named)
    except AtlasError as error:
        raise ConfigError(f"--base {named} is no run, here or in {options.runs_dir}; as a model: {error}") from error


def _scale_table(rows: Sequence[arithmetic.ScaleRow], *, best: arithmetic.ScaleRow, title: str) -> Table:

    names = list(rows[0].test)
    cells = [
        [Number(value=row.scale, text=f"{row.scale:g}"), *map(plain, (row.mean, *(row.test[name] for name in names)))]
        for row in rows
    ]
    lines = [f"{index}: {name}" for index, name in enumerate(names, start=1)]
    return Table(
        title=title,
        columns=("scale", "mean", *(str(index) for index in range(1, len(names) + 1))),
        rows=cells,
        note="\n".join(["test images; bold: the best mean on validation images", *lines]),
        bold_row=next(index for index, row in enumerate(rows) if row is best),
    )
