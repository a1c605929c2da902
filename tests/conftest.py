"""Tiny models of every architecture, clients to train on them, and the stock and PEFT models to compare with.

Everything heavy is imported inside the fixtures, so that tests without a model start at once.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy as np
import pytest

from tests.architectures import architectures_in_turn
from tests.durations import pytest_addoption as pytest_addoption
from tests.durations import pytest_configure as pytest_configure
from tests.durations import pytest_runtest_makereport as pytest_runtest_makereport
from tests.durations import pytest_runtest_setup as pytest_runtest_setup
from tests.examples import PROFILE, QUICK_EXAMPLES

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from atlas_fl.client.job import ClientTokens, Site
    from atlas_fl.models.backbone import Backbone

# The same examples in every run: what is merged does not depend on luck. HYPOTHESIS_PROFILE=default searches anew.
# No deadline: on a busy machine an example takes many times its usual time.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("quick", derandomize=True, deadline=None, max_examples=QUICK_EXAMPLES)
hypothesis.settings.load_profile(PROFILE)

WORDS = [f"w{i}" for i in range(40)]
_TOKENIZER_OF = {
    "distilbert": "bert",
    "mistral": "llama",
    "xlm-roberta": "roberta",
    "electra": "bert",
    "qwen3": "qwen2",
    "phi3": "llama",
    "gemma2": "llama",
    "gemma3_text": "llama",
}
"""Architectures whose tokenizer is that of another one."""
_SPECIAL = {
    "bert": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "roberta": ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
    "gpt2": ("<|endoftext|>",),
    "qwen2": ("<|endoftext|>", "<|im_end|>"),
    "llama": ("<unk>", "<s>", "</s>"),
}
_ROLES: dict[str, dict[str, str]] = {
    "bert": {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"},
    "roberta": {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "gpt2": {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "qwen2": {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
    "llama": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
}
_TEMPLATES = {
    "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "roberta": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    "llama": ("<s> $A", "<s> $A <s> $B"),
}
TARGETS = {
    "bert": ("query", "value"),
    "roberta": ("query", "value"),
    "distilbert": ("q_lin", "v_lin"),
    "gpt2": ("c_attn",),
    "qwen2": ("q_proj", "v_proj"),
    "llama": ("q_proj", "v_proj"),
    "mistral": ("q_proj", "v_proj"),
    "xlm-roberta": ("query", "value"),
    "electra": ("query", "value"),
    "qwen3": ("q_proj", "v_proj"),
    "phi3": ("qkv_proj",),
    "gemma2": ("q_proj", "v_proj"),
    "gemma3_text": ("q_proj", "v_proj"),
}
"""PEFT's own choice, spelled out."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A client for tests: its classes (0 for a regression), examples and rank in every block."""

    name: str
    labels: int = 2
    examples: int = 12
    ranks: tuple[int, int, int] = (2, 3, 4)
    words: tuple[int, int] = (1, 14)
    pairs: bool = False


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """One architecture: the directory that both sides load, our backbone, and the stock classifier."""

    name: str
    path: Path
    backbone: Backbone
    targets: tuple[str, ...] = field(default=())

    def stock(self, num_labels: int = 3) -> PreTrainedModel:
        """A fresh stock classifier, in evaluation mode, whose head has been drawn from a fixed seed."""
        return copy.deepcopy(_classifier(self.path, num_labels, self.backbone.tokenizer.pad_token_id))

    def modules(self, targets: Sequence[str] | None = None) -> dict[str, torch.nn.Module]:
        """The layers of the backbone's blocks that adapters stand on, found by their last names."""
        ends = tuple("." + end for end in targets or self.targets)
        named = self.backbone.model.named_modules()
        return {name: module for name, module in named if name.endswith(ends) and any(map(str.isdigit, name))}

    def params(self, spec: Spec, targets: Sequence[str] | None = None, *, seed: int = 0) -> dict[str, torch.Tensor]:
        """A trained-looking model of a client: random A, random B that is not zero, and the stock head."""
        import torch

        source = torch.Generator().manual_seed(seed)
        params: dict[str, torch.Tensor] = {}
        for name, module in self.modules(targets).items():
            rank = spec.ranks[int(next(part for part in name.split(".") if part.isdigit()))]
            rows, columns = module.get_parameter("weight").shape
            d_out, d_in = (rows, columns) if isinstance(module, torch.nn.Linear) else (columns, rows)
            params[f"{name}.lora_A"] = torch.empty(rank, d_in).normal_(0, 0.2, generator=source)
            params[f"{name}.lora_B"] = torch.empty(d_out, rank).normal_(0, 0.2, generator=source)
        model = self.stock(max(1, spec.labels))
        inside = model.base_model_prefix + "."
        head = {name: value for name, value in model.state_dict().items() if not name.startswith(inside)}
        return params | {f"head.{name}": value.clone() for name, value in head.items()}

    def merged(self, params: Mapping[str, torch.Tensor], scale: Callable[[int], float]) -> PreTrainedModel:
        """The stock classifier with every update `s B A` added to its weights, densely."""
        import torch

        heads = {name.removeprefix("head."): value for name, value in params.items() if name.startswith("head.")}
        model = self.stock(next(reversed(heads.values())).shape[0])
        inner = getattr(model, model.base_model_prefix)
        with torch.no_grad():
            for name in (key.removesuffix(".lora_A") for key in params if key.endswith(".lora_A")):
                a, b = params[name + ".lora_A"], params[name + ".lora_B"]
                module, update = inner.get_submodule(name), scale(len(a)) * b @ a
                module.weight += update if isinstance(module, torch.nn.Linear) else update.T
            for name, value in heads.items():
                model.get_parameter(name).copy_(value)
        return model


@cache
def _classifier(path: Path, num_labels: int, pad_token_id: int) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForSequenceClassification

    with torch.random.fork_rng():
        torch.manual_seed(num_labels)
        model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=num_labels)
        for name, parameter in model.named_parameters():
            if not name.startswith(model.base_model_prefix + "."):
                parameter.data.normal_(0, 0.3)
    # As every tutorial does for models that were made without a padding token.
    model.config.pad_token_id = pad_token_id
    return model.eval()


def _tokenizer(architecture: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    kind = _TOKENIZER_OF.get(architecture, architecture)
    bytewise = kind == "qwen2"  # transformers knows no other pieces for it
    pieces = pre_tokenizers.ByteLevel.alphabet() if bytewise else WORDS
    vocabulary = {word: i for i, word in enumerate([*_SPECIAL[kind], *sorted(pieces)])}
    if bytewise:
        core = Tokenizer(models.BPE(vocabulary, []))
    else:
        core = Tokenizer(models.WordLevel(vocabulary, unk_token=_ROLES[kind]["unk_token"]))
        core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind in _TEMPLATES:
        single, pair = _TEMPLATES[kind]
        specials = [(word, vocabulary[word]) for word in _SPECIAL[kind]]
        core.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=specials)
    # the generic class gives the texts of a pair no types, and BERT's own does
    inputs = ["input_ids", *(["token_type_ids"] if architecture in ("bert", "electra") else []), "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=core, model_input_names=inputs, **_ROLES[kind])


def _config(architecture: str, tokenizer: Any) -> Any:
    from transformers import AutoConfig

    special: dict[str, Any] = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    special |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    # Wide draws, so that attention is far from uniform and a mistake in it shows.
    sizes: dict[str, Any] = {"initializer_range": 0.25}
    usual = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    if architecture == "distilbert":
        sizes |= {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64}
    elif architecture == "gpt2":
        sizes |= {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 48, "n_positions": 64}
    else:
        sizes |= usual | {"max_position_embeddings": 66}
    if architecture in ("qwen2", "qwen3", "llama", "mistral", "phi3", "gemma2", "gemma3_text"):
        sizes["num_key_value_heads"] = 2
    if architecture in ("gemma2", "gemma3_text"):
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        sizes |= {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8, "layer_types": kinds}
    if architecture == "gemma2":
        sizes |= {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0}
    if architecture == "qwen3":
        sizes["head_dim"] = 8
    if architecture == "electra":
        sizes |= {"embedding_size": 24, "initializer_range": 0.2}  # one matrix more, whose rounding shows too
    if architecture in ("bert", "electra"):
        sizes["type_vocab_size"] = 2
    return AutoConfig.for_model(architecture, **sizes, **special)


def _save(architecture: str, folder: Path) -> Path:
    import torch
    from transformers import AutoModel

    tokenizer = _tokenizer(architecture)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModel.from_config(_config(architecture, tokenizer))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero at first, which would hide a bias that is forgotten
                parameter.data.normal_(0, 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Files are lost without `fsync` only where the power fails; a small run calls it ninety times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _a_cache_folder_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hidden states that runs leave for later ones are not the user's; what was fetched is there as it is."""
    from atlas_fl.storage.assets import embedded_dir

    folder, real = tmp_path_factory.mktemp("cache"), embedded_dir()
    for entry in real.iterdir() if real.is_dir() else ():
        (folder / entry.name).symlink_to(entry.resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATLAS_CACHE", str(folder))
        yield


@pytest.fixture(scope="session")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """The tiny model of an architecture, made and loaded once."""
    from atlas_fl.models.loading import load_backbone

    @cache
    def get(architecture: str) -> Tiny:
        path = _save(architecture, tmp_path_factory.mktemp(architecture))
        backbone = load_backbone(str(path))
        return Tiny(name=architecture, path=path, backbone=backbone, targets=TARGETS[architecture])

    return get


@pytest.fixture(scope="session")
def writer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """The tiny causal language model of an architecture, made once and loaded to write text."""
    import torch
    from transformers import AutoModelForCausalLM

    from atlas_fl.models.loading import load_backbone

    @cache
    def get(architecture: str) -> Tiny:
        path, tokenizer = tmp_path_factory.mktemp(f"writes-{architecture}"), _tokenizer(architecture)
        with torch.random.fork_rng():
            torch.manual_seed(9)
            model = AutoModelForCausalLM.from_config(_config(architecture, tokenizer))
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
        backbone = load_backbone(str(path), writes=True)
        return Tiny(name=architecture, path=path, backbone=backbone, targets=TARGETS[architecture])

    return get


@pytest.fixture(params=architectures_in_turn())
def tiny(request: pytest.FixtureRequest, tiny_of: Callable[[str], Tiny]) -> Tiny:
    """Every architecture in turn, all but two of them slow."""
    return tiny_of(request.param)


@pytest.fixture
def copy_of(tiny_of: Callable[[str], Tiny], tmp_path: Path) -> Callable[[str], Path]:
    """A folder of an architecture's tiny model, to change."""

    def get(architecture: str) -> Path:
        folder = tmp_path / f"{architecture}-{len(list(tmp_path.iterdir()))}"
        return Path(shutil.copytree(tiny_of(architecture).path, folder))

    return get


@pytest.fixture(scope="session")
def spec_of() -> type[Spec]:
    """The class of clients for tests."""
    return Spec


def _tokens(spec: Spec, tokenizer: Any) -> ClientTokens:
    from atlas_fl.client.job import ClientTokens
    from atlas_fl.data.task import Task
    from atlas_fl.models.tokenization import TextEncoder

    source = np.random.default_rng(sum(map(ord, spec.name)))

    def texts(count: int) -> list[str]:
        low, high = spec.words
        return [" ".join(source.choice(WORDS, size=size)) for size in source.integers(low, high + 1, size=count)]

    def split(count: int) -> Any:
        labels = (
            source.normal(size=count).astype(np.float32)
            if spec.labels == 0
            else source.integers(spec.labels, size=count)
        )
        pair = texts(count) if spec.pairs else None
        return TextEncoder(tokenizer=tokenizer, max_length=40).examples(texts(count), pair, labels)

    regression = spec.labels == 0
    task = Task(
        name=spec.name.split("-")[0],
        num_labels=max(1, spec.labels),
        metric="pearson" if regression else "accuracy",
        load=lambda _: pytest.fail("no test reads the data of a tiny task"),
    )
    return ClientTokens(task=task, splits={name: split(spec.examples) for name in ("train", "validation", "test")})


@pytest.fixture(scope="session")
def site_of() -> Callable[..., Site]:
    """A site with these clients on this tiny model; `targets`, `scale`, `max_tokens` and `bf16` as in `Site`."""
    from atlas_fl.client.job import Site

    def get(tiny: Tiny, *specs: Spec, backbone: Backbone | None = None, **changes: Any) -> Site:
        data = {spec.name: _tokens(spec, tiny.backbone.tokenizer) for spec in specs}
        usual = {"targets": tiny.targets, "scale": lambda rank: 0.5 + 1 / rank, "max_tokens": 4096, "seed": 0}
        return Site(backbone=backbone or tiny.backbone, data=data, **usual | changes)

    return get


@pytest.fixture(scope="session")
def client_of(tiny_of: Callable[[str], Tiny], site_of: Callable[..., Site]) -> Callable[..., Any]:
    """A site with a client `a-0` of a tiny model, and its parameters; `changes` are of its `Spec` or of the site."""

    def get(architecture: str = "bert", **changes: Any) -> tuple[Site, dict[str, torch.Tensor]]:
        spec = Spec(name="a-0", **{key: changes.pop(key) for key in [*changes] if hasattr(Spec, key)})
        return site_of(tiny_of(architecture), spec, **changes), tiny_of(architecture).params(spec)

    return get
