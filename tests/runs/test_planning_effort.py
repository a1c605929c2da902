"""What planning takes is predicted with it: operations that torch counts, memory that autograd keeps, both sides."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from atlas_fl.client.importance import batch_gradients
from atlas_fl.client.job import Job
from atlas_fl.config import Config
from atlas_fl.events import ignore
from atlas_fl.planning.planner import local_engine, make_plan
from atlas_fl.planning.planning_costs import planning_bytes, predict_planning
from atlas_fl.planning.ranks_and_cuts import measure_importance
from atlas_fl.planning.round_costs import SERVER_DEVICE
from atlas_fl.planning.task_discovery import discover_tasks, make_client_graph
from atlas_fl.ranks.cost_model import RESERVE_BYTES
from atlas_fl.report.tables import plan_tables
from atlas_fl.setup.assembly import Assembly, assemble
from atlas_fl.setup.options import cut_of, fingerprint_options
from tests.runs.test_split import SMALL, most_needed

Make = Callable[..., Config]
Efforts = dict[str, dict[str, float]]


class Counted(TorchDispatchMode):
    """Operations of all products; torch's own counter is refused by `autograd.grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.operations += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif packet is torch.ops.aten.linear:  # whole in inference mode
            self.operations += 2 * args[0].numel() * args[1].shape[0]
        return out


def of_first(assembly: Assembly, blocks: int | None = None) -> Efforts:
    cut = cut_of(assembly.config, blocks)
    return predict_planning(assembly, assembly.clients[0], assembly.devices[0], cut)


def operations(assembly: Assembly, phase: str) -> float:
    pairs = zip(assembly.clients, assembly.devices, strict=True)
    found = [(predict_planning(assembly, client, device, None)[phase], device) for client, device in pairs]
    return sum(own["client_seconds"] * device.flops_per_second for own, device in found)


@pytest.mark.parametrize("fingerprint", ["fisher", "delta"])
def test_operations_are_those_that_torch_counts_and_at_most_twice_as_many(config: Make, fingerprint: str) -> None:
    """More by what only the first block's inputs and the last block's other tokens would take: here of three blocks."""
    assembly = assemble(config(fingerprint=fingerprint, graph="adaptive", fingerprint_steps=6))
    engine = local_engine(assembly, ignore)
    counted = dict[str, int]()
    with Counted() as mode:
        found = discover_tasks(assembly, engine, clustered=True)
        counted["fingerprint"] = mode.operations
        measure_importance(assembly, engine, found)
        counted["importance"] = mode.operations - sum(counted.values())
        make_client_graph(assembly, engine, found)
        counted["evaluate"] = mode.operations - sum(counted.values())
    for phase, number in counted.items():
        assert number <= operations(assembly, phase) <= 2 * number, phase


@pytest.mark.parametrize(("kind", "setting"), [("fisher", "fingerprint_batches"), ("delta", "fingerprint_steps")])
def test_twice_as_much_to_measure_takes_twice_as_long(config: Make, kind: str, setting: str) -> None:
    once, twice = (of_first(assemble(config(fingerprint=kind, **{setting: count}))) for count in (2, 4))
    assert once["fingerprint"]["client_seconds"] > 0
    assert twice["fingerprint"]["client_seconds"] == pytest.approx(2 * once["fingerprint"]["client_seconds"])
    assert twice["fingerprint"]["memory_bytes"] == once["fingerprint"]["memory_bytes"]
    assert twice["importance"] == once["importance"]


def test_what_is_not_measured_takes_nothing(config: Make) -> None:
    assert set(of_first(assemble(config(strategy="local")))) == {"importance"}
    assert set(of_first(assemble(config(strategy="local", fingerprint="delta")))) == {"fingerprint", "importance"}
    assert set(of_first(assemble(config(graph="adaptive")))) == {"fingerprint", "importance", "evaluate"}
    for effort in of_first(assemble(config())).values():
        assert [effort[name] for name in ("server_seconds", "link_seconds", "server_memory_bytes")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("fingerprint", "head", "messages"),
    [
        ("fisher", "server", {"fingerprint": 8, "importance": 8, "evaluate": 2}),
        # four batches there and back twice
        ("fisher", "client", {"fingerprint": 16, "importance": 16, "evaluate": 2}),
    ],
)
def test_both_sides_of_a_cut_do_what_the_whole_does(config: Make, fingerprint: str, head: str, messages) -> None:
    settings = {"fingerprint": fingerprint, "head": head, "graph": "adaptive", "fingerprint_steps": 12}
    assembly = assemble(config(split="1", **settings))
    client, device, cut = assembly.clients[0], assembly.devices[0], cut_of(assembly.config, 1)
    assert cut is not None
    whole, parts, sizes = of_first(assembly), of_first(assembly, 1), planning_bytes(assembly, client, cut)
    assert whole.keys() == parts.keys() == messages.keys()
    for phase, own in parts.items():
        done = own["client_seconds"] * device.flops_per_second + own["server_seconds"] * SERVER_DEVICE.flops_per_second
        assert done == pytest.approx(whole[phase]["client_seconds"] * device.flops_per_second)
        moved = sizes[phase].get("up", 0) / device.up_bytes_per_second
        moved += sizes[phase].get("down", 0) / device.down_bytes_per_second
        assert own["link_seconds"] == pytest.approx(moved + messages[phase] * device.latency_seconds)
        # in a forward pass one block works at a time, however many there are
        assert phase == "evaluate" or own["memory_bytes"] < whole[phase]["memory_bytes"]
        assert own["server_memory_bytes"] > 0


def test_memory_holds_what_autograd_keeps_and_the_gradients_twice(config: Make) -> None:
    assembly = assemble(config(tasks=("movie",), clients_per_task=1, fingerprint_blocks=2))
    site, client = assembly.site, assembly.clients[0]
    shape, options = assembly.shape, fingerprint_options(assembly.config)
    job = Job(client=client.name, params=assembly.initial_params(client, (2,) * 3), round=0, options=options)
    frozen = {tensor.untyped_storage().data_ptr() for tensor in site.backbone.model.state_dict().values()}
    kept = dict[int, torch.Tensor]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in frozen:
            kept[storage.data_ptr()] = tensor  # alive, so that no other one gets its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ((_, gradients),) = batch_gradients(job, site, half=0, blocks=2, count=1)
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    taken = 2 * sum(tensor.nbytes for tensor in gradients.values())
    weights = shape.embedding_bytes + sum(shape.block_bytes)
    predicted = of_first(assembly)["fingerprint"]["memory_bytes"] - RESERVE_BYTES - weights
    assert saved + taken <= predicted <= 4 * (saved + taken)


def test_the_plan_has_it_and_names_devices_that_are_too_small_for_it(config: Make) -> None:
    """A warm-up trains two models at once: more than a device has that just holds one."""
    gb = 1.0005 * most_needed(config, "none")
    settings = {"devices": ("small",), "device": (SMALL.format(gb=gb),), "ranks": "2"}
    assert not [note for note in make_plan(config(**settings)).notes if "more memory" in note]
    plan = make_plan(config(fingerprint="delta", **settings))
    (note,) = [note for note in plan.notes if note.startswith("planning takes more memory than the device has of ")]
    assert " MB for its fingerprint, of " in note
    for client in plan.clients:
        assert set(client.planning) == {"fingerprint", "importance"}
    shown = io.StringIO()
    for table in plan_tables(plan.to_json()):
        Console(width=80, file=shown).print(table)
    assert "Planning, predicted" in shown.getvalue()
    assert max(map(len, shown.getvalue().splitlines())) <= 80
