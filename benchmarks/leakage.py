"""What do the activations at each cut give away of a client's text, over other wires and with noise?

`atlas leakage` is this for one wire and one task after another; here are several ways side by side, on MiniLM.

    python benchmarks/leakage.py --cuts 0 1 3 5
"""

import argparse
from dataclasses import replace

from atlas_fl.assemble import assemble
from atlas_fl.config import with_values
from atlas_fl.phases import leakage_of
from atlas_fl.presets import find_preset

WAYS = (("fp32", 0.0), ("int8", 0.0), ("fp32", 0.5), ("fp32", 1.0), ("fp32", 2.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, nargs="+", default=[0, 1, 3, 5])
    parser.add_argument("--task", default="movie")
    parser.add_argument("--examples", type=int, default=400)
    args = parser.parse_args()
    values = {"tasks": args.task, "clients_per_task": "1", "samples": str(args.examples), "test_samples": "100"}
    assembly = assemble(with_values(find_preset("quick"), values))
    by_way = {}
    for wire, noise in WAYS:
        config = with_values(assembly.config, {"wire": wire, "wire_noise": str(noise)})
        by_way[wire, noise] = leakage_of(replace(assembly, config=config), {args.task: args.cuts})
    first = by_way[WAYS[0]][0]
    print(f"tokens: {first.known} known, {first.unseen} unseen; the commonest is {first.commonest:.3f} of them")
    for rows in zip(*by_way.values(), strict=True):
        cells = [f"{wire} noise {noise:g}: {row.read:.3f}" for (wire, noise), row in zip(by_way, rows, strict=True)]
        print(f"cut at {rows[0].blocks}: dFIL {rows[0].dfil:.3g}, " + ", ".join(cells))


if __name__ == "__main__":
    main()
