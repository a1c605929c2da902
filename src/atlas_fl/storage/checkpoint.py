"""Checkpoints of the whole federation: written in one step, verified when read, the last good one used.

`checkpoints/round-0003/` holds `state.safetensors` and `state.json`. Both are written into a hidden folder of a new
name, flushed, and the folder is renamed: a run that is killed at any moment leaves complete checkpoints only. What a
disk or a person does to them later is found out by two SHA-256 digests, one of the tensors' file and one of the rest.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch

from atlas_fl.errors import CheckpointError
from atlas_fl.frozen import Frozen
from atlas_fl.params import Params
from atlas_fl.storage import folder_access
from atlas_fl.storage.files import set_aside
from atlas_fl.storage.jsonl import read_sealed, to_json, write_sealed
from atlas_fl.storage.mapped import MappedTensors
from atlas_fl.storage.tensors import decode_tensors, parts_of, write_tensors

TENSORS, STATE = "state.safetensors", "state.json"
NAME = re.compile(r"round-(\d{4,})(\.replaced)?")
_HIDDEN = re.compile(rf"\.{NAME.pattern}\.(([0-9a-f]{{16}}\.)?writing|removed)")
_NAMES = r"state(-\d{4})?\.(safetensors|json)"
_CHECKPOINT_FILES = re.compile(rf"{_NAMES}|\.{_NAMES}\.([0-9a-f]{{16}}\.)?writing")
"""Files of a checkpoint's folder, and for a moment of a draft."""
FILE_BYTES = 1 << 28
"""Bytes with which a file of tensors is full."""
LEAST_KEPT = 1 << 26
"""Fewest bytes of unchanged tensors for which a checkpoint is made of what has changed."""
MOST_FILES = 100
"""Most files of tensors in such a checkpoint."""

Found = TypeVar("Found")


class Checkpoint(Frozen):
    """State from which a run goes on after a round."""

    round: int
    """The last round that is complete."""
    tensors: dict[str, torch.Tensor]
    """Every tensor of the federation, on the CPU."""
    state: dict[str, Any]
    """Everything else, as JSON gives it back: tuples are lists, keys of mappings are text."""
    path: Path
    """The folder that it was read from."""


class TensorFile(Frozen):
    """A written file of tensors."""

    path: Path
    digest: str
    sizes: Mapping[str, int]
    """Bytes of each of its tensors."""
    tensors: Params
    """The tensors that the checkpoint has from it; others of the same names are newer, or gone."""


def save(
    folder: Path, *, round: int, tensors: Params, state: Mapping[str, Any], written: list[TensorFile] | None = None
) -> Path:
    """Write a checkpoint in one step and return its folder.

    Checkpoints of later rounds are removed: the run went back behind them because they were damaged. `written` are the
    files of the last checkpoint of this run, and then those of this one; without them all tensors are written.

    Raises:
        DataError: the state holds a NaN or an infinity; nothing is changed then.
    """
    to_json(state)  # refuses before anything is written
    final = folder / f"round-{round:04d}"
    draft = folder_access.make_folder(folder / folder_access.draft_name(final.name), within=folder.parent)
    replaced = folder / f"{final.name}.replaced"
    files = _link_unchanged(tensors, written or (), draft)
    held = {name: tensor for file in files for name, tensor in file.tensors.items()}
    changed = {name: tensor for name, tensor in tensors.items() if name not in held}
    *full, last = parts_of(changed, FILE_BYTES)
    for part in (*full, last):
        path = draft / (TENSORS if part is last else f"state-{len(files) + 1:04d}.safetensors")
        sizes = {name: tensor.nbytes for name, tensor in part.items()}
        digest = write_tensors(path, part, within=folder.parent)
        files.append(TensorFile(path=path, digest=digest, sizes=sizes, tensors=part))
    gone = sorted({name for file in files for name in file.sizes} - tensors.keys())
    content = {"round": round, "files": {file.path.name: file.digest for file in files}, "state": state}
    content |= {"gone": gone} if gone else {}
    write_sealed(draft / STATE, content, within=folder.parent)
    if final.exists():  # a folder cannot be renamed onto another, so the old one stays readable under a second name
        _remove(replaced)
        final.rename(replaced)
    draft.rename(final)
    with folder_access.opened_folder(folder, within=folder.parent) as descriptor:
        os.fsync(descriptor)
    for path in [path for path in folder.iterdir() if _is_leftover(path, round)]:
        _remove(path)
    if written is not None:
        written[:] = [replace(file, path=final / file.path.name) for file in files]
    return final


def _link_unchanged(tensors: Params, written: Sequence[TensorFile], draft: Path) -> list[TensorFile]:
    """Link the files with tensors that are the same objects as now, oldest first; none where it is not worth it.

    It is worth it where half of the linked bytes are of such tensors. A file system without hard links has none.
    """
    files = [
        replace(file, tensors={name: tensor for name, tensor in file.tensors.items() if tensors.get(name) is tensor})
        for file in written
    ]
    files = [file for file in files if file.tensors]
    kept = sum(file.sizes[name] for file in files for name in file.tensors)
    if kept < max(LEAST_KEPT, sum(sum(file.sizes.values()) for file in files) / 2) or len(files) >= MOST_FILES:
        return []
    linked: list[TensorFile] = []
    with suppress(OSError):
        for number, file in enumerate(files, start=1):
            path = draft / f"state-{number:04d}.safetensors"
            os.link(file.path, path)
            linked.append(replace(file, path=path))
        return linked
    return []


def load_latest(
    folder: Path, *, check: Callable[[Checkpoint], None] | None = None, mapped: MappedTensors | None = None
) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest checkpoint that is intact, and one line for each newer one that is not.

    `check` may refuse one by a CheckpointError, such as for rows that are damaged before its end. Nothing is changed on
    the disk. Without an intact checkpoint the first value is None.
    """
    messages: list[str] = []
    for path in _newest_first(folder):
        try:
            candidate = load(path, mapped=mapped)
            if check is not None:
                check(candidate)
            return candidate, tuple(f"{line}; going on from {path.name}" for line in messages)
        except CheckpointError as error:
            messages.append(f"checkpoint {path.name} passed over: {error}")
    return None, tuple(messages)


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint, None where there is none: for what would say something else from an older one.

    Raises:
        CheckpointError: it is damaged.
    """
    return read_newest(folder, load)


def read_newest(folder: Path, read: Callable[[Path], Found]) -> Found | None:
    """The newest checkpoint by this reader, `load` or `read_state`; None where there is none.

    Raises:
        CheckpointError: it is damaged; a resumed run passes over it.
    """
    for path in _newest_first(folder)[:1]:
        try:
            return read(path)
        except CheckpointError as error:
            fault = str(error).partition("; ")[0]
            raise CheckpointError(
                f"checkpoint {path} is damaged: {fault}; restore it from a copy, or go on with a run that is not"
                " complete, which passes over it"
            ) from None
    return None


def newest_state(folder: Path) -> Mapping[str, Any] | None:
    """The state of the newest checkpoint whose state is intact, without its tensors; None where there is none."""
    for path in _newest_first(folder):
        with suppress(CheckpointError):
            state: Mapping[str, Any] = read_state(path)["state"]
            return state
    return None


def load(path: Path, *, mapped: MappedTensors | None = None) -> Checkpoint:
    """The checkpoint in this folder; `mapped` moves its tensors to the disk where they take too much memory.

    Raises:
        CheckpointError: a file is missing, cut off or altered; the message says which and how.
    """
    head = read_state(path)
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(head["files"]):  # the oldest first
        payload = folder_access.read_written(
            path / name, max_bytes=folder_access.memory_bytes(), within=path.parents[2]
        )
        digest, expected = sha256(payload).hexdigest(), head["files"][name]
        if digest != expected:
            raise CheckpointError(
                f"{name} of {len(payload)} bytes has SHA-256 {digest[:12]}, but {STATE} says {expected[:12]}"
            )
        tensors |= decode_tensors(payload)
        moved = {} if mapped is None else mapped.move(tensors.values())
        tensors = {key: moved.get(id(tensor), tensor) for key, tensor in tensors.items()}
    for name in head.get("gone", ()):
        del tensors[name]
    return Checkpoint(round=head["round"], tensors=tensors, state=head["state"], path=path)


def prune(folder: Path, *, keep: int, keep_rounds: Collection[int] = ()) -> None:
    """Remove all but the newest `keep` checkpoints, one or more, and those of the rounds `keep_rounds`."""
    for path in _newest_first(folder)[keep:]:
        if round_of(path) not in keep_rounds:
            _remove(path)


def paths_by_round(folder: Path) -> dict[int, Path]:
    """The checkpoints of a folder by round, rising; whether they are intact is not looked at."""
    return {round_of(path): path for path in reversed(_newest_first(folder))}


def round_of(path: Path) -> int:
    """The round in a checkpoint's name."""
    match = NAME.fullmatch(path.name)
    assert match is not None, "only folders of such names are listed"
    return int(match[1])


def read_state(path: Path) -> dict[str, Any]:
    """The content of a checkpoint's `state.json`; raises `CheckpointError` where it is damaged."""
    return read_sealed(path / STATE, "round", "files", "state", within=path.parents[2])


def _newest_first(folder: Path) -> list[Path]:
    """Complete checkpoints; one that was being replaced comes after the one that replaces it."""
    paths = [folder / name for name in folder_access.list_folder(folder, within=folder.parent) if NAME.fullmatch(name)]
    return sorted(paths, key=lambda path: (round_of(path), path.suffix == ""), reverse=True)


def _is_leftover(path: Path, round: int) -> bool:
    if match := NAME.fullmatch(path.name):
        return bool(match[2]) or int(match[1]) > round
    return _HIDDEN.fullmatch(path.name) is not None


def _remove(path: Path) -> None:
    """Remove a checkpoint: renamed first, so that a half-removed one is never taken for a damaged one.

    What no run has written stays, under a name that is no checkpoint's.
    """
    if not os.path.lexists(path):
        return
    hidden = path if path.name.startswith(".") else path.with_name(f".{path.name}.removed")
    if hidden != path:
        _remove(hidden)
        path.rename(hidden)
    if hidden.is_dir() and not hidden.is_symlink():
        for file in hidden.iterdir():
            if _CHECKPOINT_FILES.fullmatch(file.name) and file.is_file() and not file.is_symlink():
                file.unlink()
        if not any(hidden.iterdir()):
            hidden.rmdir()
            return
    set_aside(hidden, name=hidden.name.removeprefix(".").removesuffix(".removed"))
