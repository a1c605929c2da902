"""The end of a served run: every client gets its own model, also who was away, or whose server had died, just then.

`heard.json` in the run's folder says who has got it. A run that was not served has no such file.
"""

from collections.abc import Collection, Mapping

from atlas_fl.config import Config, load_config, pinned, run_folder
from atlas_fl.deployed.listening import Service, listening
from atlas_fl.engines.hall import farewells
from atlas_fl.engines.hall.hall import Hall
from atlas_fl.engines.stream.loops import Desk
from atlas_fl.events import Note, OnEvent
from atlas_fl.io import checkpoint
from atlas_fl.io.certs import listed_clients, open_certs
from atlas_fl.io.folder import RunFolder
from atlas_fl.io.lock import run_lock
from atlas_fl.io.results import read_json, write_json
from atlas_fl.io.tensors import read_tensors
from atlas_fl.origin import check_settings
from atlas_fl.plan import Plan
from atlas_fl.records import models_of
from atlas_fl.types import Params


def begin_to_serve(folder: RunFolder) -> None:
    """Write down that nobody has got its model, where that is not known from before."""
    if not folder.heard.exists():
        write_json(folder.heard, {"heard": []})


def dismiss(folder: RunFolder, hall: Hall, desk: Desk, *, seconds: float, awaited: Collection[str] = ()) -> None:
    """Give all who are here, or come within so many seconds where they are awaited, the model of this complete run.

    Writes down who has got it, and tells who has not.
    """
    models = _final_models(folder)
    heard = _heard(folder) | desk.call(farewells.dismiss(hall, models, seconds=seconds, awaited=awaited))
    write_json(folder.heard, {"heard": sorted(heard)})
    if rest := [name for name in models if name not in heard]:
        desk.on_event(
            Note(
                f"{', '.join(rest)} did not get the model at the end of the run; start the same command again, here and"
                " there"
            )
        )


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
    awaited = [name for name in rest if name in listed]
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
            dismiss(folder, hall, desk, seconds=seconds, awaited=awaited)


def last_plan(folder: RunFolder) -> tuple[checkpoint.Checkpoint, tuple[str, ...]] | None:
    """The newest checkpoint and who is in its plan; None where there is none to go on from."""
    found, _ = checkpoint.load_latest(folder.checkpoints)
    if found is None:
        return None
    plan = Plan.from_json(read_json(folder.path / found.state["plan"]))
    return found, tuple(client.name for client in plan.clients)


def _heard(folder: RunFolder) -> set[str]:
    return set(read_json(folder.heard)["heard"])


def _final_models(folder: RunFolder) -> Mapping[str, Params]:
    last = last_plan(folder)
    assert last is not None, "a complete run has written its last checkpoint"
    return models_of(*last)[1]
