"""A model's files as data: where they lie, the names and shapes of their tensors, and checks before anything is built.

A folder of a model may come from anybody. Its files are regular and of bounded size, its config asks for no more than
its weights hold, and all of this is known from headers: nothing is allocated that the files do not have.
"""

import os
import stat
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from transformers.utils import cached_file

from atlas_fl.errors import ModelError, short_repr
from atlas_fl.models.registry import Family
from atlas_fl.storage.hub import hub_fault
from atlas_fl.storage.jsonl import from_json

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""Shapes of stored tensors by their stored names."""

CONFIG, ADAPTER = "config.json", "adapter_config.json"
WEIGHTS = "model.safetensors"
_FORMATS = (WEIGHTS, "pytorch_model.bin")
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ot"})
MOST_TEXT_BYTES = 64 * 2**20
"""Most bytes of a config, a tokenizer or another file that is no weights; published ones have at most half."""
MOST_REPEATS = 1 << 16
"""Most of whatever a config counts and a library makes one by one: layers, heads, classes."""
_COUNTED = ("layer", "depth", "block", "stage", "head", "label")
_LARGEST = 2**62
_OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Names of the norms in early BERT checkpoints; transformers renames them on loading."""


def is_local(source: str) -> bool:
    """Return whether files are looked for on this machine alone: in a directory, or where the hub does not answer."""
    return Path(source).is_dir() or hub_fault() is not None


def find_file(source: str, file: str) -> Path | None:
    """Path of a file of the model, fetched from the hub if need be; None where there is none."""
    path = cached_file(source, file, _raise_exceptions_for_missing_entries=False, local_files_only=is_local(source))
    return None if path is None else Path(path)


def hub_name(source: str) -> str:
    """The name on the hub of a folder of its cache; any other source as it is.

    >>> hub_name("/cache/models--prajjwal1--bert-tiny/snapshots/6f75de8")
    'prajjwal1/bert-tiny'
    """
    folder = Path(source).parent.parent.name
    is_cached = folder.startswith("models--") and Path(source).parent.name == "snapshots"
    return folder.removeprefix("models--").replace("--", "/") if is_cached else source


def cached_folder(source: str) -> Path | None:
    """Folder of a hub model in the hub's cache; None without its config or weights. No network is used."""
    weights = [name for single in _FORMATS for name in (single, f"{single}.index.json")]
    config, *paths = (try_to_load_from_cache(source, file) for file in (CONFIG, *weights))
    return Path(config).parent if isinstance(config, str) and any(isinstance(path, str) for path in paths) else None


def check_folder(name: str, source: str) -> None:
    """Raise `ModelError` where a file of the model's folder is not regular or too large, or where it is an adapter.

    A device has no end, and a pipe may never begin. Beside an adapter transformers would load the model that it names.
    """
    if Path(source).is_dir():
        folder = Path(source)
    elif (config := find_file(source, CONFIG)) is not None:
        folder = config.parent
    else:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            _check_file(name, Path(entry.path))
    if (folder / ADAPTER).exists():
        raise ModelError(
            f"model {name!r} holds {ADAPTER} and so is an adapter; give its base model with --model and this folder"
            " with --init-adapter"
        )


def _check_file(name: str, path: Path) -> None:
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        return
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"model {name!r}: {path.name} is no regular file; remove it, or give another folder")
    if path.suffix not in _WEIGHT_SUFFIXES and status.st_size > MOST_TEXT_BYTES:
        raise ModelError(
            f"model {name!r}: {path.name} has {status.st_size:,} bytes, and at most {MOST_TEXT_BYTES:,} are read of a"
            " file that is no weights; give the model's own files"
        )


def check_raw_config(name: str, source: str) -> None:
    """Raise `ModelError` for numbers of a config that no model has, before a library makes lists of such lengths."""
    path = find_file(source, CONFIG)
    if path is None:
        return
    try:
        config = from_json(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"model {name!r}: {CONFIG} is no JSON ({error}); give the model's own file") from None
    if not isinstance(config, dict):
        raise ModelError(f"model {name!r}: {CONFIG} is no object of settings; give the model's own file")
    if config.get("quantization_config") is not None:
        raise ModelError(
            f"model {name!r} is quantised ({CONFIG} has quantization_config), and adapters train on plain weights; give"
            " the model that it was made of"
        )
    for key, value in _settings(config):
        is_count = any(word in key for word in _COUNTED) and "id" not in key.split("_")
        if isinstance(value, int) and abs(value) > (MOST_REPEATS if is_count else _LARGEST):
            raise ModelError(
                f"model {name!r}: its config has {key} {short_repr(value)}, and no model has so many; give the model's"
                " own files"
            )


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(key, value) of everything in a config; what is inside a list has the key of the list."""
    pending = list(config.items())
    while pending:
        key, value = pending.pop()
        if isinstance(value, Mapping):
            pending.extend((str(inner), part) for inner, part in value.items())
        elif isinstance(value, list):
            pending.extend((key, part) for part in value)
        else:
            yield str(key), value


def weight_files(name: str, source: str) -> dict[str, str] | Path:
    """The one file of all weights, or where they are sharded the shard of every tensor by its stored name.

    Raises `ModelError` where there is no safetensors file.
    """
    files = _find_weights(name, source, _FORMATS[:1])
    if files is None:
        raise ModelError(
            f"model {name!r} ({source}) has no {WEIGHTS} or its index, the files that can be read in parts;"
            " save it again with save_pretrained"
        )
    return files


def _find_weights(name: str, source: str, formats: Sequence[str] = _FORMATS) -> dict[str, str] | Path | None:
    """`weight_files` of the first of these formats, safetensors before torch's own, that is there; None without any."""
    for single in formats:
        for file in (single, f"{single}.index.json"):
            path = find_file(source, file)
            if path is not None:
                return path if file == single else _shards(name, path)
    return None


def _shards(name: str, index: Path) -> dict[str, str]:
    """The shard of every tensor by its stored name; shards are files beside their index."""
    try:
        shards = from_json(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError):
        shards = None
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise ModelError(f"model {name!r}: {index.name} names no file for each tensor; give the model's own files")
    for shard in dict.fromkeys(shards.values()):
        if not shard or Path(shard).name != shard:
            raise ModelError(
                f"model {name!r}: {index.name} names {short_repr(shard)}, which is no file beside it; give the model's"
                " own files"
            )
    return shards


def shard_file(name: str, source: str, shard: str) -> Path:
    """Path of a shard, fetched from the hub if need be; raises `ModelError` where it is not to be had."""
    path = find_file(source, shard)
    if path is None:
        raise ModelError(f"model {name!r} ({source}) lacks {shard}, which its index names; give all files")
    return path


def checkpoint_names(key: str, prefix: str) -> tuple[str, ...]:
    """The names that a tensor of the headless model may have in a file, likeliest first.

    >>> checkpoint_names("wte.weight", "transformer")
    ('wte.weight', 'transformer.wte.weight')
    """
    legacy_keys = [key.replace(new, legacy) for new, legacy in _OLD_NAMES.items() if key.endswith(new)]
    return tuple(f"{front}{name}" for name in (key, *legacy_keys) for front in ("", f"{prefix}."))


def tensor_names(name: str, source: str) -> Collection[str]:
    """The stored names of all tensors; of a sharded model from its index, without its shards."""
    files = _find_weights(name, source)
    return files if isinstance(files, dict) else tensor_shapes(name, source)


def tensor_shapes(name: str, source: str) -> Shapes:
    """The shapes of all tensors by their stored names, from the headers of the files that transformers would read.

    Raises:
        OSError: there is no file of weights.
        ModelError: a file is damaged.
    """
    files = _find_weights(name, source)
    if files is None:
        raise OSError(f"there is no {' or '.join(_FORMATS)}, and no index of either")
    if isinstance(files, Path):
        return _file_shapes(name, files)
    shards = [shard_file(name, source, shard) for shard in dict.fromkeys(files.values())]
    return {key: shape for shard in shards for key, shape in _file_shapes(name, shard).items()}


def _file_shapes(name: str, path: Path) -> Shapes:
    """Shapes of one file; code in one that torch has saved is not run, and compressed parts are refused."""
    if path.suffix != ".bin":
        with safe_open(path, framework="pt") as reader:
            names = reader.keys()
            return {name: tuple(reader.get_slice(name).get_shape()) for name in names}
    with zipfile.ZipFile(path) as archive:
        if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
            raise ModelError(f"model {name!r}: {path.name} is compressed; save it again with save_pretrained")
    state = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    if not isinstance(state, Mapping):
        raise ModelError(f"model {name!r}: {path.name} holds no tensors by name; save it again with save_pretrained")
    return {str(key): tuple(value.shape) for key, value in state.items() if isinstance(value, torch.Tensor)}


def lacks_pooler(config: Any, family: Family, names: Collection[str]) -> bool:
    """Return whether the stock classifier reads a pooler that these files lack, as those of masked models do.

    Of files that lack the last block too nothing follows: they are a part of a model, and the pooler stands above.
    """
    if family.pooler is None:
        return False
    parts = (f"{family.pooler}.", f"{family.blocks}.{config.num_hidden_layers - 1}.")
    has_pooler, has_blocks = (
        any(name.startswith(checkpoint_names(part, family.prefix)) for name in names) for part in parts
    )
    return has_blocks and not has_pooler


def check_config(name: str, config: Any) -> None:
    """Raise `ModelError` for a config of no model, or where what is made of a text depends on what lies beside it."""
    for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
        value = getattr(config, key, 1)
        by_stage = value if isinstance(value, list) and value else [value]  # Swin has a number for each stage
        if not all(isinstance(number, int) and number >= 1 for number in by_stage):
            raise ModelError(f"model {name!r}: {CONFIG} has {key} {short_repr(value)}; it is a whole number from 1 on")
    if getattr(config, "chunk_size_feed_forward", 0):
        raise ModelError(
            f"model {name!r}: {CONFIG} has chunk_size_feed_forward {short_repr(config.chunk_size_feed_forward)}, which"
            " splits rows and changes no result; set it to 0"
        )


def check_size(name: str, auto: Any, config: Any, source: str) -> None:
    """Raise `ModelError` where this class's model of a config, built without memory, is far larger than its files."""
    with torch.device("meta"):
        outline = auto.from_config(config, trust_remote_code=False)
    asked = sum(parameter.numel() for parameter in outline.parameters())
    held = sum(prod(shape) for shape in tensor_shapes(name, source).values())
    if asked > 2 * held:
        raise ModelError(
            f"model {name!r}: {CONFIG} asks for {asked:,} parameters and the files hold {held:,}; give files that"
            " belong together"
        )
