"""What memory does a client with a cut take, against one that holds the whole model, and against the prediction?

Trains MiniLM for some steps of random tokens, each case in a process of its own: all weights of the model (what LoRA is
to save memory against), LoRA on query and value of the whole model, and LoRA in the part below every given cut with a
gradient that comes from nowhere. Prints the peak resident memory, what loading the model alone took, and for
LoRA what `ranks.cost_model.device_memory` predicts, and the ratio.

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
from atlas_fl.models.lora import Adapters, attach_adapters, init_adapters
from atlas_fl.ranks.cost_model import TrainingStep, device_memory
from atlas_fl.ranks.devices import DEVICES
from atlas_fl.split.codec import decode_rows, encode_rows
from atlas_fl.split.model import load_client_part

RANK, LENGTH = 8, 64
ALL_WEIGHTS, WHOLE = "all-weights", "whole"
CUTS = range(1, 6)
"""Blocks that a client may keep of MiniLM's six."""


def steps(backbone: Backbone, *, blocks: int, batch: int, count: int, all_weights: bool) -> None:
    """Train the adapters of these blocks, or all weights; the gradient of the blocks' output comes from elsewhere."""
    modules = {
        name: module
        for name, module in target_modules(backbone, ("query", "value")).items()
        if not all_weights and block_index(backbone, name) < blocks
    }
    dims = {name: module_dims(module) for name, module in modules.items()}
    params = {key: t.requires_grad_() for key, t in init_adapters(dims, dict.fromkeys(dims, RANK), seed=1).items()}
    if all_weights:
        backbone.model.requires_grad_(True)
    optimizer = torch.optim.AdamW(backbone.model.parameters() if all_weights else params.values())
    tokens = batch * LENGTH
    whole = range(0, tokens)
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


def case(args: argparse.Namespace) -> dict[str, int]:
    """The sizes of this process and the prediction, in bytes."""
    is_cut = args.case not in (ALL_WEIGHTS, WHOLE)
    backbone = load_client_part("minilm", blocks=int(args.case)) if is_cut else load_backbone("minilm")
    blocks = int(args.case) if is_cut else len(backbone.blocks)
    loaded = psutil.Process().memory_info().rss
    steps(backbone, blocks=blocks, batch=args.batch, count=args.steps, all_weights=args.case == ALL_WEIGHTS)
    measured = {"weights": backbone.num_parameters * 4, "loaded": loaded, "peak": peak_memory()["rss_bytes"]}
    if args.case == ALL_WEIGHTS:
        return measured
    # The part knows only its own blocks, and that is all that is asked of its shape.
    shape = model_shape(backbone, target_modules(backbone, ("query", "value")))
    tokens = args.batch * LENGTH
    step = TrainingStep(tokens=tokens, crossing=2 * tokens * backbone.hidden if is_cut else 0)
    memory = device_memory(shape, DEVICES["cpu_2gb"], ranks=[RANK] * blocks, step=step)
    return measured | {"predicted": memory.used_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = range(1, 10_000)
    parser.add_argument("--cuts", type=int, nargs="+", default=[2], choices=CUTS)
    parser.add_argument("--batch", type=int, default=16, choices=numbers, metavar="SEQUENCES")
    parser.add_argument("--steps", type=int, default=5, choices=numbers, metavar="STEPS")
    parser.add_argument("--case", choices=(ALL_WEIGHTS, WHOLE, *map(str, CUTS)), help="one case in this process")
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(case(args)))
        return
    options = ["--batch", str(args.batch), "--steps", str(args.steps)]
    for name in (ALL_WEIGHTS, WHOLE, *map(str, args.cuts)):
        command = [sys.executable, __file__, "--case", name, *options]
        measured = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        )
        sizes = ", ".join(f"{part} {size / 1e6:.0f} MB" for part, size in measured.items())
        ratio = (
            f"; predicted over peak {measured['predicted'] / measured['peak']:.2f}" if "predicted" in measured else ""
        )
        print(f"{f'cut at {name}' if name.isdigit() else name}: {sizes}{ratio}")


if __name__ == "__main__":
    main()
