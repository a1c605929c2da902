"""A SmolLM2 of transformers out of the GGUF file that a package ships: float32 weights, and its tokenizer.

transformers reads the weights. How texts are split into words is not in the file but for a name; it stands in
`smollm2/tokenizer.json`.
"""

import json
from importlib import resources
from pathlib import Path

import torch

from atlas_fl.storage.tensors import write_tensors

CONFIG_FILES = ("config.json", "tokenizer_config.json")
"""Files of `smollm2/`, with the values of the model's authors; the second holds its chat template."""
_CONTROL = 3
"""Type of a token that stands for no text."""


def convert(source: Path, target: Path) -> None:
    """Write `config.json`, `model.safetensors`, `tokenizer.json` and its config, made of the one GGUF file of `source`.

    The bytes are always the same.
    """
    from gguf import GGUFReader  # an extra, which no other command needs
    from transformers import AutoModelForCausalLM

    (path,) = source.glob("*.gguf")
    fields = {name: field.contents() for name, field in GGUFReader(path).fields.items()}
    how = {"gguf_file": path.name, "dtype": torch.float32, "local_files_only": True}
    tensors = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False, **how).state_dict()
    del tensors["lm_head.weight"]  # tied to the embeddings
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
