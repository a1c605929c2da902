"""A client's personal model as a PEFT folder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from atlas_fl.assemble import Assembly, scale_of
from atlas_fl.assemble_images import ImageAssembly
from atlas_fl.config import load_config
from atlas_fl.errors import CheckpointError, ConfigError, unknown
from atlas_fl.io import checkpoint
from atlas_fl.io.folder import RunFolder, find_run
from atlas_fl.io.results import read_json
from atlas_fl.lora.peft_io import export_adapter
from atlas_fl.models.loading import find_family
from atlas_fl.models.vision_export import save_vision
from atlas_fl.plan import Plan
from atlas_fl.records import leads_of, models_of
from atlas_fl.types import ByClient, Params


def export_clients(assembly: Assembly, models: ByClient, folder: RunFolder) -> None:
    """Write every client's model under the run's `adapters/`."""
    backbone = assembly.site.backbone
    for client, params in models.items():
        export_adapter(
            params,
            folder.adapter(client),
            family=backbone.family,
            base=backbone.source.path,
            scale=assembly.site.scale,
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


def export(run: str | Path, *, client: str, to: str | Path) -> Path:
    """Write the model that a client has after the run's last complete round as a PEFT folder.

    `client` is a name such as `movie-0`, or the client's number in the run's order.
    Raises `CheckpointError` without a good checkpoint and `ConfigError` for an unknown client.
    """
    folder = find_run(run)
    config = load_config(folder.config)
    found, damaged = checkpoint.load_latest(folder.checkpoints)
    if found is None:
        raise CheckpointError(
            f"run {folder.path} has no good checkpoint to export from; {'; '.join(damaged) or 'resume it'}"
        )
    plan = Plan.from_json(read_json(folder.path / found.state["plan"]))
    if not any(client.ranks for client in plan.clients):
        raise ConfigError(
            f"run {folder.path} trained whole models, which have no adapters; at its end they lie in {folder.models}"
        )
    _, models = models_of(found, [client.name for client in plan.clients])
    params = _pick(models, client)
    source, family = find_family(config.model.model)
    export_adapter(params, Path(to), family=family, base=source.path, scale=scale_of(config))
    return Path(to)


def _pick(models: ByClient, client: str) -> Params:
    names = list(models)
    if client.isdecimal() and int(client) < len(names):
        return models[names[int(client)]]
    if client not in models:
        raise unknown("client", client, names)
    return models[client]
