"""What do the activations at each cut give away of a client's text, over other wires and with noise?

`atlas attack cuts` is this for one wire and one task after another; here are several ways side by side, on MiniLM.

    python benchmarks/leakage.py --cuts 0 1 3 5
    python benchmarks/leakage.py --cuts 3 5 --draws 5     # of the noise: the mean share, and the least and the largest
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from atlas_fl.config import with_values
from atlas_fl.config.presets import find_preset
from atlas_fl.planning.leakage import CutLeakage, leakage_of
from atlas_fl.setup.assembly import assemble

WAYS = (("fp32", 0.0), ("int8", 0.0), ("fp32", 0.5), ("fp32", 1.0), ("fp32", 2.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, nargs="+", default=[0, 1, 3, 5])
    parser.add_argument("--task", default="movie")
    parser.add_argument("--examples", type=int, default=400)
    parser.add_argument("--draws", type=int, default=1, help="draws of the noise")
    args = parser.parse_args()
    values = {"tasks": args.task, "clients_per_task": "1", "samples": str(args.examples), "test_samples": "100"}
    assembly = assemble(with_values(find_preset("quick"), values))
    by_way: dict[tuple[str, float], list[tuple[CutLeakage, ...]]] = {}
    for wire, noise in WAYS:
        for draw in range(args.draws if noise else 1):
            values = {"wire": wire, "wire_noise": str(noise), "seed": str(assembly.config.run.seed + draw)}
            variant = replace(assembly, config=with_values(assembly.config, values))
            by_way.setdefault((wire, noise), []).append(leakage_of(variant, {args.task: args.cuts}))
    first = by_way[WAYS[0]][0][0]
    print(f"tokens: {first.known} known, {first.unseen} unseen; the commonest is {first.commonest:.3f} of them")
    for index, cut in enumerate(by_way[WAYS[0]][0]):
        shares = {way: [draw[index].read for draw in draws] for way, draws in by_way.items()}
        cells = [f"{wire} noise {noise:g}: {format_share(reads)}" for (wire, noise), reads in shares.items()]
        print(f"cut at {cut.blocks}: " + ", ".join(cells))


def format_share(shares: Sequence[float]) -> str:
    """The share, or the mean of several with the least and the largest."""
    mean = f"{sum(shares) / len(shares):.3f}"
    return mean if len(shares) == 1 else f"{mean} ({min(shares):.3f} to {max(shares):.3f})"


if __name__ == "__main__":
    main()
