"""Loading a frozen backbone from an alias, a hub name or a directory, or only its first blocks.

Files are checked (`models.files`) before a library reads them. `build_first_blocks` builds the lower part of a stock
model without the rest.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from atlas_fl.errors import ModelError, one_line, short_repr
from atlas_fl.models import files
from atlas_fl.models.attention import FLASH, PACKED, make_layout, register_packed_attention
from atlas_fl.models.backbone import Backbone, backbone_features, block_index
from atlas_fl.models.registry import FAMILIES, VISION_FAMILIES, Family, locate_model, with_trained_pooler
from atlas_fl.models.stock import auto_class, remove_last_layer, stock_family, stock_outputs
from atlas_fl.models.weights import FLOAT_TYPES, hold_weights
from atlas_fl.params import HEAD, Params
from atlas_fl.storage.files import atomic_folder

_LOADING = RLock()
UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    MemoryError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
    vars(torch.serialization)["pickle"].UnpicklingError,
)
"""Errors of libraries that read a config, a tokenizer or weights which somebody else has written: of a setting of
another type or another name whatever happens first; the last where an old file of weights would run code, which torch
does not do."""


def load_backbone(
    name: str,
    *,
    device: str = "cpu",
    gradient_checkpointing: bool = False,
    writes: bool = False,
    weights: Params | None = None,
    held: str = "fp32",
    fast: bool = False,
) -> Backbone:
    """The frozen backbone of this alias, hub name or directory; with its output embedding if it `writes` text.

    `held` is the type of all its matrices, where it runs in packs (`models.weights`). `fast` lets it attend by
    `flash_attention`. `weights` are those of
    `Backbone.frozen`, which then are not read: on the CPU the backbone's are these very tensors.
    Raises `ModelError` when the files are not to be had, the architecture is not known or cannot write.
    """
    register_packed_attention()
    source, family = find_family(name, writes=writes)
    if family.images:
        raise ModelError(
            f"model {name!r} has the architecture {family.model_type!r}; known: {', '.join(sorted(FAMILIES))};"
            " choose one of these or add a Family in models/known.toml"
        )
    if family.stock:
        return _load_stock_backbone(name, source, family, device=device, writes=writes, weights=weights)
    if writes and not family.causal:
        causal = ", ".join(sorted(model_type for model_type, candidate in FAMILIES.items() if candidate.causal))
        raise ModelError(
            f"model {name!r} has the architecture {family.model_type!r}, which cannot write text, as a task with"
            f" target= asks; choose a model of {causal}, such as --model gpt2"
        )
    auto = AutoModelForCausalLM if writes else AutoModel
    with as_model_error(name, source), loading_lock():
        tokenizer = load_tokenizer(name, source)
        config = AutoConfig.from_pretrained(source, **loading_options(source))
        options = {"attn_implementation": PACKED, "dtype": FLOAT_TYPES[held]}
        loaded, missing = load_stock(name, source, auto, config, weights=weights, **options)
        model = loaded.base_model
        inside = [key.removeprefix(f"{family.prefix}.") for key in missing]
        if missing and family.pooler is None and all(key.startswith("pooler.") for key in inside):
            model.pooler = None  # a part of the head where the stock classifier reads it
        else:
            check_complete(name, missing)
        prepare_model(name, model, tokenizer, family)
        if held != "fp32":
            hold_weights(model, held)
        loaded = loaded.requires_grad_(False).eval()
        backbone = Backbone(name=name, source=source, model=model, tokenizer=tokenizer, family=family, held=held)
        if weights is None:
            # settings that do not fit each other show here, and not in the first round
            tokens = torch.zeros(2, dtype=torch.int64)
            with torch.no_grad():
                backbone_features(backbone, tokens, tokens, make_layout([2]))
    loaded.to(device)
    if writes:
        backbone = replace(backbone, vocabulary=loaded.get_output_embeddings().weight)
    if gradient_checkpointing:
        checkpoint_blocks(backbone)
    return _with_fast_kernels(backbone) if fast else backbone


def _with_fast_kernels(backbone: Backbone) -> Backbone:
    """The model, attending by `flash_attention`; raise `ModelError` where it caps its scores (Gemma 2)."""
    if getattr(backbone.model.config, "attn_logit_softcapping", None) is not None:
        raise ModelError(
            f"model {backbone.name!r} caps its attention scores, and --fast-kernels do not; leave them out"
        )
    backbone.model.config._attn_implementation = FLASH
    return replace(backbone, fast=True)


def _load_stock_backbone(
    name: str, source: str, family: Family, *, device: str, writes: bool, weights: Params | None
) -> Backbone:
    """The backbone of the stock path; `weights` share the memory of another process's."""
    with as_model_error(name, source), loading_lock():
        tokenizer = load_tokenizer(name, source)
        config = AutoConfig.from_pretrained(source, **loading_options(source))
        config.use_cache = False
        model, missing = load_stock(name, source, auto_class(config, writes=writes), config)
        own_layers = (*family.parts, *(() if writes else (f"{family.head[0].name}.",)))
        check_complete(name, [key for key in missing if not key.startswith(own_layers)])
        head_start = remove_last_layer(model, family, missing)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if model.config.get_text_config().pad_token_id is None:
            model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        _check_tokens(name, model, tokenizer, family)
        for key, parameter in model.named_parameters():
            # as tensors of a mapped file, whose address decides last bits
            parameter.data = parameter.data.clone() if weights is None else weights[key]
        model = model.requires_grad_(False).eval()
        backbone = Backbone(
            name=name, source=source, model=model, tokenizer=tokenizer, family=family, head_start=head_start
        )
        if weights is None:
            _compute_stock_once(backbone, writes=writes)
    model.to(device)
    return replace(backbone, vocabulary=model.get_output_embeddings().weight) if writes else backbone


def _compute_stock_once(backbone: Backbone, *, writes: bool) -> None:
    """Let the model read two texts of different lengths: what does not fit shows here, and not in the first round."""
    lengths = [len(ids) for ids in backbone.tokenizer([".", ". . ."], verbose=False)["input_ids"]]
    ids = torch.tensor([token for ids in backbone.tokenizer([".", ". . ."])["input_ids"] for token in ids])
    ends = torch.tensor(lengths).cumsum(0) - 1
    with torch.no_grad():
        stock_outputs(backbone, ids, torch.zeros_like(ids), lengths, targets=ends if writes else None)


def load_stock(
    name: str, source: str, auto: Any, config: Any, *, weights: Params | None = None, **options: Any
) -> tuple[PreTrainedModel, list[str]]:
    """(the stock model, in float32 unless told, names of the tensors that it lacks), of these weights or the files'.

    Raises `ModelError` where the files hold less than the config asks for, or a tensor in another shape.
    """
    options = {"dtype": torch.float32, "output_loading_info": True, **options}
    if weights is None:
        files.check_size(name, auto, config, source)
        loaded, info = auto.from_pretrained(
            source, config=config, ignore_mismatched_sizes=True, **options, **loading_options(source)
        )
        # tensors of a mapped file lie wherever its header ends, and products of what is unaligned may end in other bits
        for tensor in (*loaded.parameters(), *loaded.buffers()):
            tensor.data = tensor.data.clone()
    else:
        with torch.device("meta"):  # transformers takes weights in the place of files by the model's own class alone
            model_class = type(auto.from_config(config, trust_remote_code=False))
        loaded, info = model_class.from_pretrained(
            None, config=config, state_dict=dict(weights), trust_remote_code=False, **options
        )
    for key, stored, expected in sorted(info["mismatched_keys"]):
        check_shape(name, key, stored, expected)
    return loaded, sorted(info["missing_keys"])


def check_complete(name: str, missing: Sequence[str]) -> None:
    """Raise `ModelError` where files lack tensors."""
    if missing:
        raise ModelError(f"model {name!r} lacks {missing[0]} and {len(missing) - 1} more tensors; give complete files")


@dataclass(frozen=True)
class _TokenizerErrors(AbstractContextManager[None]):
    """Raise `ModelError` for the plain `Exception`, and for no class below it.

    The tokenizers library raises it, without a class of its own, for a damaged file.
    """

    model: str

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is Exception:
            assert isinstance(error, Exception)
            raise ModelError(
                f"the tokenizer of model {self.model!r} could not be loaded: {first_line(error)}; give the model's own"
                " files"
            ) from None


def load_tokenizer(name: str, source: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer; raises `ModelError` where its files are damaged, or there are none."""
    with _TokenizerErrors(name):
        tokenizer = AutoTokenizer.from_pretrained(source, **loading_options(source))
    _pair_ids(tokenizer)  # settings of other types show when it is used
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ModelError(
            f"the tokenizer of model {name!r} knows no word: {source} has no file of its tokens; copy"
            " tokenizer.json, or the vocabulary that the model was published with, beside its config.json"
        )
    return tokenizer


def _pair_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a pair of texts of no words: what is set around them, by its own number and not by its name."""
    tokenizer(".", ".", truncation=True, max_length=8)
    ids: list[int] = tokenizer(".", ".", verbose=False)["input_ids"]
    return ids


def check_shape(name: str, key: str, stored: Sequence[int], expected: Sequence[int]) -> None:
    """Raise `ModelError` where a tensor's shape in the files is not that of its config."""
    if tuple(stored) != tuple(expected):
        raise ModelError(
            f"model {name!r}: {key} is {tuple(stored)} in the file and {tuple(expected)} by its config.json; give files"
            " that belong together"
        )


def prepare_model(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, family: Family) -> None:
    """Make the model ready for packed rows; both are changed.

    Raises `ModelError` where the tokenizer and the model's config or embeddings do not belong together.
    """
    # A packed row holds no padding, but GPT-2 would warn of one that ends with the token that it pads with.
    model.warn_if_padding_and_no_attention_mask = lambda *_: None
    _check_tokens(name, model, tokenizer, family)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not family.counts_from_padding:
        model.config.pad_token_id = tokenizer.pad_token_id
    model.config.use_cache = False
    model.config.return_dict = True
    model.config._attn_implementation = PACKED  # a config may name another, which would see the whole row


def _check_tokens(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, family: Family) -> None:
    rows = model.get_input_embeddings().weight.shape[0]
    ids = {**tokenizer.get_vocab(), "around a pair of texts": max(_pair_ids(tokenizer), default=0)}
    token, last = max(ids.items(), key=lambda item: item[1])
    if last >= rows:
        raise ModelError(
            f"the tokenizer of model {name!r} gives {short_repr(token)} the id {last:,}, and the model has embeddings"
            f" for ids below {rows:,}; give the tokenizer that belongs to the model"
        )
    padding = model.config.pad_token_id
    if family.counts_from_padding and not (isinstance(padding, int) and 0 <= padding < rows):
        raise ModelError(
            f"model {name!r}: config.json has pad_token_id {padding}, and {family.model_type} counts positions from it;"
            " give the id of the padding token"
        )
    if family.causal and None not in (padding, tokenizer.pad_token_id) and padding != tokenizer.pad_token_id:
        raise ModelError(
            f"model {name!r}: config.json has pad_token_id {padding} and its tokenizer pads with"
            f" {tokenizer.pad_token_id}, so that the stock classifier would read padding; set one to the other"
        )
    if family.stem == ("wte", "wpe") and "token_type_ids" in tokenizer.model_input_names:
        raise ModelError(
            f"the tokenizer of model {name!r} gives token types, which {family.model_type} would add as words; take"
            " token_type_ids out of model_input_names in tokenizer_config.json"
        )


def save_classifier(
    backbone: Backbone, params: Params, folder: Path, *, labels: Sequence[str], multilabel: bool = False
) -> None:
    """Write config, weights and tokenizer; stock `AutoModelForSequenceClassification` loads them to the same logits.

    Tensors that `params` lacks are the backbone's own. `labels` name the classes in order; a regression has none. The
    folder is there in full, or not at all (`storage.files.atomic_folder`).
    """
    source, family = backbone.source, backbone.family
    config = AutoConfig.from_pretrained(source, **loading_options(source))
    config.num_labels = len(params[family.head[-1].key + "weight"])
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {name: index for index, name in enumerate(labels)}
    if config.num_labels == 1:
        config.problem_type = "regression"  # without it a pipeline takes the value's sigmoid
    elif multilabel:
        config.problem_type = "multi_label_classification"
    config.pad_token_id = backbone.model.config.pad_token_id
    tensors = {
        key.removeprefix(HEAD) if key.startswith(HEAD) else f"{family.prefix}.{key}": tensor
        for key, tensor in {**backbone.frozen, **params}.items()
    }
    save_stock(AutoModelForSequenceClassification, config, tensors, backbone.tokenizer, folder)


def save_stock(auto: Any, config: Any, tensors: Params, processor: Any, folder: Path) -> None:
    """Write the stock model of this config with these tensors, and what prepares its input, as a folder."""
    with loading_lock():
        model = auto.from_config(config, trust_remote_code=False)
        assert not dict(model.named_parameters()).keys() - tensors.keys(), "a classifier is its backbone and its head"
        stored = [key for key in model.state_dict() if key in tensors]
        model.load_state_dict({key: tensors[key].cpu() for key in stored}, strict=False)
        with atomic_folder(folder) as draft:
            model.save_pretrained(draft)
            processor.save_pretrained(draft)


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


def find_family(name: str, *, writes: bool = False) -> tuple[str, Family]:
    """Source of a model's files and its architecture, without loading its weights; `writes` decides what has no packs.

    Raises `ModelError` where the folder, the config or the names of the tensors are no model's.
    """
    source = locate_model(name)
    with as_model_error(name, source), loading_lock():
        config = read_config(name, source)
        family = {**FAMILIES, **VISION_FAMILIES}.get(config.model_type)
        # EmbeddingGemma sees both ways inside a window, which is no packed row's
        if family is None or getattr(config, "use_bidirectional_attention", False):
            return source, stock_family(name, config, writes=writes)
        if files.lacks_pooler(config, family, files.tensor_names(name, source)):
            return source, with_trained_pooler(family)
        return source, family


def read_config(name: str, source: str) -> Any:
    """The config of a model's folder, whose files are checked; raises `ModelError` for what is no model's."""
    files.check_folder(name, source)
    files.check_raw_config(name, source)
    config = AutoConfig.from_pretrained(source, **loading_options(source))
    files.check_config(name, config)
    return config


def loading_options(source: str) -> dict[str, Any]:
    """The arguments with which the files of a source are read: code among them is never run, and nobody is asked."""
    return {"local_files_only": files.is_local(source), "trust_remote_code": False}


@contextmanager
def loading_lock() -> Iterator[None]:
    """Make a model while no other thread makes one, without a word of transformers; torch's generator stays as it was.

    While it loads, transformers replaces the function of its class that ties weights and then puts back what it found.
    Of two threads at once one finds the other's replacement, and nothing is tied any more in this process. Loading also
    draws what files lack from the global generator, which is not ours to move.
    """
    with _LOADING, torch.random.fork_rng(devices=[]):
        shows_progress = hf_logging.is_progress_bar_enabled()
        verbosity = hf_logging.get_verbosity()
        hf_logging.disable_progress_bar()
        # whoever loads a model looks at the tensors that it or its files lack, and raises an error of our own
        hf_logging.set_verbosity_error()
        try:
            yield
        finally:
            hf_logging.set_verbosity(verbosity)
            if shows_progress:
                hf_logging.enable_progress_bar()


@contextmanager
def as_model_error(name: str, source: str, *, images: bool = False) -> Iterator[None]:
    """Turn any error of a library that reads a model's files into `ModelError`."""
    try:
        yield
    except UNREADABLE as error:
        failure = " as an image classifier" if images else ""
        reader = "preprocessor_config.json" if images else "tokenizer.json"
        embedded = "vision` and --model dinov2-vits14" if images else "embedded` and --model minilm"
        raise ModelError(
            f"model {name!r} ({source}) could not be loaded{failure}: {first_line(error)}; give a directory that"
            f" holds config.json, model.safetensors and {reader}, fill the hub's cache on a machine with a network and"
            f" copy it, or use the embedded one: `atlas fetch {embedded}"
        ) from error


def build_first_blocks(name: str, *, blocks: int | None) -> Backbone:
    """A backbone of this model's embeddings and first `blocks` blocks, with its tokenizer; the weights are not read.

    None is all blocks: an outline of the model, for whom names and sizes suffice.

    Nothing is built of what stands above, so the state dict of the model names what a file has to give.
    Raises `ModelError` where the model is not to be had or has no more blocks than these.
    """
    register_packed_attention()
    source, family = find_family(name)
    if family.stock:
        raise ModelError(
            f"model {name!r} has the architecture {family.model_type!r}, which runs through the stock path and cannot"
            f" be cut; known to be cut: {', '.join(sorted(FAMILIES))}; leave --split out, or choose one of these"
        )
    with as_model_error(name, source), loading_lock():
        tokenizer = load_tokenizer(name, source)
        config = AutoConfig.from_pretrained(source, **loading_options(source))
        total = int(config.num_hidden_layers)
        if blocks is not None and not 0 <= blocks < total:
            raise ModelError(
                f"model {name!r} has {total} blocks and cannot be cut at {blocks}; choose 0 to {total - 1}"
            )
        config.num_hidden_layers = total if blocks is None else blocks
        model = AutoModel.from_config(config, attn_implementation=PACKED, dtype=torch.float32, trust_remote_code=False)
    prepare_model(name, model, tokenizer, family)
    needed = {*family.stem, family.blocks.split(".")[0], family.rotary}
    for child in [child for child, _ in model.named_children() if child not in needed]:
        delattr(model, child)
    return Backbone(
        name=name, source=source, model=model.requires_grad_(False).eval(), tokenizer=tokenizer, family=family
    )


def first_block_tensors(backbone: Backbone, *, blocks: int) -> dict[str, torch.Tensor]:
    """The frozen tensors of a whole model that stand in its first `blocks` blocks or before them, by name."""
    stem = tuple(f"{module}." for module in backbone.family.stem)
    inside = f"{backbone.family.blocks}."
    return {
        name: tensor
        for name, tensor in backbone.parameters.items()
        if name.startswith(stem) or (name.startswith(inside) and block_index(backbone, name) < blocks)
    }


def first_line(error: Exception) -> str:
    """Message of a library's error, in a line; its kind where that is a mere key or nothing."""
    lines = str(error).strip().splitlines()
    if lines and lines[0].endswith(":"):
        lines[0] = " ".join(lines[0:2])
    text = one_line(" ".join(lines[0].split())).rstrip(".:") if lines else ""
    return text if len(text.split()) > 1 else f"{type(error).__name__} {text}".strip()
