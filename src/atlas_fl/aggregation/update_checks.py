"""Checks of an update before it may meet the models of others: names, shapes, dtypes and finite values."""

from collections.abc import Iterator

import torch

from atlas_fl.errors import ProtocolError, first_of
from atlas_fl.params import ByClient, Params

LARGEST = 1e18
"""Size of a weight above which it is refused: the square of a little more is no float32 any longer."""


def check_update(start: Params, update: Params) -> None:
    """Raise ProtocolError unless the update has the keys, shapes and dtypes of `start`, no value beyond `LARGEST`."""
    missing, extra = start.keys() - update.keys(), update.keys() - start.keys()
    if missing or extra:
        parts = [f"lacks {first_of(sorted(missing))}"] if missing else []
        parts += [f"has unknown {first_of(sorted(extra))}"] if extra else []
        raise ProtocolError(f"the update {' and '.join(parts)}; it must hold the {len(start)} tensors that were sent")
    for key, sent in start.items():
        got = update[key]
        if got.shape != sent.shape or got.dtype != sent.dtype:
            raise ProtocolError(
                f"{key} is {tuple(got.shape)} {got.dtype}, sent was {tuple(sent.shape)} {sent.dtype}; return it as sent"
            )
    check_finite(update)


def check_finite(update: Params) -> None:
    """Raise ProtocolError where a value is NaN, infinite or beyond `LARGEST`."""
    for key, bad in unusable_values(update):
        kind = f"beyond {LARGEST:g}" if bool(update[key].isfinite().all()) else "NaN or infinite"
        raise ProtocolError(f"{key} holds {bad} values that are {kind}; lower the learning rate or clip")


def unusable_values(params: Params) -> Iterator[tuple[str, int]]:
    """(name, how many) of every tensor with values that are NaN, infinite or beyond `LARGEST` in size."""
    floats = {key: tensor for key, tensor in params.items() if tensor.is_floating_point() and tensor.numel()}
    # one call for all: no value is larger than the norm, and NaN and infinity survive it
    norms = torch._foreach_norm(list(floats.values())) if floats else []
    for key, norm in zip(floats, torch.stack(tuple(norms)).tolist() if floats else []):
        bad = 0 if norm <= LARGEST else int((~(floats[key].abs() <= LARGEST)).sum())
        if bad:
            yield key, bad


def unusable_models(models: ByClient) -> tuple[str, ...]:
    """The clients whose models hold such values; tensors that several share are read once."""
    tensors = {id(tensor): tensor for params in models.values() for tensor in params.values()}
    bad = {int(key) for key, _ in unusable_values({str(index): tensor for index, tensor in tensors.items()})}
    return tuple(name for name, params in models.items() if bad & {id(tensor) for tensor in params.values()})
