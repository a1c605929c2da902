"""Which fingerprint and which way to cluster finds the tasks? The table that picks the defaults.

`measure` takes all fingerprints of five sets of tasks at 100, 200 and 400 examples a client over many seeds and
keeps the sketches (minutes on a GPU, hours on two cores); `table` clusters them in every way and prints, for each,
the mean adjusted Rand index and how often the tasks were found exactly.

    python benchmarks/fingerprints.py measure --to sketches --device cuda
    python benchmarks/fingerprints.py table --of sketches
"""

import argparse
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from atlas_fl.client.batching import packs
from atlas_fl.client.fingerprint import delta_sketch, half_job
from atlas_fl.client.importance import batch_gradients
from atlas_fl.client.job import Job, Site
from atlas_fl.client.local_training import train
from atlas_fl.client.options import FingerprintOptions
from atlas_fl.clustering.cluster import cluster_clients
from atlas_fl.clustering.labels import ClusteringSettings
from atlas_fl.clustering.result import agreement
from atlas_fl.clustering.sketch import sketch
from atlas_fl.config import Config
from atlas_fl.config.schema import DataConfig, RunConfig
from atlas_fl.params import Params
from atlas_fl.setup.assembly import Assembly, assemble
from atlas_fl.setup.options import warmup_options

SETS = {
    "movie trec pairs": ("movie", "trec", "pairs"),
    "movie amazon scramble": ("movie", "amazon", "scramble"),
    "six tasks": ("movie", "amazon", "trec", "pairs", "scramble", "sms"),
    "same text": ("scramble", "nyt_sentiment"),
    "two of one kind": ("movie", "nyt_sentiment", "trec"),
}
SENTIMENT = {"nyt_sentiment": "movie", "amazon": "movie"}
"""Three sources of one question: what the task of a client is by what is asked; by what is read each has its own."""
SIZES = (100, 200, 400)
STEPS = (10, 20, 30, 40, 60)
DIM = 1024


def federations(name: str, size: int, seeds: int, device: Literal["cpu", "cuda"]) -> Iterator[Assembly]:
    for seed in range(seeds):
        data = DataConfig(
            tasks=SETS[name], samples=size, validation_samples=10, test_samples=10, max_length=64, clients_per_task=3
        )
        yield assemble(Config(data=data, run=RunConfig(seed=seed, accelerator=device)))


def merge_sites(assemblies: list[Assembly]) -> Site:
    """One site with the clients of all seeds, so that they train in the same packs."""
    data = {f"{a.config.run.seed}:{name}": tokens for a in assemblies for name, tokens in a.site.data.items()}
    return replace(assemblies[0].site, data=data)


def jobs_of(assemblies: list[Assembly], *, batches: int, steps: int) -> list[Job]:
    jobs = []
    for assembly in assemblies:
        train = warmup_options(assembly.config)
        options = FingerprintOptions(
            kind="delta", sketch_dim=DIM, train=train, batches=batches, steps=steps, stride=10, reliability=2.0
        )
        ranks = (8,) * assembly.shape.num_layers
        jobs += [
            Job(client=f"{train.seed}:{c.name}", params=assembly.initial_params(c, ranks), round=0, options=options)
            for c in assembly.clients
        ]
    return jobs


def deltas(site: Site, jobs: list[Job]) -> dict[str, np.ndarray]:
    """Sketches (clients, 2, dim) of the delta fingerprint after each of the wanted steps."""
    sketches: dict[str, list[list[np.ndarray]]] = {f"delta {steps}": [] for steps in STEPS}

    def watch(done: int, live: Mapping[int, Params]) -> tuple[int, ...]:
        if done in STEPS:
            rows = [delta_sketch(params, jobs[0].options) for params in live.values()]
            sketches[f"delta {done}"] += [rows[index : index + 2] for index in range(0, len(rows), 2)]
        return ()

    for pack in packs(jobs, site):
        train([half_job(job, half) for job in pack for half in (0, 1)], site, watch=watch)
    return {name: np.array(rows) for name, rows in sketches.items()}


def gradient_sketches(site: Site, jobs: list[Job]) -> dict[str, np.ndarray]:
    """Sketches (clients, 2, dim) of `gradient` and `fisher`, both from the same batches."""
    sketches: dict[str, list[list[np.ndarray]]] = {"gradient": [], "fisher": []}
    for job in jobs:
        both: dict[str, list[np.ndarray]] = {"gradient": [], "fisher": []}
        for half in (0, 1):
            mean: dict[str, torch.Tensor] = {}
            square: dict[str, torch.Tensor] = {}
            for _, gradient in batch_gradients(job, site, half=half, blocks=2, count=job.options.batches):
                for key, value in gradient.items():
                    mean[key] = value.clone() if key not in mean else mean[key].add_(value)
                    square[key] = value.square() if key not in square else square[key].addcmul_(value, value)
            root = {key: value.sqrt() for key, value in square.items()}
            both["gradient"].append(sketch(mean, dim=DIM, seed=job.options.train.seed))
            both["fisher"].append(sketch(root, dim=DIM, seed=job.options.train.seed))
        for kind in sketches:
            sketches[kind].append(both[kind])
    return {kind: np.array(rows) for kind, rows in sketches.items()}


def measure(args: argparse.Namespace) -> None:
    args.to.mkdir(parents=True, exist_ok=True)
    for size in args.sizes:
        file = args.to / f"{'-'.join(args.kinds)}-{size}.npz"
        arrays: dict[str, np.ndarray] = dict(np.load(file)) if file.exists() else {}
        for name in args.sets:
            began = time.perf_counter()
            assemblies = list(federations(name, size, args.seeds, args.device))
            site = merge_sites(assemblies)
            jobs = jobs_of(assemblies, batches=args.batches, steps=STEPS[-1])
            clients = len(assemblies[0].clients)
            sketches = deltas(site, jobs) if "delta" in args.kinds else {}
            if "gradient" in args.kinds:
                sketches |= gradient_sketches(site, jobs)
            for kind, rows in sketches.items():
                shaped = rows.reshape(args.seeds, clients, 2, DIM)
                arrays[f"{name}|{kind}"] = shaped.astype(np.float16)
            print(f"{name}, {size} examples: {time.perf_counter() - began:.0f} s", flush=True)
            np.savez_compressed(file, allow_pickle=False, **arrays)


def table(args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    by_size: dict[int, dict[str, np.ndarray]] = {}
    for path in sorted(args.of.glob("*.npz")):
        size = int(path.stem.rsplit("-", 1)[1])
        by_size.setdefault(size, {}).update(np.load(path))
    sets = [name for name in SETS if any(key.split("|")[0] == name for arrays in by_size.values() for key in arrays)]
    print("| fingerprint | clustering | examples | " + " | ".join(sets) + " | mean ARI | exact |")
    print("|---|---|---|" + "---|" * (len(sets) + 2))
    kinds = sorted({key.split("|")[1] for arrays in by_size.values() for key in arrays})
    for kind in args.kinds or kinds:
        for method in args.methods:
            for size, arrays in sorted(by_size.items()):
                row, exact, total = [], 0, 0
                for name in sets:
                    read = name != "two of one kind" and args.truth == "read"
                    truth = [task if read else SENTIMENT.get(task, task) for task in SETS[name] for _ in range(3)]
                    measured = arrays.get(f"{name}|{kind}")
                    if measured is None:  # not measured for this fingerprint
                        row.append(math.nan)
                        continue
                    scores = [
                        ari(settings(seed, kind, method, args.threshold), rows, truth)
                        for seed, rows in enumerate(measured)
                    ]
                    row.append(float(np.mean(scores)))
                    exact, total = exact + sum(score == 1 for score in scores), total + len(scores)
                cells = " | ".join(f"{value:.2f}" for value in row)
                print(f"| {kind} | {method} | {size} | {cells} | {np.nanmean(row):.3f} | {exact}/{total} |", flush=True)


def settings(seed: int, kind: str, method: str, threshold: float) -> ClusteringSettings:
    return ClusteringSettings(
        seed=seed, cluster_by=method, k_range=(2, 7), centre=kind == "fisher", draws=19, threshold=threshold
    )


def ari(settings: ClusteringSettings, rows: np.ndarray, truth: list[str]) -> float:
    unit = rows.astype(np.float32)
    unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
    clustering = cluster_clients(unit[:, 0], unit[:, 1], settings=settings)
    return agreement(clustering.labels, truth)["ari"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("measure")
    first.add_argument("--to", type=Path, required=True)
    first.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    first.add_argument("--seeds", type=int, default=20)
    first.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    first.add_argument("--sets", nargs="+", choices=tuple(SETS), default=list(SETS))
    first.add_argument("--batches", type=int, default=6)
    first.add_argument("--kinds", nargs="+", choices=("delta", "gradient"), default=["delta", "gradient"])
    second = commands.add_parser("table")
    second.add_argument("--of", type=Path, required=True)
    second.add_argument("--kinds", nargs="+")
    second.add_argument("--methods", nargs="+", default=["corrected", "atlas", "silhouette"])
    second.add_argument("--threshold", type=float, default=0.6, help="of `corrected`; a run has 0.8")
    second.add_argument("--truth", choices=("read", "asked"), default="read")
    args = parser.parse_args()
    measure(args) if args.command == "measure" else table(args)


if __name__ == "__main__":
    main()
