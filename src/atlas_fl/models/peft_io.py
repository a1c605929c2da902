"""PEFT adapters in and out: the only file that knows PEFT's table, its names and its folders."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load

from atlas_fl.errors import ModelError
from atlas_fl.models.registry import VISION_FAMILIES, Family, modules_to_save
from atlas_fl.params import HEAD, LORA_A, LORA_B, Params, head_keys, lora_modules, ranks
from atlas_fl.storage.files import atomic_folder
from atlas_fl.storage.folder_access import MOST_JSON_BYTES, memory_bytes, read_named_file, write_atomic
from atlas_fl.storage.jsonl import from_json
from atlas_fl.storage.tensors import write_tensors

WEIGHTS, SETTINGS, LABELS = "adapter_model.safetensors", "adapter_config.json", "labels.json"
_ROOT = "base_model.model."
_QUERY_AND_VALUE = {"distilbert": ("q_lin", "v_lin"), **dict.fromkeys(VISION_FAMILIES, ("q_proj", "v_proj"))}


def default_targets(model_type: str) -> tuple[str, ...]:
    """The last parts of the module names that PEFT adapts in this architecture, e.g. `("query", "value")`.

    PEFT adapts query and value; architectures that stand in no table of its LoRA have these under other names.
    """
    if model_type in _QUERY_AND_VALUE:
        return _QUERY_AND_VALUE[model_type]
    table: Mapping[str, list[str] | str] = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    targets = table.get(model_type)
    if not isinstance(targets, list):
        raise ModelError(f"PEFT knows no LoRA targets for {model_type!r}; name them with --targets")
    return tuple(targets)


def export_adapter(
    params: Params,
    folder: Path,
    *,
    family: Family,
    base: str,
    scale: Callable[[int], float],
    labels: Sequence[str] = (),
    within: Path | None = None,
) -> None:
    """Write one client's model as a PEFT folder that `PeftModel.from_pretrained` loads onto the stock classifier.

    The folder is there in full, or not at all, and no part of its path below `within` is a link
    (`storage.files.atomic_folder`).

    A client without a head writes text: its folder is for the stock causal language model. Of images it names no task,
    because PEFT has none of its own for them, and loads onto the stock image classifier. Ranks per module go into
    `rank_pattern` and `alpha_pattern`, with alpha = scale * rank. The names of the classes, in the order of the logits,
    go into `labels.json`, for which PEFT's settings have no place.
    """
    by_module = ranks(params)
    names = {module: f"{family.prefix}.{module}" for module in by_module}
    max_rank = max(by_module.values())
    classifies = bool(head_keys(params))
    config = LoraConfig(
        task_type=None if family.images else "SEQ_CLS" if classifies else "CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
        r=max_rank,
        lora_alpha=_integral(scale(max_rank) * max_rank),
        lora_dropout=0.0,
        target_modules=sorted(names.values()),
        rank_pattern={names[module]: rank for module, rank in by_module.items()},
        alpha_pattern={names[module]: _integral(scale(rank) * rank) for module, rank in by_module.items()},
        modules_to_save=modules_to_save(family) if classifies else None,
        fan_in_fan_out=family.conv1d,
    )
    tensors = {peft_name(key, family): tensor.detach() for key, tensor in params.items()}
    with atomic_folder(folder, within=within) as draft:
        config.save_pretrained(str(draft))
        write_tensors(draft / WEIGHTS, tensors, metadata=("format", "pt"))
        if labels:
            write_atomic(draft / LABELS, (json.dumps(list(labels), ensure_ascii=False) + "\n").encode())


def _integral(alpha: float) -> int | float:
    return int(alpha) if alpha == int(alpha) else alpha


def peft_name(key: str, family: Family) -> str:
    """PEFT's name of one of our tensors in a saved adapter."""
    if key.startswith(HEAD):
        return _ROOT + key.removeprefix(HEAD)
    return f"{_ROOT}{family.prefix}.{key}.weight"


def import_adapter(folder: Path, *, family: Family) -> tuple[dict[str, torch.Tensor], Callable[[int], float]]:
    """The tensors of a PEFT LoRA folder under our names, and the scale of every rank in it.

    Raises `ModelError` when the folder is none, is not LoRA, or scales two modules of one rank differently.
    """
    try:
        settings = from_json(read_named_file(folder / SETTINGS, max_bytes=MOST_JSON_BYTES))
        tensors = load(read_named_file(folder / WEIGHTS, max_bytes=memory_bytes()))
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"no PEFT adapter in {folder}: {error}; give a folder that holds {SETTINGS} and {WEIGHTS}"
        ) from error
    if settings.get("peft_type") != "LORA":
        raise ModelError(f"the adapter in {folder} is {settings.get('peft_type')!r}; only LORA can be imported")
    params = {_internal_name(name, family): tensor.float() for name, tensor in tensors.items()}
    scales = _scales(settings, params, folder, family=family)
    return params, scales.__getitem__


def _internal_name(name: str, family: Family) -> str:
    stripped = name.removeprefix(_ROOT).replace(".modules_to_save.default", "").replace(".default.weight", ".weight")
    backbone = family.prefix + "."
    if stripped.startswith(backbone) and stripped.endswith((LORA_A + ".weight", LORA_B + ".weight")):
        return stripped.removeprefix(backbone).removesuffix(".weight")
    return HEAD + stripped


def _scales(settings: Mapping[str, Any], params: Params, folder: Path, *, family: Family) -> dict[int, float]:
    """alpha over rank (or its root) by rank, as the folder's settings say it of every module."""
    alpha_pattern: Mapping[str, float] = settings.get("alpha_pattern") or {}
    scales: dict[int, float] = {}
    for module in lora_modules(params):
        rank = params[module + LORA_A].shape[0]
        alpha = alpha_pattern.get(get_pattern_key(alpha_pattern, f"{family.prefix}.{module}"), settings["lora_alpha"])
        scale = float(alpha) / (rank**0.5 if settings.get("use_rslora") else rank)
        if scales.setdefault(rank, scale) != scale:
            raise ModelError(
                f"the adapter in {folder} scales modules of rank {rank} by {scales[rank]} and {scale}; export it with"
                " one alpha for a rank"
            )
    return scales
