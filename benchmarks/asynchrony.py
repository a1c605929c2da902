"""How soon do asynchronous steps reach the score of synchronous rounds, on devices that differ tenfold?

FedIT waits for the slowest of nine clients in each of its rounds; FedBuff steps as soon as `--buffer` updates have
arrived, and semi-synchronous rounds end when two thirds of the clients have. Three of the clients compute a tenth as
fast as the others. Time is that of the devices' profiles (`timed` in `metrics.jsonl`), so it is the same on every
machine. The target is a share of FedIT's last validation score.

    OMP_NUM_THREADS=1 python benchmarks/asynchrony.py
"""

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

FLAGS = ["--preset", "null", "--dial", "3", "--ranks", "8", "--devices", "cpu_2gb", "laptop_8gb", "laptop_8gb"]
TARGET = 0.95


def curve(folder: Path, *flags: str) -> list[tuple[float, float, int]]:
    """(seconds of the profiles, mean validation score, updates so far) after each round of a run."""
    words = [
        sys.executable,
        "-m",
        "atlas_fl",
        "run",
        *FLAGS,
        "--alone",
        "none",
        "--eval-every",
        "1",
        *flags,
        "--runs-dir",
        str(folder),
    ]
    subprocess.run(words, check=True, capture_output=True)
    (file,) = folder.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rounds = range(1, 1 + max(row["round"] for row in rows))
    scores, taken = [[row for row in rows if row.get("split") == split] for split in ("validation", "train")]
    seconds = itertools.accumulate(row["device_seconds"] for row in rows if row.get("event") == "timed")
    return [
        (
            clock,
            statistics.fmean(row["primary"] for row in scores if row["round"] == number),
            sum(row["round"] <= number for row in taken),
        )
        for number, clock in zip(rounds, seconds, strict=True)
    ]


def main() -> None:
    """Print a row for each seed and method, and the mean ratio of their times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 123, 456, 789, 1024])
    parser.add_argument("--buffer", type=int, default=3)
    parser.add_argument("--percentile", type=int, default=66)
    parser.add_argument("--rounds", type=int, default=10, help="of FedIT; the others take about as many updates")
    given = parser.parse_args()
    ratios = dict[str, list[float]]()
    print("seed   method   to target   in all   updates   last score")
    for seed in given.seeds:
        steps = str(given.rounds * 9 // given.buffer)
        kinds = {
            "fedit": ["--rounds", str(given.rounds)],
            "fedbuff": ["--rounds", steps, "--buffer", str(given.buffer)],
            "semi": ["--rounds", str(given.rounds * 100 // given.percentile)],
        }
        kinds["semi"] += ["--round-percentile", str(given.percentile)]
        times, wanted = dict[str, float](), 0.0
        for name, flags in kinds.items():
            with tempfile.TemporaryDirectory() as folder:
                strategy = "fedit" if name == "fedit" else "fedbuff"
                found = curve(Path(folder), "--strategy", strategy, "--seed", str(seed), *flags)
            wanted = wanted or TARGET * found[-1][1]
            times[name] = next((clock for clock, score, _ in found if score >= wanted), math.inf)
            reached = f"{times[name]:.1f} s" if times[name] < math.inf else "never"
            clock, score, updates = found[-1]
            print(f"{seed:<6} {name:<8} {reached:<11} {clock:5.1f} s   {updates:<9} {score:.3f}", flush=True)
        for name in ("fedbuff", "semi"):
            ratios.setdefault(name, []).append(times["fedit"] / times[name])
    for name, shares in ratios.items():
        print(
            f"FedIT takes {statistics.median(shares):.1f} times as long as {name} (median), which arrives in"
            f" {sum(share > 0 for share in shares)} of {len(shares)} seeds"
        )


if __name__ == "__main__":
    main()
