"""What does the engine itself cost, per client and round, when training takes no time?

100 clients with MiniLM's adapters at rank 8; the engine returns what it was sent, with every tensor moved a little.
Everything else is the product: sampling, the check of every update, the server's rule, byte counting, rows of metrics
and ledger on the disk. Checkpoints are measured apart, since they are due as often as the user says.

    python benchmarks/overhead.py
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from atlas_fl.clients.base import Job, Update
from atlas_fl.config import Config
from atlas_fl.io.folder import RunFolder
from atlas_fl.lora.adapters import init_adapters, init_head
from atlas_fl.mixing.matrices import Federation
from atlas_fl.options import strategy_of
from atlas_fl.records import Recorder
from atlas_fl.state import State
from atlas_fl.train import one_round

HIDDEN, LAYERS, RANK, LABELS = 384, 6, 8, 2


@dataclass(frozen=True)
class Echo:
    """An engine whose clients do nothing but move every tensor."""

    seconds: list[float]

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        began = time.perf_counter()
        metrics = {"loss": 0.5, "primary": 0.5, "accuracy": 0.5, "seconds": 0.0}
        updates = [
            Update(
                client=job.client,
                params={k: t + 0.01 for k, t in job.params.items()} if action == "train" else job.params,
                examples=100,
                metrics=metrics,
                keys=len(job.params),
            )
            for job in jobs
        ]
        self.seconds.append(time.perf_counter() - began)  # this is the clients' time, not the engine's
        return updates


def models(count: int) -> dict[str, dict[str, torch.Tensor]]:
    modules = [f"encoder.layer.{i}.attention.self.{part}" for i in range(LAYERS) for part in ("query", "value")]
    dims = dict.fromkeys(modules, (HIDDEN, HIDDEN))
    head = {"head.classifier.weight": (LABELS, HIDDEN), "head.classifier.bias": (LABELS,)}
    start = {**init_adapters(dims, dict.fromkeys(modules, RANK), seed=0), **init_head(head, seed=0, group="task")}
    return {f"task-{k}": {key: tensor.clone() for key, tensor in start.items()} for k in range(count)}


def federation(names: Sequence[str]) -> Federation:
    """All in clusters of ten, every pair inside a cluster joined."""
    clusters = np.arange(len(names)) // 10
    graph = (clusters[:, None] == clusters[None, :]).astype(float)
    np.fill_diagonal(graph, 0.0)
    return Federation(
        clients=tuple(names),
        weights=np.full(len(names), 100.0),
        clusters=clusters,
        adjacency=graph,
        head_groups=("task",) * len(names),
    )


def measure(strategy: str, space: str, *, clients: int, rounds: int, every: int, folder: Path) -> float:
    """Milliseconds per client and round, the median over the rounds."""
    config = Config()
    config = replace(
        config,
        mixing=replace(config.mixing, strategy=strategy, space=space),
        training=replace(config.training, rounds=rounds + 1, eval_every=rounds + 5),
    )
    start = models(clients)
    assembly = SimpleNamespace(config=config, names=tuple(start))
    known = federation(list(start))
    planned = SimpleNamespace(plan=SimpleNamespace(federation=lambda: known))
    recorder = Recorder(
        folder=RunFolder(folder),
        clients=(),
        share=config.mixing.share,
        audit=False,
        checkpoint_every=every,
        keep_checkpoints=1,
        rounds=rounds + 5,
    )
    folder.mkdir(parents=True)
    memory = strategy_of(config).init(start)
    state, taken = State(round=0, strategy=memory, start=memory), []
    for _ in range(rounds):
        engine, began = Echo([]), time.perf_counter()
        state, record = one_round(assembly, planned, engine, state)
        recorder.round(record, state, seconds=0.0)
        taken.append(time.perf_counter() - began - sum(engine.seconds))
    return 1e3 * statistics.median(taken) / clients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    cases = [
        ("local", "factors", 99),
        ("fedavg", "factors", 99),
        ("fedavg", "product", 99),
        ("atlas", "factors", 99),
        ("atlas", "product", 99),
        ("fedavg", "factors", 1),
    ]
    with tempfile.TemporaryDirectory() as base:
        for number, (strategy, space, every) in enumerate(cases):
            taken = measure(
                strategy, space, clients=args.clients, rounds=args.rounds, every=every, folder=Path(base, str(number))
            )
            saved = ", checkpoint every round" if every == 1 else ""
            print(f"{strategy:8s} {space:8s}{saved}: {taken:.3f} ms per client and round", flush=True)
            if (strategy, space, every) == ("fedavg", "factors", 99):
                figure = taken
    print(f"overhead per client and round (fedavg, factors, {args.clients} clients): {figure:.3f} ms")


if __name__ == "__main__":
    main()
