"""The folder of a run: where everything lies, what it is called, how it is found, and its log."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from atlas_fl.errors import CheckpointError, ConfigError, first_of
from atlas_fl.storage import files, folder_access

MAPPED = "mapped.safetensors"
"""The name whose drafts hold tensors on their way to the disk (`storage.mapped`)."""
_AUDIT_FOLDERS = re.compile(r"(round|joined)-[0-9].*")


class InnerPath:
    """The path of this name inside a run's folder, as an attribute."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: "RunFolder", _: type["RunFolder"]) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The paths inside a run's folder; nothing is created by asking for one."""

    path: Path

    config = InnerPath("config.toml")
    """The settings that reproduce the run."""
    plan = InnerPath("plan.json")
    """Clusters, graph and ranks."""
    sketches = InnerPath("plan.safetensors")
    """The clients' sketches: `sketch/first` and `sketch/second`, each (clients, dim)."""

    def plans(self) -> list[Path]:
        """The files of the first plan and of every later one, in their order."""
        later = [path for path in self.path.glob("plan-*.json") if re.fullmatch(r"plan-\d{4,}", path.stem)]
        return [self.plan, *sorted(later, key=lambda path: int(path.stem.removeprefix("plan-")))]

    def sketches_of(self, plan: str) -> Path:
        """The sketches beside the plan of this file name."""
        return (self.path / plan).with_suffix(".safetensors")

    mask = InnerPath("mask.safetensors")
    """The weights that may move: a truth value for each, by the names of the tensors."""
    metrics = InnerPath("metrics.jsonl")
    """A row for each round, client and split."""
    ledger = InnerPath("ledger.jsonl")
    """A row for each message."""
    summary = InnerPath("summary.json")
    """The outcome; it is there once the run is complete."""
    digests = InnerPath("digests.json")
    """Digests of the files of a complete run."""
    resampled = InnerPath("resampled.safetensors")
    """Test scores of a user's own data over draws of the examples, by client."""
    tuning = InnerPath("tuning.json")
    """Trials by which the run's settings were chosen, where `atlas compare --trials` chose them."""
    deliveries = InnerPath("heard.json")
    """Clients of a served run that have got their model at its end."""
    releases = InnerPath("releases.json")
    """Id of a served run whose server draws noise (`--dp client`), and the rounds whose sums it has given out."""
    sites = InnerPath("sites.json")
    """Metadata that the clients of a served run have sent."""
    checkpoints = InnerPath("checkpoints")
    """The folder of `round-000N`."""
    adapters = InnerPath("adapters")
    """A PEFT folder for each client."""
    models = InnerPath("models")
    """A folder for each different whole model."""
    figures = InnerPath("figures")
    """Figures of `atlas report`."""
    audit = InnerPath("audit")
    """Models that clients trained and loaded, by round."""
    alone = InnerPath("alone")
    """The run of the clients that were trained alone for comparison, a run folder of its own."""
    evaluation = InnerPath("evaluation.json")
    """Scores of the run's models and of what they are compared with (`atlas evaluate`)."""
    answers = InnerPath("answers.jsonl")
    """The answers of these models: a row for each prompt."""
    harness = InnerPath("harness.json")
    """Scores of lm-evaluation-harness by model and task (`atlas evaluate --harness`)."""
    log = InnerPath("log.txt")
    """Lines of time, level and message."""

    def audit_round(self, round: int) -> Path:
        """The folder of one audited round."""
        return self.audit / f"round-{round:04d}"

    def audit_arrival(self, round: int) -> Path:
        """Models that clients that joined before a round brought to it and began it with."""
        return self.audit / f"joined-{round:04d}"

    def adapter(self, client: str) -> Path:
        """The folder of one client's adapter."""
        return self.adapters / client

    def is_reference(self) -> bool:
        """Return whether this is the run of clients alone inside another run, and no run that somebody made."""
        outer = RunFolder(self.path.parent)
        return self.path == outer.alone and outer.is_resumable()

    def is_resumable(self) -> bool:
        """Return whether the folder holds a run that can be resumed, be it one that was stopped while it planned."""
        try:
            return self.config.is_file()
        except OSError:  # the folder may not be read
            return False

    def is_run(self) -> bool:
        """Return whether the folder holds a run that can be read."""
        return self.is_resumable() and self.plan.is_file()


_FILES = [path.name for path in vars(RunFolder).values() if isinstance(path, InnerPath) and "." in path.name]
_AUDIT_FILES = ("record.json", "start.safetensors", "trained.safetensors", "fresh.safetensors")
_NAMES = "|".join(re.escape(name) for name in (*_FILES, *_AUDIT_FILES))
_RUN_FILES = re.compile(rf"{_NAMES}|\.({_NAMES})\.([0-9a-f]{{16}}\.)?writing|{re.escape(files.LOCK)}")
"""Files that a run writes, and may have written before its first checkpoint."""
_LOCKED_FILES = re.compile(rf"{_NAMES}|plan-\d{{4,}}\.(json|safetensors)|\.?{re.escape(MAPPED)}(\..+)?")
"""Files that nobody writes but who holds the run's lock."""


def run_name(*, preset: str, strategy: str, model: str, seed: int, config_hash: str) -> str:
    """The name of a run's folder: recipe, rule, model, seed, and eight digits of the hash of all settings.

    >>> run_name(preset="quick", strategy="atlas", model="org/Some Model", seed=42, config_hash="0123456789ab")
    'quick-atlas-some-model-s42-01234567'
    """
    short = Path(model.rstrip("/")).name
    words = [re.sub(r"[^a-z0-9._]+", "-", word.lower()).strip("-.") for word in (preset, strategy, short)]
    return "-".join([*words, f"s{seed}", config_hash[:8]])


def list_runs(runs_dir: Path) -> list[str]:
    """The names of the runs in a folder, sorted; none where there is no such folder."""
    return sorted(path.name for path in runs_dir.glob("*") if RunFolder(path).is_run())


def find_run(run: str | Path, *, runs_dir: str | Path = "runs", allow_unplanned: bool = False) -> RunFolder:
    """The folder of a run that is given by its path, or by its name in `runs_dir`.

    With `allow_unplanned` also a run that has no plan yet: it can be resumed, but there is nothing to read.

    Raises:
        CheckpointError: neither is a run; the message names the runs that there are.
    """
    run_path, parent = Path(run), Path(runs_dir)
    for path in (run_path, parent / run_path):
        folder = RunFolder(path)
        if folder.is_run() or (allow_unplanned and folder.is_resumable()):
            return folder
    names = list_runs(parent)
    have = f"have: {first_of(names)}" if names else f"there are no runs in {parent}"
    raise CheckpointError(f"not a run folder: {run}; a run folder holds config.toml and plan.json; {have}")


def check_folder_is_free(folder: RunFolder) -> None:
    """Check that a run, or nothing, lies where a run is to be: other files are never written over or removed.

    Raises:
        ConfigError: something else lies there; the message names it.
    """
    if folder.path.exists() and not folder.path.is_dir():
        raise ConfigError(f"{folder.path} is a file; choose another --name or --runs-dir")
    if folder.config.exists() or not folder.path.exists():
        return
    foreign = [name for name in folder_access.list_folder(folder.path) if not files.is_left_of_beginning(name)]
    if foreign:
        raise ConfigError(
            f"{folder.path} exists, is no run and holds {foreign[0]}; choose another --name or --runs-dir"
        )


def remove_aborted_run(path: Path, *, is_new: bool) -> None:
    """Remove what this run has written into a folder that was empty or not there; what came beside it stays.

    `is_new` says that the run has made the folder: it goes too, where it is empty then.
    """
    audit = path / "audit"
    names = folder_access.list_folder(audit, within=path) if folder_access.is_inner_folder(audit) else []
    folders = [
        audit / name for name in names if _AUDIT_FOLDERS.fullmatch(name) and folder_access.is_inner_folder(audit / name)
    ]
    for folder in (*folders, path):
        for file in folder.iterdir() if folder.is_dir() else ():
            if _RUN_FILES.fullmatch(file.name) and folder_access.is_inner_file(file):
                file.unlink()
    made = [*folders, *([audit] if folder_access.is_inner_folder(audit) else []), *([path] if is_new else [])]
    for folder in made:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def held_run(path: Path) -> Iterator[None]:
    """The lock of a run's folder, without the drafts that a killed process has left in it."""
    with files.run_lock(path):
        folder_access.remove_drafts(path, of=_LOCKED_FILES)
        yield


@contextmanager
def run_log(path: Path) -> Iterator[Callable[[str], None]]:
    """A function that appends a line such as `2026-11-21T10:15:02Z INFO round 3 of 6` to this file.

    It stands alone: the program's own logging is neither used nor changed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = folder_access.open_to_append(path)

    def log(text: str) -> None:
        line = text.replace("\n", " | ")
        with folder_access.os_errors_with_path(path):
            file.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} INFO {line}\n".encode())
            file.flush()

    try:
        yield log
    finally:
        with folder_access.os_errors_with_path(path):  # what is in the buffer of a full disk fails once more
            file.close()
