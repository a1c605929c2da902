"""Execution backends: clients train in this process, in worker processes, or in actors of Ray.

Workers share the frozen weights of one backbone. Each assembles the run from the same settings, takes the weights from
memory that all workers read, and raises an error where its data differ. Models of clients that train the whole model
are sent to a worker once a round (`runtime.protocol.model_sync`).
"""

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any, TypeAlias

import torch

from atlas_fl.client.job import Site
from atlas_fl.config import Config, parse_config, to_toml
from atlas_fl.errors import DataError
from atlas_fl.events import Note, OnEvent, Progress
from atlas_fl.models.backbone import buffer_entries, tensor_views, write_weights
from atlas_fl.planning.planner import local_engine
from atlas_fl.plugins import check_registered, load_plugins, registered_names
from atlas_fl.runtime import processes, reuse, worker_pool
from atlas_fl.runtime.engine import Engine
from atlas_fl.runtime.protocol.model_sync import Receiver
from atlas_fl.runtime.ray import ray_cluster
from atlas_fl.runtime.transport.frames import Head
from atlas_fl.setup.assembly import Assembly, assemble, backbone_of, pick_device, worker_receiver, worker_sender
from atlas_fl.storage.files import secret_digest

Backend: TypeAlias = Callable[[Config, OnEvent], AbstractContextManager[tuple[Assembly, Engine]]]
"""A context manager of the run's assembly and its engine; errors of the run leave through it."""

PROGRAM = """\
import sys
from atlas_fl.storage.extras import silence_libraries
silence_libraries()
from atlas_fl.experiment.backends import worker_main
worker_main(*map(int, sys.argv[1:]))
"""


@contextmanager
def in_process_backend(config: Config, on_event: OnEvent) -> Iterator[tuple[Assembly, Engine]]:
    """All clients in this process."""
    assembly = assemble(config)
    assembly = replace(assembly, site=reuse.REUSED_RESULTS.with_prefix_cache(assembly.site))
    yield assembly, reuse.ReusingEngine(engine=local_engine(assembly, on_event), site=assembly.site)


@contextmanager
def multiprocess_backend(config: Config, on_event: OnEvent) -> Iterator[tuple[Assembly, Engine]]:
    """Packs in `--workers` processes of this machine, which end with the context."""
    count = config.run.workers or 1
    with ExitStack() as stack:
        memory = stack.enter_context(closing(processes.SharedMemory()))
        threads = stack.enter_context(ThreadPoolExecutor(count))
        workers = stack.enter_context(processes.worker_processes(count, program=PROGRAM, files=(memory.file,)))
        assembly, entries = share_weights(assemble(config, backbone_device="cpu"), memory.allocate)
        devices = _worker_devices(config, count)
        messages = worker_init_messages(assembly, entries, devices=devices, cpus=torch.get_num_threads() // count)
        worker_pool.init_workers(workers, messages, threads)
        yield assembly, pool_engine(assembly, workers, threads, on_event)


@contextmanager
def ray_backend(config: Config, on_event: OnEvent) -> Iterator[tuple[Assembly, Engine]]:
    """Packs in actors of a Ray cluster; each actor assembles the run once and keeps it."""
    cuda = pick_device(config.run.accelerator, precision=config.model.precision) == "cuda"
    with ExitStack() as stack:
        cluster = stack.enter_context(ray_cluster())
        share = cluster.actor_resources(config.run.workers, cuda=cuda)
        assembly, entries = share_weights(assemble(config, backbone_device="cpu"), cluster.allocate)
        threads = stack.enter_context(ThreadPoolExecutor(share.count))
        workers = stack.enter_context(cluster.actors(share, init_worker))
        # an actor sees no GPU but its own
        devices = ["cuda" if cuda else "cpu"] * share.count
        messages = worker_init_messages(assembly, entries, devices=devices, cpus=share.cpus)
        worker_pool.init_workers(workers, messages, threads)
        on_event(Note(f"{share.count} actors of {share.cpus} CPUs train the packs"))
        yield assembly, pool_engine(assembly, workers, threads, on_event)


def local_backend(config: Config, on_event: OnEvent) -> AbstractContextManager[tuple[Assembly, Engine]]:
    """All clients in this process, or with `--workers` in so many processes."""
    backend = in_process_backend if config.run.workers in (None, 1) else multiprocess_backend
    return backend(config, on_event)


BACKENDS: Mapping[str, Backend] = {"local": local_backend, "ray": ray_backend}
"""The backend of every `--engine`."""


def pool_engine(
    assembly: Assembly, workers: Sequence[worker_pool.Worker], threads: ThreadPoolExecutor, on_event: OnEvent
) -> worker_pool.PoolEngine:
    """The engine of workers that are initialised."""
    return worker_pool.PoolEngine(
        site=assembly.site,
        new_sender=worker_sender(assembly),
        workers=workers,
        threads=threads,
        on_progress=lambda action, done, total: on_event(Progress(action, done, total)),
    )


Allocate: TypeAlias = Callable[[int, Callable[[Any], None]], Any]
"""(size in bytes, a function that fills a buffer) -> shared memory of this size, filled."""


def share_weights(assembly: Assembly, allocate: Allocate) -> tuple[Assembly, list[dict[str, Any]]]:
    """(the assembly with its frozen weights in shared memory, the place of each tensor in it)."""
    frozen = assembly.site.backbone.frozen
    entries, size = buffer_entries(frozen)
    memory = allocate(size, lambda buffer: write_weights(frozen, buffer, entries))
    weights = tensor_views(memory, entries)
    backbone = backbone_of(assembly.config, [client.task for client in assembly.clients], weights=weights)
    return replace(assembly, site=replace(assembly.site, backbone=backbone)), entries


def worker_init_messages(
    assembly: Assembly, entries: list[dict[str, Any]], *, devices: Sequence[str], cpus: int
) -> list[dict[str, Any]]:
    """The first message to each worker; `devices` are those of torch, one a worker, and `cpus` its processors."""
    common = {
        "settings": to_toml(assembly.config),
        "registered": registered_names(),
        "data": _data_digest(assembly),
        "weights": entries,
        "threads": torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else max(1, cpus),
    }
    return [{**common, "place": device} for device in devices]


def init_worker(head: Head, memory: Any) -> tuple[Site, Receiver]:
    """The site and the receiver of a worker, from its `worker_init_messages`.

    Raises `DataError` where the data here are others.
    """
    torch.set_num_threads(head["threads"])
    config = parse_config(head["settings"], origin="the settings of this run")
    load_plugins(config.run.plugin)
    check_registered(head["registered"])
    assembly = assemble(config, weights=tensor_views(memory, head["weights"]), backbone_device=head["place"])
    if _data_digest(assembly) != head["data"]:
        raise DataError(
            "a worker has read other data than the run; leave files alone while it goes on, and give every machine of a"
            " cluster the same"
        )
    return assembly.site, worker_receiver(assembly)


def worker_main(link: int, memory: int) -> None:
    """A worker process, from its first frame to its last."""
    processes.run_worker_loop(link, worker_pool.WorkerLoop(init_worker, lambda: mmap.mmap(memory, 0)).ask)


def _data_digest(assembly: Assembly) -> str:
    """SHA-256 of all rows and of digests of given secrets."""
    rows = [client.digest() for client in assembly.clients]
    secrets = [secret_digest(assembly.site.secrets.get(client.name)) for client in assembly.clients]
    return sha256("".join([*rows, *secrets]).encode()).hexdigest()


def _worker_devices(config: Config, count: int) -> list[str]:
    """The device of every worker: the GPUs in turn."""
    if pick_device(config.run.accelerator, precision=config.model.precision) == "cpu":
        return ["cpu"] * count
    return [f"cuda:{number % torch.cuda.device_count()}" for number in range(count)]
