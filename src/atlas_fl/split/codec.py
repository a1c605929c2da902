"""Messages through a cut as bytes: rows of numbers, one per token, as fp32, bf16 or int8, with optional noise.

| wire | bytes of a token | error of a value x in a row whose largest magnitude is m |
|---|---|---|
| `fp32` | 4 width | none |
| `bf16` | 2 width | |x| / 256 |
| `int8` | width + 4 | m / 254 |

Both errors are up to float32's own rounding, and 1e-30 at most where a row is all but zero. int8 has one scale per row,
m / 127, so that a token with large values takes no precision from its neighbours (Dettmers et al. 2022, "LLM.int8()",
section 2). Finite rows arrive finite, whatever their size. A row that holds NaN or infinity arrives as such, so that
its effect on a model is refused as it would be without a cut.

The noise on what leaves a client is a function of a secret of the client and of the rows themselves:

    y = x + s rms(x) z,    z = N(SHAKE-256(k || x)),    k = BLAKE2b(kind, s; key = the client's secret)

N makes standard normal numbers of a stream of bits (Box and Muller 1958). The server influences nothing of it but s and
the model that computes the rows x. Equal rows get equal noise, so a site that restarts or is asked again sends the same
bytes, and a second request for the same row reveals nothing. Rows that differ in a bit, and one row with two s, get
noise that is independent for whoever lacks the secret: the difference of two requests does not cancel it (ADR 16).
"""

from collections.abc import Callable, Mapping
from hashlib import blake2b, shake_256
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from atlas_fl.errors import ProtocolError
from atlas_fl.storage.ledger import Kind
from atlas_fl.storage.tensors import decode_tensors, encode_tensors, encoded_size

NUMBERS_AT_ONCE = 1 << 20
"""Numbers that are drawn at once: a few times as many are held meanwhile."""


def simulated_secret(seed: int, client: str) -> bytes:
    """A client's secret in a simulation, (32,) bytes: a function of the seed, and so known to all who know the config.

    A simulated run thus stays a function of its config, and its noise hides nothing from who has that.
    """
    return blake2b(f"{seed}\x1f{client}".encode(), person=b"simulated noise", digest_size=32).digest()


def add_noise(rows: Tensor, *, noise: float, secret: bytes, kind: Kind) -> Tensor:
    """The rows with Gaussian noise of `noise` times each row's root mean square; (tokens, width), a new tensor.

    A row's noise depends on the row, on `noise`, `kind` and the secret, and on no other row.
    """
    values = rows.detach().float()
    normals = _draw_normals(values.cpu(), _key(secret, f"{kind}\x1f{noise!r}")).to(rows.device)
    spread = noise * values.square().mean(-1, keepdim=True).sqrt()
    return rows + (spread * normals).to(rows.dtype)


def _key(secret: bytes, use: str) -> bytes:
    """The key of one use of the secret; another one for every other use."""
    return blake2b(use.encode(), key=secret, person=b"wire noise", digest_size=32).digest()


def _draw_normals(rows: Tensor, key: bytes) -> Tensor:
    """Standard normal numbers for these rows on the CPU, (tokens, width) float32, row by row."""
    count, width = rows.shape
    normals = torch.empty(count, width)
    if normals.numel():
        values = rows.contiguous().view(torch.uint8).numpy()  # (tokens, bytes)
        pairs, at_once = -(-width // 2), max(1, NUMBERS_AT_ONCE // width)
        for first in range(0, count, at_once):
            block = values[first : first + at_once]
            bits = b"".join(shake_256(key + row.tobytes()).digest(8 * pairs) for row in block)
            normals[first : first + len(block)] = torch.from_numpy(_box_muller(bits, pairs)[:, :width])
    return normals


def _box_muller(bits: bytes, pairs: int) -> np.ndarray:
    """Standard normal numbers of uniform bits, (rows, 2 pairs) float32; the largest there is is 6.7."""
    uniform = np.frombuffer(bits, dtype="<u4").reshape(-1, 2, pairs)
    radius = np.sqrt(np.float32(-2) * np.log((uniform[:, 0].astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)))
    angle = uniform[:, 1].astype(np.float32) * np.float32(2 * np.pi * 2**-32)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)


WireName: TypeAlias = Literal["fp32", "bf16", "int8"]
WIRES: tuple[WireName, ...] = get_args(WireName)

SMALLEST = 1e-30
"""A row whose largest magnitude is below this travels as zeros in int8: its scale would leave float32's range."""

ROWS, _SCALES = "rows", "scales"


def encode_rows(rows: Tensor, *, wire: WireName, extra: Mapping[str, Tensor] | None = None) -> bytes:
    """The message that carries these rows, (tokens, width) of any floating dtype, and the `extra` tensors beside them.

    The bytes are a safetensors file; their length is what a ledger counts.
    """
    return encode_tensors({**_PACK[wire](rows.detach().float()), **(extra or {})})


def decode_rows(message: bytes) -> tuple[Tensor, dict[str, Tensor]]:
    """(rows, extra) that a message carries: rows (tokens, width) float32 on the CPU, whatever the wire was."""
    tensors = read_message(message)
    return tensors.pop(ROWS), tensors


def read_message(message: bytes) -> dict[str, Tensor]:
    """The tensors of a message from another machine; its rows, if it has any, are under `rows` as float32.

    Raises `ProtocolError` for bytes that no codec of this module writes.
    """
    try:
        tensors = decode_tensors(message)
    except SafetensorError as error:
        raise ProtocolError(f"what came through the cut cannot be read ({error!s:.80})") from None
    if ROWS in tensors:
        if not _has_row_format(tensors):
            raise ProtocolError(f"rows came through the cut in another form than {', '.join(WIRES)}")
        rows = tensors[ROWS]
        tensors[ROWS] = _from_int8(rows, tensors.pop(_SCALES)) if rows.dtype is torch.int8 else rows.float()
    return tensors


def _has_row_format(tensors: Mapping[str, Tensor]) -> bool:
    rows, scales = tensors[ROWS], tensors.get(_SCALES)
    fits = scales is not None and scales.dtype is torch.float32 and scales.shape == rows.shape[:1]
    return rows.ndim == 2 and (fits if rows.dtype is torch.int8 else rows.dtype in (torch.float32, torch.bfloat16))


def message_size(count: int, width: int, *, wire: WireName, extra: Mapping[str, Tensor] | None = None) -> int:
    """Bytes that `encode_rows` makes of `count` rows of this width, without any rows."""
    return encoded_size({**_PACK[wire](torch.empty(count, width, device="meta")), **(extra or {})})


def _to_bf16(rows: Tensor) -> dict[str, Tensor]:
    largest = torch.finfo(torch.bfloat16).max
    # Values between bfloat16's largest and float32's would round to infinity.
    clamped = torch.where(rows.isfinite(), rows.clamp(-largest, largest), rows)
    return {ROWS: clamped.to(torch.bfloat16)}


def _to_int8(rows: Tensor) -> dict[str, Tensor]:
    most = rows.abs().amax(-1) if rows.shape[-1] else rows.new_zeros(len(rows))  # (tokens,)
    finite = most.isfinite()
    scales = torch.where(most >= SMALLEST, most / 127, torch.zeros_like(most))
    steps = torch.where(finite & (scales > 0), scales, torch.ones_like(scales))[:, None]
    levels = torch.where(finite[:, None], rows / steps, torch.zeros_like(rows)).round_().clamp_(-127, 127)
    return {
        ROWS: torch.where(scales[:, None] == 0, torch.zeros_like(levels), levels).to(torch.int8),
        _SCALES: torch.where(finite, scales, torch.full_like(scales, torch.nan)),
    }


def _from_int8(levels: Tensor, scales: Tensor) -> Tensor:
    largest = torch.finfo(torch.float32).max
    # 127 * (m / 127) may round above float32's largest number.
    return (levels.float() * scales[:, None]).clamp_(-largest, largest)


_PACK: Mapping[WireName, Callable[[Tensor], dict[str, Tensor]]] = {
    "fp32": lambda rows: {ROWS: rows},
    "bf16": _to_bf16,
    "int8": _to_int8,
}
