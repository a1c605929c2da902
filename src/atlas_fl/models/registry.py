"""The models by alias: where they come from and the settings that suit them."""

import socket
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

from atlas_fl.errors import ModelError, shown, unknown
from atlas_fl.io.fetch import embedded_dir, model_dir, vit_dir
from atlas_fl.io.parts import VIT


@dataclass(frozen=True, kw_only=True)
class Model:
    """A registered model."""

    alias: str
    path: str
    """Hub name, or `embedded` for one that `atlas fetch` brings."""
    parameters: str
    """Size as its authors give it."""
    lr: float
    """Peak learning rate that suits LoRA on it, or SGD on all of it where it sees images."""
    images: bool = False
    """Whether it sees images and reads no text."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the files of a model are looked for."""

    path: str
    gguf_file: str | None = None


MODELS: dict[str, Model] = {
    model.alias: model
    for model in (
        Model(alias="minilm", path="embedded", parameters="22.7M", lr=1e-3, note="all-MiniLM-L6-v2"),
        Model(alias="distilbert", path="distilbert-base-uncased", parameters="66M", lr=5e-4),
        Model(alias="bert", path="bert-base-uncased", parameters="110M", lr=3e-4),
        Model(alias="bert-large", path="bert-large-uncased", parameters="336M", lr=2e-4),
        Model(alias="roberta", path="roberta-base", parameters="125M", lr=3e-4),
        Model(alias="roberta-large", path="roberta-large", parameters="355M", lr=2e-4),
        Model(alias="gpt2", path="gpt2", parameters="124M", lr=5e-4),
        Model(alias="gpt2-medium", path="gpt2-medium", parameters="355M", lr=3e-4),
        Model(alias="gpt2-xl", path="gpt2-xl", parameters="1.5B", lr=2e-4),
        Model(alias="qwen2.5-0.5b", path="Qwen/Qwen2.5-0.5B", parameters="494M", lr=2e-4),
        Model(alias="llama-3.2-1b", path="meta-llama/Llama-3.2-1B", parameters="1.2B", lr=2e-4, note="gated"),
        Model(alias="smollm2-135m", path="HuggingFaceTB/SmolLM2-135M", parameters="135M", lr=5e-4, note="Llama"),
        Model(alias="mistral-7b", path="mistralai/Mistral-7B-v0.3", parameters="7.2B", lr=1e-4, note="gated"),
        Model(alias="dino-vits16", path="facebook/dino-vits16", parameters="21.7M", lr=1e-3, images=True, note="ViT"),
        Model(
            alias="dinov2-vits14",
            path="embedded",
            parameters="22.1M",
            lr=1e-3,
            images=True,
            note=f"`atlas fetch vision`; {VIT.note}",
        ),
    )
}


def locate(name: str) -> Source:
    """Where the files of this alias, hub name, directory or GGUF file are.

    Raises `ConfigError` for a name that is none of these, `ModelError` for a path where nothing is or that cannot be
    looked at, and `DataError` for an embedded model not fetched yet.
    """
    if name in MODELS:
        registered = MODELS[name].path
        if registered != "embedded":
            return Source(path=registered)
        return Source(path=str((vit_dir if MODELS[name].images else model_dir)(embedded_dir())))
    if (source := _at_path(name)) is not None:
        return source
    if name.startswith((".", "/", "~")):
        raise ModelError(
            f"model {name!r} is neither a directory nor a .gguf file; give the path of one, a hub name such as"
            f" owner/model, or one of {', '.join(sorted(MODELS))}"
        )
    if "/" in name or any(name == model.path for model in MODELS.values()):
        return Source(path=name)
    raise unknown("model", name, MODELS)


def _at_path(name: str) -> Source | None:
    """The directory or GGUF file of this name; raises `ModelError` where that cannot be told."""
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return Source(path=str(path))
        if path.is_file() and path.suffix == ".gguf":
            return Source(path=str(path.parent), gguf_file=path.name)
    except (OSError, RuntimeError, ValueError) as error:  # a long name, another's folder, no such user
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(
            f"model {shown(name)} cannot be looked for ({reason}); give the path of a directory or a .gguf file, a hub"
            f" name such as owner/model, or one of {', '.join(sorted(MODELS))}"
        ) from None
    return None


def hub_answers(*, timeout_seconds: float = 3.0) -> bool:
    """Whether the hub of models can be reached; its own client tries for half a minute before it says that it cannot.

    Behind a proxy this cannot be told in advance and is taken as a yes.
    """
    if HF_HUB_OFFLINE or getproxies():
        return not HF_HUB_OFFLINE
    url = urlsplit(ENDPOINT)
    try:
        socket.create_connection((url.hostname or "", url.port or 443), timeout=timeout_seconds).close()
    except OSError:
        return False
    return True


def suggested_lr(name: str) -> float:
    """The registered learning rate of a model, and that of BERT for one that is not registered."""
    return MODELS[name].lr if name in MODELS else MODELS["bert"].lr
