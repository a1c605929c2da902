"""What crosses a cut, as bytes: rows of numbers, a token each, in one of three formats.

| wire | bytes of a token | error of a value x in a row whose largest magnitude is m |
|---|---|---|
| `fp32` | 4 width | none |
| `bf16` | 2 width | |x| / 256 |
| `int8` | width + 4 | m / 254 |

Both errors are up to float32's own rounding, and 1e-30 at most where a row is all but zero. int8 has a scale a row,
m / 127, so that a token with large values takes no precision from its neighbours (Dettmers et al. 2022, "LLM.int8()",
section 2). Finite rows arrive finite, whatever their size; a row that holds NaN or infinity arrives as such, so
that what it does to a model is refused as it would be without a cut.
"""

from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from atlas_fl.io.tensors import decode, encode, encoded_size

WireName: TypeAlias = Literal["fp32", "bf16", "int8"]
WIRES: tuple[WireName, ...] = get_args(WireName)

SMALLEST = 1e-30
"""A row whose largest magnitude is below this travels as zeros in int8: its scale would leave float32's range."""

_ROWS, _SCALES = "rows", "scales"


def encode_rows(rows: Tensor, *, wire: WireName, extra: Mapping[str, Tensor] | None = None) -> bytes:
    """The message that carries these rows, (tokens, width) of any floating dtype, and the `extra` tensors beside them.

    The bytes are a safetensors file; their length is what a ledger counts.
    """
    return encode({**_PACK[wire](rows.detach().float()), **(extra or {})})


def decode_rows(message: bytes) -> tuple[Tensor, dict[str, Tensor]]:
    """(rows, extra) that a message carries: rows (tokens, width) float32 on the CPU, whatever the wire was."""
    tensors = decode(message)
    rows = tensors.pop(_ROWS)
    if rows.dtype is torch.int8:
        return _from_int8(rows, tensors.pop(_SCALES)), tensors
    return rows.float(), tensors


def message_size(count: int, width: int, *, wire: WireName, extra: Mapping[str, Tensor] | None = None) -> int:
    """How many bytes `encode_rows` makes of `count` rows of this width, without any rows."""
    return encoded_size({**_PACK[wire](torch.empty(count, width, device="meta")), **(extra or {})})


def with_noise(rows: Tensor, *, noise: float, generator: np.random.Generator) -> Tensor:
    """The rows with Gaussian noise of `noise` times each row's root mean square; (tokens, width), a new tensor.

    The draws are one stream, row after row, so that rows in two messages get what they would get in one.
    """
    drawn = torch.from_numpy(generator.standard_normal(size=tuple(rows.shape), dtype=np.float32)).to(rows.device)
    spread = noise * rows.float().square().mean(-1, keepdim=True).sqrt()
    return rows + (spread * drawn).to(rows.dtype)


def _to_fp32(rows: Tensor) -> dict[str, Tensor]:
    return {_ROWS: rows}


def _to_bf16(rows: Tensor) -> dict[str, Tensor]:
    largest = torch.finfo(torch.bfloat16).max
    # Values between bfloat16's largest and float32's would round to infinity.
    held = torch.where(rows.isfinite(), rows.clamp(-largest, largest), rows)
    return {_ROWS: held.to(torch.bfloat16)}


def _to_int8(rows: Tensor) -> dict[str, Tensor]:
    most = rows.abs().amax(-1) if rows.shape[-1] else rows.new_zeros(len(rows))  # (tokens,)
    finite = most.isfinite()
    scales = torch.where(most >= SMALLEST, most / 127, torch.zeros_like(most))
    steps = torch.where(finite & (scales > 0), scales, torch.ones_like(scales))[:, None]
    levels = torch.where(finite[:, None], rows / steps, torch.zeros_like(rows)).round_().clamp_(-127, 127)
    return {
        _ROWS: torch.where(scales[:, None] == 0, torch.zeros_like(levels), levels).to(torch.int8),
        _SCALES: torch.where(finite, scales, torch.full_like(scales, torch.nan)),
    }


def _from_int8(levels: Tensor, scales: Tensor) -> Tensor:
    largest = torch.finfo(torch.float32).max
    # 127 * (m / 127) may round above float32's largest number.
    return (levels.float() * scales[:, None]).clamp_(-largest, largest)


_PACK: Mapping[WireName, Callable[[Tensor], dict[str, Tensor]]] = {
    "fp32": _to_fp32,
    "bf16": _to_bf16,
    "int8": _to_int8,
}
