"""A secret of this machine: random bytes in a file that its user alone can read."""

import secrets
from pathlib import Path

from atlas_fl.errors import ConfigError
from atlas_fl.storage.files import sync_folder, write_synced

SECRET_BYTES = 32


def load_or_create_secret(path: Path) -> bytes:
    """The 32 bytes that this file holds as hexadecimal digits; where there is no file, they are drawn and written.

    Raises `ConfigError` where something else is there.
    """
    if not path.exists():
        _write_private(path, secrets.token_bytes(SECRET_BYTES).hex())
    try:
        secret = bytes.fromhex(path.read_text(encoding="ascii")) if path.is_file() else b""
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"{path} is no secret of {2 * SECRET_BYTES} hexadecimal digits; put back the one that was there, or"
            " remove it and a new one is drawn"
        )
    return secret


def _write_private(path: Path, text: str) -> None:
    """Write a file with mode 0600 in one step, so that a process that is killed leaves none or the whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.writing")
    draft.unlink(missing_ok=True)
    draft.touch(mode=0o600, exist_ok=False)
    write_synced(draft, [text.encode()])
    draft.replace(path)
    sync_folder(path.parent)
