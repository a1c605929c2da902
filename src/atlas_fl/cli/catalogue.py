"""`atlas list`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import tyro
from rich.table import Table

from atlas_fl.cli.live import show
from atlas_fl.cli.parse import parse
from atlas_fl.cli.words import split
from atlas_fl.report.words import human_bytes

Lines: TypeAlias = Iterator[tuple[str, ...]]
What: TypeAlias = Literal["tasks", "models", "strategies", "devices", "presets"]

WRAPPED = ("note", "what the server does", "what it is")
"""Columns of sentences; every other one keeps its words on one line."""


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """Show what there is to choose from."""

    what: Annotated[What, tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")]
    """What is listed."""


def catalogue(words: Sequence[str]) -> int:
    """Print the registry that these words name; 0."""
    options = parse(ListOptions(what=tyro.MISSING), split(words), command="atlas list")
    header, *lines = CATALOGUES[options.what]()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in header:
        table.add_column(title, overflow="fold", no_wrap=title not in WRAPPED)
    for line in lines:
        table.add_row(*line)
    show([table])
    return 0


def _tasks() -> Lines:
    from atlas_fl.tasks import TASKS

    yield "task", "labels", "metric", "length", "note"
    for task in TASKS.values():
        labels = str(task.num_labels) if task.has_classes else "text" if task.writes else "number"
        yield task.name, labels, task.metric, "-" if task.images else str(task.max_length), task.note


def _models() -> Lines:
    from atlas_fl.models.registry import MODELS

    yield "model", "size", "lr", "from", "note"
    for model in MODELS.values():
        yield model.alias, model.parameters, f"{model.lr:g}", model.path, model.note


def _strategies() -> Lines:
    from atlas_fl.strategies import ALIASES, STRATEGIES

    yield "strategy", "also", "what the server does"
    for name, rule in STRATEGIES.items():
        aliases = ", ".join(alias for alias, target in ALIASES.items() if target == name)
        yield name, aliases, _first_line(rule)


def _devices() -> Lines:
    from atlas_fl.ranks.devices import DEVICES

    # the words of --device, so that a line can be copied into a profile of one's own
    yield "device", "memory_gb", "gflops", "up_mbps", "down_mbps", "latency_ms", "max_rank", "upload"
    for device in DEVICES.values():
        numbers = (
            device.memory_bytes / 2**30,
            device.flops_per_second / 1e9,
            device.up_bytes_per_second * 8 / 1e6,
            device.down_bytes_per_second * 8 / 1e6,
            device.latency_seconds * 1e3,
            device.max_rank,
        )
        yield device.name, *(f"{number:g}" for number in numbers), human_bytes(device.adapter_bytes)


def _presets() -> Lines:
    from atlas_fl.presets import PRESETS

    yield "preset", "what it is"
    for name, recipe in PRESETS.items():
        yield name, _first_line(recipe)


def _first_line(function: object) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]


CATALOGUES: Mapping[What, Callable[[], Lines]] = {
    "tasks": _tasks,
    "models": _models,
    "strategies": _strategies,
    "devices": _devices,
    "presets": _presets,
}
