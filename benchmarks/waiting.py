"""What a round costs where other work holds the cores, by how threads wait for each other.

    python benchmarks/waiting.py            # alone on the machine
    python benchmarks/waiting.py --busy 2   # beside two programs that do nothing else than compute

The quick preset's clients train once, as one pack, in two processes that take turns: one whose OpenMP waits as it does
when nobody tells it, and one that waits as the command `atlas` has it.
"""

import argparse
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from statistics import median

from atlas_fl.cli.main import SPINS
from atlas_fl.client.job import Job
from atlas_fl.client.local_training import train
from atlas_fl.config import with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.setup.assembly import assemble
from atlas_fl.setup.options import train_options

SPINNING, ASLEEP = "spinning", "asleep"
BUSY = "while True: pass"


def train_on_demand(samples: int) -> None:
    """Train every client once for every line of standard input; a line of standard output says that it is done."""
    config = with_values(find_preset("quick"), {"samples": str(samples)})
    assembly = assemble(config)
    ranks = (8,) * assembly.shape.num_layers
    jobs = [
        Job(
            client=client.name,
            params=assembly.initial_params(client, ranks),
            round=1,
            options=train_options(config, with_images=False),
        )
        for client in assembly.clients
    ]
    print("ready", flush=True)
    for _ in sys.stdin:
        train(jobs, assembly.site)
        print("done", flush=True)


def trainer(way: str, samples: int, spins: str) -> subprocess.Popen[str]:
    """A process that trains on demand, once it is ready."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    started = subprocess.Popen(
        [sys.executable, __file__, "--train", "--samples", str(samples)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**environment, "GOMP_SPINCOUNT": spins} if way == ASLEEP else environment,
    )
    answer(started)
    return started


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def seconds(process: subprocess.Popen[str]) -> float:
    """What one turn takes."""
    assert process.stdin is not None
    began = time.perf_counter()
    process.stdin.write("\n")
    process.stdin.flush()
    assert answer(process) == "done\n"
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--spins", default=SPINS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train_on_demand(args.samples)
        return
    taken: dict[str, list[float]] = {SPINNING: [], ASLEEP: []}
    with ExitStack() as stack:
        trainers = {way: trainer(way, args.samples, args.spins) for way in taken}
        others = [subprocess.Popen([sys.executable, "-c", BUSY], text=True) for _ in range(args.busy)]
        for process in [*trainers.values(), *others]:
            stack.callback(process.wait)
            stack.callback(process.kill)
        for _ in range(args.turns):
            for way, process in trainers.items():
                taken[way].append(seconds(process))
            print(", ".join(f"{way} {values[-1]:.2f} s" for way, values in taken.items()), flush=True)
    print(f"ratio spinning/asleep: {median(taken[SPINNING]) / median(taken[ASLEEP]):.2f}")


if __name__ == "__main__":
    main()
