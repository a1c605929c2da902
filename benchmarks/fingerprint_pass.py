"""What does the gradient fingerprint save by going through the last two blocks alone?

The same batches, once with the gradients of the last two blocks and the head, once with those of all blocks, in turns.

    python benchmarks/fingerprint_pass.py
"""

import argparse
import statistics
import time
from collections.abc import Iterable

from atlas_fl.assemble import assemble
from atlas_fl.clients.base import Job
from atlas_fl.clients.fingerprint import FingerprintOptions
from atlas_fl.clients.gradients import batch_gradients
from atlas_fl.config import Config, DataConfig
from atlas_fl.options import warmup_options


def seconds(work: Iterable[object]) -> float:
    began = time.perf_counter()
    for _ in work:
        pass
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    config = Config(data=DataConfig(tasks=("movie",), clients_per_task=1, validation_samples=10, test_samples=10))
    assembly = assemble(config)
    site, client = assembly.site, assembly.clients[0]
    options = FingerprintOptions(
        kind="gradient", sketch_dim=1024, train=warmup_options(config), batches=args.batches, steps=1
    )
    params = assembly.start(client, (4,) * assembly.shape.num_layers)
    job = Job(client=client.name, params=params, round=0, options=options)
    ratios = []
    for number in range(args.repeat + 1):
        few, whole = (
            seconds(batch_gradients(job, site, half=0, blocks=blocks, count=args.batches))
            for blocks in (2, assembly.shape.num_layers)
        )
        if number:  # the first turn warms up
            ratios.append(few / whole)
            print(f"last two blocks {few:.2f} s, all blocks {whole:.2f} s, ratio {ratios[-1]:.2f}", flush=True)
    print(f"ratio fingerprint/full: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
