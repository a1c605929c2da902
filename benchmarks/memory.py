"""How does a run's memory grow with the number of clients?

Runs the smoke preset on three tasks with 9 and with 90 clients, each in a process of its own, and prints the peak
resident memory that the runs record.

    python benchmarks/memory.py
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def peak(clients_per_task: int, folder: Path) -> float:
    """Peak resident memory of one run in GB, from its summary."""
    words = ["run", "--preset", "smoke", "--tasks", "movie", "trec", "tweets", "--rounds", "1", "--name", "run"]
    words += ["--clients-per-task", str(clients_per_task), "--runs-dir", str(folder)]
    subprocess.run([sys.executable, "-m", "atlas_fl", *words], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return float(summary["memory"]["rss_bytes"]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", type=int, default=3, help="clients of each of three tasks")
    parser.add_argument("--many", type=int, default=30)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        few, many = peak(args.few, Path(folder, "few")), peak(args.many, Path(folder, "many"))
    print(f"{3 * args.few} clients: {few:.2f} GB; {3 * args.many} clients: {many:.2f} GB")
    print(f"growth of peak memory: {many / few:.2f}")


if __name__ == "__main__":
    main()
