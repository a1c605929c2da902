"""Digests of all that a frozen model computes with: its weights, its architecture, and what prepares its input.

Two models that agree in the three compute the same, wherever their files lie. They are equal for a folder and for the
same model in a cache: names, paths, versions of libraries and settings that only training from scratch or generation
reads are left out, and so is what is spelled out in one `config.json` and is the default in the other.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from transformers import AutoConfig

from atlas_fl.frozen import Frozen
from atlas_fl.models.backbone import Backbone
from atlas_fl.models.loading import as_model_error, loading_lock, loading_options
from atlas_fl.models.registry import KNOWN
from atlas_fl.params import digest

NOT_COMPUTED_WITH = frozenset(KNOWN["settings"]["not_computed_with"])
"""Entries of a `config.json` that a frozen backbone computes nothing with. The tokens are the tokenizer's here, also
where padding shifts positions, and are digested with it."""
_IMAGE_INPUT = ("image_size", "mean", "std", "rescale", "resample")
_SPECIAL = ("pad_token_id", "unk_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")


class ModelIdentity(Frozen):
    """Digests of all that a model computes with, a SHA-256 each."""

    weights: str | None
    """Digest of all tensors below an output embedding; None where none are loaded yet."""
    vocabulary: str | None
    """Digest of an output embedding that is no copy of the input's; None where none is loaded."""
    architecture: str
    """Digest of the entries of `config.json` that take part in computing."""
    tokenizer: str
    """Digest of what turns texts into tokens, or pixels into the model's input."""


def model_identity(backbone: Backbone, *, has_weights: bool = True) -> ModelIdentity:
    """The identity of this backbone; without weights where only some of them, or none, are loaded."""
    own = backbone.frozen.keys() - backbone.parameters.keys()
    return ModelIdentity(
        weights=weights_digest(backbone) if has_weights else None,
        vocabulary=digest({name: backbone.frozen[name] for name in own}) if has_weights and own else None,
        architecture=_digest(_architecture(backbone)),
        tokenizer=_digest(
            _text_input(backbone.tokenizer)
            if backbone.vision is None
            else {name: getattr(backbone.vision, name) for name in _IMAGE_INPUT}
        ),
    )


def weights_digest(backbone: Backbone) -> str:
    """SHA-256 of the parameters of a backbone, and of what it counts beside them, such as means of batches."""
    # an output embedding has its own digest: who writes no text does not load it
    buffers = dict(backbone.model.named_buffers())
    stored = {name: tensor for name, tensor in backbone.model.state_dict().items() if name in buffers}
    return digest({**backbone.parameters, **stored})


def _architecture(backbone: Backbone) -> Mapping[str, Any]:
    """The entries of the files' `config.json` that differ from the architecture's defaults and are computed with."""
    source = backbone.source
    with as_model_error(backbone.name, source), loading_lock():
        config = AutoConfig.from_pretrained(source, **loading_options(source))
    defaults = type(config)().to_dict()
    values = {name: value for name, value in config.to_dict().items() if name not in NOT_COMPUTED_WITH}
    changed = {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}
    return {**changed, "model_type": config.model_type}


def _text_input(tokenizer: Any) -> Mapping[str, Any]:
    """Settings by which a tokenizer computes; how it cuts and fills up is set by each call and left out."""
    special = {name: getattr(tokenizer, name) for name in _SPECIAL}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        content: dict[str, Any] = {"kind": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    else:
        backend.no_truncation()
        backend.no_padding()
        content = {"backend": backend.to_str()}  # in one order, however the file was written
    return {**content, "special": special, "cut": tokenizer.truncation_side}


def _digest(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
