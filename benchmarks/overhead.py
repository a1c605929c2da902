"""What does the engine itself cost, per client and round, when training takes no time?

100 clients with MiniLM's adapters at rank 8; the engine returns what it was sent, with every tensor moved a little and
by chance, so that updates have the rank that trained ones have.
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

import numpy as np
import torch

from atlas_fl.client.job import Job, Update
from atlas_fl.config import Config, with_values
from atlas_fl.experiment.recorder import Recorder
from atlas_fl.experiment.rounds import one_round
from atlas_fl.experiment.state import CurrentRun, FederationState
from atlas_fl.params import Params
from atlas_fl.planning.plan import ClientPlan, Plan, PlanResult
from atlas_fl.rng import torch_generator
from atlas_fl.setup.assembly import Assembly, assemble
from atlas_fl.storage.run_folder import RunFolder

RANK, EXAMPLES = 8, 100


@dataclass(frozen=True)
class Echo:
    """An engine whose clients do nothing but move every tensor."""

    seconds: list[float]

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        began = time.perf_counter()
        chance = torch_generator(0, "echo")
        metrics = {"loss": 0.5, "primary": 0.5, "accuracy": 0.5, "seconds": 0.0}
        updates = [
            Update(
                client=job.client,
                params=add_noise(job.params, chance) if action == "train" else job.params,
                examples=EXAMPLES,
                metrics=metrics,
                keys=len(job.params),
            )
            for job in jobs
        ]
        self.seconds.append(time.perf_counter() - began)  # this is the clients' time, not the engine's
        return updates


def add_noise(params: Params, chance: torch.Generator) -> Params:
    return {key: value + 0.01 * torch.randn(value.shape, generator=chance) for key, value in params.items()}


def settings(strategy: str, space: str, *, clients: int, rounds: int) -> Config:
    """Rounds that are not evaluated: the last one, which would be, is never reached."""
    data = {"tasks": "movie", "clients_per_task": clients, "samples": 4, "validation_samples": 2, "test_samples": 2}
    return with_values(
        Config(), {**data, "strategy": strategy, "space": space, "rounds": rounds + 1, "eval_every": rounds + 5}
    )


def plan_of(assembly: Assembly) -> PlanResult:
    """All in clusters of ten, every pair inside a cluster joined."""
    layers, clusters = assembly.shape.num_layers, np.arange(len(assembly.names)) // 10
    graph = (clusters[:, None] == clusters[None, :]).astype(float)
    np.fill_diagonal(graph, 0.0)
    clients = tuple(
        ClientPlan(
            name=client.name,
            task=client.task.name,
            device=device.name,
            examples=EXAMPLES,
            cluster=int(cluster),
            ranks=(RANK,) * layers,
            cut=None,
            budget_bytes=0,
            largest_rank=RANK,
            memory={},
            predicted={},
        )
        for client, device, cluster in zip(assembly.clients, assembly.devices, clusters, strict=True)
    )
    plan = Plan(
        clients=clients,
        adjacency=graph,
        importance=np.full((len(clients), layers), 1 / layers),
        layer_of=assembly.layer_of,
        lora={"alpha": assembly.config.model.lora_alpha, "rslora": assembly.config.model.rslora},
    )
    start = {client.name: assembly.initial_params(client, (RANK,) * layers) for client in assembly.clients}
    return PlanResult(plan=plan, initial_models=start, sketches=None, clustering=None)


def measure(config: Config, *, rounds: int, every: int, folder: Path) -> float:
    """Milliseconds per client and round, the median over the rounds."""
    assembly = assemble(config)
    planned = plan_of(assembly)
    kept = replace(config, run=replace(config.run, checkpoint_every=every, keep_checkpoints=1))
    recorder = Recorder(
        folder=RunFolder(folder),
        config=kept,
        clients=assembly.clients,
        provenance={"settings": {}, "data": {}, "model": {}},
    )
    folder.mkdir(parents=True)
    models = dict(planned.initial_models)
    state, taken = FederationState(round=0, server_models=models, client_models=models), []
    for _ in range(rounds):
        engine, began = Echo([]), time.perf_counter()
        state, record = one_round(CurrentRun(assembly, planned, state), engine)
        recorder.record_round(record, state, seconds=0.0)
        taken.append(time.perf_counter() - began - sum(engine.seconds))
    return 1e3 * statistics.median(taken) / len(assembly.names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    cases = [
        ("local", "factors", 99),
        ("fedavg", "factors", 99),
        ("fedavg", "product", 99),
        ("atlas_laplacian", "factors", 99),
        ("atlas_laplacian", "product", 99),
        ("fedavg", "factors", 1),
    ]
    with tempfile.TemporaryDirectory() as base:
        for number, (strategy, space, every) in enumerate(cases):
            config = settings(strategy, space, clients=args.clients, rounds=args.rounds)
            taken = measure(config, rounds=args.rounds, every=every, folder=Path(base, str(number)))
            saved = ", checkpoint every round" if every == 1 else ""
            print(f"{strategy:8s} {space:8s}{saved}: {taken:.3f} ms per client and round", flush=True)
            if (strategy, space, every) == ("fedavg", "factors", 99):
                figure = taken
    print(f"overhead per client and round (fedavg, factors, {args.clients} clients): {figure:.3f} ms")


if __name__ == "__main__":
    main()
