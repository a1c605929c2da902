"""What a round of whole models costs against the loop that one would write without ATLAS.

A vision transformer of the size of ViT-S (random weights), ten clients of the digits a round, four steps of sixteen
images each. Both sides take the same batches through the same preparation of pixels; the loop sets the stock model to
the global weights for each client, runs torch.optim.SGD with momentum and adds up the weighted models. They take turns
in one process; the difference of the models after the rounds says whether they did the same work. The peak memory of
each side is that of a process of its own. What a round takes beyond its steps is the median over the turns, in each of
which the same steps are taken once more with nothing around them.

    python benchmarks/fedavg_images.py
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from atlas_fl.client.job import Job
from atlas_fl.client.local_training import batches
from atlas_fl.config import Config, with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.events import ignore
from atlas_fl.experiment.rounds import one_round, round_participants
from atlas_fl.experiment.state import CurrentRun, FederationState
from atlas_fl.models.vision import preprocess
from atlas_fl.params import HEAD
from atlas_fl.planning.planner import local_engine, plan_run
from atlas_fl.setup.assembly import Assembly, assemble
from atlas_fl.setup.options import train_options

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def save_vit(folder: Path, *, pixels: int) -> None:
    """A random model of the size of ViT-S, as a directory that `--model` takes."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536}
    ViTForImageClassification(ViTConfig(**sizes, image_size=pixels, patch_size=16, num_labels=10)).save_pretrained(
        folder
    )
    ViTImageProcessorPil(size={"height": pixels, "width": pixels}).save_pretrained(folder)


def settings(model: Path, args: argparse.Namespace) -> Config:
    return with_values(
        find_preset("vision-quick"),
        {
            **{"model": str(model), "tasks": "digits", "image_size": args.pixels, "head_first": "none"},
            **{"clients_per_task": 2 * args.clients, "samples": 40, "validation_samples": 4, "test_samples": 8},
            **{"participation": 0.5, "rounds": 1000, "eval_every": 1000, "local_steps": args.steps},
            **{"mask": "random" if args.masked else "none", "clip": 0.0},
        },
    )


class Ours:
    """Rounds of the product, without its files."""

    def __init__(self, config: Config) -> None:
        self.assembly = assemble(config)
        self.engine = local_engine(self.assembly, ignore)
        self.planned = plan_run(self.assembly, self.engine)
        self.state = FederationState(
            round=0, server_models=self.planned.initial_models, client_models=self.planned.initial_models
        )

    def round(self) -> None:
        self.state, _ = one_round(CurrentRun(self.assembly, self.planned, self.state), self.engine)

    def model(self) -> Mapping[str, Tensor]:
        return self.state.client_models[self.assembly.names[0]]


class Loop:
    """The same rounds as one would write them."""

    def __init__(self, config: Config, model: Path) -> None:
        self.assembly = assemble(config)
        self.options = train_options(config, with_images=True)
        start = self.assembly.full_models()[self.assembly.names[0]]
        labels = start[HEAD + "bias"].numel()
        self.net = AutoModelForImageClassification.from_pretrained(model, num_labels=labels).train()
        self.net.load_state_dict({stock(key, self.assembly): tensor for key, tensor in start.items()}, strict=True)
        self.weights = {key: value.clone() for key, value in self.net.state_dict().items()}
        self.number = 0

    def round(self) -> None:
        self.number += 1
        chosen = round_participants(self.assembly.config, self.assembly.names, round=self.number)
        counts = [self.assembly.site.data[name].examples for name in chosen]
        total = {key: torch.zeros_like(value) for key, value in self.weights.items()}
        for name, count in zip(chosen, counts, strict=True):
            self.net.load_state_dict(self.weights)
            self.client(name)
            for key, value in self.net.state_dict().items():
                total[key].add_(value, alpha=count / sum(counts))
        self.weights = total

    def client(self, name: str) -> None:
        options, site = self.options, self.assembly.site
        optimizer = torch.optim.SGD(
            self.net.parameters(), lr=options.lr, momentum=options.momentum, weight_decay=options.weight_decay
        )
        job = Job(client=name, params={}, round=self.number, options=options)
        for batch in batches(site.data[name].splits["train"], job, secret=None):
            logits = self.net(preprocess(site.vision, torch.from_numpy(batch.pixels))).logits
            torch.autograd.backward(cross_entropy(logits, torch.from_numpy(batch.labels)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def steps_alone(self) -> None:
        """The last round's steps with neither loading nor averaging."""
        for name in round_participants(self.assembly.config, self.assembly.names, round=self.number):
            self.client(name)

    def model(self) -> Mapping[str, Tensor]:
        return self.weights


def stock(key: str, assembly: Assembly) -> str:
    """The stock classifier's name of one of our tensors."""
    return (
        "classifier." + key.removeprefix(HEAD) if key.startswith(HEAD) else assembly.site.vision.classifier_names[key]
    )


def time_call(work: Callable[[], object], clock: str) -> float:
    began = CLOCKS[clock]()
    work()
    return CLOCKS[clock]() - began


def peak_of(side: str, args: argparse.Namespace, model: Path) -> float:
    """Megabytes of a process of its own that trains two rounds."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peak, (side, args, model))


def _peak(side: str, args: argparse.Namespace, model: Path) -> float:
    config = settings(model, args)
    rounds = Ours(config) if side == "ours" else Loop(config, model)
    for _ in range(2):
        rounds.round()
    # not ru_maxrss, which a new process takes over from the one that started it
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def compare(ours: Ours, loop: Loop, args: argparse.Namespace) -> tuple[dict[str, list[float]], float]:
    """Seconds of both sides' rounds and of the steps alone in turns, and the largest difference of the last models."""
    work = {"ours": ours.round, "loop": loop.round, "steps": loop.steps_alone}
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(args.turns):
        for name, call in work.items():
            taken[name].append(time_call(call, args.clock))
    names, tensors = loop.model(), ours.model()
    return taken, max(float((names[stock(key, ours.assembly)] - value).abs().max()) for key, value in tensors.items())


def beyond(taken: Mapping[str, Sequence[float]], side: str) -> float:
    """What a round of this side takes beyond its steps, as a share of them: the median over the turns."""
    return statistics.median(mine / bare - 1 for mine, bare in zip(taken[side], taken["steps"], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", type=int, default=32)
    parser.add_argument("--clients", type=int, default=10, help="clients of a round")
    parser.add_argument("--steps", type=int, default=4, help="steps of a client")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--masked", action="store_true", help="ours under a random mask of sparsity 0.9")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        save_vit(model := Path(base), pixels=args.pixels)
        ours, loop = Ours(settings(model, args)), Loop(settings(model, args), model)
        taken, apart = compare(ours, loop, args)
        peaks = {side: peak_of(side, args, model) for side in ("ours", "loop")}
    for name, seconds in taken.items():
        print(f"seconds a round, {name}: " + ", ".join(f"{value:.2f}" for value in seconds))
    print(f"largest difference of the models: {apart:.1e}")
    print(f"peak memory: ours {peaks['ours']:.0f} MB, loop {peaks['loop']:.0f} MB")
    print(f"a round beyond its steps: ours {beyond(taken, 'ours'):+.1%}, loop {beyond(taken, 'loop'):+.1%}")
    print(f"ratio loop/ours: {sum(taken['loop']) / sum(taken['ours']):.2f}")


if __name__ == "__main__":
    main()
