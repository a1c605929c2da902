"""A sparse step against a dense one.

All sides take turns in one process. Steps: 21 M values in the shapes of a vision transformer of the size of ViT-S (12
blocks, width 384, patches of 16, random weights), momentum 0.9, decay 1e-4, against torch.optim.SGD as it comes and
fused; then whole local steps, of 16 images forward and back. Clients use the fused one, with a mask and without.

    python benchmarks/sparse.py
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from atlas_fl.sparse.masked_sgd import SparseSGDM
from atlas_fl.sparse.masks import calibrate_mask

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Rates(TypedDict):
    """Arguments of all optimizers."""

    lr: float
    momentum: float
    weight_decay: float


RATES: Rates = {"lr": 1e-6, "momentum": 0.9, "weight_decay": 1e-4}


def seconds(work: Callable[[], object], clock: str) -> float:
    began = CLOCKS[clock]()
    work()
    return CLOCKS[clock]() - began


def vit(pixels: int) -> torch.nn.Module:
    config = ViTConfig(
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        intermediate_size=1536,
        image_size=pixels,
        patch_size=16,
        num_labels=10,
    )
    torch.manual_seed(0)
    model: torch.nn.Module = ViTForImageClassification(config)
    return model.eval()


def measure_step(args: argparse.Namespace, sparsity: float) -> None:
    start = {name: value.detach() for name, value in vit(64).named_parameters()}
    source = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(value.shape, generator=source) for name, value in start.items()}

    def leaves() -> dict[str, Tensor]:
        made = {name: value.clone().requires_grad_() for name, value in start.items()}
        for name, leaf in made.items():
            leaf.grad = gradients[name]
        return made

    mask = calibrate_mask(dict, start, names=start, strategy="random", sparsity=sparsity, seed=0)
    steps = {
        "sparse": SparseSGDM(leaves(), masks=mask, fused=True, **RATES).step,
        "dense": torch.optim.SGD(leaves().values(), **RATES).step,
        "fused": torch.optim.SGD(leaves().values(), fused=True, **RATES).step,
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.steps + 2):
        for name, step in steps.items():
            spent = seconds(step, args.clock)
            if turn >= 2:  # buffers are made in the first
                times[name].append(spent)
    middle = {name: sorted(samples)[len(samples) // 2] for name, samples in times.items()}
    print(
        f"sparsity {sparsity}: "
        + ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in middle.items())
        + f"; sparse/fused {middle['sparse'] / middle['fused']:.2f}"
    )
    print(f"ratio sparse/dense: {middle['sparse'] / middle['dense']:.2f}", flush=True)


def measure_local_step(args: argparse.Namespace, sparsity: float, pixels: int) -> None:
    source = torch.Generator().manual_seed(2)
    inputs = torch.randn(16, 3, pixels, pixels, generator=source)
    labels = torch.randint(0, 10, (16,), generator=source)
    dense, fused, sparse = vit(pixels), vit(pixels), vit(pixels)
    named = dict(sparse.named_parameters())
    params = {name: value.detach() for name, value in named.items()}
    mask = calibrate_mask(dict, params, names=params, strategy="random", sparsity=sparsity, seed=0)
    sides = [
        (dense, torch.optim.SGD(dense.parameters(), **RATES)),
        (fused, torch.optim.SGD(fused.parameters(), fused=True, **RATES)),
        (sparse, SparseSGDM(named, masks=mask, fused=True, **RATES)),
    ]
    times: list[list[float]] = [[] for _ in sides]

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.autograd.backward(torch.nn.functional.cross_entropy(model(inputs).logits, labels))
        optimizer.step()
        optimizer.zero_grad()

    for turn in range(args.steps + 2):
        for samples, side in zip(times, sides, strict=True):
            spent = seconds(partial(step, *side), args.clock)
            if turn >= 2:
                samples.append(spent)
    plain, quick, ours = (sorted(samples)[len(samples) // 2] for samples in times)
    print(
        f"local step, {pixels} pixels, sparsity {sparsity}: dense {1e3 * plain:.1f} ms, fused {1e3 * quick:.1f} ms, "
        f"sparse {1e3 * ours:.1f} ms; sparse/fused {ours / quick:.2f}"
    )
    print(f"ratio sparse/dense local step: {ours / plain:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pixels", type=int, nargs="*", default=[32, 64])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sparsity", type=float, nargs="*", default=[0.5, 0.9, 0.99])
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall", help="cpu where others use the machine too")
    args = parser.parse_args()
    for sparsity in args.sparsity:
        measure_step(args, sparsity)
        for pixels in args.pixels:
            measure_local_step(args, sparsity, pixels)


if __name__ == "__main__":
    main()
