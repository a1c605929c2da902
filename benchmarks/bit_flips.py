"""Is a flipped bit in a run's folder found, or harmless by name? None may change a number in silence.

Four runs of random models of two or three narrow blocks, with an audit: adapters on texts with two plans, and whole
image models; each complete, and killed in its third round behind two checkpoints. Of every class of files as many bits
are drawn, files and bytes evenly. After each flip the audit's look at the files is asked, and whatever else reads the
file: report, export, compare, and what a resume would go on from. What they read is held against what they read of the
undamaged folder. Every `--commands`-th flip goes through the commands themselves, and a resume of it to its end.

    python benchmarks/bit_flips.py --to DIR

Outcomes stand in DIR, a line for each flip; started again, it goes on. `silent` is the defect: it exits with 1.
"""

import argparse
import json
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel, ViTConfig, ViTImageProcessorPil, ViTModel

from atlas_fl.audit.check import audit_run, damaged_files
from atlas_fl.cli.main import main as atlas
from atlas_fl.config import Config, load_config, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.errors import AtlasError
from atlas_fl.experiment.export import export_client
from atlas_fl.experiment.recorder import check_run_files
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.report.finished_runs import read_summary
from atlas_fl.report.record import read_record
from atlas_fl.rng import generator
from atlas_fl.storage import checkpoint
from atlas_fl.storage.assets import asset_dir, embedded_dir
from atlas_fl.storage.jsonl import append_rows, read_json, read_rows
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import encode_tensors

HARMLESS = ("log.txt", ".lock", "figures")
"""What decides nothing, by its name."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
OUTCOMES = ("found", "cut back", "same values", "harmless by name", "silent")


def tiny_models(to: Path) -> tuple[Path, Path]:
    """A random BERT of three narrow blocks with the embedded model's tokenizer, and a random ViT of two."""
    text, image, source = to / "tiny-bert", to / "tiny-vit", asset_dir(embedded_dir(), "minilm")
    if not text.is_dir():
        with warnings.catch_warnings(), torch.random.fork_rng():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
            vocab = json.loads((source / "config.json").read_text())["vocab_size"]
            bert = BertConfig(vocab_size=vocab, num_hidden_layers=3, max_position_embeddings=64, **sizes)
            BertModel(bert).save_pretrained(text)
            vit = ViTConfig(num_hidden_layers=2, image_size=16, patch_size=8, **sizes)
            ViTModel(vit, add_pooling_layer=False).save_pretrained(image)
        ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(image)
        for name in TOKENIZER:
            shutil.copy(source / name, text / name)
    return text, image


def settings(to: Path) -> dict[str, Config]:
    text, image = tiny_models(to)
    sizes = {"samples": "24", "validation_samples": "12", "test_samples": "12", "rounds": "3", "eval_every": "1"}
    common = {**sizes, "audit": "true", "alone": "none", "runs_dir": str(to / "runs")}
    texts = {"tasks": "movie+trec", "clients_per_task": "2", "max_length": "24", "batch_size": "8", "model": str(text)}
    fingerprints = {"clusters": "2", "fingerprint_steps": "2", "fingerprint_batches": "2", "sketch_dim": "64"}
    ranks = {"candidates": "2+4+8", "recluster_every": "2"}
    images = {"tasks": "digits", "clients_per_task": "4", "samples": "40", "model": str(image), "image_size": "16"}
    masked = {"mask": "random", "sparsity": "0.5"}
    return {
        "texts": with_values(Config(), {**common, **texts, **fingerprints, **ranks}),
        "images": with_values(find_preset("vision-quick"), {**common, **images, **masked, "lr": "0.02"}),
    }


def folders(to: Path) -> dict[str, Path]:
    """The four runs, made where they are not there yet."""
    runs: dict[str, Path] = {}
    for name, config in settings(to).items():
        for kind, values in {"complete": {}, "killed": {"max_rounds": "2"}}.items():
            folder = to / "runs" / f"{name}-{kind}"
            if not (to / f"{name}-{kind}.made").exists():
                shutil.rmtree(folder, ignore_errors=True)
                run_config(with_values(config, {"name": folder.name, **values}))
                if kind == "killed":  # it was killed when some rows of its third round were written
                    whole = RunFolder(to / "runs" / f"{name}-complete")
                    late = [row for row in read_rows(whole.metrics) if row["round"] == 3]
                    append_rows(RunFolder(folder).metrics, late[:5])
                (to / f"{name}-{kind}.made").touch()
            runs[folder.name] = folder
    return runs


def class_of(name: str) -> str:
    """The class of a file of a run."""
    parts = name.split("/")
    if len(parts) == 1:
        return "later plan" if name.startswith("plan-") and name.endswith(".json") else name
    return f"{parts[0]}/{parts[-1]}" if parts[0] in ("audit", "checkpoints") else f"{parts[0]}/*"


def draw_flips(runs: Mapping[str, Path], flips: int) -> Iterator[tuple[int, str, str, int, int]]:
    """(number, run, file, byte, bit) of every flip; classes take turns."""
    classes: dict[tuple[str, str], list[Path]] = {}
    for name, folder in runs.items():
        for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size):
            classes.setdefault((name, class_of(file.relative_to(folder).as_posix())), []).append(file)
    turns = sorted(classes)
    for number in range(flips):
        name, kind = turns[number % len(turns)]
        draw = generator(0, "flip", number)
        file = classes[name, kind][int(draw.integers(len(classes[name, kind])))]
        offset, bit = int(draw.integers(file.stat().st_size)), int(draw.integers(8))
        yield number, name, file.relative_to(runs[name]).as_posix(), offset, bit


def read_report(folder: Path) -> Any:
    record = read_record(folder)
    sketches = None if record.sketches is None else [half.tobytes() for half in record.sketches]
    return record.plan, list(record.metrics), list(record.ledger), sketches


def read_export(folder: Path) -> Any:
    to = folder.parent / "exported"
    shutil.rmtree(to, ignore_errors=True)
    export_client(folder, client="0", to=to)
    return {path.name: path.read_bytes() for path in sorted(to.iterdir())}


def resume_point(folder: Path) -> Any:
    """What a resume would go on from, but for its round: rows that a checkpoint covers are the same in every one."""
    run_folder = RunFolder(folder)
    latest, _ = checkpoint.load_latest(run_folder.checkpoints, check=partial(check_run_files, run_folder))
    if latest is None:
        raise AtlasError("it begins again, or names the file")
    lengths = latest.state["metrics_bytes"], latest.state["ledger_bytes"]
    rows = [file.read_bytes()[:length] for file, length in zip((run_folder.metrics, run_folder.ledger), lengths)]
    plan = read_json(folder / latest.state["plan"])
    mask = run_folder.mask.read_bytes() if run_folder.mask.exists() else None
    config = load_config(run_folder.config)
    return latest.round, (latest.state, encode_tensors(latest.tensors), rows, plan, mask, config)


READERS: Mapping[str, Callable[[Path], Any]] = {
    "report": read_report,
    "export": read_export,
    "compare": lambda folder: read_summary(folder) if RunFolder(folder).summary.exists() else None,
}


READ = {
    "report": ("plan", "later plan", "metrics", "ledger", "digests", "checkpoints"),
    "export": ("config", "plan", "later plan", "digests", "checkpoints"),
    "compare": ("summary", "digests", "checkpoints"),
    "resume": ("config", "plan", "later plan", "mask", "metrics", "ledger", "checkpoints"),
}
"""How the classes of the files begin that a command reads."""


def read_undamaged(runs: Mapping[str, Path]) -> dict[str, Any]:
    """What is read of the folders as they were written; what a resume goes on from by round."""
    truth: dict[str, Any] = {}
    for name, folder in runs.items():
        truth[name] = {reader: read(folder) for reader, read in READERS.items()}
        truth[name]["resume"] = {}
        for path in checkpoint.paths_by_round(RunFolder(folder).checkpoints).values():
            hidden = [other for other in path.parent.iterdir() if other.name > path.name]
            for other in hidden:
                other.rename(other.with_name("." + other.name))
            at, value = resume_point(folder)
            truth[name]["resume"][at] = value
            for other in hidden:
                other.with_name("." + other.name).rename(other)
    return truth


def outcome(folder: Path, file: str, truth: Mapping[str, Any]) -> str:
    """What became of a flip in this file."""
    if file.split("/")[0] in HARMLESS:
        return "harmless by name"
    faults = list(damaged_files(folder))
    if any(row.detail.startswith(f"{file} is damaged") for row in faults):
        is_detected = True
    else:
        assert not faults, f"{file} was flipped, and {faults} were found"
        is_detected = False
    for reader, read in READERS.items():
        try:
            if class_of(file).startswith(READ[reader]) and read(folder) != truth[reader]:
                return "silent"
        except AtlasError as error:
            assert "\n" not in str(error)
            is_detected = True
    try:
        at, value = (
            resume_point(folder) if class_of(file).startswith(READ["resume"]) else next(iter(truth["resume"].items()))
        )
        if value != truth["resume"][at] and file != "config.toml":  # of which `config_change_note` says that it changed
            return "silent"
    except AtlasError:
        is_detected = True
    if is_detected:
        return "found"
    return "cut back" if file == "metrics.jsonl" else "same values"


def through_commands(folder: Path, file: str, whole: Path, *, expected: str) -> None:
    """The same flip through the commands: exit codes and lines, and a resume that ends as the undisturbed run."""
    audited, line = command("audit", str(folder))
    wrong = expected == "found"
    assert audited == (1 if wrong and "atlas:" not in line else 2 if wrong else 0), (file, line)
    assert not wrong or file in line.replace("\n", ""), (file, line)
    if not folder.name.endswith("killed"):
        return
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    try:
        resume_run(copy)
    except AtlasError as error:
        assert "\n" not in str(error)
        assert expected == "found", (file, error)
    else:
        left, right = (encode_tensors(checkpoint.load(run / "checkpoints/round-0003").tensors) for run in (copy, whole))
        assert left == right, f"{file}: the run ends in other bits"
        assert file.startswith("audit/") or audit_run(copy).ok, f"{file}: the audit of the resumed run fails"


def command(*words: str) -> tuple[int, str]:
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        code = atlas(words)
    return code, out.getvalue()


def flip_bit(folder: Path, file: str, offset: int, bit: int) -> None:
    content = bytearray((folder / file).read_bytes())
    content[offset] ^= 1 << bit
    (folder / file).write_bytes(content)


def table(lines: Path) -> int:
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    counts = Counter((class_of(row["file"]), row["outcome"]) for row in rows)
    print("| file | flips | " + " | ".join(OUTCOMES) + " |")
    print("|---" * (len(OUTCOMES) + 2) + "|")
    for kind in [*sorted({kind for kind, _ in counts}), "all"]:
        cells = [
            sum(n for (file_class, what), n in counts.items() if what == name and kind in (file_class, "all"))
            for name in OUTCOMES
        ]
        print(f"| {kind} | {sum(cells)} | " + " | ".join(str(cell or "") for cell in cells) + " |")
    print(f"{len(rows)} flips, {sum(row['commands'] for row in rows)} of them through the commands")
    return sum(row["outcome"] == "silent" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="folder for the runs and the outcomes")
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--commands", type=int, default=80, help="every so many flips go through the commands")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.to.mkdir(parents=True, exist_ok=True)
    lines, work = args.to / "flips.jsonl", args.to / "work"
    shutil.rmtree(work, ignore_errors=True)  # whoever was killed has left a flip there
    runs = {name: Path(shutil.copytree(folder, work / name)) for name, folder in folders(args.to).items()}
    done = len(lines.read_text().splitlines()) if lines.exists() else 0
    truth = read_undamaged(runs)
    for number, name, file, offset, bit in draw_flips(runs, args.flips):
        if number < done:
            continue
        folder = runs[name]
        before = (folder / file).read_bytes()
        try:
            flip_bit(folder, file, offset, bit)
            what = outcome(folder, file, truth[name])
            by_commands = number % args.commands == 0 and what != "harmless by name"
            if by_commands:
                through_commands(folder, file, runs[name.replace("killed", "complete")], expected=what)
        finally:
            (folder / file).write_bytes(before)
        row = {"number": number, "run": name, "file": file, "byte": offset, "bit": bit, "outcome": what}
        with lines.open("a") as out:
            out.write(json.dumps({**row, "commands": by_commands}) + "\n")
    return 1 if table(lines) else 0


if __name__ == "__main__":
    sys.exit(main())
