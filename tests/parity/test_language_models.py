"""Language models as they are published: logits and gradients of clients in a pack, and of each alone, are PEFT's.

Each is a tiny random model with what its family is known for: scaled and partial rotations, grouped queries, heads of
another width, tied embeddings, sliding windows in some blocks or all, logits that are capped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from atlas_fl.client.batching import collate_packed, forward
from atlas_fl.client.job import ClientTokens, Site, initial_params
from atlas_fl.client.local_training import example_loss
from atlas_fl.data.task import Task
from atlas_fl.models.loading import load_backbone
from atlas_fl.models.peft_io import default_targets, export_adapter
from atlas_fl.models.tokenization import EncodedExamples, TextEncoder
from atlas_fl.models.weights import FLOAT_TYPES, QUANTISERS, to_nf4
from atlas_fl.params import Params
from atlas_fl.setup.assembly import max_sequence_length
from tests.conftest import WORDS, _tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT's
]

WINDOW = 6
USUAL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 66,
    # wide draws, so that attention is far from uniform and a mistake in it shows
    "initializer_range": 0.25,
}
GEMMA: dict[str, Any] = {
    **USUAL,
    "head_dim": 16,
    "query_pre_attn_scalar": 12,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
SHORT, LONG = ({f"{kind}_factor": [factor] * 2} for kind, factor in (("short", 1.5), ("long", 9.0)))
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1 and 3.2": (
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 16},
                **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
            },
        },
    ),
    "SmolLM2": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "Qwen2.5": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "Qwen2.5 of long texts": (
        "qwen2",
        {
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16},
            },
        },
    ),
    "Qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "Mistral": ("mistral", {"head_dim": 16, "sliding_window": WINDOW}),
    "Phi-3": ("phi3", {"sliding_window": WINDOW}),
    "Phi-4-mini": (
        "phi3",
        {
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 40,
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **SHORT, **LONG},
                **{"original_max_position_embeddings": 40},
            },
        },
    ),
    "Gemma 2": ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "Gemma 3": (
        "gemma3_text",
        {
            **GEMMA,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "Falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48}),
}
QUICK = ("Llama 3.1 and 3.2", "Gemma 2")
HELD = ("Llama 3.1 and 3.2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Mistral", "Qwen3", "Phi-3")))
IN_TURN = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]
CLIENTS = ("a-0", "b-0", "c-0")


def scale(rank: int) -> float:
    return 3.0 / rank


def texts(count: int, *, seed: int, words: tuple[int, int]) -> list[str]:
    source = np.random.default_rng(seed)
    return [" ".join(source.choice(WORDS, size=size)) for size in source.integers(*words, size=count)]


def examples(tokenizer: Any, *, seed: int) -> EncodedExamples:
    """Prompts and answers that are longer than a window."""
    prompts, answers = texts(5, seed=seed, words=(1, 12)), texts(5, seed=seed + 1, words=(1, 9))
    return TextEncoder(tokenizer=tokenizer, max_length=36).targets(prompts, answers)


@pytest.fixture(scope="module")
def site_of_model(tmp_path_factory: pytest.TempPathFactory):
    """(folder, site of three clients, their parameters) of a model."""

    @cache
    def get(name: str, held: str = "fp32") -> tuple[Path, Site, list[Params]]:
        architecture, changes = MODELS[name]
        # transformers knows no other pieces than bytes for Qwen2
        tokenizer = _tokenizer("qwen2" if architecture == "qwen2" else "llama")
        folder = tmp_path_factory.mktemp(architecture)
        ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
        config = AutoConfig.for_model(architecture, **{**USUAL, **changes}, vocab_size=len(tokenizer), **ids)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            model = AutoModelForCausalLM.from_config(config)
            for parameter in model.parameters():
                if parameter.dim() == 1:  # biases of zero and norms of one would hide one that is forgotten
                    parameter.data.add_(torch.empty_like(parameter).normal_(0, 0.1))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        backbone = load_backbone(str(folder), writes=True, held=held)
        task = Task(name="a", num_labels=0, load=lambda _: pytest.fail("nothing is read"))
        data = {
            client: ClientTokens(task=task, splits={"train": examples(tokenizer, seed=3 * k)})
            for k, client in enumerate(CLIENTS)
        }
        targets = default_targets(architecture)
        site = Site(backbone=backbone, data=data, targets=targets, scale=scale, max_tokens=4096, seed=0)
        return folder, site, [adapter(site, k) for k in range(3)]

    return get


def adapter(site: Site, k: int) -> Params:
    """Adapters of ranks of the client's own, with A and B of random numbers."""
    task, modules = site.data[CLIENTS[k]].task, site.modules
    ranks = {name: 1 + (index + k) % 3 for index, name in enumerate(modules)}
    source = torch.Generator().manual_seed(k)
    params = initial_params(site.backbone, modules, ranks=ranks, task=task, seed=1)
    return {key: torch.empty_like(value).normal_(0, 0.2, generator=source) for key, value in params.items()}


def ours(site: Site, clients: Sequence[int], params: Sequence[Params]) -> list[tuple[Tensor, Params]]:
    """(logits of the tokens to be written, gradients of the mean loss) of each of these clients in one row."""
    leaves = [{key: value.clone().requires_grad_() for key, value in params[k].items()} for k in clients]
    row = collate_packed([site.data[CLIENTS[k]].splits["train"] for k in clients], device=torch.device("cpu"))
    with forward(row, leaves, site) as logits:
        sum(example_loss(own, labels) for own, labels in zip(logits, row.labels, strict=True)).backward()
    return [
        (own.detach(), {key: leaf.grad for key, leaf in leaf_of.items()})
        for own, leaf_of in zip(logits, leaves, strict=True)
    ]


def pefts(
    folder: Path, site: Site, k: int, params: Params, work_dir: Path, base: PreTrainedModel | None = None
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The same of a plain model of PEFT, a text at a time: nothing is padded, and no text has a neighbour."""
    export_adapter(params, work_dir, family=site.backbone.family, base=str(folder), scale=scale)
    stock = AutoModelForCausalLM.from_pretrained(folder) if base is None else base
    model = PeftModel.from_pretrained(stock, str(work_dir), is_trainable=True)
    data, logits = site.data[CLIENTS[k]].splits["train"], []
    for start, stop in zip(data.offsets[:-1], data.offsets[1:], strict=True):
        ids, is_target = (torch.from_numpy(array[start:stop]) for array in (data.ids, data.target_mask))
        logits.append(model.eval()(input_ids=ids[None]).logits[0, :-1][is_target[1:]])
    found = torch.cat(logits)
    torch.nn.functional.cross_entropy(found, torch.from_numpy(data.ids[data.target_mask])).backward()
    inside = f"base_model.model.{site.backbone.family.prefix}.".replace("..", ".")
    gradients = {
        key.removeprefix(inside).removesuffix(".default.weight"): parameter.grad
        for key, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return found.detach(), gradients


@pytest.mark.parametrize("name", IN_TURN)
def test_logits_and_gradients_in_a_pack_and_alone_are_those_of_peft(site_of_model, tmp_path: Path, name: str) -> None:
    folder, site, params = site_of_model(name)
    is_packed = not site.backbone.family.stock
    assert is_packed == (name != "Falcon")
    assert max_sequence_length(site.backbone) == (40 if name == "Phi-4-mini" else 66)
    assert site.data["a-0"].splits["train"].lengths.max() > 2 * WINDOW
    alone = [ours(site, [k], params)[0] for k in range(3)]
    packed = ours(site, range(3), params) if is_packed else alone
    for k in range(3):
        logits, gradients = pefts(folder, site, k, params[k], tmp_path / str(k))
        assert gradients.keys() == params[k].keys()
        for found, own in (alone[k], packed[k]):
            torch.testing.assert_close(found, logits, atol=2e-5, rtol=1e-5)
            for key, expected in gradients.items():
                assert expected.abs().max() > 1e-4, f"{key} has no gradient to compare"
                torch.testing.assert_close(own[key], expected, atol=2e-5, rtol=1e-4, msg=key)


def base_of(folder: Path, held: str) -> PreTrainedModel:
    """The stock model with the weights that are held, in float32 but for quantised layers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=FLOAT_TYPES[held]).float()
    if held == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model.model, Int8WeightOnlyConfig())
    if held == "nf4":
        for module in model.model.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(to_nf4(module.weight.detach()), requires_grad=False)
    return model


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning")
@pytest.mark.parametrize("held", [held for held in FLOAT_TYPES if held != "fp32"])
@pytest.mark.parametrize("name", HELD)
def test_so_they_are_on_a_base_held_in_another_type(site_of_model, tmp_path: Path, name: str, held: str) -> None:
    """In a pack, alone and with checkpoints; not so Gemma, which scales its embeddings in their own type."""
    if held in QUANTISERS:
        pytest.importorskip("torchao", reason="without the extra quant nothing is compared in 8 and 4 bits")
    folder, site, params = site_of_model(name, held)
    packed = ours(site, range(3), params)
    lean = load_backbone(str(folder), writes=True, held=held, gradient_checkpointing=True)
    for k in range(3):
        logits, gradients = pefts(folder, site, k, params[k], tmp_path / str(k), base_of(folder, held))
        ((exact, _),) = ours(site_of_model(name)[1], [k], params)
        assert (logits - exact).norm() > 3e-5 * exact.norm(), "held in another type it is another base"
        alone, checkpointed = (ours(one, [k], params)[0] for one in (site, replace(site, backbone=lean)))
        for found, own in (alone, checkpointed, packed[k]):
            torch.testing.assert_close(found, logits, atol=2e-5, rtol=1e-5)
            for key, expected in gradients.items():
                torch.testing.assert_close(own[key], expected, atol=2e-5, rtol=1e-4, msg=key)


def test_weights_and_arithmetic_in_bf16_are_as_near_to_float32_as_pefts(site_of_model, tmp_path: Path) -> None:
    """The two round at other places, and what both round is farther from float32 than they are from each other."""
    folder, site, params = site_of_model(QUICK[0], "bf16")
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    results = (
        *ours(site_of_model(QUICK[0])[1], [0], params),
        *ours(replace(site, bf16=True), [0], params),
        pefts(folder, site, 0, params[0], tmp_path, base),
    )
    exact, own, expected = (torch.cat([tree[key].flatten().float() for key in params[0]]) for _, tree in results)
    far = (expected - exact).norm()
    assert 0.01 * exact.norm() < far < 0.15 * exact.norm()
    assert (own - exact).norm() < 1.2 * far
    assert (own - expected).norm() < 1.5 * far
