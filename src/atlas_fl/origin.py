"""What a run was begun with, settings and data, and what it has written: with others it would not be one run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atlas_fl.config import Config, differences, identity
from atlas_fl.errors import CheckpointError
from atlas_fl.io import digests
from atlas_fl.io.checkpoint import Checkpoint
from atlas_fl.io.folder import RunFolder
from atlas_fl.io.results import from_json, to_json
from atlas_fl.tasks.clients import ClientData


def origin_of(config: Config, clients: Sequence[ClientData]) -> dict[str, Any]:
    """The settings that make the run what it is, and a SHA-256 of each client's rows; plain data for JSON."""
    data = {client.name: client.digest() for client in clients}
    plain: dict[str, Any] = from_json(to_json({"settings": identity(config), "data": data}))
    return plain


def check_origin(begun: Mapping[str, Any], now: Mapping[str, Any], *, folder: Path) -> None:
    """Nothing where the run goes on with what it was begun with.

    Raises:
        CheckpointError: a setting or a client's rows are others; the message names the first.
    """
    # A setting younger than runs (`config.identity.LATER`) is not among those of a run begun with its default.
    for name in dict.fromkeys([*begun["settings"], *sorted(now["settings"])]):
        old, new = begun["settings"].get(name), now["settings"].get(name)
        if new != old:
            raise CheckpointError(
                f"run {folder} was begun with {name} = {old!r}, and its config.toml now says {new!r}; restore the file,"
                " or begin another run"
            )
    for name, digest in begun["data"].items():
        if now["data"].get(name) != digest:
            raise CheckpointError(
                f"the data of client {name} are not those that run {folder} was begun with; restore them, or begin"
                " another run: rows that were trained on could now be tested on"
            )


def check_settings(wanted: Config, found: Config, *, folder: Path) -> None:
    """Nothing where these are the settings of the run in this folder.

    Raises:
        CheckpointError: they differ; the message names the first and says how many more.
    """
    changed = differences(found, wanted)
    if changed:
        name, (old, new) = next(iter(changed.items()))
        raise CheckpointError(
            f"run {folder} was begun with {name} = {old!r}, not {new!r}"
            f"{f' (and {len(changed) - 1} more settings differ)' if len(changed) > 1 else ''};"
            " a run goes on with its own config: leave the flags away, or choose another --name"
        )


def check_written(folder: RunFolder, found: Checkpoint) -> None:
    """Nothing where all that a run goes on from beside this checkpoint is what was written with it.

    The settings are not looked at: `check_origin` names the one that differs.

    Raises:
        CheckpointError: a plan, sketches, mask or rows before the checkpoint are damaged; the message names the file.
    """
    digests.check_state(found)
    written = digests.of_state(found.state)
    if written is not None:
        written.check(folder, *(folder.path / name for name in written.sha256 if name != folder.config.name))


def config_note(folder: RunFolder, found: Checkpoint) -> str:
    """What is to be said of a `config.toml` that was changed where nothing depends on it; empty where it was not."""
    written = digests.of_state(found.state)
    if written is None:
        return f"checkpoint {found.path.name} has no digests: an earlier version wrote it; the next one will have them"
    if not written.fault(folder, folder.config):
        return ""
    return f"{folder.config} is not what it was at {found.path.name}; no setting that the run depends on differs"
