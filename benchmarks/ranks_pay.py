"""Does phase 2 pay? Ranks by importance against one rank for all, each at its own rate; stopped and gone on with.

A unit is one way of choosing ranks in one federation: one run at every rate on each development seed, then runs at the
rate of the best validation score on the seeds of the comparison. A run is a row of the CSV file, written when it ends;
rows that are there are not made again, and the folders of runs are deleted. A row holds scores, bytes, and what the
delivered adapters `s B A` fill, averaged over modules and clients, with sigma_i the singular values of one of them:

    effective rank     exp(-sum_i p_i log p_i), p_i = sigma_i / sum_j sigma_j     (Roy and Vetterli, EUSIPCO 2007)
    first four         sum_{i <= 4} sigma_i^2 / sum_i sigma_i^2
    tail               share of the squared norm beyond the least rank that a client of the same task has in a module,
                       of the client with the largest ranks, after each round

    python benchmarks/ranks_pay.py --rows docs/results-ranks.csv --minutes 60   # one command, as often as it is stopped
    python benchmarks/ranks_pay.py --rows docs/results-ranks.csv --report       # the table from the rows alone

Declared before the first run: the constants below. `quick-short` is `quick` with half of the rounds and half of the
examples, because `quick` takes minutes a run; `label-skew` is eight clients of one task, ranks on the two uppermost
blocks, on four kinds of devices.
"""

import argparse
import csv
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

FEDERATIONS = {
    "label-skew": "--preset label-skew --dial 3 --adapted-blocks 2 --eval-every 10 --strategy fedavg"
    " --devices cpu_2gb tablet_4gb laptop_8gb gpu_16gb",
    "quick-short": "--preset quick --samples 100 --rounds 6 --eval-every 6 --strategy fedavg_cluster",
    "quick": "--preset quick --eval-every 12 --strategy fedavg_cluster",
}
LEARNING_RATES = {"label-skew": 5e-3, "quick-short": 1e-3, "quick": 1e-3}
"""The rates that the multiples are of: the model's own, and for two of six blocks half of the preset's for one."""
RANKS = ("budget", "4", "64", "8", "uniform", "16", "matched")
MULTIPLES = (0.5, 1.0, 2.0, 4.0)
DEVELOPMENT_SEEDS = (9003,)
SEEDS = (3001, 3002, 3003)
TAILS = (
    "--preset smoke --tasks trec --clients-per-task 4 --samples 100 --rounds 8 --eval-every 8 --ranks budget"
    " --candidates 2 4 8 16 --adapter-bytes 60000"
)
"""The federation in which the tail is looked at after each round: its devices' budgets are those of `TAIL_DEVICES`."""
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

    def words(self, folder: str) -> list[str]:
        """The command."""
        if self.purpose == "tail":
            flags = f"{TAILS} --strategy {self.rule} --keep-checkpoints 99"
        else:
            rate = LEARNING_RATES[self.federation] * self.multiple
            flags = f"{FEDERATIONS[self.federation]} --ranks {self.ranks} --lr {rate:g}"
        flags += f" --seed {self.seed} --alone none --runs-dir {folder}"
        return [sys.executable, "-m", "atlas_fl", "run", *shlex.split(flags)]

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
    return torch.linalg.svdvals(left @ right.T)


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


def run_once(run: Run, path: Path) -> bool:
    """Make the row of this run and add it to the file; False where the run failed, which is printed."""
    folder, began = tempfile.mkdtemp(prefix="ranks-pay-"), time.monotonic()
    done = subprocess.run(run.words(folder), capture_output=True, text=True, check=False)
    name = " ".join(run.key())
    if done.returncode:
        (reason, *_) = done.stderr.strip().splitlines()[-1:] or ["no reason"]
        print(f"{name} failed: {reason}", flush=True)
    else:
        row = measure(run, next(Path(folder).glob("*/summary.json")).parent)
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            if is_new:
                writer.writeheader()
            writer.writerow(row)
        print(f"{name}: {time.monotonic() - began:.0f} s, test {row['test']}", flush=True)
    shutil.rmtree(folder)
    return not done.returncode


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


def runs_of(federation: str, ranks: str, path: Path) -> Iterator[Run]:
    """The runs of a unit in order; the rate of the later ones is read from the rows of the earlier ones."""
    words = shlex.split(FEDERATIONS[federation])
    rule = words[words.index("--strategy") + 1]
    common = {"federation": federation, "ranks": ranks, "rule": rule}
    for seed in DEVELOPMENT_SEEDS:
        for multiple in MULTIPLES:
            yield Run(multiple=multiple, seed=seed, purpose="tuning", **common)
    multiple = tuned_multiple(read_rows(path), federation, ranks)
    for seed in SEEDS:
        yield Run(multiple=multiple, seed=seed, purpose="test", **common)


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
    """Run what is missing, as long as there is time; 0, or 1 where a run failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, default=Path("docs/results-ranks.csv"), help="the file of rows")
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
    tail_runs = [
        Run(federation="smoke", ranks="budget", rule=rule, multiple=1.0, seed=seed, purpose="tail")
        for seed in SEEDS
        for rule in TAIL_RULES
    ]
    units = [iter(tail_runs)]
    if not given.tails:
        units = [runs_of(federation, ranks, given.rows) for ranks in given.ranks for federation in given.federations]
    for unit in units:
        for run in unit:
            if time.monotonic() > end:
                return 0
            if run.key() not in {key_of(row) for row in read_rows(given.rows)} and not run_once(run, given.rows):
                return 1
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
