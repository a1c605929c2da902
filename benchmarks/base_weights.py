"""What do frozen weights in fewer bits save, and what do they cost?

Trains two clients of the preset chat for a round (SmolLM2-135M), once with every type of `--base-weights`, each in a
process of its own, and prints the plan's bytes of frozen weights (what is held, and the largest matrix in float32), the
peak resident memory and the seconds of the run, which include loading. Ratios are to fp32. int8 and nf4 need the extra
`quant`, and the model `atlas fetch llm`.

    OMP_NUM_THREADS=1 python benchmarks/base_weights.py
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

TYPES = ("fp32", "bf16", "fp16", "int8", "nf4")


def measure(held: str, folder: Path) -> tuple[float, float, float]:
    """Bytes of the frozen weights, peak bytes of the process, and seconds of a run with this type."""
    words = [
        "run",
        "--preset",
        "chat",
        "--dial",
        "0",
        "--clients-per-task",
        "2",
        "--strategy",
        "fedavg",
        "--rounds",
        "1",
    ]
    words += ["--samples", "16", "--rouge-examples", "0", "--alone", "none", "--base-weights", held, "--name", held]
    subprocess.run(
        [sys.executable, "-m", "atlas_fl", *words, "--runs-dir", str(folder)], check=True, stdout=subprocess.DEVNULL
    )
    summary = json.loads((folder / held / "summary.json").read_text())
    client = next(iter(summary["clients"].values()))
    return client["memory"]["frozen weights"], summary["memory"]["rss_bytes"], summary["seconds"]["total"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES, help="these alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {held: measure(held, Path(folder)) for held in args.types}
    first = next(iter(rows.values()))
    print("| type | weights | peak | seconds |\n|---|---|---|---|")
    for held, (weights, peak, seconds) in rows.items():
        print(f"| {held} | {weights / 1e6:.0f} MB | {peak / 1e6:,.0f} MB | {seconds:.0f} ({seconds / first[2]:.2f}) |")


if __name__ == "__main__":
    main()
