"""A site's end of a run: its final model is written and confirmed to the server, then its private part is removed.

The folder of the model has `atlas.json` beside the files: whose it is, of which settings, the server's name for it, and
the SHA-256 of every file. A site that is killed at any of these steps finds there how far it has come, once the same
command is started again.
"""

import errno
from collections.abc import Callable
from dataclasses import asdict, field
from pathlib import Path

from atlas_fl.errors import CheckpointError, ConfigError, DataError
from atlas_fl.frozen import Frozen
from atlas_fl.storage.digests import file_sha256
from atlas_fl.storage.files import atomic_folder
from atlas_fl.storage.jsonl import read_sealed, write_sealed

RECEIPT = "atlas.json"
OTHER_RUN = "has the model of another run"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a disk that has no room."""


class Receipt(Frozen):
    """The file beside a model that says whose it is."""

    client: str
    config: str
    """Hash of the settings of its run."""
    model: str
    """The server's name for the model."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of every file of the model."""


def read_receipt(to: Path, *, client: str) -> Receipt | None:
    """The receipt of this client's model, which lies there in full; None where nothing is there.

    Raises:
        ConfigError: something else is there, or a file of the model is missing or altered.
    """
    if not to.exists():
        return None
    try:
        receipt = Receipt(**read_sealed(to / RECEIPT))
    except (CheckpointError, OSError, TypeError):
        raise occupied_error(to) from None
    if receipt.client != client:
        raise occupied_error(to)
    for name, digest in receipt.files.items():
        path = to / name
        if Path(name).name != name or not path.is_file() or file_sha256(path).hexdigest() != digest:
            raise ConfigError(
                f"{path} is not as it was written; move {to} away, and have the server give the model again with"
                f" `atlas serve --again {client}`"
            )
    return receipt


def occupied_error(to: Path, what: str = "exists already") -> ConfigError:
    """The error for a place that something else has."""
    return ConfigError(f"{to} {what}; name another folder with --to, or move it away")


def write_model(to: Path, receipt: Receipt, export: Callable[[Path], None]) -> None:
    """Write a model with its receipt, readable by its user alone; it is there in full then, or nothing is.

    Raises:
        ConfigError: something has come to lie there.
        DataError: the disk has no room for it, or fails.
    """
    if to.exists():
        raise occupied_error(to)
    try:
        with atomic_folder(to, mode=0o700) as draft:
            export(draft)
            files = {path.name: file_sha256(path).hexdigest() for path in sorted(draft.iterdir())}
            write_sealed(draft / RECEIPT, {**asdict(receipt), "files": files})
    except OSError as error:
        room = "make room" if error.errno in FULL else "mend it, or name another folder with --to"
        raise DataError(
            f"the model cannot be written to {to} ({error.strerror}); {room} and start the same commands again, here"
            " and at the server, which has it still"
        ) from None
