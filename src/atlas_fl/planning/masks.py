"""Planning of runs that train whole models: ridge heads, the mask, costs of a round, notes of the plan.

The heads are fitted first, then the mask is made, then the bytes, seconds and memory of a round are predicted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from atlas_fl.client.calibration import CROSS, GRAM, LOSSES, SCALED_BY, SCALES, ridge_head
from atlas_fl.client.job import Job, make_jobs
from atlas_fl.client.options import RidgeOptions, ScaleOptions
from atlas_fl.config import check_mask_file
from atlas_fl.config.schema import SparseConfig, parse_mask_file
from atlas_fl.errors import BudgetError, ConfigError
from atlas_fl.params import HEAD, ByClient, Params, add, head_keys, num_bytes, num_values, select, shared_params
from atlas_fl.planning.plan import ClientPlan
from atlas_fl.rng import generator
from atlas_fl.runtime.engine import Engine, run_on_all_clients
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import sensitivity_options, strategy_of
from atlas_fl.sparse import masks
from atlas_fl.sparse.codec import mask_size, message_size
from atlas_fl.storage.ledger import Direction, Kind, LedgerRow
from atlas_fl.storage.tensors import encoded_size

SCORES_AT_ONCE = 8
"""Clients whose sensitivities are in memory at the same time: each is as large as a model."""


def fit_heads_and_mask(
    assembly: Assembly, engine: Engine, models: ByClient
) -> tuple[ByClient, masks.Mask | None, tuple[LedgerRow, ...]]:
    """Fit the heads of images and make the mask of all clients, as the config says; fitted heads are frozen.

    (initial models, mask, the messages of both).
    """
    messages = list[LedgerRow]()
    mask: masks.Mask | None = None
    if assembly.config.sparse.has_mask:  # before the heads, whose fit passes over all images
        mask = _mask_from_file(assembly, models)
    if should_fit_heads(assembly):
        models, sent = fit_heads(assembly, engine, models)
        messages += sent
    if assembly.config.sparse.has_mask:
        if mask is None:
            mask, sent = _calibrate_body_mask(assembly, engine, models)
            messages += sent
        messages += mask_messages(assembly, mask)
        heads = {
            key: torch.full_like(models[name][key], not should_fit_heads(assembly), dtype=torch.bool)
            for name in assembly.names
            for key in head_keys(models[name])
        }
        mask = {**mask, **heads}
    return models, mask, tuple(messages)


def should_fit_heads(assembly: Assembly) -> bool:
    """Return whether heads are fitted before round one: those of images, where the config says so."""
    return assembly.has_images and assembly.config.images.head_first == "ridge"


def check_heads(assembly: Assembly) -> None:
    """Raise `ConfigError` where a mask would have to hold heads of several sizes."""
    sizes = {client.task.num_labels: client.task.name for client in assembly.clients}
    sparse = assembly.config.sparse
    regressions = [client.task.name for client in assembly.clients if client.task.is_regression]
    if regressions and sparse.mask_file is None and sparse.mask in masks.BY_SENSITIVITY:
        raise ConfigError(
            f"--mask {sparse.mask} ranks weights by what they do to the probabilities of classes, and {regressions[0]}"
            " has real numbers in their place; take lowest_magnitude, highest_magnitude or random"
        )
    if sparse.has_mask and len(sizes) > 1:
        class_counts = ", ".join(f"{name} {classes}" for classes, name in sizes.items())
        raise ConfigError(
            f"one mask holds for the heads of all clients, and the classes of their tasks are {class_counts}; give"
            " tasks of as many classes each, or run them apart"
        )


def fit_heads(assembly: Assembly, engine: Engine, models: ByClient) -> tuple[ByClient, list[LedgerRow]]:
    """Fit every task's head by ridge regression over its clients, at the best scale; sums go up, heads come down."""
    penalty, tasks = assembly.config.images.ridge, {client.name: client.task.name for client in assembly.clients}
    jobs = make_jobs(models, RidgeOptions(), round=0, clients=tasks)
    sums, messages = _sum_answers(engine, "ridge", jobs, kind="head", groups=tasks)
    heads = {task: ridge_head(task_sums[GRAM], task_sums[CROSS], penalty=penalty) for task, task_sums in sums.items()}
    fitted, head_messages = _assign_heads(assembly, models, heads)
    clients = Counter(tasks.values())
    options = {task: ScaleOptions(examples=-(-SCALED_BY // num_clients)) for task, num_clients in clients.items()}
    jobs = [Job(client=name, params=fitted[name], round=0, options=options[task]) for name, task in tasks.items()]
    losses, loss_messages = _sum_answers(engine, "scale", jobs, kind="head", groups=tasks)
    best_scale = {task: SCALES[int(task_sums[LOSSES].argmin())] for task, task_sums in losses.items()}
    heads = {task: {key: best_scale[task] * tensor for key, tensor in head.items()} for task, head in heads.items()}
    scaled, scale_messages = _assign_heads(assembly, models, heads)
    return scaled, [*messages, *head_messages, *loss_messages, *scale_messages]


def _sum_answers(
    engine: Engine, action: str, jobs: Sequence[Job], *, kind: Kind, groups: Mapping[str, str], at_once: int = 10**9
) -> tuple[dict[str, Params], list[LedgerRow]]:
    """The clients' answers, summed by group as they arrive, and the messages that carried them."""
    sums: dict[str, Params] = {}
    messages = []
    for first in range(0, len(jobs), at_once):
        for update in run_on_all_clients(engine, action, jobs[first : first + at_once]):
            group = groups[update.client]
            sums[group] = add(sums[group], update.params) if group in sums else update.params
            messages.append(_ledger_row(update.client, "up", kind, encoded_size(update.params)))
    return sums, messages


def _assign_heads(
    assembly: Assembly, models: ByClient, heads: Mapping[str, Params]
) -> tuple[ByClient, list[LedgerRow]]:
    """Every client's model with its task's head: one mapping a task, so that clients with one model still share it."""
    fitted = {client.task.name: {**models[client.name], **heads[client.task.name]} for client in assembly.clients}
    messages = [
        _ledger_row(client.name, "down", "head", encoded_size(heads[client.task.name])) for client in assembly.clients
    ]
    return {client.name: fitted[client.task.name] for client in assembly.clients}, messages


def _mask_from_file(assembly: Assembly, models: ByClient) -> masks.Mask | None:
    """The mask of the config's file, checked against the model; None where there is no file.

    A mask that is yet to be made is checked to keep something.
    """
    sparse = assembly.config.sparse
    body = _body_params(assembly, models)
    path, _ = parse_mask_file(sparse.mask_file)
    if path is None:
        masks.check_any_kept(body, sparsity=sparse.sparsity, scope=sparse.mask_scope)
        return None
    check_mask_file(assembly.config)
    return masks.load_mask(Path(path), like=body)


def mask_messages(assembly: Assembly, mask: masks.Mask) -> list[LedgerRow]:
    """The messages that send this mask over the backbone to every client."""
    size = mask_size(mask)
    return [_ledger_row(name, "down", "mask", size) for name in assembly.names]


def _calibrate_body_mask(
    assembly: Assembly, engine: Engine, initial_models: ByClient
) -> tuple[masks.Mask, list[LedgerRow]]:
    """The mask over the backbone by the config's strategy and clients' scores, and the messages with the scores.

    Sensitivities are sums over the clients that score; magnitudes and chance need no client.
    """
    sparse, messages, body = assembly.config.sparse, list[LedgerRow](), _body_params(assembly, initial_models)
    options = sensitivity_options(assembly.config, body)
    count = min(sparse.calibration_clients, len(assembly.names))
    drawn = generator(assembly.config.run.seed, "calibration").choice(len(assembly.names), size=count, replace=False)
    scorers = [assembly.names[index] for index in sorted(drawn)]

    def score(params: Params) -> Params:
        jobs = make_jobs({name: {**initial_models[name], **params} for name in scorers}, options, round=0)
        everyone = dict.fromkeys(scorers, "all")
        sums, sent = _sum_answers(engine, "sensitivity", jobs, kind="mask", groups=everyone, at_once=SCORES_AT_ONCE)
        messages.extend(sent)
        return sums["all"]

    mask = masks.calibrate_mask(
        score,
        body,
        names=body,
        strategy=sparse.mask,
        sparsity=sparse.sparsity,
        scope=sparse.mask_scope,
        rounds=sparse.calibration_rounds,
        seed=assembly.config.run.seed,
    )
    return mask, messages


def _body_params(assembly: Assembly, models: ByClient) -> Params:
    return {key: tensor for key, tensor in models[assembly.names[0]].items() if not key.startswith(HEAD)}


def _ledger_row(client: str, direction: Direction, kind: Kind, size: int) -> LedgerRow:
    return LedgerRow(round=0, client=client, direction=direction, kind=kind, bytes=size)


MODEL_COPIES = 3
"""Copies of a model that its training holds: weights, gradients and momentum."""


def sparse_report(mask: masks.Mask | None, config: SparseConfig) -> dict[str, Any]:
    """The plan's entry on the mask; empty where there is none."""
    if mask is None:
        return {}
    body = {name: tensor for name, tensor in mask.items() if not name.startswith(HEAD)}
    sparsity = 1 - masks.num_kept(body) / sum(tensor.numel() for tensor in body.values())
    return {
        "mask": config.mask if config.mask_file is None else "from a file",
        "sparsity": config.sparsity if config.mask_file is None else sparsity,
        "layers": masks.density_by_layer(body),
        "kept": masks.num_kept(mask),
        "weights": sum(tensor.numel() for tensor in mask.values()),
        "density": masks.density(mask),
    }


def check_training_memory(assembly: Assembly) -> None:
    """Raise `BudgetError` where a client's device has less memory than training all weights of its model needs.

    Activations are in no prediction, so a device that passes may still be too small.
    """
    models = assembly.full_models()
    for client, device in zip(assembly.clients, assembly.devices, strict=True):
        if (needed := MODEL_COPIES * num_bytes(models[client.name])) > device.memory_bytes:
            raise BudgetError(
                f"{device.name} has {device.memory_bytes / 1e6:,.1f} MB of memory; weights, gradients and momentum"
                f" of {client.name} take {needed / 1e6:,.1f} MB; take a larger device, a smaller model or --tune lora"
            )


def full_client_plans(
    assembly: Assembly, models: ByClient, mask: masks.Mask | None, labels: Sequence[int]
) -> tuple[ClientPlan, ...]:
    """The plans of clients that train whole models; `labels` are their clusters.

    Seconds are those of the link. Memory is that of weights, gradients and momentum; activations are in no prediction.
    """
    share = assembly.config.mixing.share if strategy_of(assembly.config).communicates else ()
    plans = []
    for client, device, label in zip(assembly.clients, assembly.devices, labels, strict=True):
        model = models[client.name]
        model_bytes = num_bytes(model)
        sent_bytes = message_size(shared_params(model, share), mask)
        predicted = {
            "up_bytes": sent_bytes,
            "down_bytes": sent_bytes,
            "memory_bytes": MODEL_COPIES * model_bytes,
            "seconds": sent_bytes / device.up_bytes_per_second + sent_bytes / device.down_bytes_per_second,
        }
        plans.append(
            ClientPlan(
                name=client.name,
                task=client.task.name,
                device=device.name,
                examples=len(client.train),
                cluster=label,
                memory={
                    "total": device.memory_bytes,
                    **dict.fromkeys(("weights", "gradients", "momentum"), model_bytes),
                },
                predicted=predicted,
            )
        )
    return tuple(plans)


def full_notes(assembly: Assembly, models: ByClient) -> tuple[str, ...]:
    """Notes on whole models: their sizes, and settings without effect."""
    config = assembly.config
    notes = []
    changed = [field for field in fields(config.sparse) if getattr(config.sparse, field.name) != field.default]
    if changed and not config.sparse.has_mask:
        # no error, since a sweep may try `none` beside masks of one sparsity
        flags = [f"--{field.name.replace('_', '-')} {getattr(config.sparse, field.name)}" for field in changed]
        notes.append(f"without --mask there is no mask, and {', '.join(flags)} does nothing")
    masked = " where no mask holds them" if config.sparse.has_mask else ""
    for task, model in {client.task.name: models[client.name] for client in assembly.clients}.items():
        head = num_values(select(model, head_keys(model)))
        total = assembly.site.backbone.num_parameters + head
        notes.append(f"{task}: {total:,} parameters, {head:,} of them in the head; {num_values(model):,} train{masked}")
    return tuple(notes)
