"""What memory does a client with a cut take, against one that holds the whole model, and against the prediction?

Trains MiniLM with LoRA on query and value for some steps of random tokens, each case in a process of its own: the whole
model, and the part below every given cut with a gradient that comes from nowhere. Prints the peak resident
memory, what `ranks.cost_model.device_memory` predicts, and the ratio.

    python benchmarks/split.py --cuts 2 4
"""

import argparse
import json
import subprocess
import sys

import numpy as np
import psutil
import torch

from atlas_fl.experiment.summary import peak_memory
from atlas_fl.models.attention import make_layout
from atlas_fl.models.backbone import (
    Backbone,
    block_index,
    embed_tokens,
    model_shape,
    module_dims,
    run_blocks,
    target_modules,
)
from atlas_fl.models.loading import load_backbone
from atlas_fl.models.lora import Adapters, Segment, attach_adapters, init_adapters
from atlas_fl.ranks.cost_model import TrainingStep, device_memory
from atlas_fl.ranks.devices import DEVICES
from atlas_fl.split.codec import decode_rows, encode_rows
from atlas_fl.split.model import load_client_part

RANK, LENGTH = 8, 64


def steps(backbone: Backbone, *, blocks: int, batch: int, count: int) -> None:
    """Train the adapters of these blocks for some steps; the gradient of their output comes from elsewhere."""
    modules = {
        name: module
        for name, module in target_modules(backbone, ("query", "value")).items()
        if block_index(backbone, name) < blocks
    }
    dims = {name: module_dims(module) for name, module in modules.items()}
    params = {key: t.requires_grad_() for key, t in init_adapters(dims, dict.fromkeys(dims, RANK), seed=1).items()}
    optimizer = torch.optim.AdamW(params.values())
    tokens = batch * LENGTH
    whole = Segment(start=0, stop=tokens)
    adapters = Adapters(clients=[params], segments=[whole], sequences=[whole], scale=lambda _: 2.0)
    layout, draw = make_layout([LENGTH] * batch), np.random.default_rng(0)
    for _ in range(count):
        ids = torch.from_numpy(draw.integers(1000, 20000, tokens))
        with attach_adapters(modules, adapters):
            hidden = run_blocks(
                backbone, embed_tokens(backbone, ids, torch.zeros_like(ids), layout), layout, range(blocks)
            )
            message = encode_rows(hidden, wire="fp32")
            torch.autograd.backward(hidden, decode_rows(message)[0])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def case(args: argparse.Namespace) -> dict[str, float]:
    """The peak of this process and the prediction, in bytes."""
    backbone = load_backbone("minilm") if args.case < 0 else load_client_part("minilm", blocks=args.case)
    blocks = len(backbone.blocks) if args.case < 0 else args.case
    loaded = psutil.Process().memory_info().rss
    steps(backbone, blocks=blocks, batch=args.batch, count=args.steps)
    # The part knows only its own blocks, and that is all that is asked of its shape.
    shape = model_shape(backbone, target_modules(backbone, ("query", "value")))
    step = TrainingStep(
        tokens=args.batch * LENGTH, crossing=0 if args.case < 0 else 2 * args.batch * LENGTH * backbone.hidden
    )
    memory = device_memory(shape, DEVICES["cpu_2gb"], ranks=[RANK] * blocks, step=step)
    weights = backbone.num_parameters * 4
    return {"peak": peak_memory()["rss_bytes"], "loaded": loaded, "predicted": memory.used_bytes, "weights": weights}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, nargs="+", default=[2])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--case", type=int, help="one case in this process: blocks, or -1 for the whole model")
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(case(args)))
        return
    options = ["--batch", str(args.batch), "--steps", str(args.steps)]
    for blocks in (-1, *args.cuts):
        command = [sys.executable, __file__, "--case", str(blocks), *options]
        measured = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        )
        name = "whole model" if blocks < 0 else f"cut at {blocks}"
        sizes = ", ".join(
            f"{part} {measured[part] / 1e6:.0f} MB" for part in ("weights", "loaded", "peak", "predicted")
        )
        print(f"{name}: {sizes}; predicted over peak {measured['predicted'] / measured['peak']:.2f}")


if __name__ == "__main__":
    main()
