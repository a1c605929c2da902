"""Export of client models: an adapter as a PEFT folder, a gated one as ours, a whole model as a transformers folder.

What is exported scores as what was evaluated. Log frequencies of a client's classes (`methods.prior_correction`) are
added to the bias of its head; where the head has none, the folder's README.md and a note say so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atlas_fl.config import Config, load_config
from atlas_fl.config.values import invalid_value, parse_integer
from atlas_fl.data.clients import ClientData
from atlas_fl.errors import CheckpointError, unknown_name
from atlas_fl.events import Note, OnEvent, ignore
from atlas_fl.experiment.early_stopping import best_rounds
from atlas_fl.experiment.model_card import CARD, LACKS_PRIOR, model_card
from atlas_fl.experiment.recorder import (
    checkpoint_by_client,
    checkpoint_models,
    checkpoint_server_state,
    deduplicate_models,
)
from atlas_fl.methods.prior_correction import fold_prior, log_frequencies
from atlas_fl.models.backbone import Backbone
from atlas_fl.models.gated_adapter import NOTE as GATED_NOTE
from atlas_fl.models.gated_adapter import export_gated_adapter, is_gated
from atlas_fl.models.loading import find_family, load_backbone, save_classifier
from atlas_fl.models.peft_io import export_adapter
from atlas_fl.models.registry import Family
from atlas_fl.models.vision_loading import as_whole, load_vision, save_vision
from atlas_fl.params import HEAD, PRIVATE, ByClient, Params, head_keys
from atlas_fl.planning.plan import read_plan
from atlas_fl.plugins import load_plugins
from atlas_fl.setup.assembly import Assembly, scale_of
from atlas_fl.setup.options import predicting_models
from atlas_fl.storage import checkpoint
from atlas_fl.storage.digests import check_files
from atlas_fl.storage.files import atomic_folder
from atlas_fl.storage.folder_access import write_atomic
from atlas_fl.storage.run_folder import RunFolder, find_run


@dataclass(frozen=True, kw_only=True)
class Head:
    """Classes of a client's head, and their prior."""

    labels: Sequence[str] = ()
    """The names of the classes in the order of the logits; none of a regression, or of a task that writes text."""
    prior: Tensor | None = None
    """Log frequencies of the client's classes, (classes,), where they are added to its logits."""


def head_of(config: Config, labels: Sequence[str], train_counts: Tensor | None) -> Head:
    """The head of a client whose training examples by class are these; None of a task without classes."""
    if train_counts is None or not config.training.prior_correction:
        return Head(labels=labels)
    return Head(labels=labels, prior=log_frequencies(train_counts))


def head_of_client(config: Config, client: ClientData) -> Head:
    """The head of a client whose examples are here."""
    task = client.task
    counts = (
        torch.bincount(torch.from_numpy(client.train.label), minlength=task.num_labels) if task.has_classes else None
    )
    return head_of(config, task.label_names, counts)


def export_clients(assembly: Assembly, models: ByClient, folder: RunFolder, *, on_event: OnEvent = ignore) -> None:
    """Write every client's adapters under the run's `adapters/`, or every different whole model under its `models/`."""
    config, site = assembly.config, assembly.site
    heads = {client.name: head_of_client(config, client) for client in assembly.clients}
    notes: dict[str, None] = {}
    if assembly.is_full:
        # Equal models of clients with priors of their own do not score alike.
        distinct = models if config.training.prior_correction else dict.fromkeys(deduplicate_models(models).values())
        for client in distinct:
            said = write_whole(
                site.backbone, models[client], folder.models / client, head=heads[client], within=folder.path
            )
            notes |= dict.fromkeys(said)
    else:
        for client, params in models.items():
            if PRIVATE in params:
                continue  # the rest of it is at the client, which writes the whole
            said = write_adapter(
                params,
                folder.adapter(client),
                family=site.backbone.family,
                base=site.backbone.source,
                scale=site.scale,
                head=heads[client],
                within=folder.path,
            )
            notes |= dict.fromkeys(said)
    for line in notes:
        on_event(Note(line))


def export_client(
    run: str | Path, *, client: str, to: str | Path, round: str | None = None, on_event: OnEvent = ignore
) -> Path:
    """Write the model that a client has after a round: an adapter as a PEFT folder, a whole model as transformers' own.

    What `--second-gate` weighs is written for `models.gated_adapter`, which PEFT does not load.
    `client` is a name such as `movie-0`, or the client's number in the run's order. `round` is a number, or `best` for
    the best mean validation score; the last complete round without it. A `Note` says what the files lack.
    Raises `CheckpointError` without a good checkpoint of that round and `ConfigError` for an unknown client.
    """
    folder = find_run(run)
    check_files(folder, folder.config)
    config = load_config(folder.config, within=folder.path)
    load_plugins(config.run.plugin, outside=folder.path)
    saved = _load_checkpoint(folder, round)
    plan = read_plan(folder, folder.path / saved.state["plan"])
    server_models, client_models = checkpoint_models(saved, [client.name for client in plan.clients])
    models = predicting_models(
        config,
        checkpoint_by_client(saved),
        checkpoint_server_state(saved),
        client_models=client_models,
        server_models=server_models,
    )
    index = _client_index(list(models), client)
    client_plan, params = plan.clients[index], models[plan.clients[index].name]
    if PRIVATE in params:
        raise CheckpointError(
            f"what {client_plan.name} does not share (--share {' '.join(config.mixing.share)}) is at its site alone,"
            " where `atlas join` has written the whole model"
        )
    head = _head_of_row(config, next(row for row in plan.data if row["client"] == client_plan.name))
    if any(client.ranks for client in plan.clients):
        source, family = find_family(config.model.model)
        notes = write_adapter(params, Path(to), family=family, base=source, scale=scale_of(config), head=head)
    else:
        notes = write_whole(_full_model_backbone(config, params), params, Path(to), head=head)
    for line in notes:
        on_event(Note(line))
    return Path(to)


def _head_of_row(config: Config, row: Mapping[str, Any]) -> Head:
    """The head of a client by the statistics of its labels in a plan."""
    if "majority" not in row:  # a regression has other statistics in the place of counts
        return head_of(config, (), None)
    return head_of(config, list(row["labels"]), torch.tensor(list(row["labels"].values())))


def write_adapter(
    params: Params,
    to: Path,
    *,
    family: Family,
    base: str,
    scale: Callable[[int], float],
    head: Head,
    within: Path | None = None,
) -> tuple[str, ...]:
    """Write an adapter as a PEFT folder, or one with a gate as a folder of ours; a line on what the files lack.

    No part of its path below `within` is a link.
    """
    write, kind = (export_gated_adapter, "gated adapter") if is_gated(params) else (export_adapter, "adapter")

    def save(model: Params, draft: Path) -> None:
        write(model, draft, family=family, base=base, scale=scale, labels=head.labels)

    notes = _write_folder(save, params, to, kind=kind, family=family, base=base, head=head, within=within)
    return (GATED_NOTE, *notes) if is_gated(params) else notes


def write_whole(
    backbone: Backbone, params: Params, to: Path, *, head: Head, within: Path | None = None
) -> tuple[str, ...]:
    """Write a whole model as a folder that stock transformers load; a line on what the files lack."""

    def save(model: Params, draft: Path) -> None:
        save_model(backbone, model, draft, labels=head.labels)

    base = backbone.source
    return _write_folder(
        save, params, to, kind="whole model", family=backbone.family, base=base, head=head, within=within
    )


def _write_folder(
    save: Callable[[Params, Path], None],
    params: Params,
    to: Path,
    *,
    kind: str,
    family: Family,
    base: str,
    head: Head,
    within: Path | None,
) -> tuple[str, ...]:
    """Write a model with its prior in its head, and its card; a line where the head cannot hold the prior."""
    folded = None if head.prior is None else fold_prior(params, head.prior, family=family)
    missing = head.prior.tolist() if head.prior is not None and folded is None else None
    card = model_card(
        kind=kind,
        base=base,
        images=family.images,
        writes=not head_keys(params),
        labels=head.labels,
        missing_prior=missing,
    )
    with atomic_folder(to, within=within) as draft:
        save(params if folded is None else folded, draft)
        write_atomic(draft / CARD, card.encode())
    return () if missing is None else (f"exported models are not whole: {LACKS_PRIOR}, which each {CARD} lists",)


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
    return checkpoint.load(paths[number])


def _newest_checkpoint(folder: RunFolder) -> checkpoint.Checkpoint:
    newest = checkpoint.load_newest(folder.checkpoints)
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
