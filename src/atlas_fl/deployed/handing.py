"""The end of a served run: every client gets its own model, also who was away, or whose server had died, just then.

`heard.json` in the run's folder says who has it on its disk: a site says so once it is written, and is answered when
that is written down here. A run that was not served has no such file.
"""

from collections.abc import Callable, Collection, Mapping

from atlas_fl.config import Config, load_config, pinned, run_folder
from atlas_fl.deployed.listening import Service, listening
from atlas_fl.engines.hall import farewells
from atlas_fl.engines.hall.hall import Hall
from atlas_fl.engines.stream.loops import Desk
from atlas_fl.errors import ConfigError, ProtocolError, unknown
from atlas_fl.events import Note, OnEvent
from atlas_fl.io import checkpoint
from atlas_fl.io.certs import listed_clients, open_certs
from atlas_fl.io.digests import check_files, check_state
from atlas_fl.io.folder import RunFolder
from atlas_fl.io.lock import run_lock
from atlas_fl.io.results import read_json, read_sealed, write_sealed
from atlas_fl.io.tensors import read_tensors
from atlas_fl.origin import check_settings
from atlas_fl.plan import Plan
from atlas_fl.records import models_of
from atlas_fl.types import Params


def begin_to_serve(folder: RunFolder) -> None:
    """Write down that nobody has got its model, where that is not known from before."""
    if not folder.heard.exists():
        write_sealed(folder.heard, {"heard": []})


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
    desk.call(farewells.dismiss(hall, models, seconds=seconds, writing_seconds=writing_seconds, awaited=awaited))
    write_sealed(folder.heard, {"heard": sorted(heard)})
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
            write_sealed(folder.heard, {"heard": sorted(heard)})
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
    folder = run_folder(pinned(config))
    if not (folder.summary.exists() and folder.heard.exists()):
        raise ConfigError(
            f"--again is for a served run that is complete, and {folder.path} is none; leave --again out, or name the"
            " run as it was served"
        )
    check_settings(pinned(config), load_config(folder.config), folder=folder.path)
    models = _final_models(folder)
    for name in names:
        if name not in models:
            raise unknown("client in --again", name, models)
    with run_lock(folder.path):
        write_sealed(folder.heard, {"heard": sorted(_heard(folder).difference(names))})


def hand_out(config: Config, service: Service, on_event: OnEvent) -> None:
    """Nothing, once those of a complete run who did not get their model have it, or `wait_seconds` are over.

    Raises an `AtlasError` as the run itself would: for other settings, certificates, or an address that is taken.
    """
    config = pinned(config)
    folder = run_folder(config)
    if not (folder.summary.exists() and folder.heard.exists()):
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
    return set(read_sealed(folder.heard, unsealed=("heard",))["heard"])


def _final_models(folder: RunFolder) -> Mapping[str, Params]:
    checkpoint.load_newest(folder.checkpoints)  # raises: an older one holds other models
    last = last_plan(folder)
    assert last is not None, "a complete run has written its last checkpoint"
    return models_of(*last)[1]
