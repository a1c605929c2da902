"""Gated adapters in files: two stacked LoRA adapters with an input-dependent gate, which plain PEFT cannot load.

    y = W x + s (w_1 B_1 A_1 x + w_2 B_2 A_2 x)        (w_1, w_2) = softmax(G x + c)        for every token x

A folder holds `gated_adapter.safetensors`, `gated_adapter.json` with the base model and the scale s of every layer, and
`labels.json` as a PEFT folder has it. It has no `adapter_config.json`, so that PEFT refuses it and does not load it
without its gate. Tensors have the names of the stock model: `<layer>.lora_A` (2 rank, d_in), `<layer>.lora_B`
(d_out, 2 rank), `<layer>.lora_gate` (2, d_in + 1), and the head's own.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from atlas_fl.errors import ModelError
from atlas_fl.models import lora, peft_io, registry
from atlas_fl.params import HEAD, LORA_A, LORA_B, LORA_GATE, Params, lora_modules, stock_key
from atlas_fl.storage.files import atomic_folder
from atlas_fl.storage.folder_access import MOST_JSON_BYTES, memory_bytes, read_named_file, write_atomic
from atlas_fl.storage.jsonl import from_json
from atlas_fl.storage.tensors import write_tensors

WEIGHTS, SETTINGS = "gated_adapter.safetensors", "gated_adapter.json"
NOTE = (
    f"adapters have a gate: they are written as {WEIGHTS}, which plain PEFT cannot load;"
    " atlas_fl.load_gated_adapter puts one on the stock model"
)
"""Note for the user where such folders are written."""


def is_gated(params: Params) -> bool:
    """Return whether a gate weighs what is stacked in this model."""
    return any(key.endswith(LORA_GATE) for key in params)


def export_gated_adapter(
    params: Params,
    folder: Path,
    *,
    family: registry.Family,
    base: str,
    scale: Callable[[int], float],
    labels: Sequence[str] = (),
) -> None:
    """Write one client's gated model as a folder for `load_gated_adapter`; it is there in full, or not at all."""
    scales = {family.stock_name(module): scale(len(params[module + LORA_A])) for module in lora_modules(params)}
    tensors = {
        stock_key(key) if key.startswith(HEAD) else family.stock_name(key): tensor.detach()
        for key, tensor in params.items()
    }
    with atomic_folder(folder) as draft:
        settings = {"format": 1, "base_model_name_or_path": base, "scales": scales}
        write_atomic(draft / SETTINGS, (json.dumps(settings, indent=2) + "\n").encode())
        write_tensors(draft / WEIGHTS, tensors, metadata=("format", "pt"))
        peft_io.write_labels(draft, labels)


def load_gated_adapter(model: nn.Module, folder: str | Path) -> nn.Module:
    """Put the gated adapter of this folder on the stock transformers model, in place, with its head; the same model.

    Raises:
        ModelError: the folder holds none, or one for another architecture.
    """
    try:
        settings = from_json(read_named_file(Path(folder) / SETTINGS, max_bytes=MOST_JSON_BYTES))
        tensors = load(read_named_file(Path(folder) / WEIGHTS, max_bytes=memory_bytes()))
        scales = dict(settings["scales"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"no gated adapter in {folder}: {reason}; give a folder that holds {SETTINGS} and {WEIGHTS}"
        ) from error
    head = {key: tensor for key, tensor in tensors.items() if not key.endswith((LORA_A, LORA_B, LORA_GATE))}
    try:
        layers = {name: model.get_submodule(name) for name in scales}
        adapters = {name: tuple(tensors[name + part] for part in (LORA_A, LORA_B, LORA_GATE)) for name in scales}
        rest = model.load_state_dict(head, strict=False).unexpected_keys
    except (AttributeError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"the gated adapter in {folder} is not for this model: {' '.join(str(error).split())}; load its base model"
        ) from error
    if rest:
        raise ModelError(f"the gated adapter in {folder} is not for this model, which has no {rest[0]}; load its base")
    for name, layer in layers.items():
        a, b, gate = (tensor.to(next(layer.parameters()).device) for tensor in adapters[name])
        layer.register_forward_hook(_add_gated(a, b, gate, scale=scales[name]))
    return model


def _add_gated(a: Tensor, b: Tensor, gate: Tensor, *, scale: float) -> Callable[..., Tensor]:
    rank = len(a) // 2

    def add(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        x = inputs[0]
        first, second = (weight[..., None] for weight in lora.gate_weights(x, gate).unbind(-1))
        own, rest = (x @ a[part].T @ b[:, part].T for part in (slice(rank), slice(rank, None)))
        return output + scale * (first * own + second * rest)

    return add
