"""A client's personal model as a folder that PEFT or transformers load."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from atlas_fl.config import load_config
from atlas_fl.config.values import mistake, whole_number
from atlas_fl.errors import CheckpointError, unknown
from atlas_fl.experiment.early_stopping import best_rounds
from atlas_fl.experiment.recorder import leads_of, models_of
from atlas_fl.models.loading import find_family
from atlas_fl.models.peft_io import export_adapter
from atlas_fl.models.vision_loading import load_vision, save_vision
from atlas_fl.params import PRIVATE, ByClient
from atlas_fl.planning.plan import Plan
from atlas_fl.setup.assembly import Assembly, ImageAssembly, scale_of
from atlas_fl.storage import checkpoint
from atlas_fl.storage.digests import check_files, check_state
from atlas_fl.storage.jsonl import read_json
from atlas_fl.storage.run_folder import RunFolder, find_run


def export_clients(assembly: Assembly, models: ByClient, folder: RunFolder) -> None:
    """Write every client's model under the run's `adapters/`."""
    backbone = assembly.site.backbone
    tasks = {client.name: client.task for client in assembly.clients}
    for client, params in models.items():
        if PRIVATE in params:
            continue  # the rest of it is at the client, which writes the whole
        export_adapter(
            params,
            folder.adapter(client),
            family=backbone.family,
            base=backbone.source.path,
            scale=assembly.site.scale,
            labels=tasks[client].label_names,
        )


def export_models(assembly: ImageAssembly, models: ByClient, folder: RunFolder) -> None:
    """Write every different whole model once under the run's `models/`, named by the first client that has it."""
    tasks = {client.name: client.task for client in assembly.clients}
    for client in dict.fromkeys(leads_of(models).values()):
        save_vision(assembly.site.vision, models[client], folder.models / client, labels=tasks[client].label_names)


EXPORTS: Mapping[str, Callable[[Any, ByClient, RunFolder], None]] = {
    "adapters": export_clients,
    "images": export_models,
}
"""What a finished run writes, by the line of work."""


def export(run: str | Path, *, client: str, to: str | Path, round: str | None = None) -> Path:
    """Write the model that a client has after a round: an adapter as a PEFT folder, a whole model as transformers' own.

    `client` is a name such as `movie-0`, or the client's number in the run's order. `round` is a number, or `best` for
    the best mean validation score; the last complete round without it.
    Raises `CheckpointError` without a good checkpoint of that round and `ConfigError` for an unknown client.
    """
    folder = find_run(run)
    config = load_config(folder.config)
    found = _checkpoint(folder, round)
    check_files(folder, folder.config, folder.path / found.state["plan"])
    plan = Plan.from_json(read_json(folder.path / found.state["plan"]))
    _, models = models_of(found, [client.name for client in plan.clients])
    own = _place(list(models), client)
    planned, params = plan.clients[own], models[plan.clients[own].name]
    if PRIVATE in params:
        raise CheckpointError(
            f"what {planned.name} does not share (--share {' '.join(config.mixing.share)}) is at its site alone, where"
            " `atlas join` has written the whole model"
        )
    known = next(row for row in plan.data if row["client"] == planned.name)
    labels = list(known["labels"]) if "majority" in known else []  # a regression has statistics in their place
    if not any(client.ranks for client in plan.clients):
        vision = load_vision(config.model.model, image_size=config.images.image_size)
        save_vision(vision, params, Path(to), labels=labels)
        return Path(to)
    source, family = find_family(config.model.model)
    export_adapter(params, Path(to), family=family, base=source.path, scale=scale_of(config), labels=labels)
    return Path(to)


def _checkpoint(folder: RunFolder, round: str | None) -> checkpoint.Checkpoint:
    """The newest checkpoint, or that of a round; an older one holds other models, and is taken by its number alone."""
    if round is None:
        return _newest(folder)
    number = _best(folder) if round == "best" else whole_number(round)
    if number is None:
        raise mistake("--round", round, "best, or the number of a round")
    if number not in (held := checkpoint.rounds_in(folder.checkpoints)):
        raise CheckpointError(
            f"run {folder.path} has no checkpoint of round {number}; have: {', '.join(map(str, held))}; a run with"
            " --keep-best K keeps those of its K best rounds"
        )
    found = checkpoint.load(held[number])
    check_state(found)
    return found


def _newest(folder: RunFolder) -> checkpoint.Checkpoint:
    newest = checkpoint.load_newest(folder.checkpoints, check=check_state)
    if newest is None:
        raise CheckpointError(f"run {folder.path} has no checkpoint to export from; resume it")
    return newest


def _best(folder: RunFolder) -> int:
    scores = {int(at): score for at, score in _newest(folder).state.get("history", {}).items()}
    if not scores:
        raise CheckpointError(f"run {folder.path} has no evaluated round, so none is the best; give a number")
    return best_rounds(scores, 1)[0]


def _place(names: Sequence[str], client: str) -> int:
    if client.isdecimal() and int(client) < len(names):
        return int(client)
    if client not in names:
        raise unknown("client", client, names)
    return names.index(client)
