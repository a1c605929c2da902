"""What do the activations at each cut give away of a client's text?

For every cut of MiniLM: dFIL of the client's part, and the share of the tokens of unseen sentences that a linear probe
reads out of the rows as they arrive over each wire, with and without noise. The probe has seen other sentences of the
same task. Beside it, the share of the most frequent token.

    python benchmarks/leakage.py --cuts 0 1 3 5
"""

import argparse

import numpy as np
import torch

from atlas_fl.assemble import assemble
from atlas_fl.clients.rows import make_row
from atlas_fl.config import with_values
from atlas_fl.models.blocks import embed, through
from atlas_fl.presets import find_preset
from atlas_fl.rng import generator
from atlas_fl.split.codec import decode_rows, encode_rows, with_noise
from atlas_fl.split.leakage import fisher_leakage, token_probe

WAYS = (("fp32", 0.0), ("int8", 0.0), ("fp32", 0.5), ("fp32", 2.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, nargs="+", default=[0, 1, 3, 5])
    parser.add_argument("--task", default="movie")
    parser.add_argument("--examples", type=int, default=400)
    args = parser.parse_args()
    values = {"tasks": args.task, "clients_per_task": "1", "samples": str(args.examples), "test_samples": "100"}
    assembly = assemble(with_values(find_preset("quick"), values))
    backbone, data = assembly.site.backbone, assembly.site.data[assembly.names[0]].splits
    table = backbone.model.get_input_embeddings().weight
    known, unseen = (make_row([data[name]], device=backbone.device) for name in ("train", "test"))
    print(f"tokens: {len(known.ids)} known, {len(unseen.ids)} unseen")
    print(f"most frequent token: {float((unseen.ids == known.ids.mode().values).float().mean()):.2f}")
    few = make_row([data["test"].take(np.arange(8))], device=backbone.device)
    for blocks in args.cuts:
        given = embed(backbone, few.ids, few.types, few.layout)
        cells = [f"dFIL {fisher_leakage(backbone, given, few.layout, blocks=blocks, seed=0):.3g}"]
        with torch.no_grad():
            low, high = (
                through(backbone, embed(backbone, row.ids, row.types, row.layout), row.layout, range(blocks))
                for row in (known, unseen)
            )
        for wire, noise in WAYS:
            sent = [
                decode_rows(encode_rows(with_noise(rows, noise=noise, generator=generator(0, name)), wire=wire))[0]
                for name, rows in (("known", low), ("unseen", high))
            ]
            found = token_probe(sent[0], known.ids, sent[1], embeddings=table)
            cells.append(f"{wire} noise {noise:g}: {float((found == unseen.ids).float().mean()):.2f}")
        print(f"cut at {blocks}: " + ", ".join(cells))


if __name__ == "__main__":
    main()
