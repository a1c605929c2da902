"""How long does the same federation take on Flower's simulation with PEFT, and on ATLAS?

The same clients, texts, batches, adapters (rank 8 in every block) and rounds of FedAvg. On Flower a `ClientApp` loads
the adapters that it is sent into a PEFT model, trains, and sends them back, and Flower's `FedAvg` averages them, as its
quickstart for transformers does; each of its processes keeps its model between messages, which the quickstart does not.
On ATLAS it is `run_config`. Neither evaluates before the last round. They take turns, so that a noisy machine slows
both.

    python benchmarks/peers.py                # 8 clients with 120 questions each, 4 rounds, 2 processes of Flower

The time of a round is without the first, in which processes load models, and without the last, which ATLAS ends with
scores.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from packed import RANK, peft_client, peft_model
from peft import set_peft_model_state_dict

from atlas_fl import Config, Event, RoundFinished, find_preset, run_config, with_values
from atlas_fl.client.job import Job
from atlas_fl.client.options import TrainOptions
from atlas_fl.models.peft_io import peft_name
from atlas_fl.setup.assembly import Assembly, assemble

CLIENTS = 8
LEARNING_RATE = 2e-3


def federation(rounds: int) -> Config:
    """Eight clients with questions of TREC."""
    return with_values(
        find_preset("quick"),
        {
            **{"tasks": ("trec",), "clients_per_task": CLIENTS, "samples": 120, "devices": ("laptop_8gb",)},
            **{"validation_samples": 10, "test_samples": 10, "strategy": "fedavg", "space": "factors"},
            **{"ranks": str(RANK), "lr": LEARNING_RATE, "rounds": rounds},
            **{"eval_every": rounds, "checkpoint_every": rounds, "alone": "none"},
        },
    )


@cache
def loaded(rounds: int) -> tuple[Assembly, torch.nn.Module]:
    """What a process of Flower keeps: the clients' texts and a PEFT model."""
    torch.set_num_threads(1)
    assembly = assemble(federation(rounds))
    return assembly, peft_model(assembly, assembly.clients[0].task.num_labels, "cpu")


def client_app(rounds: int) -> ClientApp:
    app = ClientApp()

    def train(message: Message, context: Context) -> Message:
        from peers import loaded  # this very file as a module, which a process keeps with what is cached in it

        assembly, model = loaded(rounds)
        name = assembly.clients[int(context.node_config["partition-id"])].name
        set_peft_model_state_dict(model, dict(message.content["arrays"].to_torch_state_dict()))
        options = TrainOptions(seed=federation(rounds).run.seed, epochs=1, lr=LEARNING_RATE)
        job = Job(client=name, params={}, round=int(message.content["config"]["server-round"]), options=options)
        trained = peft_client(model, job, assembly, "cpu", bf16=False)
        counted = MetricRecord({"num-examples": len(assembly.site.data[name].splits["train"])})
        content = RecordDict({"arrays": ArrayRecord(torch_state_dict=trained), "metrics": counted})
        return Message(content=content, reply_to=message)

    app.train()(train)
    return app


def initial_adapters(rounds: int) -> dict[str, torch.Tensor]:
    assembly = assemble(federation(rounds))
    params = assembly.initial_params(assembly.clients[0], (RANK,) * assembly.shape.num_layers)
    return {peft_name(key, assembly.site.backbone.family): tensor for key, tensor in params.items()}


def on_flower(rounds: int, initial: Mapping[str, torch.Tensor], *, processes: int) -> tuple[float, float]:
    """Seconds of the whole simulation, and of a round after the first."""
    ends, server = list[float](), ServerApp()

    def main(grid: Grid, context: Context) -> None:  # noqa: ARG001  # as Flower calls it
        strategy = FedAvg(fraction_evaluate=0.0)

        def at_the_end_of(number: int, arrays: ArrayRecord) -> None:  # noqa: ARG001
            ends.append(time.perf_counter())

        strategy.start(grid, ArrayRecord(torch_state_dict=dict(initial)), num_rounds=rounds, evaluate_fn=at_the_end_of)

    server.main()(main)
    began = time.perf_counter()
    resources: dict[str, int | float] = {"num_cpus": 1, "num_gpus": 0.0}
    backend = {"client_resources": resources, "init_args": {"num_cpus": processes}}
    run_simulation(server, client_app(rounds), CLIENTS, backend_config=backend)
    return time.perf_counter() - began, (ends[-1] - ends[1]) / (rounds - 1)


def on_atlas(rounds: int, folder: Path) -> tuple[float, float]:
    """Seconds of the whole run, and of a round after the first and before the last, which evaluates."""
    ended = list[RoundFinished]()

    def note(event: Event) -> None:
        if isinstance(event, RoundFinished):
            ended.append(event)

    began = time.perf_counter()
    run_config(with_values(federation(rounds), {"runs_dir": str(folder)}), on_event=note)
    return time.perf_counter() - began, statistics.fmean(event.seconds for event in ended[1:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    if args.rounds < 3:
        parser.error(f"--rounds is {args.rounds}; allowed: at least 3, since neither the first nor the last one counts")
    initial = initial_adapters(args.rounds)
    ratios = list[tuple[float, float]]()
    for _ in range(args.repeat):
        whole, each = on_flower(args.rounds, initial, processes=args.processes)
        with tempfile.TemporaryDirectory() as folder:
            our_whole, our_each = on_atlas(args.rounds, Path(folder))
        ratios.append((whole / our_whole, each / our_each))
        print(
            f"Flower {whole:.1f} s, a round {each:.2f} s; ATLAS {our_whole:.1f} s, a round {our_each:.2f} s", flush=True
        )
    with_start, without = (statistics.median(column) for column in zip(*ratios))
    print(f"{CLIENTS} clients, {args.rounds} rounds, {args.processes} processes of Flower, rank {RANK}")
    print(f"Flower over ATLAS: {with_start:.2f} with start-up, {without:.2f} a round")


if __name__ == "__main__":
    main()
