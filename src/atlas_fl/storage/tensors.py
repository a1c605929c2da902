"""Tensors as safetensors: bytes of messages and files, sketches beside a plan, models of many clients in one file.

The header is written here and cached by names, dtypes and shapes, because a run encodes the same layout once for
every client and round: about a tenth of the time of `safetensors.torch.save`, which also refuses tensors that share
memory, as the equal rows of an average do. The bytes are those of `safetensors.torch.save` (held by a test).

In a file of many clients' models, adapters stand under every client's name, as any reader of safetensors sees them.
Whole models are too large for that: of these a file keeps every different tensor once, under the name of the first
client that has it, and its metadata say who else does.
"""

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from atlas_fl.errors import CheckpointError
from atlas_fl.params import ByClient, Params, digest, flatten_by_client, is_full_model
from atlas_fl.storage.folder_access import memory_bytes, read_written, write_pieces

DTYPES: dict[torch.dtype, str] = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The name of every dtype that travels; the format lays the tensors down in this order, then by name."""

Piece: TypeAlias = bytes | memoryview
Signature: TypeAlias = tuple[tuple[str, torch.dtype, torch.Size], ...]
Key = TypeVar("Key")
_MOST_CACHED_NAMES = 10_000


@lru_cache(maxsize=256)
def _layout(signature: Signature, metadata: tuple[str, str] | None = None) -> tuple[bytes, tuple[str, ...]]:
    """The length and the header as bytes, and the names in the order in which their bytes follow."""
    dtype_order = {dtype: index for index, dtype in enumerate(DTYPES)}
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict([metadata])}
    order, start = [], 0
    for name, dtype, shape in sorted(signature, key=lambda entry: (dtype_order[entry[1]], entry[0])):
        end = start + shape.numel() * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        order.append(name)
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to eight bytes
    return len(text).to_bytes(8, "little") + text, tuple(order)


def _layout_of(params: Params, metadata: tuple[str, str] | None = None) -> tuple[bytes, tuple[str, ...]]:
    """The layout of these tensors; one of very many names, such as of all clients' models, is not kept."""
    layout = _layout if len(params) <= _MOST_CACHED_NAMES else _layout.__wrapped__
    return layout(tuple([(name, tensor.dtype, tensor.shape) for name, tensor in params.items()]), metadata)


def _tensor_buffer(tensor: torch.Tensor) -> memoryview:
    """The values of a tensor as one contiguous buffer, without a copy where they already lie so on the CPU."""
    if tensor.dtype is torch.bfloat16:  # unknown to NumPy
        tensor = tensor.detach().cpu().contiguous().view(torch.int16)
    array: npt.NDArray[np.generic] = tensor.numpy(force=True)
    return (array if array.flags.c_contiguous else np.ascontiguousarray(array)).data


def encode_pieces(params: Params, *, metadata: tuple[str, str] | None = None) -> Iterator[Piece]:
    """The encoded tensors piece by piece, header first, so that no second copy of them has to be held.

    `metadata` is a name and a text that the format's metadata shall hold.
    """
    header, order = _layout_of(params, metadata)
    yield header
    for name in order:
        yield _tensor_buffer(params[name])


def encoded_size(params: Params) -> int:
    """Bytes of `encode_tensors(params)`, without encoding: the header, and those of every tensor."""
    header, _ = _layout_of(params)
    return len(header) + sum(tensor.nbytes for tensor in params.values())


def encode_tensors(params: Params) -> bytes:
    """The safetensors bytes of the tensors, as they would cross a network.

    The same values give the same bytes, whatever the order of the names.
    """
    return b"".join(encode_pieces(params))


def decode_tensors(payload: bytes) -> dict[str, torch.Tensor]:
    """The tensors that `encode_tensors` was given, on the CPU, by name in the order of the payload.

    Raises:
        SafetensorError: the bytes are cut off or no safetensors.
    """
    return load(payload)


def write_tensors(
    path: Path, tensors: Params, *, metadata: tuple[str, str] | None = None, within: Path | None = None
) -> str:
    """Write a safetensors file in one step, with `metadata` as its metadata; its SHA-256 as hexadecimal digits.

    No part of the path below `within` is a link (`storage.folder_access`); so it is for all readers and writers here.
    """
    digest = sha256()

    def hash_pieces() -> Iterator[Piece]:
        for part in encode_pieces(tensors, metadata=metadata):
            digest.update(part)
            yield part

    write_pieces(path, hash_pieces(), within=within)
    return digest.hexdigest()


def parts_of(tensors: Mapping[Key, Tensor], size: int) -> Iterator[dict[Key, Tensor]]:
    """The tensors in their order, in parts of about `size` bytes; at least one part."""
    part: dict[Key, Tensor] = {}
    held = 0
    for key, tensor in tensors.items():
        if held >= size:
            yield part
            part, held = {}, 0
        part[key] = tensor
        held += tensor.nbytes
    yield part


def read_tensors(path: Path, *, within: Path | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Raises:
        CheckpointError: there is no such file, or it is damaged.
    """
    try:
        return decode_tensors(read_written(path, max_bytes=memory_bytes(), within=within))
    except (SafetensorError, ValueError, RuntimeError) as error:  # torch refuses what a header may say
        raise CheckpointError(f"damaged file {path}: {error}; restore it or repeat the run") from error


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


SAME = "same"
"""The entry of the metadata: as JSON, by the name under which a tensor stands, the other clients that hold it."""


def write_models(path: Path, models: ByClient, *, within: Path | None = None) -> str:
    """Write these models in one step, with keys `<client>/<parameter>`; the file's SHA-256 as hexadecimal digits.

    The audit has a reader of its own for them.

    Which tensors are the same is told by their bytes and not by the objects: a run in sessions shares others in memory
    than an undisturbed one, and leaves the same file.
    """
    if not any(is_full_model(params) for params in models.values()):
        return write_tensors(path, flatten_by_client(models), within=within)
    unique, other_holders = _deduplicate(models)
    metadata = (SAME, json.dumps(other_holders, sort_keys=True)) if other_holders else None
    return write_tensors(path, unique, metadata=metadata, within=within)


def _deduplicate(models: ByClient) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """(every different tensor under its first holder, the other holders of those that have any)."""
    digests: dict[tuple[str, int], str] = {}
    first_holder: dict[str, str] = {}
    unique: dict[str, Tensor] = {}
    other_holders: dict[str, list[str]] = {}
    for client, params in models.items():
        for key, tensor in params.items():
            cache_key = (key, id(tensor))
            if cache_key not in digests:
                digests[cache_key] = digest({key: tensor})
            if (name := first_holder.setdefault(digests[cache_key], f"{client}/{key}")) in unique:
                other_holders.setdefault(name, []).append(client)
            else:
                unique[name] = tensor
    return unique, other_holders
