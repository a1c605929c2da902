"""Adapters of language models in GGUF, as llama.cpp and what builds on it read them (`--lora FILE`).

The names of the tensors are those of the package `gguf`. Rows of queries and keys of Llama and Mistral stand in another
order there: the two halves of a head alternate, because llama.cpp rotates neighbours where transformers rotates halves.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor
from transformers import PretrainedConfig

from atlas_fl.errors import ModelError
from atlas_fl.models.registry import KNOWN, Family
from atlas_fl.params import LORA_A, LORA_B, Params, ranks
from atlas_fl.storage.extras import import_extra

FILE = "adapter.gguf"
ARCHITECTURES: Mapping[str, str] = KNOWN["llama_cpp"]
"""llama.cpp's name of an architecture by that of transformers."""
_ROTATED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
"""Heads by the name of a layer whose rows stand in another order, as the model's config has them."""


def export_gguf_adapter(
    params: Params, folder: Path, *, family: Family, config: PretrainedConfig, scale: Callable[[int], float]
) -> None:
    """Write `adapter.gguf` (float32) with these LoRA factors.

    llama.cpp multiplies each B A by alpha over its rank; other scales than that of the largest rank go into B.

    Raises:
        ModelError: the architecture has other layers there.
        ConfigError: the package `gguf` is missing.
    """
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise ModelError(
            f"--form gguf cannot hold adapters of {config.model_type}; allowed: {', '.join(ARCHITECTURES)}; export the"
            " adapter as a PEFT folder (--form adapter)"
        )
    gguf = import_extra("gguf", extra="llm", asked="--form gguf needs")
    by_module = ranks(params)
    alpha = scale(max(by_module.values())) * max(by_module.values())
    (number,) = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(folder / FILE, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for module, rank in by_module.items():
        name = names.get_name(family.stock_name(module))
        b = params[module + LORA_B] * (scale(rank) * rank / alpha)
        layer = name.rpartition(".")[2]
        if architecture == "llama" and layer in _ROTATED:
            b = _alternate_halves(b, heads=getattr(config, _ROTATED[layer]))
        for ending, tensor in (("lora_a", params[module + LORA_A]), ("lora_b", b)):
            writer.add_tensor(f"{name}.weight.{ending}", tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _alternate_halves(rows: Tensor, *, heads: int) -> Tensor:
    """The rows (heads * 2 * half, rank) with those of the two halves of each head in turn."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
