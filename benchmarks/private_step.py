"""How much longer does a step take in which every example is clipped and noise is added (`--dp example`)?

A pack of clients trains from the same adapters with and without, in turns, so that a noisy machine slows both.

    python benchmarks/private_step.py                       # nine clients of MiniLM, all blocks adapted
    python benchmarks/private_step.py --adapted-blocks 1
"""

import argparse
import statistics
from dataclasses import replace

from packed import config_of, jobs_of, time_call

from atlas_fl.client.privacy import noise_multiplier
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.setup.assembly import assemble


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapted-blocks", type=int, help="all by default")
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=5)
    parser.set_defaults(
        model="minilm",
        tasks=["movie", "trec", "pairs"],
        clients_per_task=3,
        bf16=False,
        pack_tokens=None,
        device="cpu",
        conversations=False,
    )
    args = parser.parse_args()
    assembly = assemble(config_of(args))
    engine = LocalEngine(site=assembly.site)
    plain = jobs_of(assembly, steps=args.steps)
    private = [replace(job, options=replace(job.options, dp="example", epsilon=8.0, rounds=10)) for job in plain]
    print(f"noise multiplier {noise_multiplier(args.samples, private[0].options):.2f}")
    engine.run("train", plain)  # warm both up
    engine.run("train", private)
    ratios = []
    for _ in range(args.repeat):
        without, _ = time_call(lambda: engine.run("train", plain), "cpu")
        seconds, _ = time_call(lambda: engine.run("train", private), "cpu")
        ratios.append(seconds / without)
        print(f"plain {without:.2f} s, private {seconds:.2f} s, ratio {ratios[-1]:.2f}", flush=True)
    print(f"ratio private/plain: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
