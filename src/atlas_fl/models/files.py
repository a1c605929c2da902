"""A model's files as data: where they lie, the names and shapes of their tensors, and checks before anything is built.

A folder of a model may come from anybody. Its files are regular and of bounded size, its config asks for no more than
its weights hold, and all of this is known from headers: nothing is allocated that the files do not have.
"""

import os
import stat
import struct
import zipfile
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from safetensors import safe_open
from transformers.utils import cached_file

from atlas_fl.errors import ModelError, short_repr
from atlas_fl.models.registry import Family, ModelSource, is_hub_reachable
from atlas_fl.storage.jsonl import from_json

Shapes: TypeAlias = dict[str, tuple[int, ...]]
"""Shapes of stored tensors by their stored names."""

CONFIG, ADAPTER = "config.json", "adapter_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OLD_WEIGHTS, OLD_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ot"})
MOST_TEXT_BYTES = 64 * 2**20
"""Most bytes of a config, a tokenizer or another file that is no weights; published ones have at most half."""
MOST_HEADER_BYTES = 64 * 2**20
MOST_REPEATS = 1 << 16
"""Most of whatever a config counts and a library makes one by one: layers, heads, classes."""
_COUNTED = ("layer", "depth", "block", "stage", "head", "label")
_LARGEST = 2**62
_OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Names of the norms in early BERT checkpoints; transformers renames them on loading."""


def is_local(source: ModelSource) -> bool:
    """Return whether files are looked for on this machine alone: in a directory, or where the hub does not answer."""
    return is_directory(source.path) or not is_hub_reachable()


def is_directory(name: str) -> bool:
    """Return whether a model's name is a directory on this machine."""
    return Path(name).expanduser().is_dir()


def find_file(source: ModelSource, file: str) -> Path | None:
    """Path of a file of the model, fetched from the hub if need be; None where there is none."""
    path = cached_file(
        source.path, file, _raise_exceptions_for_missing_entries=False, local_files_only=is_local(source)
    )
    return None if path is None else Path(path)


def check_folder(name: str, source: ModelSource) -> None:
    """Raise `ModelError` where a file of the model's folder is not regular or too large, or where it is an adapter.

    A device has no end, and a pipe may never begin. Beside an adapter transformers would load the model that it names.
    """
    if source.gguf_file is not None:
        _check_file(name, Path(source.path, source.gguf_file))
        return
    if is_directory(source.path):
        folder = Path(source.path)
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


def check_raw_config(name: str, source: ModelSource) -> None:
    """Raise `ModelError` for numbers of a config that no model has, before a library makes lists of such lengths."""
    if source.gguf_file is not None:
        _check_counts(name, _read_gguf(Path(source.path, source.gguf_file))[1])
        return
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
            " the model that it was made of, or a GGUF file"
        )
    _check_counts(name, config)


def _check_counts(name: str, config: Mapping[str, Any]) -> None:
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


def weight_files(name: str, source: ModelSource) -> dict[str, str] | Path:
    """The one file of all weights, or where they are sharded the shard of every tensor by its stored name.

    Raises `ModelError` where there is no safetensors file.
    """
    files = _find_weights(name, source, WEIGHTS, INDEX)
    if files is None:
        raise ModelError(
            f"model {name!r} ({source.path}) has no {WEIGHTS} or {INDEX}, the files that can be read in parts;"
            " save it again with save_pretrained"
        )
    return files


def _find_weights(name: str, source: ModelSource, single: str, index: str) -> dict[str, str] | Path | None:
    """`weight_files` of these names; None where there is neither."""
    path = find_file(source, single)
    if path is not None:
        return path
    path = find_file(source, index)
    return None if path is None else _shards(name, path)


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


def shard_file(name: str, source: ModelSource, shard: str) -> Path:
    """Path of a shard, fetched from the hub if need be; raises `ModelError` where it is not to be had."""
    path = find_file(source, shard)
    if path is None:
        raise ModelError(f"model {name!r} ({source.path}) lacks {shard}, which its index names; give all files")
    return path


def checkpoint_names(key: str, prefix: str) -> tuple[str, ...]:
    """The names that a tensor of the headless model may have in a file, likeliest first.

    >>> checkpoint_names("wte.weight", "transformer")
    ('wte.weight', 'transformer.wte.weight')
    """
    legacy_keys = [key.replace(new, legacy) for new, legacy in _OLD_NAMES.items() if key.endswith(new)]
    return tuple(f"{front}{name}" for name in (key, *legacy_keys) for front in ("", f"{prefix}."))


def tensor_names(name: str, source: ModelSource) -> Collection[str]:
    """The stored names of all tensors; of a sharded model from its index, without its shards."""
    if source.gguf_file is None:
        files = _find_weights(name, source, WEIGHTS, INDEX) or _find_weights(name, source, OLD_WEIGHTS, OLD_INDEX)
        if isinstance(files, dict):
            return files
    return tensor_shapes(name, source)


def tensor_shapes(name: str, source: ModelSource) -> Shapes:
    """The shapes of all tensors by their stored names, from the headers of the files that transformers would read.

    Raises:
        OSError: there is no file of weights.
        ModelError: a file is damaged.
    """
    if source.gguf_file is not None:
        return _read_gguf(Path(source.path, source.gguf_file))[0]
    for single, index in ((WEIGHTS, INDEX), (OLD_WEIGHTS, OLD_INDEX)):
        read = _safetensors_shapes if single == WEIGHTS else _old_shapes
        files = _find_weights(name, source, single, index)
        if isinstance(files, Path):
            return read(name, files)
        if files is not None:
            shards = [shard_file(name, source, shard) for shard in dict.fromkeys(files.values())]
            return {key: shape for shard in shards for key, shape in read(name, shard).items()}
    raise OSError(f"there is no {WEIGHTS}, and no {INDEX}, {OLD_WEIGHTS} or {OLD_INDEX} in its place")


def _safetensors_shapes(name: str, path: Path) -> Shapes:
    with path.open("rb") as file:
        start = file.read(8)
    header_bytes = int.from_bytes(start, "little")
    if header_bytes > MOST_HEADER_BYTES:
        raise ModelError(
            f"model {name!r}: {path.name} has a header of {header_bytes:,} bytes, and at most {MOST_HEADER_BYTES:,} are"
            " read; give the model's own file"
        )
    with safe_open(path, framework="pt") as reader:
        names = reader.keys()
        return {name: tuple(reader.get_slice(name).get_shape()) for name in names}


def _old_shapes(name: str, path: Path) -> Shapes:
    """Shapes of a file that torch has saved; code in it is not run, and compressed parts are refused."""
    is_zip = zipfile.is_zipfile(path)
    if is_zip:
        with zipfile.ZipFile(path) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ModelError(f"model {name!r}: {path.name} is compressed; save it again with save_pretrained")
    state = torch.load(path, map_location="meta" if is_zip else "cpu", weights_only=True, mmap=is_zip or None)
    if not isinstance(state, Mapping):
        raise ModelError(f"model {name!r}: {path.name} holds no tensors by name; save it again with save_pretrained")
    return {str(key): tuple(value.shape) for key, value in state.items() if isinstance(value, torch.Tensor)}


_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a scalar by its kind; 8 is a text, 9 a list."""
_GGUF_INTEGERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}


class _GgufReader:
    """The bytes of a GGUF file from a position on; reading past its end is a ValueError."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def take(self, size: int) -> bytes:
        self._use(size)
        return self._file.read(size)

    def skip(self, size: int) -> None:
        self._use(size)
        self._file.seek(size, os.SEEK_CUR)

    def _use(self, size: int) -> None:
        if size > self._left:
            raise ValueError("the file ends before what its header says")
        self._left -= size

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def text(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> int | None:
        """The value of a setting where it is a whole number; any other is passed over."""
        if kind in _GGUF_INTEGERS:
            return self.number(_GGUF_INTEGERS[kind])
        count = 1
        if kind == 9:
            kind = self.number("<I")
            count = self.number("<Q")
        if kind in _GGUF_SIZES:
            self.skip(_GGUF_SIZES[kind] * count)
        elif kind == 8:
            for _ in range(count):  # a text takes eight bytes or more, so that the file's end ends this
                self.skip(self.number("<Q"))
        else:
            raise ValueError(f"no setting or list is of kind {kind}")
        return None


@cache
def _gguf_of(path: Path, _modified: int, size: int) -> tuple[Shapes, dict[str, int]]:
    with path.open("rb") as file:
        reader = _GgufReader(file, size)
        if reader.take(4) != b"GGUF" or reader.number("<I") not in (2, 3):
            raise ValueError("it is no GGUF file of version 2 or 3")
        num_tensors = reader.number("<Q")
        num_settings = reader.number("<Q")
        settings: dict[str, int] = {}
        for _ in range(num_settings):  # each takes twelve bytes or more, so that the file's end ends this
            key = reader.text()
            value = reader.value(reader.number("<I"))
            if value is not None:
                settings[key] = value
        shapes: Shapes = {}
        for _ in range(num_tensors):
            key = reader.text()
            dimensions = reader.number("<I")
            if dimensions > 8:
                raise ValueError(f"{key} has {dimensions} dimensions")
            shapes[key] = tuple(reader.number("<Q") for _ in range(dimensions))
            reader.skip(12)  # its kind and its place
        return shapes, settings


def _read_gguf(path: Path) -> tuple[Shapes, dict[str, int]]:
    """(shapes of the tensors, whole numbers among the settings) of a GGUF file; lists are passed over."""
    status = path.stat()
    return _gguf_of(path, status.st_mtime_ns, status.st_size)


def lacks_pooler(family: Family, names: Collection[str]) -> bool:
    """Return whether the stock classifier reads a pooler that these files lack, as those of masked models do."""
    if family.pooler is None:
        return False
    poolers = checkpoint_names(f"{family.pooler}.", family.prefix)
    return not any(name.startswith(poolers) for name in names)


MOST_BLOCKS = 1000
"""Most blocks of a model of which a site may hold a part; none that is known has a fifth of them."""


def check_blocks(name: str, config: Any, held: int, *, in_part: bool = False) -> bool:
    """Return whether the files hold all blocks of a config; raise `ModelError` where they hold none or lack some.

    Files that are read `in_part` may lack blocks: a cut client holds those below its cut.
    """
    asked = _whole_number(name, config, "num_hidden_layers")
    if in_part and 1 <= asked <= MOST_BLOCKS:
        return asked <= held
    if not 1 <= asked <= held:
        raise ModelError(
            f"model {name!r}: {CONFIG} says num_hidden_layers {asked:,} and the files hold {held:,} blocks; give files"
            " that belong together"
        )
    return True


def count_blocks(names: Collection[str], family: Family) -> int:
    """Number of blocks, from the first on, that have tensors in files with these names."""
    fronts = checkpoint_names(f"{family.blocks}.", family.prefix)
    found = {name.removeprefix(front).split(".")[0] for name in names for front in fronts if name.startswith(front)}
    count = 0
    while str(count) in found:
        count += 1
    return count


def check_heads(name: str, config: Any) -> None:
    """Raise `ModelError` unless heads divide the width, queries divide among keys, and a window holds a token."""
    heads = _whole_number(name, config, "num_attention_heads")
    hidden = _whole_number(name, config, "hidden_size")
    groups = heads
    if getattr(config, "num_key_value_heads", None) is not None:
        groups = _whole_number(name, config, "num_key_value_heads")
    if hidden < 1 or heads < 1 or groups < 1 or heads % groups:
        raise ModelError(
            f"model {name!r}: {CONFIG} says hidden_size {hidden:,} and num_attention_heads {heads:,} for {groups:,}"
            " heads of keys, which do not divide; give the model's own file"
        )
    if getattr(config, "head_dim", None) is not None:
        width = _whole_number(name, config, "head_dim")
        if width < 2 or width % 2:
            raise ModelError(f"model {name!r}: {CONFIG} says head_dim {width}; it is even")
    elif hidden % heads:
        raise ModelError(
            f"model {name!r}: {CONFIG} says hidden_size {hidden:,} and num_attention_heads {heads:,}, which does not"
            " divide it; give the model's own file"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and _whole_number(name, config, "sliding_window") < 1:
        raise ModelError(f"model {name!r}: {CONFIG} says sliding_window {window}; it is 1 or more, or null")


def check_packable(name: str, config: Any) -> None:
    """Raise `ModelError` where what a model makes of a text depends on what lies beside it in a row."""
    rotations = getattr(config, "rope_parameters", None) or {}
    if isinstance(rotations, Mapping) and rotations.get("rope_type") == "longrope":
        raise ModelError(
            f"model {name!r}: {CONFIG} has rope_type longrope, whose rotations follow from the longest text of a batch,"
            " so that texts in one row would change each other; choose another model"
        )
    if getattr(config, "chunk_size_feed_forward", 0):
        raise ModelError(
            f"model {name!r}: {CONFIG} has chunk_size_feed_forward {short_repr(config.chunk_size_feed_forward)}, which"
            " splits rows and changes no result; set it to 0"
        )


def _whole_number(name: str, config: Any, key: str) -> int:
    value = getattr(config, key, None)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"model {name!r}: {CONFIG} has {key} {short_repr(value)}, which is no whole number")
    return value


def check_tables(name: str, config: Any, shapes: Mapping[str, tuple[int, ...]], family: Family) -> None:
    """Raise `ModelError` where tokens, positions or width of a config are not those of the embeddings in the files."""
    hidden = _whole_number(name, config, "hidden_size")
    rows = {"vocab_size": family.word_table}
    if family.position_table is not None:
        rows["max_position_embeddings"] = family.position_table
    for key, table in rows.items():
        expected = _whole_number(name, config, key), hidden
        stored = next((shapes[n] for n in checkpoint_names(table, family.prefix) if n in shapes), None)
        if stored is None:
            raise ModelError(f"model {name!r} lacks {table}; give complete files")
        if stored != expected:
            raise ModelError(
                f"model {name!r}: {table} is {stored} in the files, and {CONFIG} says {key} {expected[0]:,} and"
                f" hidden_size {hidden:,}; give files that belong together"
            )


def check_size(name: str, auto: Any, config: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ModelError` where this class's model of a config, built without memory, is far larger than its files."""
    with torch.device("meta"):
        outline = auto.from_config(config, trust_remote_code=False)
    asked = sum(parameter.numel() for parameter in outline.parameters())
    held = sum(prod(shape) for shape in shapes.values())
    if asked > 2 * held:
        raise ModelError(
            f"model {name!r}: {CONFIG} asks for {asked:,} parameters and the files hold {held:,}; give files that"
            " belong together"
        )
