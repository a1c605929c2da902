"""Digests of a run's files: what lies on the disk is what was written, and nobody looks at it a second time.

A checkpoint holds the SHA-256 of everything else that a run goes on from: settings, plans, sketches, mask, and the rows
up to it. The record of an audited round holds those of the files beside it. `digests.json` of a complete run holds
those of all that a later command reads, its exports and its summary too. These three are sealed (`storage.jsonl`).

This finds damage. It is no signature: whoever can write a run's folder can write its digests too.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from atlas_fl.errors import CheckpointError, short_repr
from atlas_fl.frozen import Frozen
from atlas_fl.storage import checkpoint
from atlas_fl.storage.folder_access import files_below, list_folder, memory_bytes, open_to_read
from atlas_fl.storage.jsonl import read_json, read_rows, read_sealed, write_sealed
from atlas_fl.storage.run_folder import RunFolder

BLOCK = 1 << 20
STATE_ENTRY = "digests"
"""The entry of a checkpoint's state."""
MESSAGE_DIGITS = 12
"""Digits of a digest in a message."""


class Digests(Frozen):
    """Digests of a run's files as they were written."""

    sha256: Mapping[str, str]
    """By the path inside the run's folder."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Bytes that are meant of files that grow, from the first on."""

    def __post_init__(self) -> None:
        entries = self.sha256 if isinstance(self.sha256, dict) else {"": ""}
        for name, digest in entries.items():
            is_inside = name and not Path(name).is_absolute() and ".." not in Path(name).parts
            if not is_inside or not isinstance(digest, str):
                raise CheckpointError(f"damaged digests: {short_repr(name)} is no file inside the folder; run again")

    def fault(self, folder: RunFolder, file: Path, *, within: Path | None = None) -> str:
        """The difference of this file from what was written; empty where there is none, or nothing is known of it.

        No part of its path below `within`, or else below the folder, is a link.
        """
        name = file.relative_to(folder.path).as_posix()
        written, length = self.sha256.get(name), self.lengths.get(name)
        if written is None:
            return ""
        if not file.is_file():
            return "it is missing"
        if length is not None and (size := file.stat().st_size) < length:
            return f"it holds {size} bytes of {length} that were written"
        digest = file_sha256(file, length=length, within=within or folder.path).hexdigest()
        part = "" if length is None else f" of the first {length} bytes"
        return (
            ""
            if digest == written
            else f"its SHA-256{part} is {digest:.{MESSAGE_DIGITS}}, and {written:.{MESSAGE_DIGITS}} was written"
        )

    def check(self, folder: RunFolder, *files: Path) -> None:
        """Raise `CheckpointError`, which names the file, unless these files are what was written."""
        for file in files:
            if fault := self.fault(folder, file):
                raise damaged_file_error(folder, file, fault)


def damaged_file_error(folder: RunFolder, file: Path, fault: str) -> CheckpointError:
    """The error for a file of a run that is not what was written, with what mends it."""
    name = file.relative_to(folder.path).as_posix()
    again = f"remove {folder.summary} and go on with the run, which writes its end again"
    remedy = f"restore it from a copy, or {again if is_final_output(name) else 'run again'}"
    return CheckpointError(f"damaged file {file}: {fault}; {remedy}")


def is_final_output(name: str) -> bool:
    """Return whether the end of a run writes this file, from its last checkpoint, its plan and its rows."""
    return name in ("summary.json", "digests.json") or name.startswith(("adapters/", "models/"))


def file_sha256(path: Path, *, length: int | None = None, within: Path | None = None) -> Any:
    """The running SHA-256 over a file, or over its first bytes; no part of its path below `within` is a link.

    Raises:
        CheckpointError: it cannot be read.
    """
    digest, remaining = sha256(), length
    try:
        with open_to_read(path, max_bytes=memory_bytes(), within=within) as file:
            while block := file.read(BLOCK if remaining is None else min(BLOCK, remaining)):
                digest.update(block)
                remaining = None if remaining is None else remaining - len(block)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); restore it, or run again") from None
    return digest


def digests_in_state(state: Mapping[str, Any]) -> Digests:
    """The digests in the state of a checkpoint."""
    lengths = {"metrics.jsonl": state["metrics_bytes"], "ledger.jsonl": state["ledger_bytes"]}
    return Digests(sha256=state[STATE_ENTRY], lengths=lengths)


def read_digests(folder: RunFolder) -> Digests | None:
    """The digests of a run: of a complete one all, else those of its newest good checkpoint.

    None where there is no checkpoint.

    Raises:
        CheckpointError: `digests.json` is damaged, or missing beside checkpoints.
    """
    if folder.summary.is_file() and folder.digests.is_file():
        return _sealed_digests(folder.digests, within=folder.path)
    state = checkpoint.newest_state(folder.checkpoints)
    if state is not None and folder.summary.is_file():
        raise damaged_file_error(folder, folder.digests, "it is missing")
    return None if state is None else digests_in_state(state)


def _sealed_digests(path: Path, *, within: Path) -> Digests:
    """The digests in a sealed file."""
    return Digests(sha256=read_sealed(path, "files", within=within)["files"])


def check_files(folder: RunFolder, *files: Path) -> None:
    """Raise `CheckpointError` unless these files of a run are what was written, once there is a checkpoint."""
    if (digests := read_digests(folder)) is not None:
        digests.check(folder, *files)


def read_checked(folder: RunFolder, file: Path, *names: str) -> dict[str, Any]:
    """The content of a JSON file of a run that is what was written, a mapping with these entries.

    Raises:
        CheckpointError: it is damaged, or another program's.
    """
    check_files(folder, file)
    content = read_json(file, within=folder.path)
    if not isinstance(content, dict):
        raise damaged_file_error(folder, file, "it is no mapping")
    if missing := next((name for name in names if name not in content), ""):
        raise damaged_file_error(folder, file, f"it lacks {missing!r}")
    return content


def read_checked_rows(folder: RunFolder, file: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` or `ledger.jsonl` that are what was written.

    Of a run that is not complete these are the rows up to its newest good checkpoint: a resumed run writes the others
    again.

    Raises:
        CheckpointError: they are damaged; the message names the file.
    """
    digests = read_digests(folder)
    if digests is None:
        return read_rows(file)
    digests.check(folder, file)
    if digests.lengths:  # by an older checkpoint there are fewer rows
        checkpoint.read_newest(folder.checkpoints, checkpoint.read_state)
    return read_rows(file, length=digests.lengths.get(file.name))


def write_digests(folder: RunFolder, digest_by_path: Mapping[str, str]) -> None:
    """Write `digests.json`: these digests by path, and those of the exports, which are read for them."""
    exports = [path for part in (folder.adapters, folder.models) for path in files_below(part, within=folder.path)]
    export_digests = {
        path.relative_to(folder.path).as_posix(): file_sha256(path, within=folder.path).hexdigest() for path in exports
    }
    write_sealed(folder.digests, {"files": {**digest_by_path, **export_digests}})


def find_faults(folder: RunFolder) -> Iterator[tuple[Path, str]]:
    """Every file of a run that is not what was written, and how it differs.

    Of a complete run a checkpoint or an export that is not there is no fault: nothing is read from it.
    """
    yield from _faults_beside(folder.digests, partial(read_digests, folder), within=folder.path)
    heads = [path / checkpoint.STATE for path in checkpoint.paths_by_round(folder.checkpoints).values()]
    heads += [folder.audit / name / "record.json" for name in list_folder(folder.audit, within=folder.path)]
    for head in heads:
        if head.exists():
            yield from _faults_beside(head, partial(_sealed_digests, head, within=folder.path), within=folder.path)


def _faults_beside(head: Path, read: Callable[[], Digests | None], *, within: Path) -> Iterator[tuple[Path, str]]:
    """Every file that is not what was written, of those in the folder of this head, or the head that cannot be read."""
    try:
        digests = read() or Digests(sha256={})
    except CheckpointError as error:
        yield head, reason(error)
        return
    for name in digests.sha256:
        file = head.parent / name
        fault = digests.fault(RunFolder(head.parent), file, within=within)
        if fault and (file.exists() or not is_final_output(name)):
            yield file, fault


def reason(error: CheckpointError) -> str:
    """The fault of a file, out of a message that begins with its name and ends with what mends it."""
    return str(error).partition(": ")[2].partition("; ")[0] or str(error)
