"""Does phase 2 pay? Ranks by importance against one rank for all, each at its own rate; stopped and gone on with.

Each way of choosing ranks has one run at every rate on each development seed, then runs at the rate of the best
validation score on the seeds of the comparison. What runs of a seed share is computed once. A run is a row of the CSV
file, written when it ends; rows that are there are not made again, and the folders of runs are deleted. A row holds
scores, bytes, and what the delivered adapters `s B A` fill, averaged over modules and clients, with sigma_i the
singular values of one of them:

    effective rank     exp(-sum_i p_i log p_i), p_i = sigma_i / sum_j sigma_j     (Roy and Vetterli, EUSIPCO 2007)
    first four         sum_{i <= 4} sigma_i^2 / sum_i sigma_i^2
    tail               share of the squared norm beyond the least rank that a client of the same task has in a module,
                       of the client with the largest ranks, after each round

    python benchmarks/ranks_pay.py --rows benchmarks/ranks_pay.csv --minutes 60   # as often as it is stopped
    python benchmarks/ranks_pay.py --rows benchmarks/ranks_pay.csv --report       # the table from the rows alone

Declared before the first run: the constants below. `quick` takes minutes a run; `quick-trec` is its second task alone,
four clients on the four kinds of devices with half of the examples; `label-skew` is eight clients of one task on the
same devices, ranks on the two uppermost blocks.
"""

import argparse
import csv
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from atlas_fl import Config, find_preset, run_config, with_values
from atlas_fl.runtime.reuse import REUSED_RESULTS

DEVICES = ("cpu_2gb", "tablet_4gb", "laptop_8gb", "gpu_16gb")
QUICK_TREC = {
    "preset": "quick", "tasks": ("trec",), "clients_per_task": 4, "samples": 100, "rounds": 8, "eval_every": 8,
    "clusters": "oracle", "strategy": "fedavg_cluster",
}  # fmt: skip
FEDERATIONS: dict[str, dict[str, Any]] = {
    "quick-trec": QUICK_TREC,
    "label-skew": {
        "preset": "label-skew", "dial": 3, "adapted_blocks": 2, "devices": DEVICES, "eval_every": 10,
        "strategy": "fedavg",
    },
    "quick": {"preset": "quick", "eval_every": 12, "strategy": "fedavg_cluster"},
}  # fmt: skip
LEARNING_RATES = {"quick-trec": 1e-3, "label-skew": 5e-3, "quick": 1e-3}
"""The rates that the multiples are of: the model's own, and for two of six blocks half of the preset's for one."""
CAPPED = {"ranks": "budget", "candidates": (4, 8), "rslora": True, "lora_alpha": 8.0}
"""The settings of `capped`: ranks by importance up to 8, whose scale falls as the best rate does."""
RANKS = ("budget", "4", "64", "capped", "8", "uniform", "16", "matched")
MULTIPLES = (2.0, 4.0, 1.0, 8.0, 0.5)
DEVELOPMENT_SEEDS = (9003,)
SEEDS = (3001, 3002, 3003)
TAILS = {**QUICK_TREC, "ranks": "budget", "candidates": (2, 4, 8, 16, 32, 64), "keep_checkpoints": 99}
"""The federation in which the tail is looked at after each round."""
TAIL_RULES = ("fedavg", "flexlora", "raflora")
FIELDS = (
    "federation", "ranks", "rule", "multiple", "seed", "purpose", "validation", "validation_loss", "test", "test_loss",
    "up_bytes", "training_bytes", "mean_rank", "effective_rank", "first_four", "tails",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: a row."""

    federation: str
    ranks: str
    rule: str
    multiple: float
    seed: int
    purpose: str
    """`tuning`, `test` or `tail`."""

    def config(self, folder: str) -> Config:
        """The config, whose folder is below `folder`."""
        values = dict(TAILS if self.purpose == "tail" else FEDERATIONS[self.federation])
        preset = find_preset(values.pop("preset"), dial=values.pop("dial", None))
        if self.purpose != "tail":
            values |= {"lr": LEARNING_RATES[self.federation] * self.multiple}
            values |= CAPPED if self.ranks == "capped" else {"ranks": self.ranks}
        return with_values(
            preset, values | {"strategy": self.rule, "seed": self.seed, "alone": "none", "runs_dir": folder}
        )

    def key(self) -> tuple[str, ...]:
        """What tells rows apart."""
        return (self.federation, self.ranks, self.rule, f"{self.multiple:g}", str(self.seed), self.purpose)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows so far."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def key_of(row: Mapping[str, str]) -> tuple[str, ...]:
    """The key of the run that made a row."""
    return tuple(row[name] for name in ("federation", "ranks", "rule", "multiple", "seed", "purpose"))


def singular_values(a: Tensor, b: Tensor) -> Tensor:
    """The singular values of B A, falling, float64, by the QR factors of both."""
    right, left = torch.linalg.qr(a.double().T)[1], torch.linalg.qr(b.double())[1]
    values: Tensor = torch.linalg.svdvals(left @ right.T)
    return values


def effective_rank(sigma: Tensor) -> float:
    """Exponential of the entropy of the singular values' shares; 0 of a zero matrix."""
    shares = sigma[sigma > 0] / sigma.sum()
    return math.exp(-float((shares * shares.log()).sum())) if len(shares) else 0.0


def spectra(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The singular values of every module's B A."""
    found = {}
    for key, a in tensors.items():
        if "lora_A" in key and len(a):
            found[key] = singular_values(a, tensors[key.replace("lora_A", "lora_B")])
    return found


def tails(folder: Path) -> list[float]:
    """After each round, the share of the squared norm beyond the least rank of the client with the largest ranks."""
    shares = []
    for path in sorted(folder.glob("checkpoints/round-*/state.safetensors")):
        clients: dict[str, dict[str, Tensor]] = {}
        for key, tensor in load_file(path).items():
            if key.startswith("strategy/"):
                _, client, name = key.split("/", 2)
                clients.setdefault(client, {})[name] = tensor
        ranks = {
            client: {name: len(a) for name, a in model.items() if "lora_A" in name} for client, model in clients.items()
        }
        (largest, *_) = sorted(ranks, key=lambda client: (-sum(ranks[client].values()), client))
        sigma = spectra(clients[largest])
        beyond = sum(float(s[min(own[name] for own in ranks.values()) :].square().sum()) for name, s in sigma.items())
        shares.append(beyond / max(sum(float(s.square().sum()) for s in sigma.values()), 1e-300))
    return shares


def measure(run: Run, folder: Path) -> dict[str, str]:
    """The row of a run from its folder."""
    summary = json.loads((folder / "summary.json").read_text())
    final = summary["overall"]["final"]
    clients = json.loads((folder / "plan.json").read_text())["clients"]
    sigmas = [
        sigma
        for path in sorted(folder.glob("adapters/*/adapter_model.safetensors"))
        for sigma in spectra(load_file(path)).values()
    ]
    ranks = [rank for client in clients for rank in client["ranks"] if rank]
    parts = ("adapters and head", "gradients", "Adam moments")
    numbers: dict[str, float | int | str] = {
        "validation": final["validation"]["primary"],
        "validation_loss": final["validation"]["loss"],
        "test": final["test"]["primary"],
        "test_loss": final["test"]["loss"],
        "up_bytes": summary["bytes"]["up"],
        "training_bytes": max(sum(client["memory"][part] for part in parts) for client in clients),
        "mean_rank": statistics.fmean(ranks),
        "effective_rank": statistics.fmean(map(effective_rank, sigmas)),
        "first_four": statistics.fmean(float(s[:4].square().sum() / s.square().sum()) for s in sigmas if s.any()),
        "tails": " ".join(f"{share:.4f}" for share in tails(folder)) if run.purpose == "tail" else "",
    }
    words = {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in numbers.items()}
    return dict(zip(FIELDS, run.key(), strict=False)) | words


def run_once(run: Run, path: Path) -> None:
    """Make the row of this run and add it to the file."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ranks-pay-") as folder:
        run_config(run.config(folder))
        row = measure(run, next(Path(folder).glob("*/summary.json")).parent)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if is_new:
            writer.writeheader()
        writer.writerow(row)
    print(f"{' '.join(run.key())}: {time.monotonic() - began:.0f} s, test {row['test']}", flush=True)


def tuned_multiple(rows: list[dict[str, str]], federation: str, ranks: str) -> float:
    """The multiple with the best mean validation score on the development seeds; of equal ones the lower loss."""
    scores = {}
    for multiple in MULTIPLES:
        of_it = [
            row
            for row in rows
            if (row["federation"], row["ranks"], row["purpose"]) == (federation, ranks, "tuning")
            and float(row["multiple"]) == multiple
        ]
        score, loss = (
            statistics.fmean(float(row[name]) for row in of_it) for name in ("validation", "validation_loss")
        )
        scores[multiple] = (score, -loss)
    return max(scores, key=lambda multiple: scores[multiple])


def runs_of(federation: str, choices: list[str], path: Path) -> Iterator[Run]:
    """The runs of a federation; the rates of the later ones are read from the rows of the earlier ones."""
    common = {"federation": federation, "rule": FEDERATIONS[federation]["strategy"]}
    for seed in DEVELOPMENT_SEEDS:
        for multiple in MULTIPLES:
            for ranks in choices:
                yield Run(multiple=multiple, seed=seed, purpose="tuning", ranks=ranks, **common)
    multiples = {ranks: tuned_multiple(read_rows(path), federation, ranks) for ranks in choices}
    for seed in SEEDS:
        for ranks in choices:
            yield Run(multiple=multiples[ranks], seed=seed, purpose="test", ranks=ranks, **common)


def tail_runs() -> Iterator[Run]:
    """The runs whose tails are looked at."""
    for seed in SEEDS:
        for rule in TAIL_RULES:
            yield Run(federation="quick-trec", ranks="budget", rule=rule, multiple=1.0, seed=seed, purpose="tail")


def report(rows: list[dict[str, str]]) -> None:
    """Print the means over the seeds of every unit that has them, and the tails."""
    print("| federation | ranks | rate | seeds | test | loss | MB up | training kB | rank | effective | first four |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for federation in FEDERATIONS:
        for ranks in dict.fromkeys(row["ranks"] for row in rows):
            unit = [
                row for row in rows if (row["federation"], row["ranks"], row["purpose"]) == (federation, ranks, "test")
            ]
            if not unit:
                continue
            mean = {name: statistics.fmean(float(row[name]) for row in unit) for name in FIELDS[6:-1]}
            print(
                f"| {federation} | {ranks} | x{unit[0]['multiple']} | {len(unit)} | {mean['test']:.3f}"
                f" | {mean['test_loss']:.3f} | {mean['up_bytes'] / 1e6:.1f} | {mean['training_bytes'] / 1e3:.0f}"
                f" | {mean['mean_rank']:.1f} | {mean['effective_rank']:.2f} | {mean['first_four']:.3f} |"
            )
    for row in rows:
        if row["purpose"] == "tail":
            print(f"tail {row['rule']} seed {row['seed']}: {row['tails']}")


def main() -> int:
    """Run what is missing, as long as there is time; 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, default=Path("benchmarks/ranks_pay.csv"), help="the file of rows")
    parser.add_argument("--minutes", type=float, default=60, help="no run begins after so many minutes")
    parser.add_argument("--federations", nargs="*", default=list(FEDERATIONS), help="these alone")
    parser.add_argument("--ranks", nargs="*", default=list(RANKS), help="these alone")
    parser.add_argument("--tails", action="store_true", help="the tails alone")
    parser.add_argument("--report", action="store_true", help="print the table of the rows and run nothing")
    given = parser.parse_args()
    if given.report:
        report(read_rows(given.rows))
        return 0
    end = time.monotonic() + 60 * given.minutes
    units = [runs_of(federation, given.ranks, given.rows) for federation in given.federations]
    with REUSED_RESULTS.remember():
        for run in chain(*([tail_runs()] if given.tails else units)):
            if time.monotonic() > end:
                break
            if run.key() not in {key_of(row) for row in read_rows(given.rows)}:
                run_once(run, given.rows)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
