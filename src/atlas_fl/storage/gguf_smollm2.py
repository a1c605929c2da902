"""A SmolLM2 of transformers out of the GGUF file that a package ships: float32 weights, and its tokenizer.

GGUF has its own names of tensors, and stores the rows of queries and keys in another order: the two halves of a head
alternate, because llama.cpp rotates neighbours where transformers rotates halves. How texts are split into words is not
in the file but for a name; it stands in `smollm2/tokenizer.json`.
"""

import json
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from atlas_fl.storage.tensors import write_tensors

CONFIG_FILES = ("config.json", "tokenizer_config.json")
"""Files of `smollm2/`, with the values of the model's authors; the second holds its chat template."""
_STOCK_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "blk": "layers",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3
"""Type of a token that stands for no text."""


def convert(source: Path, target: Path) -> None:
    """Write `config.json`, `model.safetensors`, `tokenizer.json` and its config, made of the one GGUF file of `source`.

    The bytes are always the same.
    """
    from gguf import GGUFReader, dequantize  # an extra, which no other command needs

    (path,) = source.glob("*.gguf")
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    half = fields["llama.embedding_length"] // fields["llama.attention.head_count"] // 2
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith((".attn_q.weight", ".attn_k.weight")):
            values = values.reshape(-1, half, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        name = ".".join(_STOCK_NAMES.get(part, part) for part in tensor.name.split("."))
        tensors[f"model.{name}"] = torch.from_numpy(np.array(values))
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(target / "model.safetensors", tensors)
    own_files = resources.files(__package__).joinpath("smollm2")
    for name in CONFIG_FILES:
        (target / name).write_bytes(own_files.joinpath(name).read_bytes())
    tokenizer = json.loads(own_files.joinpath("tokenizer.json").read_text(encoding="utf-8"))
    words, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    as_it_is = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] = [
        {"id": number, "content": word, "special": True, **as_it_is}
        for number, (word, kind) in enumerate(zip(words, kinds, strict=True))
        if kind == _CONTROL
    ]
    tokenizer["model"]["vocab"] = {word: number for number, word in enumerate(words)}
    tokenizer["model"]["merges"] = fields["tokenizer.ggml.merges"]
    (target / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1, ensure_ascii=False), encoding="utf-8")
