"""Export of client models: an adapter as a PEFT folder, a gated one as ours, a whole model as a transformers folder."""

from collections.abc import Callable, Sequence
from pathlib import Path

from atlas_fl.config import Config, load_config
from atlas_fl.config.values import invalid_value, parse_integer
from atlas_fl.errors import CheckpointError, unknown_name
from atlas_fl.experiment.early_stopping import best_rounds
from atlas_fl.experiment.recorder import (
    checkpoint_gates,
    checkpoint_models,
    checkpoint_second_models,
    checkpoint_server_state,
    deduplicate_models,
)
from atlas_fl.experiment.second_models import predicting_models
from atlas_fl.models.backbone import Backbone
from atlas_fl.models.gated_adapter import export_gated_adapter, is_gated
from atlas_fl.models.loading import find_family, load_backbone, save_classifier
from atlas_fl.models.peft_io import export_adapter
from atlas_fl.models.registry import Family
from atlas_fl.models.vision_loading import as_whole, load_vision, save_vision
from atlas_fl.params import HEAD, PRIVATE, ByClient, Params
from atlas_fl.planning.plan import Plan
from atlas_fl.setup.assembly import Assembly, scale_of
from atlas_fl.storage import checkpoint
from atlas_fl.storage.digests import check_files, check_state
from atlas_fl.storage.jsonl import read_json
from atlas_fl.storage.run_folder import RunFolder, find_run


def export_clients(assembly: Assembly, models: ByClient, folder: RunFolder) -> None:
    """Write every client's adapters under the run's `adapters/`, or every different whole model under its `models/`."""
    tasks = {client.name: client.task for client in assembly.clients}
    if assembly.is_full:
        for client in dict.fromkeys(deduplicate_models(models).values()):
            labels = tasks[client].label_names
            to = folder.models / client
            save_model(assembly.site.backbone, models[client], to, labels=labels, within=folder.path)
        return
    backbone = assembly.site.backbone
    for client, params in models.items():
        if PRIVATE in params:
            continue  # the rest of it is at the client, which writes the whole
        _export_adapter(
            params,
            folder.adapter(client),
            family=backbone.family,
            base=backbone.source.path,
            scale=assembly.site.scale,
            labels=tasks[client].label_names,
            within=folder.path,
        )


def export_client(run: str | Path, *, client: str, to: str | Path, round: str | None = None) -> Path:
    """Write the model that a client has after a round: an adapter as a PEFT folder, a whole model as transformers' own.

    What `--second-gate` weighs is written for `models.gated_adapter`, which PEFT does not load.
    `client` is a name such as `movie-0`, or the client's number in the run's order. `round` is a number, or `best` for
    the best mean validation score; the last complete round without it.
    Raises `CheckpointError` without a good checkpoint of that round and `ConfigError` for an unknown client.
    """
    folder = find_run(run)
    check_files(folder, folder.config)
    config = load_config(folder.config, within=folder.path)
    saved = _load_checkpoint(folder, round)
    check_files(folder, folder.path / saved.state["plan"])
    plan = Plan.from_json(read_json(folder.path / saved.state["plan"]))
    server_models, client_models = checkpoint_models(saved, [client.name for client in plan.clients])
    second, gates = checkpoint_second_models(saved), checkpoint_gates(saved)
    state = checkpoint_server_state(saved)
    models = predicting_models(config, second, gates, state, client_models=client_models, server_models=server_models)
    index = _client_index(list(models), client)
    client_plan, params = plan.clients[index], models[plan.clients[index].name]
    if PRIVATE in params:
        raise CheckpointError(
            f"what {client_plan.name} does not share (--share {' '.join(config.mixing.share)}) is at its site alone,"
            " where `atlas join` has written the whole model"
        )
    data_row = next(row for row in plan.data if row["client"] == client_plan.name)
    labels = list(data_row["labels"]) if "majority" in data_row else []  # a regression has statistics in their place
    if not any(client.ranks for client in plan.clients):
        save_model(_full_model_backbone(config, params), params, Path(to), labels=labels)
        return Path(to)
    source, family = find_family(config.model.model)
    _export_adapter(params, Path(to), family=family, base=source.path, scale=scale_of(config), labels=labels)
    return Path(to)


def _export_adapter(
    params: Params,
    to: Path,
    *,
    family: Family,
    base: str,
    scale: Callable[[int], float],
    labels: Sequence[str],
    within: Path | None = None,
) -> None:
    """Write an adapter as a PEFT folder, or one with a gate as a folder of ours."""
    write = export_gated_adapter if is_gated(params) else export_adapter
    write(params, to, family=family, base=base, scale=scale, labels=labels, within=within)


def save_model(
    backbone: Backbone, params: Params, to: Path, *, labels: Sequence[str], within: Path | None = None
) -> None:
    """Write a whole model as a folder that stock transformers load; `labels` name the classes in order.

    No part of its path below `within` is a link.
    """
    if backbone.vision is not None:
        save_vision(backbone.vision, params, to, labels=labels, within=within)
    else:
        save_classifier(backbone, params, to, labels=labels, within=within)


def _full_model_backbone(config: Config, params: Params) -> Backbone:
    """The backbone whose weights these are; a whole image model is recognised by the name of its head."""
    if HEAD + "weight" in params:
        return as_whole(load_vision(config.model.model, image_size=config.images.image_size))
    return load_backbone(config.model.model)


def _load_checkpoint(folder: RunFolder, round: str | None) -> checkpoint.Checkpoint:
    """The newest checkpoint, that of the best round (`best`), or that of the round with this number."""
    if round is None:
        return _newest_checkpoint(folder)
    number = _best_round(folder) if round == "best" else parse_integer(round)
    if number is None:
        raise invalid_value("--round", round, "best, or the number of a round")
    if number not in (paths := checkpoint.paths_by_round(folder.checkpoints)):
        raise CheckpointError(
            f"run {folder.path} has no checkpoint of round {number}; have: {', '.join(map(str, paths))}; a run with"
            " --keep-best K keeps those of its K best rounds"
        )
    saved = checkpoint.load(paths[number])
    check_state(saved)
    return saved


def _newest_checkpoint(folder: RunFolder) -> checkpoint.Checkpoint:
    newest = checkpoint.load_newest(folder.checkpoints, check=check_state)
    if newest is None:
        raise CheckpointError(f"run {folder.path} has no checkpoint to export from; resume it")
    return newest


def _best_round(folder: RunFolder) -> int:
    scores = {int(round): score for round, score in _newest_checkpoint(folder).state.get("history", {}).items()}
    if not scores:
        raise CheckpointError(f"run {folder.path} has no evaluated round, so none is the best; give a number")
    return best_rounds(scores, 1)[0]


def _client_index(names: Sequence[str], client: str) -> int:
    if client.isdecimal() and int(client) < len(names):
        return int(client)
    if client not in names:
        raise unknown_name("client", client, names)
    return names.index(client)
