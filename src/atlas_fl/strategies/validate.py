"""What the server checks before an update may meet the models of others."""

from math import isfinite

import torch

from atlas_fl.errors import ProtocolError
from atlas_fl.types import Params


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_update(start: Params, update: Params) -> None:
    """Raise ProtocolError unless the update holds the keys, shapes and dtypes of `start` and only finite numbers."""
    missing, extra = start.keys() - update.keys(), update.keys() - start.keys()
    if missing or extra:
        parts = [f"lacks {_some(missing)}"] if missing else []
        parts += [f"has unknown {_some(extra)}"] if extra else []
        raise ProtocolError(f"the update {' and '.join(parts)}; it must hold the {len(start)} tensors that were sent")
    for key, sent in start.items():
        got = update[key]
        if got.shape != sent.shape or got.dtype != sent.dtype:
            raise ProtocolError(
                f"{key} is {tuple(got.shape)} {got.dtype}, sent was {tuple(sent.shape)} {sent.dtype}; return it as sent"
            )
    _check_finite(update)


def _check_finite(update: Params) -> None:
    floats = {key: tensor for key, tensor in update.items() if tensor.is_floating_point() and tensor.numel()}
    # one call for all: NaN and infinity survive the norm; so does an overflow, hence the second look
    norms = torch._foreach_norm(list(floats.values())) if floats else []
    for key, norm in zip(floats, torch.stack(tuple(norms)).tolist() if floats else []):
        bad = 0 if isfinite(norm) else int((~torch.isfinite(floats[key])).sum())
        if bad:
            raise ProtocolError(f"{key} holds {bad} values that are NaN or infinite; lower the learning rate or clip")
