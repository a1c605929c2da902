"""Blocks between frozen factors at a client: steps in plain torch, the gradient at the weights by differences."""

import dataclasses

import pytest
import torch

from atlas_fl.client.batching import collate_packed, forward
from atlas_fl.client.job import Job
from atlas_fl.client.local_training import batches, example_loss, train
from atlas_fl.client.options import TrainOptions
from atlas_fl.client.reports import PackReport
from atlas_fl.params import lora_modules

OPTIONS = TrainOptions(seed=3, batch_size=4, lr=1e-2, clip=0.0, epochs=2, trained_parts="core", dropout=0.3)


@pytest.mark.parametrize("scaled", [False, True], ids=["one block", "a head of each rank"])
def test_a_round_is_that_of_plain_torch_on_blocks_and_head_alone(client_of, scaled: bool) -> None:
    site, drawn = client_of(examples=10)
    draw, params = torch.Generator().manual_seed(0), dict(drawn)
    for module in lora_modules(drawn):
        rank = len(drawn[f"{module}.lora_A"])
        heads = rank if scaled else 1
        params[f"{module}.lora_B"] = torch.randn(drawn[f"{module}.lora_B"].shape, generator=draw) / 4
        params[f"{module}.lora_core"] = torch.randn(heads, rank // heads, rank // heads, generator=draw) / 4
        if scaled:
            params[f"{module}.lora_scale"] = torch.rand(heads, generator=draw) + 0.5
    job = Job(client="a-0", params=params, round=1, options=dataclasses.replace(OPTIONS, dropout=0.0))
    (update,) = train([job], site)

    moving = {key for key in params if not key.endswith((".lora_A", ".lora_B"))}
    model = {key: tensor.clone().requires_grad_(key in moving) for key, tensor in params.items()}
    optimizer = torch.optim.AdamW([model[key] for key in sorted(moving)], lr=OPTIONS.lr, weight_decay=0.0)
    for batch in batches(site.data["a-0"].splits["train"], job, secret=None):
        plain = {key: tensor for key, tensor in model.items() if not key.endswith((".lora_core", ".lora_scale"))}
        for module in lora_modules(drawn):
            blocks = list(model[f"{module}.lora_core"])
            if scaled:
                blocks = [size * block for size, block in zip(model[f"{module}.lora_scale"], blocks)]
            plain[f"{module}.lora_A"] = torch.block_diag(*blocks) @ model[f"{module}.lora_A"]
        row = collate_packed([batch], device=site.backbone.device)
        optimizer.zero_grad()
        with forward(row, [plain], site) as (logits,):
            example_loss(logits, row.labels[0]).backward()
        optimizer.step()
    torch.testing.assert_close(dict(update.params), {k: t.detach() for k, t in model.items()}, atol=2e-5, rtol=1e-4)
    assert {key for key in params if not torch.equal(update.params[key], params[key])} == moving


def test_the_gradient_at_the_weights_is_that_of_differences_of_the_loss(client_of) -> None:
    site, params = client_of(examples=10)
    job = Job(client="a-0", params=params, round=1, options=OPTIONS)
    report = PackReport(jobs=[job], site=site)
    gradient, step = report.gradient("a-0"), 1e-2
    assert report.steps["a-0"] == 6 and gradient.keys() == set(lora_modules(params))
    for seed, (module, own) in enumerate(gradient.items()):
        assert own.abs().max() > 0
        # along the gradient itself, of rank one, where a difference is well above what float32 rounds
        left, _, right = torch.linalg.svd(own)
        losses = []
        for sign in (1, -1):
            moved = {k: torch.zeros_like(t) if k.endswith(".lora_B") else t for k, t in params.items()}
            moved |= {f"{module}.lora_A": right[:1], f"{module}.lora_B": sign * step * left[:, :1] / site.scale(1)}
            total = 0.0
            for batch in batches(site.data["a-0"].splits["train"], job, secret=None):
                row = collate_packed([batch], device=site.backbone.device)
                with torch.no_grad(), forward(row, [moved], site) as (logits,):
                    total += float(example_loss(logits, row.labels[0]).double())
            losses.append(total)
        slope = (losses[0] - losses[1]) / (2 * step)
        wanted = float((own * torch.outer(left[:, 0], right[0])).sum())
        assert slope == pytest.approx(wanted, rel=0.05, abs=1e-4), (seed, module)
