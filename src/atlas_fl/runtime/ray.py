"""The workers of a Ray cluster (Moritz et al. 2018): actors that train packs of clients.

The backbone's weights are in the object store of each node once, and the actors' weights are views of them. Everything
else that Ray carries is frames, as bytes; it unpickles only the function that initialises a worker, by name, and no
data.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from atlas_fl.errors import ConfigError, ProtocolError, one_line
from atlas_fl.frozen import Frozen
from atlas_fl.runtime.worker_pool import InitWorker, WorkerLoop
from atlas_fl.storage.extras import install_command

RAY_LOG_LEVEL = 40
"""Errors only: at lower levels Ray logs every step of its start."""
CONNECT_SECONDS = 10.0
"""Longest time that a cluster may take to accept a connection."""


class ActorResources(Frozen):
    """The number of actors and the resources of each."""

    count: int
    """Number of actors."""
    cpus: int
    gpus: float = 0.0


class Actor:
    """One actor, at the driver's end."""

    def __init__(self, ray: Any, handle: Any, name: str) -> None:
        self._ray = ray
        self._handle = handle
        self.name = name

    def ask(self, frames: list[bytes]) -> list[bytes]:
        """The answer to these frames; raises `ProtocolError` where the actor or the cluster has ended."""
        try:
            answer: list[bytes] = self._ray.get(self._handle.ask.remote(list(frames)))
        except self._ray.exceptions.RayActorError as error:
            raise ProtocolError(
                f"{self.name} has ended ({one_line(error, limit=160)}); start the run again: it goes on from its last"
                " checkpoint"
            ) from None
        return answer


class Cluster:
    """A Ray cluster and the weights in its object store."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._weights: Any = None

    def allocate(self, size: int, fill: Callable[[Any], None]) -> Any:
        """Memory of `size` bytes in the object store, filled, and read-only from then on."""
        memory = np.empty(size, dtype=np.uint8)
        fill(memory)
        self._weights = self._ray.put(memory)
        return self._ray.get(self._weights)

    def actor_resources(self, count: int | None, *, cuda: bool) -> ActorResources:
        """The resources of `count` actors; by default one actor for each GPU, or CPU.

        Raises `ConfigError` where they do not fit: Ray would wait for ever.
        """
        return actor_resources_of([node["Resources"] for node in self._ray.nodes() if node["Alive"]], count, cuda=cuda)

    @contextmanager
    def actors(self, resources: ActorResources, init_worker: InitWorker) -> Iterator[list[Actor]]:
        """The actors; all are killed at the end."""
        kind = self._ray.remote(_RemoteWorker).options(num_cpus=resources.cpus, num_gpus=resources.gpus)
        with ExitStack() as stack:
            started = []
            for number in range(resources.count):
                handle = kind.remote(init_worker, self._weights, str(Path.cwd()))
                started.append(Actor(self._ray, handle, f"actor {number + 1} of {resources.count}"))
                stack.callback(self._ray.kill, handle)
            yield started


class _RemoteWorker:
    """An actor: a worker loop whose memory is in the object store."""

    def __init__(self, init_worker: InitWorker, memory: np.ndarray, folder: str) -> None:
        # paths in the settings are relative to the folder in which the run was started
        if Path(folder).is_dir():
            os.chdir(folder)
        self._worker_loop = WorkerLoop(init_worker, lambda: memory)

    def ask(self, frames: list[bytes]) -> list[bytes]:
        return self._worker_loop.ask(frames)


@contextmanager
def ray_cluster() -> Iterator[Cluster]:
    """The cluster at RAY_ADDRESS, or a local one that ends with the context.

    Raises `ConfigError` where Ray is not installed or the cluster cannot be reached.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError(f"--engine ray needs Ray, which is not installed; {install_command('ray')}") from None
    address = os.environ.get("RAY_ADDRESS", "local")
    starts_ray = not ray.is_initialized()
    if starts_ray:
        local: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
        host, _, port = address.rpartition("//")[2].rpartition(":")
        try:
            if port.isdecimal():  # else Ray tries for many minutes
                socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            ray.init(address=address, logging_level=RAY_LOG_LEVEL, log_to_driver=False, **local)
        except (OSError, OverflowError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"no Ray cluster at RAY_ADDRESS {address!r} ({one_line(error, limit=160)}); start one with"
                " `ray start --head`, or unset it"
            ) from None
    try:
        yield Cluster(ray)
    finally:
        if starts_ray:
            ray.shutdown()


def actor_resources_of(nodes: Sequence[Mapping[str, float]], count: int | None, *, cuda: bool) -> ActorResources:
    """The resources of each actor on nodes with these CPUs and GPUs.

    >>> actor_resources_of([{"CPU": 4.0}, {"CPU": 4.0}], 3, cuda=False)
    ActorResources(count=3, cpus=2, gpus=0.0)

    Raises `ConfigError` where so many do not fit.
    """
    cpus, gpus = ([int(node.get(kind, 0)) for node in nodes] for kind in ("CPU", "GPU"))
    count = count or sum(gpus if cuda else cpus)
    # no actor may lie across two nodes
    fitting = [
        per_actor
        for per_actor in range(1, max(cpus, default=0) + 1)
        if sum(node_cpus // per_actor for node_cpus in cpus) >= count > 0
    ]
    if not fitting or (cuda and not sum(gpus)):
        raise ConfigError(
            f"--workers is {count}, and the Ray cluster has {sum(cpus)} CPUs and {sum(gpus)} GPUs; allowed: 1 to"
            f" {sum(cpus)}{', with at least one GPU for --accelerator cuda' if cuda else ''}"
        )
    actors_per_gpu = -(-count // sum(gpus)) if cuda else 1
    return ActorResources(count=count, cpus=fitting[-1], gpus=1 / actors_per_gpu if cuda else 0.0)
