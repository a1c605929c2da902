"""The models of many clients in one file.

Adapters stand there under every client's name, as any reader of safetensors sees them. Whole models are too large for
that: of these a file keeps every different tensor once, under the name of the first client that holds it, and its
metadata say who else does.
"""

import json
from pathlib import Path

from torch import Tensor

from atlas_fl.io.tensors import write_tensors
from atlas_fl.tree import digest, is_whole, prefixed
from atlas_fl.types import ByClient

SAME = "same"
"""The entry of the metadata: as JSON, by the name under which a tensor stands, the other clients that hold it."""


def write_models(path: Path, models: ByClient) -> str:
    """Write these models in one step, with keys `<client>/<parameter>`; the file's SHA-256 as hexadecimal digits.

    The audit has a reader of its own for them.

    Which tensors are the same is told by their bytes and not by the objects: a run in sessions shares others in memory
    than an undisturbed one, and leaves the same file.
    """
    if not any(is_whole(params) for params in models.values()):
        return write_tensors(path, prefixed(models))
    kept, others = _once(models)
    return write_tensors(path, kept, note=(SAME, json.dumps(others, sort_keys=True)) if others else None)


def _once(models: ByClient) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """(every different tensor under its first holder, the other holders of those that have any)."""
    digests: dict[tuple[str, int], str] = {}
    first: dict[str, str] = {}
    kept: dict[str, Tensor] = {}
    others: dict[str, list[str]] = {}
    for client, params in models.items():
        for key, tensor in params.items():
            known = (key, id(tensor))
            if known not in digests:
                digests[known] = digest({key: tensor})
            if (lead := first.setdefault(digests[known], f"{client}/{key}")) in kept:
                others.setdefault(lead, []).append(client)
            else:
                kept[lead] = tensor
    return kept, others
