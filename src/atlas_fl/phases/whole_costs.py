"""What the plan of a run on whole models says of costs and of the mask."""

from collections.abc import Sequence
from typing import Any

from atlas_fl.assemble_images import ImageAssembly
from atlas_fl.config import SparseConfig
from atlas_fl.io.ledger import payload_bytes
from atlas_fl.options import strategy_of
from atlas_fl.phases.whole import Prepared
from atlas_fl.ranks.devices import Device
from atlas_fl.sparse.algebra import density, layers, num_kept
from atlas_fl.sparse.choose import Mask
from atlas_fl.sparse.codec import values_size
from atlas_fl.tree import HEAD, num_bytes, shared_part
from atlas_fl.types import Params

HELD = 3
"""Copies of a model that its training holds: weights, gradients and momentum."""


def whole_costs(assembly: ImageAssembly, prepared: Prepared) -> list[dict[str, Any]]:
    """What a round costs every client, as `ClientPlan` holds it: bytes each way, seconds on its link, and memory.

    The memory is that of weights, gradients and momentum; activations are in no prediction.
    """
    share = assembly.config.mixing.share if strategy_of(assembly.config).communicates else ()
    return [
        _cost(prepared.start[client.name], device, prepared.mask, share=share)
        for client, device in zip(assembly.clients, assembly.devices, strict=True)
    ]


def _cost(model: Params, device: Device, mask: Mask | None, *, share: Sequence[str]) -> dict[str, Any]:
    sent = 0
    if shared := shared_part(model, share):
        sent = payload_bytes(shared) if mask is None else values_size(num_kept({key: mask[key] for key in shared}))
    held = num_bytes(model)
    return {
        "ranks": (),
        "cut": None,
        "budget_bytes": 0,
        "largest_rank": 0,
        "memory": {"total": device.memory_bytes, "weights": held, "gradients": held, "momentum": held},
        "predicted": {
            "up_bytes": sent,
            "down_bytes": sent,
            "memory_bytes": HELD * held,
            "seconds": sent / device.up_bytes_per_second + sent / device.down_bytes_per_second,
        },
    }


def sparse_report(mask: Mask | None, config: SparseConfig) -> dict[str, Any]:
    """What the plan says of the mask; nothing where there is none."""
    if mask is None:
        return {}
    body = {name: own for name, own in mask.items() if not name.startswith(HEAD)}
    found = 1 - num_kept(body) / sum(own.numel() for own in body.values())
    return {
        "mask": config.mask if config.mask_file is None else "from a file",
        "sparsity": config.sparsity if config.mask_file is None else found,
        "layers": layers(body),
        "kept": num_kept(mask),
        "weights": sum(own.numel() for own in mask.values()),
        "density": density(mask),
    }
