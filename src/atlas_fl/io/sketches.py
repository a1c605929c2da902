"""The sketches of a run's clients: a file beside the plan that was made of them."""

from pathlib import Path

import numpy as np
import torch

from atlas_fl.io.tensors import read_tensors, write_tensors

FIRST, SECOND = "sketch/first", "sketch/second"


def write_sketches(path: Path, sketches: np.ndarray) -> str:
    """Write both halves (2, n, dim) of every client's sketch; the file's SHA-256 as hexadecimal digits."""
    halves = {name: torch.from_numpy(half) for name, half in zip((FIRST, SECOND), sketches, strict=True)}
    return write_tensors(path, halves)


def read_sketches(path: Path) -> np.ndarray | None:
    """(2, n, dim) float32; None where no client was fingerprinted."""
    tensors = read_tensors(path) if path.exists() else {}
    if FIRST not in tensors or SECOND not in tensors:
        return None
    return np.stack([tensors[name].float().numpy() for name in (FIRST, SECOND)])
