"""Whole models: the ridge head and the mask, and what they cost.

The plan of a run on whole models: the head first, then which weights may move, then what a round will send.

What the plan of a run on whole models says of costs and of the mask.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from atlas_fl.client.calibration import CROSS, GRAM, LOSSES, SCALED_BY, SCALES, ridge_head
from atlas_fl.client.job import Job
from atlas_fl.client.options import RidgeOptions, ScaleOptions, SensitivityOptions
from atlas_fl.config import SparseConfig, check_mask_file, parse_mask_file
from atlas_fl.errors import BudgetError, ConfigError
from atlas_fl.params import HEAD, ByClient, Params, add, head_keys, num_bytes, num_values, select, shared_params
from atlas_fl.planning.plan import ClientPlan
from atlas_fl.ranks.devices import Device
from atlas_fl.rng import generator
from atlas_fl.runtime.engine import Engine, run_all
from atlas_fl.setup.assembly import Assembly
from atlas_fl.setup.options import drawn_of, strategy_of
from atlas_fl.sparse.codec import mask_size, values_size
from atlas_fl.sparse.masks import (
    BY_SENSITIVITY,
    Mask,
    calibrate_mask,
    check_any_kept,
    density,
    density_by_layer,
    load_mask,
    num_kept,
)
from atlas_fl.storage.ledger import Direction, Kind, LedgerRow, payload_bytes

AT_ONCE = 8
"""Clients whose scores are held at the same time: each is as large as a model."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """What is known before round one."""

    start: ByClient
    mask: Mask | None
    messages: tuple[LedgerRow, ...]


def prepare_whole(assembly: Assembly, engine: Engine, start: ByClient | None = None) -> Prepared:
    """Fit the heads of images and make the mask, as the config asks for; `start` is `assembly.full_models()`."""
    check_heads(assembly)
    start = assembly.full_models() if start is None else start
    messages = list[LedgerRow]()
    given = _checked_mask(assembly, start)  # before the heads, whose fit passes over all images
    if fits_heads(assembly):
        start, sent = with_heads(assembly, engine, start)
        messages += sent
    mask = None
    if assembly.config.sparse.has_mask:
        mask, sent = make_mask(assembly, engine, start, given=given)
        messages += sent
    return Prepared(start=start, mask=mask, messages=tuple(messages))


def fits_heads(assembly: Assembly) -> bool:
    """Whether heads are fitted before round one: those of images, where the config says so."""
    return assembly.has_images and assembly.config.images.head_first == "ridge"


def check_heads(assembly: Assembly) -> None:
    """Raise `ConfigError` where a mask would have to hold heads of several sizes."""
    sizes = {client.task.num_labels: client.task.name for client in assembly.clients}
    sparse = assembly.config.sparse
    regressions = [client.task.name for client in assembly.clients if client.task.is_regression]
    if regressions and sparse.mask_file is None and sparse.mask in BY_SENSITIVITY:
        raise ConfigError(
            f"--mask {sparse.mask} ranks weights by what they do to the probabilities of classes, and {regressions[0]}"
            " has real numbers in their place; take lowest_magnitude, highest_magnitude or random"
        )
    if sparse.has_mask and len(sizes) > 1:
        told = ", ".join(f"{name} {classes}" for classes, name in sizes.items())
        raise ConfigError(
            f"one mask holds for the heads of all clients, and the classes of their tasks are {told}; give tasks of as"
            " many classes each, or run them apart"
        )


def with_heads(assembly: Assembly, engine: Engine, start: ByClient) -> tuple[ByClient, list[LedgerRow]]:
    """Every task's head by ridge regression over its clients, at the best scale; sums go up, heads come down."""
    penalty = assembly.config.images.ridge
    sums, messages = _summed(assembly, engine, "ridge", start, lambda _: RidgeOptions())
    heads = {task: ridge_head(found[GRAM], found[CROSS], penalty=penalty) for task, found in sums.items()}
    fitted, sent = _given(assembly, start, heads)
    clients = Counter(client.task.name for client in assembly.clients)
    looked_at = {task: ScaleOptions(examples=-(-SCALED_BY // many)) for task, many in clients.items()}
    losses, more = _summed(assembly, engine, "scale", fitted, looked_at.__getitem__)
    best = {task: SCALES[int(found[LOSSES].argmin())] for task, found in losses.items()}
    heads = {task: {key: best[task] * tensor for key, tensor in head.items()} for task, head in heads.items()}
    scaled, again = _given(assembly, start, heads)
    return scaled, [*messages, *sent, *more, *again]


def _summed(
    assembly: Assembly, engine: Engine, action: str, models: ByClient, options: Callable[[str], Any]
) -> tuple[dict[str, Params], list[LedgerRow]]:
    """The sum over each task's clients of what this action gives, and the messages that brought it.

    `options` are those of a task.
    """
    jobs = [
        Job(client=client.name, params=models[client.name], round=0, options=options(client.task.name))
        for client in assembly.clients
    ]
    sums: dict[str, Params] = {}
    messages = []
    for client, update in zip(assembly.clients, run_all(engine, action, jobs), strict=True):
        so_far = sums.get(client.task.name)
        sums[client.task.name] = update.params if so_far is None else add(so_far, update.params)
        messages.append(_row(client.name, "up", "head", payload_bytes(update.params)))
    return sums, messages


def _given(assembly: Assembly, start: ByClient, heads: Mapping[str, Params]) -> tuple[ByClient, list[LedgerRow]]:
    """Every client with its task's head: one mapping a task, so that clients with one model go on sharing it."""
    fitted = {client.task.name: {**start[client.name], **heads[client.task.name]} for client in assembly.clients}
    messages = [
        _row(client.name, "down", "head", payload_bytes(heads[client.task.name])) for client in assembly.clients
    ]
    return {client.name: fitted[client.task.name] for client in assembly.clients}, messages


def _checked_mask(assembly: Assembly, start: ByClient) -> Mask | None:
    """The mask of the config's file, checked against the model; None where there is no file.

    A mask that is yet to be made is checked to keep something.
    """
    sparse = assembly.config.sparse
    path, _ = parse_mask_file(sparse.mask_file)
    if path is None:
        if sparse.has_mask:
            check_any_kept(_backbone(assembly, start), sparsity=sparse.sparsity, scope=sparse.mask_scope)
        return None
    check_mask_file(assembly.config)
    return load_mask(Path(path), like=_backbone(assembly, start))


def make_mask(
    assembly: Assembly, engine: Engine, start: ByClient, *, given: Mask | None = None
) -> tuple[Mask, list[LedgerRow]]:
    """Which weights may move, for everyone, and what making it sent. Heads may not once they are fitted."""
    mask, messages = given, list[LedgerRow]()
    if mask is None:
        mask, messages = _calibrated(assembly, engine, start, scorers=_scorers(assembly))
    messages += mask_brought(assembly, mask)
    heads = {
        key: torch.full_like(start[name][key], not fits_heads(assembly), dtype=torch.bool)
        for name in assembly.names
        for key in head_keys(start[name])
    }
    return {**mask, **heads}, messages


def mask_brought(assembly: Assembly, mask: Mask) -> list[LedgerRow]:
    """The messages that bring this mask over the backbone to every client."""
    size = mask_size(mask, random_mask=drawn_of(assembly.config))
    return [_row(name, "down", "mask", size) for name in assembly.names]


def _calibrated(
    assembly: Assembly, engine: Engine, start: ByClient, *, scorers: Sequence[str]
) -> tuple[Mask, list[LedgerRow]]:
    """The mask over the backbone by the config's strategy and the scores of these clients, and what it sent up.

    Sensitivities are sums over the clients that score; magnitudes and chance need no client.
    """
    sparse, messages, body = assembly.config.sparse, list[LedgerRow](), _backbone(assembly, start)

    def score(params: Params) -> Params:
        models = {name: {**start[name], **params} for name in scorers}
        found, sent = _sensitivities(assembly, engine, models, names=tuple(body))
        messages.extend(sent)
        return found

    mask = calibrate_mask(
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


def client_masks(assembly: Assembly, engine: Engine, *, clients: int) -> dict[str, Mask]:
    """The masks that single clients would make, each by its own scores alone: of the first so many that score."""
    start: ByClient = assembly.full_models()
    if fits_heads(assembly):
        start, _ = with_heads(assembly, engine, start)
    return {name: _calibrated(assembly, engine, start, scorers=[name])[0] for name in _scorers(assembly)[:clients]}


def _backbone(assembly: Assembly, start: ByClient) -> Params:
    return {key: tensor for key, tensor in start[assembly.names[0]].items() if not key.startswith(HEAD)}


def _scorers(assembly: Assembly) -> list[str]:
    count = min(assembly.config.sparse.calibration_clients, len(assembly.names))
    drawn = generator(assembly.config.run.seed, "calibration").choice(len(assembly.names), size=count, replace=False)
    return [assembly.names[index] for index in sorted(drawn)]


def _sensitivities(
    assembly: Assembly, engine: Engine, models: ByClient, *, names: tuple[str, ...]
) -> tuple[Params, list[LedgerRow]]:
    """The sum of the clients' scores, added as they come, so that never more than a few are held."""
    sparse = assembly.config.sparse
    options = SensitivityOptions(
        seed=assembly.config.run.seed,
        examples=sparse.calibration_examples,
        labels=sparse.fisher_labels,
        names=names,
    )
    jobs = [Job(client=name, params=params, round=0, options=options) for name, params in models.items()]
    total: Params | None = None
    messages = []
    for first in range(0, len(jobs), AT_ONCE):
        for update in run_all(engine, "sensitivity", jobs[first : first + AT_ONCE]):
            total = update.params if total is None else add(total, update.params)
            messages.append(_row(update.client, "up", "mask", payload_bytes(update.params)))
    assert total is not None, "at least one client scores"
    return total, messages


def _row(client: str, direction: Direction, kind: Kind, size: int) -> LedgerRow:
    return LedgerRow(round=0, client=client, direction=direction, kind=kind, bytes=size)


HELD = 3
"""Copies of a model that its training holds: weights, gradients and momentum."""


def whole_costs(assembly: Assembly, prepared: Prepared) -> list[dict[str, Any]]:
    """What a round costs every client, as `ClientPlan` holds it: bytes each way, seconds on its link, and memory.

    The memory is that of weights, gradients and momentum; activations are in no prediction.
    """
    share = assembly.config.mixing.share if strategy_of(assembly.config).communicates else ()
    return [
        _cost(prepared.start[client.name], device, prepared.mask, share=share)
        for client, device in zip(assembly.clients, assembly.devices, strict=True)
    ]


def _cost(model: Params, device: Device, mask: Mask | None, *, share: Sequence[str]) -> dict[str, Any]:
    sent = 0
    if shared := shared_params(model, share):
        sent = payload_bytes(shared) if mask is None else values_size(num_kept({key: mask[key] for key in shared}))
    held = num_bytes(model)
    return {
        "ranks": (),
        "cut": None,
        "budget_bytes": 0,
        "largest_rank": 0,
        "memory": {"total": device.memory_bytes, "weights": held, "gradients": held, "momentum": held},
        "predicted": {
            "up_bytes": sent,
            "down_bytes": sent,
            "memory_bytes": HELD * held,
            "seconds": sent / device.up_bytes_per_second + sent / device.down_bytes_per_second,
        },
    }


def sparse_report(mask: Mask | None, config: SparseConfig) -> dict[str, Any]:
    """What the plan says of the mask; nothing where there is none."""
    if mask is None:
        return {}
    body = {name: own for name, own in mask.items() if not name.startswith(HEAD)}
    found = 1 - num_kept(body) / sum(own.numel() for own in body.values())
    return {
        "mask": config.mask if config.mask_file is None else "from a file",
        "sparsity": config.sparsity if config.mask_file is None else found,
        "layers": density_by_layer(body),
        "kept": num_kept(mask),
        "weights": sum(own.numel() for own in mask.values()),
        "density": density(mask),
    }


def check_memory(assembly: Assembly) -> None:
    """Nothing where every client's device holds what training needs of its model; else a `BudgetError` names one.

    Activations are in no prediction, so a device that passes may still be too small.
    """
    start = assembly.full_models()
    for client, device in zip(assembly.clients, assembly.devices, strict=True):
        if (needed := HELD * num_bytes(start[client.name])) > device.memory_bytes:
            raise BudgetError(
                f"{device.name} has {device.memory_bytes / 1e6:,.1f} MB of memory; weights, gradients and momentum"
                f" of {client.name} take {needed / 1e6:,.1f} MB; take a larger device, a smaller model or --tune lora"
            )


def full_client_plans(assembly: Assembly, prepared: Prepared, labels: Sequence[int]) -> tuple[ClientPlan, ...]:
    """What a round costs every client; `labels` are their clusters."""
    costs = whole_costs(assembly, prepared)
    return tuple(
        ClientPlan(
            name=client.name,
            task=client.task.name,
            device=device.name,
            examples=len(client.train),
            cluster=label,
            **cost,
        )
        for client, device, label, cost in zip(assembly.clients, assembly.devices, labels, costs, strict=True)
    )


def full_notes(assembly: Assembly, prepared: Prepared) -> tuple[str, ...]:
    """What is said of whole models: their sizes, settings that do nothing, and momentum that is held."""
    return (*_idle(assembly.config.sparse), *_counts(assembly, prepared), *_carried(assembly, prepared))


def _counts(assembly: Assembly, prepared: Prepared) -> Iterator[str]:
    """A line for each task: how many parameters its model has, and how many of them train where no mask holds them."""
    masked = " where no mask holds them" if assembly.config.sparse.has_mask else ""
    backbone = assembly.site.backbone.num_parameters
    for task, model in {client.task.name: prepared.start[client.name] for client in assembly.clients}.items():
        head = num_values(select(model, head_keys(model)))
        counts = f"{backbone + head:,} parameters, {head:,} of them in the head; {num_values(model):,} train"
        yield f"{task}: {counts}{masked}"


def _idle(sparse: SparseConfig) -> Iterator[str]:
    """What is said of masks where there is none; a sweep may try `none` beside masks of one sparsity."""
    if not sparse.has_mask and (changed := [one for one in fields(sparse) if getattr(sparse, one.name) != one.default]):
        flags = ", ".join(f"--{one.name.replace('_', '-')} {getattr(sparse, one.name)}" for one in changed)
        yield f"without --mask there is no mask, and {flags} does nothing"


def _carried(assembly: Assembly, prepared: Prepared) -> Iterator[str]:
    """What is held of momentum between rounds, where it is."""
    if not assembly.config.images.carry_momentum:
        return
    mask, models = prepared.mask, prepared.start.values()
    values = [num_values(model) if mask is None else num_kept({key: mask[key] for key in model}) for model in models]
    yield f"{len(values)} clients keep their momentum between rounds: {4 * sum(values):,} bytes, in checkpoints too"
