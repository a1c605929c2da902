"""Folders of tiny random models of architectures without packs, as the hub has them."""

from pathlib import Path
from typing import Any

from tests.conftest import _tokenizer
from tests.models.tiny_vision import save_tiny

USUAL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 66,
    # wide draws, so that attention is far from uniform and a mistake in it shows
    "initializer_range": 0.25,
}
DEBERTA: dict[str, Any] = {**USUAL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "initializer_factor": 0.5}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "modernbert": ("modernbert", {**USUAL, "global_attn_every_n_layers": 2, "local_attention": 8}),
    "deberta-v2": ("deberta-v2", {**DEBERTA, "conv_kernel_size": 3}),
    "deberta-v3": ("deberta-v2", {**DEBERTA, "share_att_key": True, "norm_rel_ebd": "layer_norm"}),
    "albert": ("albert", {**USUAL, "embedding_size": 16}),
    "falcon": ("falcon", {**USUAL, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48}),
    "t5": ("t5", T5),
    "mpnet": ("mpnet", USUAL),
    "camembert": ("camembert", USUAL),
    "clip_text_model": ("clip_text_model", USUAL),
}
"""By name, transformers' name of the architecture and its sizes."""
_TOKENIZERS = {"falcon": "llama", "t5": "roberta"}
IMAGES = ("convnext", "swin")


def save_stock_folder(folder: Path, name: str, *, writes: bool = False) -> Path:
    """A folder with the headless model, or with all of a model that writes."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    if name in IMAGES:
        return save_tiny(folder, name)
    model_type, sizes = SIZES[name]
    tokenizer = _tokenizer(_TOKENIZERS.get(name, "bert"))
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "bos", "eos", "cls", "sep")}
    if model_type == "t5":
        ids["decoder_start_token_id"] = 10  # a word: this small, a model writes again what it has read
    config = AutoConfig.for_model(model_type, **sizes, vocab_size=len(tokenizer), **ids)
    auto = (AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM) if writes else AutoModel
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = auto.from_config(config)
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):  # zero at first, which would hide a bias that is forgotten
                parameter.data.normal_(0, 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
