"""What the senders of whole models have in common: the body that the other ends have, the mask, and digests."""

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from atlas_fl.clients.base import Job
from atlas_fl.engines.stream.frames import FRAME_LIMIT
from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.io.tensors import encoded_size
from atlas_fl.sparse.choose import Mask
from atlas_fl.sparse.codec import Drawn, encode_mask
from atlas_fl.tree import HEAD, digest
from atlas_fl.types import Params

MARGIN = 2**20
"""Bytes of a message beside its body; heads of more classes than anyone has are larger."""


@dataclass(kw_only=True, eq=False)
class Common:
    """What the senders of a run have in common."""

    home: str
    """Digest of the body that every other end has in its files."""
    mask: Mask | None = None
    """Which weights of the body may move, from the first job on that says so."""
    drawn: Drawn | None = None
    """How the mask was drawn, if it was."""
    _message: torch.Tensor | None = None
    _lock: Any = field(default_factory=threading.RLock)
    _known: dict[tuple[int, ...], tuple[tuple[weakref.ref[torch.Tensor], ...], str]] = field(default_factory=dict)

    def see(self, job: Job) -> None:
        """Take note of the mask that this job brings."""
        mask = getattr(job.options, "mask", None)
        with self._lock:
            if mask is not None and self.mask is None:
                self.drawn, self.mask = job.options.drawn, parted(mask)[0]

    def mask_message(self) -> torch.Tensor:
        """The mask as it travels, (bytes,) uint8."""
        assert self.mask is not None, "asked for under a mask alone"
        with self._lock:
            if self._message is None:
                self._message = as_tensor(encode_mask(self.mask, drawn=self.drawn))
            return self._message

    def digest(self, params: Params) -> str:
        """The digest of these tensors, computed once as long as they live: many clients are sent the very same."""
        key = tuple(map(id, params.values()))
        with self._lock:
            # without the tensor an id means nothing: another one may have got it
            self._known = {key: own for key, own in self._known.items() if all(ref() is not None for ref in own[0])}
            if key not in self._known:
                self._known[key] = tuple(weakref.ref(tensor) for tensor in params.values()), digest(params)
            return self._known[key][1]


def check_frames(home: Params, *, sparse: bool, limit: int = FRAME_LIMIT) -> None:
    """Raise `ConfigError` where a message of the run would be longer than a frame may be.

    `sparse` says that dense bodies never travel: there is a mask, and no client scores weights for it.
    """
    longest = MARGIN + (0 if sparse else encoded_size(home))
    if longest > limit:
        raise ConfigError(
            f"a message with this model has {longest / 2**20:.0f} MB, and a frame has at most {limit / 2**20:.0f}; take"
            " a smaller model, freeze its first blocks with --frozen-blocks, or simulate it with `atlas run`"
        )


def parted(params: Params) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(body, head) of a model."""
    body = {key: tensor for key, tensor in params.items() if not key.startswith(HEAD)}
    return body, {key: tensor for key, tensor in params.items() if key.startswith(HEAD)}


def as_tensor(message: bytes) -> torch.Tensor:
    """The message as it lies in a frame, (bytes,) uint8."""
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def as_bytes(message: torch.Tensor) -> bytes:
    """The message that `as_tensor` was given; raises `ProtocolError` for what is no row of bytes."""
    if message.dtype is not torch.uint8 or message.ndim != 1:
        raise ProtocolError("a mask or its values are no row of bytes; install the same atlas-fl on both ends")
    return message.numpy().tobytes()
