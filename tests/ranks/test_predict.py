from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertModel

from atlas_fl.models.registry import ModelShape
from atlas_fl.ranks.cost_model import (
    TrainingStep,
    adapter_bytes,
    cut_utilities,
    device_memory,
    predict_round,
    training_flops,
)
from atlas_fl.ranks.devices import parse_device

DEVICE = parse_device("d=memory_gb=2,gflops=10,up_mbps=8,down_mbps=16,latency_ms=100,max_rank=64")
SHAPE = ModelShape(
    hidden=4,
    intermediate=16,
    heads=2,
    layers=(((4, 4), (4, 8)), ((4, 4), (4, 8))),
    block_bytes=(800, 800),
    block_params=(200, 200),
    embedding_bytes=1000,
)


def test_flops_by_hand() -> None:
    # frozen 4 * 400, LoRA 6 * 100, attention 12 * 5 * 4 * 2 for each of ten tokens
    assert training_flops(SHAPE, [2, 3], tokens=10, length=5.0) == 10 * (1600 + 600 + 480)
    # 3 tokens of 50 each are written: 2 operations forward and 2 backward for each of the width of 4
    assert training_flops(SHAPE, [2, 3], tokens=10, length=5.0, logits=150) == 26_800 + 4 * 4 * 150


def test_flops_of_a_model_whose_lower_block_has_no_adapters_by_hand() -> None:
    upper = replace(SHAPE, layers=((), SHAPE.layers[1]), first_adapted=1)
    # frozen 2 * 200 + 4 * 200, LoRA 6 * 3 * 20, attention 4 * 5 * 4 below and 12 * 5 * 4 above
    assert training_flops(upper, [0, 3], tokens=10, length=5.0) == 10 * (1200 + 360 + 80 + 240)


def test_a_round_by_hand() -> None:
    step = TrainingStep(tokens=8, head_params=7)
    found = predict_round(SHAPE, DEVICE, ranks=[2, 3], step=step, tokens=10, length=5.0, message_bytes=500)
    assert (found.up_bytes, found.down_bytes) == (500, 500)
    assert found.flops == 26_800
    assert found.compute_seconds == pytest.approx(2.68e-6)
    assert found.transfer_seconds == pytest.approx(500 / 1e6 + 500 / 2e6 + 0.2)
    assert found.seconds == pytest.approx(found.compute_seconds + found.transfer_seconds)
    assert found.memory == device_memory(SHAPE, DEVICE, ranks=[2, 3], step=step)


def test_a_client_that_shares_nothing_sends_nothing_and_waits_for_nothing() -> None:
    found = predict_round(SHAPE, DEVICE, ranks=[2, 3], step=TrainingStep(tokens=8), tokens=10, length=5.0)
    assert (found.up_bytes, found.down_bytes, found.transfer_seconds) == (0, 0, 0.0)
    assert found.seconds == found.compute_seconds > 0


def test_a_client_that_holds_one_block_pays_for_one() -> None:
    found = predict_round(SHAPE, DEVICE, ranks=[2, 3], step=TrainingStep(tokens=8, blocks=1), tokens=10, length=5.0)
    assert found.memory.parts["adapters and head"] == adapter_bytes(SHAPE, [2])
    assert found.flops == 10 * (800 + 240 + 240)


@pytest.mark.parametrize(("lowest", "tolerance"), [(0, 0.05), (2, 0.07)])
def test_flops_agree_with_the_counter_of_torch(lowest: int, tolerance: float) -> None:
    hidden, inner, blocks, rank, sequences, length = 64, 256, 4, 8, 4, 16
    config = BertConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        vocab_size=50,
        attn_implementation="eager",  # its products are matrix multiplications that the counter sees
    )
    base = BertModel(config, add_pooling_layer=False)
    params = sum(p.numel() for p in base.encoder.layer[0].parameters())
    upper = list(range(lowest, blocks))
    model = get_peft_model(base, LoraConfig(r=rank, target_modules=["query", "value"], layers_to_transform=upper))
    shape = ModelShape(
        hidden=hidden,
        intermediate=inner,
        heads=4,
        layers=((),) * lowest + (((hidden, hidden),) * 2,) * (blocks - lowest),
        block_bytes=(4 * params,) * blocks,
        block_params=(params,) * blocks,
        embedding_bytes=0,
        first_adapted=lowest,
    )
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=torch.ones(sequences, length, dtype=torch.int64)).last_hidden_state.sum().backward()
    predicted = training_flops(shape, [rank] * blocks, tokens=sequences * length, length=float(length))
    assert predicted == pytest.approx(counter.get_total_flops(), rel=tolerance)


def test_cut_utilities_by_hand() -> None:
    found = cut_utilities(np.array([0.5, 0.3, 0.2]), [4, 8, 16])
    np.testing.assert_allclose(found, [[0.0, 7.6], [2.0, 5.6], [4.4, 3.2], [7.6, 0.0]], atol=1e-12)
