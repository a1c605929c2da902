"""The noise on what leaves a client through its cut, drawn from a secret of the client and from the rows themselves.

    y = x + s rms(x) z,    z = N(SHAKE-256(k || x)),    k = BLAKE2b(kind, s; key = the client's secret)

N makes standard normal numbers of a stream of bits (Box and Muller 1958). Nothing that a server says enters but s and
the model whose rows x are. Equal rows get equal noise, so that a site that is killed, or asked again, sends the
same bytes and no second look at the same row. Rows that differ in a bit, and one row with two s, get noise that is
independent to whoever lacks the secret: the difference of two looks does not cancel it (ADR 16).
"""

from hashlib import blake2b, shake_256

import numpy as np
import torch
from torch import Tensor

from atlas_fl.io.ledger import Kind

MOST_NUMBERS = 1 << 20
"""Numbers that are drawn at once: a few times as many are held meanwhile."""


def simulated_secret(seed: int, client: str) -> bytes:
    """A client's secret in a simulation, (32,) bytes: a function of the seed, and so known to all who know the config.

    A simulated run thus stays a function of its config, and its noise hides nothing from who has that.
    """
    return blake2b(f"{seed}\x1f{client}".encode(), person=b"simulated noise", digest_size=32).digest()


def with_noise(rows: Tensor, *, noise: float, secret: bytes, kind: Kind) -> Tensor:
    """The rows with Gaussian noise of `noise` times each row's root mean square; (tokens, width), a new tensor.

    A row's noise depends on the row, on `noise`, `kind` and the secret, and on no other row.
    """
    values = rows.detach().float()
    drawn = _normals(values.cpu(), _key(secret, f"{kind}\x1f{noise!r}")).to(rows.device)
    spread = noise * values.square().mean(-1, keepdim=True).sqrt()
    return rows + (spread * drawn).to(rows.dtype)


def _key(secret: bytes, use: str) -> bytes:
    """The key of one use of the secret; another one for every other use."""
    return blake2b(use.encode(), key=secret, person=b"wire noise", digest_size=32).digest()


def _normals(rows: Tensor, key: bytes) -> Tensor:
    """Standard normal numbers for these rows on the CPU, (tokens, width) float32, row by row."""
    count, width = rows.shape
    drawn = torch.empty(count, width)
    if drawn.numel():
        values = rows.contiguous().view(torch.uint8).numpy()  # (tokens, bytes)
        pairs, at_once = -(-width // 2), max(1, MOST_NUMBERS // width)
        for first in range(0, count, at_once):
            few = values[first : first + at_once]
            bits = b"".join(shake_256(key + row.tobytes()).digest(8 * pairs) for row in few)
            drawn[first : first + len(few)] = torch.from_numpy(_box_muller(bits, pairs)[:, :width])
    return drawn


def _box_muller(bits: bytes, pairs: int) -> np.ndarray:
    """Standard normal numbers of uniform bits, (rows, 2 pairs) float32; the largest there is is 6.7."""
    uniform = np.frombuffer(bits, dtype="<u4").reshape(-1, 2, pairs)
    radius = np.sqrt(np.float32(-2) * np.log((uniform[:, 0].astype(np.float32) + np.float32(0.5)) * np.float32(2**-32)))
    angle = uniform[:, 1].astype(np.float32) * np.float32(2 * np.pi * 2**-32)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
