"""Whether what a mask froze has stayed as it was, bit for bit."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from atlas_fl.errors import CheckpointError


def read_mask(path: Path) -> dict[str, Tensor]:
    """The mask of a run folder, bool by name.

    Raises `CheckpointError` where the file is missing or damaged.
    """
    file = path / "mask.safetensors"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing, and the run was trained under a mask; restore it, or run again")
    try:
        found: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}; restore it, or run again") from error
    return found


def frozen_fault(mask: Mapping[str, Tensor], held: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> str:
    """The first tensor of which a frozen weight moved in training, or that has no mask; empty where there is none."""
    for key, before in held.items():
        if key not in mask:
            return f"{key} has no mask"
        moved = int(((before != trained[key]) & ~mask[key]).sum())
        if moved:
            return f"{moved} frozen weights of {key} moved"
    return ""
