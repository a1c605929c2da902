"""PEFT adapters in and out: the only file that knows PEFT's table, its names and its folders."""

import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from atlas_fl.errors import ModelError, short_repr
from atlas_fl.models.loading import loading_lock, loading_options
from atlas_fl.models.registry import KNOWN, Family, modules_to_save
from atlas_fl.params import HEAD, LORA_A, LORA_B, PARTS, Params, head_keys, lora_modules, ranks, stock_key
from atlas_fl.storage.files import atomic_folder
from atlas_fl.storage.folder_access import MOST_JSON_BYTES, memory_bytes, read_named_file, write_atomic
from atlas_fl.storage.jsonl import from_json
from atlas_fl.storage.tensors import write_tensors

WEIGHTS, SETTINGS, LABELS = "adapter_model.safetensors", "adapter_config.json", "labels.json"
_ROOT = "base_model.model."


def default_targets(model_type: str) -> tuple[str, ...]:
    """The last parts of the module names that PEFT adapts in this architecture, e.g. `("query", "value")`.

    PEFT adapts query and value; architectures that stand in no table of its LoRA have these under other names.
    """
    if model_type in KNOWN["query_and_value"]:
        return tuple(KNOWN["query_and_value"][model_type])
    table: Mapping[str, list[str] | str] = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    targets = table.get(model_type)
    if not isinstance(targets, list):
        raise ModelError(
            f"PEFT knows no LoRA targets for {model_type!r}; name them with --targets, or take --targets all-linear"
        )
    return tuple(targets)


def export_adapter(
    params: Params,
    folder: Path,
    *,
    family: Family,
    base: str,
    scale: Callable[[int], float],
    labels: Sequence[str] = (),
) -> None:
    """Write one client's model as a PEFT folder that `PeftModel.from_pretrained` loads onto the stock classifier.

    The folder is there in full, or not at all (`storage.files.atomic_folder`).

    A client without a head writes text: its folder is for the stock causal language model. Of images it names no task,
    because PEFT has none of its own for them, and loads onto the stock image classifier. Ranks per module go into
    `rank_pattern` and `alpha_pattern`, with alpha = scale * rank. The names of the classes, in the order of the logits,
    go into `labels.json`, for which PEFT's settings have no place.
    """
    by_module = ranks(params)
    names = {module: family.stock_name(module) for module in by_module}
    max_rank = max(by_module.values())
    classifies, writer = bool(head_keys(params)), "SEQ_2_SEQ_LM" if family.seq2seq else "CAUSAL_LM"
    config = LoraConfig(
        task_type=None if family.images else "SEQ_CLS" if classifies else writer,
        base_model_name_or_path=base,
        inference_mode=True,
        r=max_rank,
        lora_alpha=_integral(scale(max_rank) * max_rank),
        lora_dropout=0.0,
        target_modules=list(names.values()),
        rank_pattern={names[module]: rank for module, rank in by_module.items()},
        alpha_pattern={names[module]: _integral(scale(rank) * rank) for module, rank in by_module.items()},
        modules_to_save=modules_to_save(family) if classifies else None,
        fan_in_fan_out=family.conv1d,
    )
    config.target_modules = sorted(names.values())  # PEFT makes a set of it, whose order is another in every process
    tensors = {peft_name(key, family): tensor.detach() for key, tensor in params.items()}
    with atomic_folder(folder) as draft:
        config.save_pretrained(str(draft))
        write_tensors(draft / WEIGHTS, tensors, metadata=("format", "pt"))
        if labels:
            write_atomic(draft / LABELS, (json.dumps(list(labels), ensure_ascii=False) + "\n").encode())


def export_merged(folder: Path, to: Path, *, base: str, auto: Any, multilabel: bool = False) -> None:
    """Write the base, in float32, with the adapter of a PEFT folder in its weights, as the stock class `auto` loads it.

    Classes are those of the folder's head and `labels.json`; without names it is a regression. What prepares the input
    goes with it.
    """
    labels, head = adapter_labels(folder), dict[str, Any]()
    if auto in (AutoModelForSequenceClassification, AutoModelForImageClassification):
        head = {"id2label": dict(enumerate(labels)), "label2id": {name: index for index, name in enumerate(labels)}}
    if auto is AutoModelForImageClassification:
        head["ignore_mismatched_sizes"] = True
    elif head and not labels:
        head = {"num_labels": 1, "problem_type": "regression"}
    elif multilabel:
        head["problem_type"] = "multi_label_classification"
    with loading_lock(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers under an old name
        model = auto.from_pretrained(base, dtype=torch.float32, **head, **loading_options(base))
        PeftModel.from_pretrained(model, str(folder), trust_remote_code=False).merge_and_unload().save_pretrained(to)
        processor = AutoImageProcessor if auto is AutoModelForImageClassification else AutoTokenizer
        processor.from_pretrained(base, **loading_options(base)).save_pretrained(to)


def _integral(alpha: float) -> int | float:
    return int(alpha) if alpha == int(alpha) else alpha


def peft_name(key: str, family: Family) -> str:
    """PEFT's name of one of our tensors in a saved adapter."""
    if key.startswith(HEAD):
        return _ROOT + stock_key(key)
    return f"{_ROOT}{family.stock_name(key)}.weight"


MERGE = (
    "merge it into its base (PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(DIR)) and give"
    " that as --model DIR"
)
"""The remedy for an adapter that cannot be carried."""
_PLAIN = frozenset(KNOWN["settings"]["of_plain_lora"])
"""Settings of PEFT that plain LoRA may have with any value."""
_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Ways to begin that leave the weights of the base as they are."""


def import_adapter(folder: Path, *, family: Family) -> tuple[dict[str, torch.Tensor], Callable[[int], float]]:
    """The tensors of a PEFT LoRA folder under our names, and the scale of every rank in it.

    Where modules of one rank are scaled differently, their B is multiplied so that one scale is right for all.
    Raises `ModelError` when the folder is none, is not LoRA, or holds anything that plain LoRA factors and a head of
    this family cannot say.
    """
    settings = _read_settings(folder)
    _check_settings(settings, folder)
    try:
        tensors = load(read_named_file(folder / WEIGHTS, max_bytes=memory_bytes()))
    except (OSError, ValueError, SafetensorError) as error:
        raise _no_adapter(folder, error) from error
    params: dict[str, torch.Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        key = _internal_name(name, family)
        if key is None:
            raise ModelError(
                f"the adapter in {folder} holds {name}, which is neither a LoRA factor of a block nor of the head"
                f" ({', '.join(modules_to_save(family))}); {MERGE}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{name} in {folder} holds NaN or infinite values; give an adapter that has finite ones")
        params[key] = tensor.float()
    modules = dict.fromkeys(key.removesuffix(LORA_A).removesuffix(LORA_B) for key in params if not key.startswith(HEAD))
    for module in modules:
        a, b = params.get(module + LORA_A), params.get(module + LORA_B)
        if a is None or b is None or a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not len(a):
            raise ModelError(f"the adapter in {folder} has no A and B of one rank for {module}; give complete files")
    return params, _scales(settings, params, folder, family=family).__getitem__


def adapter_base(folder: Path) -> str | None:
    """The base model that a PEFT folder names; None where it names none."""
    base = _read_settings(folder).get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None


def adapter_labels(folder: Path) -> tuple[str, ...]:
    """The names of the classes of an exported adapter in the order of its logits; none where the folder names none."""
    if not (folder / LABELS).is_file():
        return ()
    try:
        labels = from_json(read_named_file(folder / LABELS, max_bytes=MOST_JSON_BYTES))
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
            raise ValueError("it holds no list of names")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder / LABELS} cannot be read ({error}); remove it, or export the adapter again"
        ) from error
    return tuple(labels)


def _read_settings(folder: Path) -> Mapping[str, Any]:
    try:
        settings = from_json(read_named_file(folder / SETTINGS, max_bytes=MOST_JSON_BYTES))
    except (OSError, ValueError) as error:
        raise _no_adapter(folder, error) from error
    if not isinstance(settings, dict):
        raise _no_adapter(folder, f"{SETTINGS} holds no settings")
    return settings


def _no_adapter(folder: Path, reason: object) -> ModelError:
    return ModelError(
        f"no PEFT adapter in {folder}: {reason}; give a folder that holds {SETTINGS} and {WEIGHTS}, as PEFT's"
        " save_pretrained writes them"
    )


def _check_settings(settings: Mapping[str, Any], folder: Path) -> None:
    """Raise ModelError for a setting that changes what an adapter computes and that plain LoRA does not have."""
    defaults = LoraConfig().to_dict()
    for name, value in {"peft_type": None, **settings}.items():
        is_default = not value or value == defaults.get(name)
        if name == "peft_type":
            is_default = value == "LORA"
        elif name == "init_lora_weights":
            is_default = value in _INITS
        if name not in _PLAIN and not is_default:
            raise ModelError(
                f"the adapter in {folder} has {name}={short_repr(value)}, which plain LoRA has not; {MERGE}"
            )


def _internal_name(name: str, family: Family) -> str | None:
    """Our name of a tensor of PEFT; None of one that is neither a factor in a block nor of the head."""
    stripped = name.removeprefix(_ROOT).replace(".modules_to_save.default", "").replace(".default.weight", ".weight")
    if stripped.endswith((LORA_A + ".weight", LORA_B + ".weight")):
        # a model without a head has no prefix
        inside = stripped.removeprefix(family.prefix + ".").removesuffix(".weight")
        return inside if inside.startswith(family.block_lists) else None
    if stripped in family.parts:
        return PARTS + stripped
    return HEAD + stripped if any(stripped.startswith(module + ".") for module in modules_to_save(family)) else None


def _scales(settings: Mapping[str, Any], params: dict[str, Any], folder: Path, *, family: Family) -> dict[int, float]:
    """alpha over rank (or its root) by rank, as the folder's settings say it of the first module of this rank.

    The B of another module of this rank, which has another alpha, is multiplied.
    """
    alphas, patterns = settings.get("alpha_pattern") or {}, LoraConfig()
    usual = settings.get("lora_alpha", patterns.lora_alpha)  # PEFT takes its default where a file has none
    scales: dict[int, float] = {}
    for module in lora_modules(params):
        rank = params[module + LORA_A].shape[0]
        try:
            alpha = float(alphas.get(get_pattern_key(alphas, family.stock_name(module)), usual))
            if not math.isfinite(alpha):
                raise ValueError(f"{alpha} is not finite")
        except (AttributeError, TypeError, ValueError, re.error) as error:
            raise ModelError(
                f"the alpha of {module} in {folder / SETTINGS} cannot be read: {error}; give a number"
            ) from error
        scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
        if scale and rank not in scales:
            scales[rank] = scale
        elif scale != scales.setdefault(rank, 1.0):  # zero divides nothing
            params[module + LORA_B] = params[module + LORA_B] * (scale / scales[rank])
    return scales
