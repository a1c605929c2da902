import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel, PreTrainedModel

from atlas_fl.errors import BudgetError, ConfigError
from atlas_fl.models.registry import ModelShape
from atlas_fl.ranks.allocation import assign_ranks
from atlas_fl.ranks.cost_model import (
    HEAP_COPIES,
    RESERVE_BYTES,
    Memory,
    TrainingStep,
    activation_bytes,
    adapter_bytes,
    check_memory,
    cost_table,
    device_memory,
    fraction_budget,
    free_memory,
    layer_cost,
)
from atlas_fl.ranks.devices import DEVICES, parse_device

HIDDEN, INNER, BLOCKS, HEADS, RANK = 64, 256, 3, 4, 8
SEQUENCES, LENGTH = 4, 32
TOKENS = SEQUENCES * LENGTH
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": HEADS,
    "vocab_size": 200,
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
BERT: dict[str, Any] = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA: dict[str, Any] = {**SIZES, **ENDS, "num_key_value_heads": 2}
GPT2: dict[str, Any] = {"n_embd": HIDDEN, "n_layer": BLOCKS, "n_head": HEADS, "vocab_size": 200, **ENDS}

SQUARE = (HIDDEN, HIDDEN)
MINILM = ModelShape(
    hidden=384,
    intermediate=1536,
    heads=12,
    layers=(((384, 384), (384, 384)),) * 6,
    block_bytes=(7_097_856,) * 6,
    block_params=(1_774_464,) * 6,
    embedding_bytes=48_000_000,
)


def shape_of(modules: Sequence[tuple[int, int]]) -> ModelShape:
    return ModelShape(
        hidden=HIDDEN,
        intermediate=INNER,
        heads=HEADS,
        layers=(tuple(modules),) * BLOCKS,
        block_bytes=(0,) * BLOCKS,
        block_params=(0,) * BLOCKS,
        embedding_bytes=0,
    )


def with_lora(model: PreTrainedModel, targets: list[str] | str) -> torch.nn.Module:
    model.set_attn_implementation("sdpa")
    adapted = get_peft_model(model, LoraConfig(r=RANK, target_modules=targets, fan_in_fan_out="c_attn" in targets))
    return adapted.eval()


def step_of(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.arange(TOKENS).reshape(SEQUENCES, LENGTH) % 100
    return model(input_ids=tokens, use_cache=False).last_hidden_state[:, 0].sum()


def saved_bytes(model: torch.nn.Module) -> int:
    """Bytes of the distinct storages that autograd keeps of one forward pass, weights and buffers aside."""
    held = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = step_of(model)
    assert loss.requires_grad
    return sum(sizes.values())


class Live(TorchDispatchMode):
    """Counts the bytes of all storages alive that were made inside it, and their peak."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        held = (*model.parameters(), *model.buffers())
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in held}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, storage._cdata)
        return result

    def free(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


@pytest.mark.parametrize(
    ("build", "targets", "modules", "copies"),
    [
        (lambda: BertModel(BertConfig(**BERT)), ["query", "value"], [SQUARE] * 2, 1),
        (lambda: BertModel(BertConfig(**BERT)), "all-linear", [SQUARE] * 4 + [(HIDDEN, INNER), (INNER, HIDDEN)], 1),
        (lambda: GPT2Model(GPT2Config(**GPT2)), ["c_attn"], [(HIDDEN, 3 * HIDDEN)], 4),
        (lambda: LlamaModel(LlamaConfig(**LLAMA)), ["q_proj", "v_proj"], [SQUARE, (HIDDEN, HIDDEN // 2)], 3),
    ],
    ids=["bert", "bert all-linear", "gpt2", "llama"],
)
def test_the_formula_is_what_autograd_keeps(
    build: Callable[[], PreTrainedModel], targets: list[str] | str, modules: list[tuple[int, int]], copies: int
) -> None:
    measured = saved_bytes(with_lora(build(), targets))
    predicted = activation_bytes(shape_of(modules), TOKENS, BLOCKS, rank=RANK)
    working = max(2 * INNER, 4 * HIDDEN) * TOKENS * 4
    more_copies = (copies - 1) * INNER * TOKENS * BLOCKS * 4  # an activation that is not fused keeps them
    assert predicted + more_copies - working == pytest.approx(measured, rel=0.06)


def test_blocks_below_the_first_adapted_one_record_nothing() -> None:
    upper = list(range(1, BLOCKS))
    config = LoraConfig(r=RANK, target_modules=["query", "value"], layers_to_transform=upper)
    base = BertModel(BertConfig(**BERT)).requires_grad_(False)
    measured = saved_bytes(get_peft_model(base, config).eval())
    shape = replace(shape_of([SQUARE] * 2), layers=((), *((SQUARE, SQUARE),) * len(upper)), first_adapted=1)
    working = max(2 * INNER, 4 * HIDDEN) * TOKENS * 4
    predicted = activation_bytes(shape, TOKENS, BLOCKS, rank=RANK) - working
    assert predicted == pytest.approx(measured, rel=0.06)
    assert predicted < (activation_bytes(shape_of([SQUARE] * 2), TOKENS, BLOCKS, rank=RANK) - working) * 0.8


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_formula_is_the_peak_of_a_step(checkpointing: bool) -> None:
    base = BertModel(BertConfig(**BERT))
    model = with_lora(base, ["query", "value"])
    if checkpointing:
        model.train()  # transformers checkpoints in training alone
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    live = Live(model)
    with live:
        step_of(model).backward()
    predicted = activation_bytes(shape_of([SQUARE] * 2), TOKENS, BLOCKS, rank=RANK, checkpointing=checkpointing)
    assert predicted == pytest.approx(live.peak, rel=0.1)


def test_logits_are_alive_four_times_at_the_peak() -> None:
    tokens, vocabulary = 40, 5000
    features, head = torch.randn(tokens, 8, requires_grad=True), torch.nn.Linear(8, vocabulary, bias=False)
    live = Live(head.requires_grad_(False))
    with live:
        logits = head(features).float()
        torch.nn.functional.cross_entropy(logits, torch.arange(tokens)).backward()
    found, without = (
        device_memory(MINILM, DEVICES["cpu_2gb"], ranks=[8] * 6, step=TrainingStep(tokens=1, logits=count)).parts[
            "activations"
        ]
        for count in (tokens * vocabulary, 0)
    )
    # blocks of this size are no part of the heap, so nothing is added to what is alive
    assert found - without == pytest.approx(live.peak, rel=0.03)
    assert found - without == 4 * 4 * tokens * vocabulary


def test_activations_by_hand() -> None:
    # a token keeps 4 * 64 + 4 of the attention, 2 * (64 + 2) of the norms, 256 inside, 64 + 2 * 8 of LoRA: 728 numbers;
    # two blocks and 512 at work are 1,968 numbers of 4 bytes, for ten tokens
    assert activation_bytes(shape_of([SQUARE] * 2), 10, 2, rank=8) == 78_720
    # checkpointed: 64 a block, one block of 728, 512 at work
    assert activation_bytes(shape_of([SQUARE] * 2), 10, 2, rank=8, checkpointing=True) == 54_720
    assert activation_bytes(shape_of([SQUARE] * 2), 10, 0) == 0


def test_adapters_by_hand() -> None:
    # (384 + 384) * 2 modules * rank 8 * 4 bytes, and four times that in training
    assert adapter_bytes(MINILM, [8, 0, 0, 0, 0, 0]) == 49_152
    assert layer_cost(MINILM, 0, 8) == 4 * 49_152
    assert adapter_bytes(MINILM, [4, 8, 16, 4, 8, 16]) == 56 * 6_144
    np.testing.assert_array_equal(cost_table(MINILM, (1, 4)), [[24_576, 98_304]] * 6)


def test_adapters_are_as_large_as_the_tensors_of_peft() -> None:
    model = with_lora(BertModel(BertConfig(**BERT)), "all-linear")
    lora = [p for name, p in model.named_parameters() if "lora" in name and "encoder" in name]
    shape = shape_of([SQUARE] * 4 + [(HIDDEN, INNER), (INNER, HIDDEN)])
    assert adapter_bytes(shape, [RANK] * BLOCKS) == sum(p.numel() * p.element_size() for p in lora)


def test_layers_of_unequal_modules_cost_unequally() -> None:
    shape = replace(shape_of([]), layers=(((4, 4),), ((4, 4), (4, 8)), ()))
    assert [layer_cost(shape, layer, 2) for layer in range(3)] == [16 * 16, 40 * 16, 0]


def test_device_memory_adds_up_and_counts_four_copies() -> None:
    step = TrainingStep(tokens=512, head_params=770)
    memory = device_memory(MINILM, DEVICES["cpu_2gb"], ranks=[8] * 6, step=step)
    trained = 48 * 6_144 + 770 * 4
    assert memory == Memory(
        total_bytes=2 * 2**30,
        parts={
            "frozen weights": 48_000_000 + 6 * 7_097_856,
            "activations": HEAP_COPIES * activation_bytes(MINILM, 512, 6, rank=8),
            "runtime": RESERVE_BYTES,
            "adapters and head": trained,
            "gradients": trained,
            "Adam moments": 2 * trained,
        },
    )
    assert memory.used_bytes + memory.free_bytes == memory.total_bytes


def test_a_device_that_holds_two_blocks_pays_for_two() -> None:
    whole = device_memory(MINILM, DEVICES["cpu_2gb"], ranks=[8] * 6, step=TrainingStep(tokens=512))
    part = device_memory(MINILM, DEVICES["cpu_2gb"], ranks=[8] * 6, step=TrainingStep(tokens=512, blocks=2))
    assert whole.parts["frozen weights"] - part.parts["frozen weights"] == 4 * 7_097_856
    assert part.parts["activations"] == HEAP_COPIES * activation_bytes(MINILM, 512, 2, rank=8)
    crossing = device_memory(
        MINILM, DEVICES["cpu_2gb"], ranks=[8] * 6, step=TrainingStep(tokens=512, blocks=2, crossing=1000)
    )
    assert crossing.parts["activations"] - part.parts["activations"] == HEAP_COPIES * 4000
    assert part.parts["adapters and head"] * 3 == whole.parts["adapters and head"]


def test_upload_bounds_parameters_and_memory_bounds_all_four_copies() -> None:
    device, step = DEVICES["cpu_2gb"], TrainingStep(tokens=512)
    free = device_memory(MINILM, device, ranks=[0] * 6, step=step).free_bytes
    inner = HEAP_COPIES * 12 * 16 * 512 * 4  # the products with A at the largest rank of the device
    assert free_memory(MINILM, device, step=step) == free - inner
    for upload, budget in ((250_000, 1_000_000), (10**12, free - inner)):
        words = {"rule": "uniform", "candidates": (4, 8), "step": step, "allowance_bytes": upload}
        found = assign_ranks(MINILM, device, importance=np.ones(6), **words)
        assert found.budget_bytes == budget


def test_no_choice_within_the_memory_budget_overruns_the_device() -> None:
    device = parse_device("tiny=memory_gb=0.6,gflops=1,up_mbps=1,down_mbps=1,latency_ms=1,max_rank=64")
    step = TrainingStep(tokens=256, head_params=1000)
    rank = min(free_memory(MINILM, device, step=step) // (16 * 6 * 1536), 64)
    assert device_memory(MINILM, device, ranks=[rank] * 6, step=step).free_bytes >= 0


def test_fractions_by_hand() -> None:
    # a quarter is left for parameters and gradients, .15 for the moments: the lesser counts, and is half of the bytes
    device = DEVICES["cpu_2gb"]
    assert fraction_budget(device, base=0.35, activations=0.25, optimizer=0.15) == int(0.3 * 2 * 2**30)
    roomy = fraction_budget(device, base=0.5, activations=0.2, optimizer=0.2)
    assert roomy == pytest.approx(0.2 * 2 * 2**30, abs=1)
    with pytest.raises(ConfigError, match="--alpha-opt is 0, which leaves nothing for Adam's moments; give a value"):
        fraction_budget(device, base=0.35, activations=0.25, optimizer=0.0)


def test_a_model_that_does_not_fit_names_every_part_and_the_remedy() -> None:
    with pytest.raises(BudgetError) as error:
        free_memory(MINILM, DEVICES["cpu_2gb"], step=TrainingStep(tokens=20_000))
    message = str(error.value)
    assert message.startswith("cpu_2gb has 2,147.5 MB of memory and training takes 5,111.0 MB (frozen")
    for part in (
        "frozen weights 90.6 MB",
        "activations",
        "runtime 427.8 MB",
        "lower --batch-size, --max-length or --ranks, add --gradient-checkpointing",
        "larger device",
    ):
        assert part in message
    assert "\n" not in message
    writes = replace(MINILM, vocabulary=30_000)
    with pytest.raises(BudgetError, match="add --base-weights bf16 or --gradient-checkpointing"):
        free_memory(writes, DEVICES["cpu_2gb"], step=TrainingStep(tokens=20_000))
    with pytest.raises(BudgetError, match="add --gradient-checkpointing"):  # it has fewer bits already
        free_memory(replace(writes, unpacked_bytes=1), DEVICES["cpu_2gb"], step=TrainingStep(tokens=20_000))


def test_check_memory_passes_what_fits_exactly() -> None:
    parts = {"frozen weights": 10, "activations": 12}
    check_memory(Memory(total_bytes=22, parts=parts), MINILM, name="x")
    with pytest.raises(BudgetError, match="x has"):
        check_memory(Memory(total_bytes=21, parts=parts), MINILM, name="x")
