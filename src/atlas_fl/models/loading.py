"""From an alias, a hub name, a directory or a GGUF file to a frozen backbone."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from atlas_fl.errors import LINE_CHARACTERS, ModelError
from atlas_fl.models.backbone import Backbone
from atlas_fl.models.family import FAMILIES, VISION_FAMILIES, Family
from atlas_fl.models.packing import PACKED, register_packed_attention
from atlas_fl.models.registry import Source, hub_answers, locate
from atlas_fl.rng import torch_generator
from atlas_fl.types import Params

_LOADING = RLock()
UNREADABLE = (OSError, ValueError, ImportError, SafetensorError, vars(torch.serialization)["pickle"].UnpicklingError)
"""What reading files raises; the last where an old file of weights would run code, which torch does not do."""


def load_backbone(
    name: str,
    *,
    device: str = "cpu",
    gradient_checkpointing: bool = False,
    writes: bool = False,
    weights: Params | None = None,
) -> Backbone:
    """The frozen backbone of this alias, hub name or directory; with its output embedding if it `writes` text.

    `weights` are those of `Backbone.frozen`, which then are not read: on the CPU the backbone's are these very tensors.
    Raises `ModelError` when the files are not to be had, the architecture is not known or cannot write.
    """
    register_packed_attention()
    source, family = find_family(name)
    if family.images:
        raise ModelError(_not_known(name, family.model_type))
    if writes and not family.causal:
        raise ModelError(_cannot_write(name, family))
    with readable(name, source), one_at_a_time():
        tokenizer = AutoTokenizer.from_pretrained(source.path, **how_read(source))
        loaded, missing = _loaded(source, AutoModelForCausalLM if writes else AutoModel, weights)
    _draw_pooler(name, loaded, family, sorted(missing))
    model = loaded.base_model
    prepare(model, tokenizer)
    loaded = loaded.to(device).requires_grad_(False).eval()
    vocabulary = loaded.get_output_embeddings().weight if writes else None
    backbone = Backbone(
        name=name, source=source, model=model, tokenizer=tokenizer, family=family, vocabulary=vocabulary
    )
    if gradient_checkpointing:
        checkpoint_blocks(backbone)
    return backbone


def _loaded(source: Source, auto: Any, weights: Params | None) -> tuple[PreTrainedModel, Collection[str]]:
    """(model, names of the tensors that its files lack); made of these weights where they are given."""
    how: dict[str, Any] = {"attn_implementation": PACKED, "dtype": torch.float32, "output_loading_info": True}
    if weights is None:
        loaded, found = auto.from_pretrained(source.path, **how, **how_read(source))
        return loaded, found["missing_keys"]
    config = AutoConfig.from_pretrained(source.path, **how_read(source))
    with torch.device("meta"):  # transformers takes weights in the place of files by the model's own class alone
        kind = type(auto.from_config(config, trust_remote_code=False))
    loaded, found = kind.from_pretrained(None, config=config, state_dict=dict(weights), trust_remote_code=False, **how)
    return loaded, found["missing_keys"]


def prepare(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the model ready for packed rows; both are changed."""
    # A packed row holds no padding, but GPT-2 would warn of one that ends with the token that it pads with.
    model.warn_if_padding_and_no_attention_mask = lambda *_: None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.use_cache = False


def _draw_pooler(name: str, model: PreTrainedModel, family: Family, missing: Sequence[str]) -> None:
    """Draw a pooler that the files lack, as those of masked language models do: the same in every process.

    Raises `ModelError` where anything else is missing.
    """
    for key in missing:
        if family.pooler is None or not key.startswith(family.pooler + "."):
            raise ModelError(f"model {name!r} lacks {key} and {len(missing) - 1} more tensors; give complete files")
        tensor = model.get_parameter(key).detach()
        spread = model.config.initializer_range if tensor.dim() > 1 else 0.0
        tensor.normal_(0.0, spread, generator=torch_generator(0, "pooler", key))


def checkpoint_blocks(backbone: Backbone) -> None:
    """Keep only the inputs of every block but the last, whose inside is needed again at once anyway.

    The last one could not be run again in the backward pass either: by then it no longer is narrowed.
    """
    model = backbone.model
    # transformers 5 renames it and warns about the old name as soon as it knows the new one
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for block in list(backbone.blocks)[:-1]:
        # Checkpointing acts in training mode only. What is inside stays in evaluation mode, without any dropout.
        block.training = True


def find_family(name: str) -> tuple[Source, Family]:
    """Where a model's files are and what architecture it has, without loading its weights."""
    source = locate(name)
    with readable(name, source):
        config = AutoConfig.from_pretrained(source.path, **how_read(source))
    return source, _family(name, config.model_type)


def how_read(source: Source) -> dict[str, Any]:
    """The arguments with which the files of a source are read: code among them is never run, and nobody is asked."""
    gguf = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    return {"local_files_only": is_local(source), "trust_remote_code": False, **gguf}


def is_local(source: Source) -> bool:
    """Whether files are looked for on this machine alone: in a directory, or where the hub does not answer."""
    return is_directory(source.path) or not hub_answers()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Make a model while no other thread makes one, without progress bars, and leave torch's generator as it was.

    While it loads, transformers replaces the function of its class that ties weights and then puts back what it found.
    Of two threads at once one finds the other's replacement, and nothing is tied any more in this process. Loading also
    draws what files lack from the global generator, which is not ours to move.
    """
    with _LOADING, _no_bars(), torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers' progress bars off the screen, which shows the run's own."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


@contextmanager
def readable(name: str, source: Source) -> Iterator[None]:
    """Turn what can go wrong in reading a model's files into `ModelError`."""
    try:
        yield
    except UNREADABLE as error:
        raise ModelError(_not_found(name, source, error)) from error


def _family(name: str, model_type: str) -> Family:
    known = {**FAMILIES, **VISION_FAMILIES}
    if model_type not in known:
        raise ModelError(_not_known(name, model_type))
    return known[model_type]


def _not_known(name: str, model_type: str) -> str:
    return (
        f"model {name!r} has the architecture {model_type!r}; known: {', '.join(sorted(FAMILIES))};"
        " choose one of these or add a Family in models/family.py"
    )


def _cannot_write(name: str, family: Family) -> str:
    able = ", ".join(sorted(kind for kind, known in FAMILIES.items() if known.causal))
    return (
        f"model {name!r} has the architecture {family.model_type!r}, which cannot write text, as a task with target="
        f" asks; choose a model of {able}, such as --model gpt2"
    )


def _not_found(name: str, source: Source, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0].rstrip(".")[:LINE_CHARACTERS]
    return (
        f"model {name!r} ({source.path}) could not be loaded: {reason}; give a directory that holds config.json,"
        " model.safetensors and tokenizer.json, fill the hub's cache on a machine with a network and copy it,"
        " or use the embedded one: `atlas fetch embedded` and --model minilm"
    )


def is_directory(name: str) -> bool:
    """Whether a model's name is a directory on this machine."""
    return Path(name).expanduser().is_dir()
