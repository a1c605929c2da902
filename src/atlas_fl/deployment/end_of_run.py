"""The end of a served run: every client gets its own model, confirms that it has it, and clears its private part.

A site's end of a run: its model is written first, then the server is told so, and then the private part goes.

The folder of the model has `atlas.json` beside the files: whose it is, of which settings, the server's name for it, and
the SHA-256 of every file. A site that is killed at any of these steps finds there how far it has come, once the same
command is started again.

The end of a served run: every client gets its own model, also who was away, or whose server had died, just then.

`heard.json` in the run's folder says who has it on its disk: a site says so once it is written, and is answered when
that is written down here. A run that was not served has no such file.
"""

import errno
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

from atlas_fl.config import Config, load_config, pin_mask_file, run_folder
from atlas_fl.deployment.service import Service, listening
from atlas_fl.errors import CheckpointError, ConfigError, DataError, ProtocolError, unknown_name
from atlas_fl.events import Note, OnEvent
from atlas_fl.experiment.recorder import check_settings, models_of
from atlas_fl.params import Params
from atlas_fl.planning.plan import Plan
from atlas_fl.runtime.coordinator import coordinator
from atlas_fl.runtime.coordinator.coordinator import Hall
from atlas_fl.runtime.coordinator.site_worker import AnotherModelError, confirm
from atlas_fl.runtime.protocol.private_params import Owner, clear_vault
from atlas_fl.runtime.transport.certificates import listed_clients, open_certs
from atlas_fl.runtime.transport.client import Link
from atlas_fl.runtime.transport.event_loop import Desk
from atlas_fl.storage import checkpoint
from atlas_fl.storage.digests import check_files, check_state
from atlas_fl.storage.files import atomic_folder, run_lock
from atlas_fl.storage.jsonl import read_json, read_sealed, write_sealed
from atlas_fl.storage.run_folder import RunFolder
from atlas_fl.storage.tensors import read_tensors

RECEIPT = "atlas.json"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a disk that has no room."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a folder says of the model in it."""

    client: str
    config: str
    """Hash of the settings of its run."""
    model: str
    """The server's name for the model."""
    files: dict[str, str] = field(default_factory=dict)
    """The SHA-256 of every file of it."""


def read_receipt(to: Path, *, client: str) -> Receipt | None:
    """What says that this client's model lies there in full; None where nothing is there.

    Raises:
        ConfigError: something else is there, or a file of the model is missing or altered.
    """
    if not to.exists():
        return None
    try:
        found = Receipt(**read_sealed(to / RECEIPT))
    except (CheckpointError, OSError, TypeError):
        raise taken(to) from None
    if found.client != client:
        raise taken(to)
    for name, digest in found.files.items():
        path = to / name
        if Path(name).name != name or not path.is_file() or sha256(path.read_bytes()).hexdigest() != digest:
            raise ConfigError(
                f"{path} is not as it was written; move {to} away, and have the server give the model again with"
                f" `atlas serve --again {client}`"
            )
    return found


def taken(to: Path) -> ConfigError:
    """The error for a place that something else has."""
    return ConfigError(f"{to} exists already; name another folder with --to, or move it away")


def write_model(to: Path, receipt: Receipt, export: Callable[[Path], None]) -> None:
    """Write a model with what says whose it is; it is there in full then, or nothing is.

    Raises:
        ConfigError: something has come to lie there.
        DataError: the disk has no room for it, or fails.
    """
    if to.exists():
        raise taken(to)
    try:
        with atomic_folder(to) as draft:
            export(draft)
            files = {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(draft.iterdir())}
            write_sealed(draft / RECEIPT, {**asdict(receipt), "files": files})
    except OSError as error:
        room = "make room" if error.errno in FULL else "mend it, or name another folder with --to"
        raise DataError(
            f"the model cannot be written to {to} ({error.strerror}); {room} and start the same commands again, here"
            " and at the server, which has it still"
        ) from None


def confirm_again(link: Link, receipt: Receipt, *, to: Path) -> None:
    """Tell the server that the model lies here, which was killed or cut off before it could hear so.

    Raises:
        ConfigError: the model is of another run.
    """
    if link.welcome.get("config") != receipt.config:
        raise taken(to)
    try:
        confirm(link, receipt.model)
    except AnotherModelError:
        raise taken(to) from None


def clear_private(private: Path, receipt: Receipt) -> str:
    """Remove what the client has not shared, which is in its model now; what stays of it, in a line."""
    return clear_vault(private, Owner(client=receipt.client, config=receipt.config))


def begin_to_serve(folder: RunFolder) -> None:
    """Write down that nobody has got its model, where that is not known from before."""
    if not folder.deliveries.exists():
        write_sealed(folder.deliveries, {"heard": []})


def dismiss(
    folder: RunFolder,
    hall: Hall,
    desk: Desk,
    *,
    seconds: float,
    writing_seconds: float,
    awaited: Collection[str] = (),
) -> None:
    """Give all who are here, or come within so many seconds where they are awaited, the model of this complete run.

    Who writes its model then has at least `writing_seconds` for it. Writes down who has done so, and tells who has not.
    """
    models, heard = _final_models(folder), _heard(folder)
    hall.on_kept = _written_down(folder, heard)
    desk.call(coordinator.dismiss(hall, models, seconds=seconds, writing_seconds=writing_seconds, awaited=awaited))
    write_sealed(folder.deliveries, {"heard": sorted(heard)})
    if rest := [name for name in models if name not in heard]:
        desk.on_event(
            Note(
                f"{', '.join(rest)} did not get the model at the end of the run; start the same command again, here and"
                " there"
            )
        )


def _written_down(folder: RunFolder, heard: set[str]) -> Callable[[str], None]:
    """What writes down that a client has its model; raises `ProtocolError` where that is not possible."""

    def write(name: str) -> None:
        heard.add(name)
        try:
            write_sealed(folder.deliveries, {"heard": sorted(heard)})
        except OSError as error:
            raise ProtocolError(
                f"the server cannot write down that {name} has its model ({error.strerror}); start the same command"
                " again once it can"
            ) from None

    return write


def give_again(config: Config, names: Collection[str]) -> None:
    """Have these clients get their models once more, although they have said that they had them.

    Raises `ConfigError` where the run is not complete, was not served, or has no model for one of them.
    """
    folder = run_folder(pin_mask_file(config))
    if not (folder.summary.exists() and folder.deliveries.exists()):
        raise ConfigError(
            f"--again is for a served run that is complete, and {folder.path} is none; leave --again out, or name the"
            " run as it was served"
        )
    check_settings(pin_mask_file(config), load_config(folder.config), folder=folder.path)
    models = _final_models(folder)
    for name in names:
        if name not in models:
            raise unknown_name("client in --again", name, models)
    with run_lock(folder.path):
        write_sealed(folder.deliveries, {"heard": sorted(_heard(folder).difference(names))})


def hand_out(config: Config, service: Service, on_event: OnEvent) -> None:
    """Nothing, once those of a complete run who did not get their model have it, or `wait_seconds` are over.

    Raises an `AtlasError` as the run itself would: for other settings, certificates, or an address that is taken.
    """
    config = pin_mask_file(config)
    folder = run_folder(config)
    if not (folder.summary.exists() and folder.deliveries.exists()):
        return
    check_settings(config, load_config(folder.config), folder=folder.path)
    rest = [name for name in _final_models(folder) if name not in _heard(folder)]
    if not rest:
        return
    seconds, certs, listed = service.wait_seconds, open_certs(service.certs), listed_clients(service.certs)
    awaited = [name for name in rest if name in listed and name not in service.without]
    if not awaited:
        names = ", ".join(rest)
        on_event(Note(f"{names} did not get the model, and may not join now; start this again once they may"))
        return
    # models under a mask go as its values, here as in the rounds: the whole one may be longer than a frame
    mask = read_tensors(folder.mask) if folder.mask.exists() else None
    listens = listening(config, service, certs, on_event=on_event, listed=listed, late=False, mask=mask)
    with run_lock(folder.path), listens as (hall, desk, where):
        names, until = ", ".join(awaited), f"for up to {seconds:g} seconds"
        on_event(Note(f"run {folder.path} is complete; listening on {where} {until} for {names}, without a model yet"))
        with service.beside(hall, desk):
            dismiss(folder, hall, desk, seconds=seconds, writing_seconds=service.deadline_seconds, awaited=awaited)


def last_plan(folder: RunFolder) -> tuple[checkpoint.Checkpoint, tuple[str, ...]] | None:
    """The newest checkpoint and who is in its plan; None where there is none to go on from."""
    found, _ = checkpoint.load_latest(folder.checkpoints, check=check_state)
    if found is None:
        return None
    check_files(folder, folder.path / found.state["plan"])
    plan = Plan.from_json(read_json(folder.path / found.state["plan"]))
    return found, tuple(client.name for client in plan.clients)


def _heard(folder: RunFolder) -> set[str]:
    return set(read_sealed(folder.deliveries, unsealed=("heard",))["heard"])


def _final_models(folder: RunFolder) -> Mapping[str, Params]:
    checkpoint.load_newest(folder.checkpoints)  # raises: an older one holds other models
    last = last_plan(folder)
    assert last is not None, "a complete run has written its last checkpoint"
    return models_of(*last)[1]
