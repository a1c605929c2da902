"""The adapter that a run starts from (`--init-adapter`): for every client at its own ranks, and what is said of it.

The start is the adapter's own function. Layers that it does not adapt begin at B = 0. A client whose ranks are lower
has the nearest approximation, and a head of other labels begins fresh; notes of the plan say so.
"""

from collections.abc import Sequence
from pathlib import Path

from atlas_fl.aggregation.mixing import resize_ranks
from atlas_fl.data.task import Task
from atlas_fl.errors import ModelError, first_of
from atlas_fl.frozen import Frozen
from atlas_fl.models.backbone import module_dims
from atlas_fl.models.peft_io import adapter_base, adapter_labels, import_adapter
from atlas_fl.models.registry import head_shapes
from atlas_fl.params import HEAD, LORA_A, LORA_B, Params, lora_modules
from atlas_fl.setup.assembly import Assembly


class StartAdapter(Frozen):
    """An imported adapter under the run's scale of a rank."""

    folder: Path
    params: Params
    base: str | None
    """The base model that its folder names."""
    labels: tuple[str, ...]
    """The names of its classes; none where its folder names none."""


def load_start_adapter(assembly: Assembly) -> StartAdapter | None:
    """The adapter of `--init-adapter`; None without the setting.

    Raises `ModelError` where it is none, is of another model, or adapts layers that this run leaves frozen.
    """
    if assembly.config.model.init_adapter is None:
        return None
    folder = Path(assembly.config.model.init_adapter)
    params, old_scale = import_adapter(folder, family=assembly.site.backbone.family)
    modules = assembly.site.modules
    if not (adapted := [module for module in lora_modules(params) if module in modules]):
        layers = sorted({name.rsplit(".", 1)[-1] for name in lora_modules(params)})
        remedy = f"it adapts {', '.join(layers)}: set --targets to these" if layers else "it is of another model"
        raise ModelError(
            f"the adapter in {folder} adapts none of the {len(modules)} layers that this run does; {remedy}"
        )
    if extra := [module for module in lora_modules(params) if module not in modules]:
        raise ModelError(
            f"the adapter in {folder} adapts {extra[0]} and {len(extra) - 1} more that this run leaves frozen; name its"
            " layers with --targets, and leave --adapted-blocks out where it adapts all blocks"
        )
    scaled = dict(params)
    for module in adapted:
        a, b = params[module + LORA_A], params[module + LORA_B]
        given, shape = (a.shape[1], b.shape[0]), module_dims(modules[module])
        if given != shape:
            raise ModelError(
                f"the adapter in {folder} is for layers of {given[0]} to {given[1]} values, and {module} of"
                f" {assembly.config.model.model!r} is of {shape[0]} to {shape[1]}; give its own base with --model"
            )
        scaled[module + LORA_B] = b * (old_scale(len(a)) / assembly.site.scale(len(a)))
    return StartAdapter(folder=folder, params=scaled, base=adapter_base(folder), labels=adapter_labels(folder))


def start_model(
    start: StartAdapter, assembly: Assembly, task: Task, fresh: Params, client_ranks: Sequence[int]
) -> Params:
    """The model of a client with this task before round one, at its ranks per layer: fresh where nothing else fits."""
    factors = {key: tensor for key, tensor in start.params.items() if not key.startswith(HEAD)}
    by_module = {module: client_ranks[assembly.layer_of[module]] for module in lora_modules(factors)}
    begun = {**resize_ranks(factors, by_module, assembly.site.scale), **(_head_for(start, task, assembly) or {})}
    return {key: begun.get(key, tensor) for key, tensor in fresh.items()}


def start_notes(start: StartAdapter, assembly: Assembly, ranks: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """A line on each part of the adapter that a run does not start from as it is."""
    where = f"the adapter in {start.folder}"
    lines = []
    path = assembly.site.backbone.source
    if start.base is not None and Path(start.base).name != Path(path).name:
        lines.append(
            f"{where} names the base model {start.base}, and this run's is {path}: its start is the adapter's own only"
            " if both have the same weights"
        )
    adapter_ranks = {module: len(start.params[module + LORA_A]) for module in lora_modules(start.params)}
    cut = [
        client.name
        for client, own in zip(assembly.clients, ranks, strict=True)
        if any(rank > own[assembly.layer_of[module]] for module, rank in adapter_ranks.items())
    ]
    if cut:
        highest = max(adapter_ranks.values())
        lines.append(
            f"{where} has ranks of up to {highest}, and those of {first_of(cut)} are lower: they start from its nearest"
            f" approximation; --ranks {highest} keeps all of it"
        )
    return (*lines, *_head_notes(start, assembly))


def _head_for(start: StartAdapter, task: Task, assembly: Assembly) -> Params | None:
    """The adapter's head for a task, its classes in the task's order; None where it does not fit."""
    backbone = assembly.site.backbone
    shapes = head_shapes(backbone.family, hidden=backbone.width, num_labels=task.num_labels)
    head = {key: start.params[key] for key in shapes if key in start.params}
    if any(key not in head or tuple(head[key].shape) != shape for key, shape in shapes.items()):
        return None
    if set(start.labels) != set(task.label_names):
        return head
    order = [start.labels.index(label) for label in task.label_names]
    outputs = backbone.family.head[-1].key
    return {key: tensor[order] if key.startswith(outputs) and order else tensor for key, tensor in head.items()}


def _head_notes(start: StartAdapter, assembly: Assembly) -> tuple[str, ...]:
    outputs = start.params.get(assembly.site.backbone.family.head[-1].key + "weight")
    tasks = {client.task.name: client.task for client in assembly.clients}
    where = f"the adapter in {start.folder}"
    if outputs is None:
        lacking = [name for name, task in tasks.items() if not task.writes]
        return (f"{where} has no head; that of {first_of(lacking)} begins fresh",) if lacking else ()
    lines = []
    for name, task in tasks.items():
        if task.writes:
            continue
        if _head_for(start, task, assembly) is None:
            lines.append(
                f"{where} has a head of {len(outputs)} outputs, which does not fit the {task.num_labels} of {name}: its"
                " head begins fresh"
            )
        elif start.labels and set(start.labels) != set(task.label_names):
            lines.append(
                f"{where} has a head for {first_of(start.labels)}, from which {name} with"
                f" {first_of(task.label_names)} starts"
            )
    return tuple(lines)
