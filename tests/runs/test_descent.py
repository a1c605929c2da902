"""How whole models descend: momentum that is carried over rounds, and fp16 with scaled losses."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageClassification

from atlas_fl.audit.check import audit_run
from atlas_fl.client import optimizer as descent
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.local_training import batches as batches_of
from atlas_fl.client.local_training import train
from atlas_fl.client.options import TrainOptions
from atlas_fl.config import Config
from atlas_fl.data.clients import ClientData
from atlas_fl.experiment.run import resume_run, run_config
from atlas_fl.models.vision import image_logits, preprocess
from atlas_fl.params import Params, unflatten_by_client
from atlas_fl.rng import generator
from atlas_fl.setup.assembly import assemble
from tests.runs.finished import Make
from tests.runs.reading import passing_audit, rows, same_tensors, state
from tests.runs.sessions import in_sessions

SGD = {"optimizer": "sgd", "momentum": 0.9, "clip": 0.0}
CENTRAL = {
    **{"clients_per_task": 1, "samples": 100, "strategy": "local", "participation": 1, "rounds": 3, "eval_every": 1},
    **{"local_steps": None, "batch_size": 16, "clip": 0, "weight_decay": 1e-4, "schedule": "cosine"},
}
"""`vision-central` with the published recipe, small."""


def begun(folder: Path, round: int) -> dict[str, torch.Tensor]:
    return unflatten_by_client(load_file(folder / f"audit/round-{round:04d}/start.safetensors"))["digits-0"]


def one_loop(folder: Path, chosen: Config, client: ClientData) -> dict[str, torch.Tensor]:
    """The weights after all epochs of one torch.optim.SGD on the stock classifier, by the names of the latter."""
    model = AutoModelForImageClassification.from_pretrained(folder / "models/digits-0").train()
    model.load_state_dict(stock(begun(folder, 0)), strict=True)
    vision, images, training = assemble(chosen).site.vision, chosen.images, chosen.training
    optimizer = torch.optim.SGD(
        model.parameters(), lr=training.lr or 0.0, momentum=images.momentum, weight_decay=training.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: 0.5 * (1 + math.cos(math.pi * epoch / training.rounds))
    )
    for epoch in range(training.rounds):
        order = generator(chosen.run.seed, "order", client.name, epoch + 1, 0).permutation(len(client.train))
        for start in range(0, len(order), training.batch_size):
            batch = client.train.take(order[start : start + training.batch_size])
            optimizer.zero_grad()
            logits = model(preprocess(vision, batch.pixels)).logits
            cross_entropy(logits, torch.from_numpy(batch.label)).backward()
            optimizer.step()
        schedule.step()
    return {key: tensor.detach() for key, tensor in model.state_dict().items()}


def stock(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names of the stock classifier."""
    return {
        key.replace("head.", "classifier.") if key.startswith("head.") else f"vit.{key}": tensor
        for key, tensor in params.items()
    }


@pytest.mark.slow
def test_a_central_run_that_carries_its_momentum_is_one_uninterrupted_loop_of_torchs_sgd(image_config: Make) -> None:
    chosen = image_config(carry_momentum=True, **CENTRAL)
    result = run_config(chosen)
    (client,) = assemble(chosen).clients
    wanted = one_loop(result.folder, chosen, client)
    for key, tensor in stock(begun(result.folder, 3)).items():
        torch.testing.assert_close(tensor, wanted[key], rtol=0, atol=0)
    anew = run_config(image_config(name="anew", **CENTRAL))
    assert same_tensors(begun(anew.folder, 1), begun(result.folder, 1)), "the first round has nothing to carry"
    assert not any(torch.equal(t, begun(anew.folder, 2)[key]) for key, t in begun(result.folder, 2).items())
    passing_audit(result.folder)


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "sparsity"), [("none", 0.9), ("random", 0.95), ("random", 0.5)])
def test_a_run_in_sessions_carries_the_same_momentum(image_config: Make, mask: str, sparsity: float) -> None:
    """Gathered where few weights are kept, under bits where many are, and of all of them without a mask."""
    settings = {
        **{"mask": mask, "sparsity": sparsity, "carry_momentum": True, "participation": 1},
        **{"clients_per_task": 3, "nesterov": True, "rounds": 2, "eval_every": 2},
    }
    undisturbed = run_config(image_config(name="undisturbed", **settings))
    parts = in_sessions(image_config(name="parts", max_rounds=1, **settings))
    stored = state(undisturbed.folder, round=2)
    assert same_tensors(stored, state(parts.folder, round=2)) and rows(undisturbed.folder) == rows(parts.folder)
    passing_audit(parts.folder)
    held = {key: own for key, own in stored.items() if key.startswith("by client/momentum/")}
    assert {key.split("/")[2] for key in held} == {"digits-0", "digits-1", "digits-2"}
    assert all(bool(own.any()) for own in held.values())
    weights = {key.removeprefix("strategy/digits-0/"): own for key, own in stored.items() if key.startswith("strategy")}
    kept = load_file(parts.folder / "mask.safetensors") if mask != "none" else weights
    values = sum(int(own.sum()) if mask != "none" else own.numel() for own in kept.values())
    assert sum(own.numel() for own in held.values()) == 3 * values, "of kept weights alone"
    assert {row["kind"] for row in rows(parts.folder, "ledger")} <= {"head", "weights", "mask", "control"}


def test_nothing_is_kept_of_momentum_that_begins_anew(image_config: Make) -> None:
    folder = run_config(image_config(rounds=1)).folder
    assert not any(key.startswith("by client/momentum/") for key in state(folder, round=1))


@pytest.mark.parametrize(("mask", "sparsity"), [("none", 0.9), ("random", 0.97), ("random", 0.4)])
def test_two_rounds_with_the_momentum_of_the_first_are_one_round_of_as_many_steps(
    image_config: Make, mask: str, sparsity: float
) -> None:
    """Batches of all images and rates that stay: nothing else tells where a round ends."""
    assembly = assemble(image_config())
    start, masks = assembly.full_models()["digits-0"], None
    if mask != "none":
        draw = torch.Generator().manual_seed(4)
        masks = {key: torch.rand(tensor.shape, generator=draw) >= sparsity for key, tensor in start.items()}

    def trained(params: Params, steps: int, momentum: Params | None) -> Update:
        """With momentum that is carried on, or that begins and ends here."""
        carried = {} if momentum is None else {"momentum": momentum}
        words = {**SGD, "batch_size": 40, "lr": 0.1, "carry_momentum": momentum is not None}
        options = TrainOptions(seed=0, epochs=steps, max_steps=steps, **words)
        job = Job(client="digits-0", params=params, round=1, options=options, kept=carried, mask=masks)
        return train([job], assembly.site)[0]

    first = trained(start, 3, {})
    before = {key: own.clone() for key, own in first.kept["momentum"].items()}
    second = trained(first.params, 2, first.kept["momentum"])
    assert same_tensors(before, dict(first.kept["momentum"])), "what was handed over is not written to"
    whole_round = trained(start, 5, None)
    for key in start:
        torch.testing.assert_close(second.params[key], whole_round.params[key], rtol=1e-5, atol=1e-6)
        assert masks is not None or not torch.equal(second.params[key], first.params[key])
    forgot = trained(first.params, 2, {})
    assert any(not torch.allclose(forgot.params[key], whole_round.params[key], rtol=1e-3, atol=1e-4) for key in start)


def by_hand(
    start: dict[str, torch.Tensor], site: Site, options: TrainOptions, batches, *, scale: float, growth: int
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """(the weights, the loss scale of every step) of SGD under fp16 with a loss scale that is kept by hand."""
    leaves = {key: tensor.clone().requires_grad_() for key, tensor in sorted(start.items())}
    optimizer, scales, good = torch.optim.SGD(leaves.values(), lr=options.lr, momentum=options.momentum), [], 0
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.float16):
            logits = image_logits(site.vision, leaves, preprocess(site.vision, batch.pixels))
        (scale * cross_entropy(logits.float(), torch.from_numpy(batch.labels))).backward()
        scales.append(scale)
        gradients = [leaf.grad for leaf in leaves.values()]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            for gradient in gradients:
                gradient /= scale
            torch.nn.utils.clip_grad_norm_(leaves.values(), options.clip)
            optimizer.step()
            good += 1
            scale, good = (2 * scale, 0) if good == growth else (scale, good)
        else:
            scale, good = scale / 2, 0
        optimizer.zero_grad()
    return {key: leaf.detach() for key, leaf in leaves.items()}, scales


def halved(image_config: Make) -> tuple[Site, dict[str, torch.Tensor]]:
    """A site that computes in fp16, and what its clients begin with."""
    assembly = assemble(image_config(precision="fp16"))
    return assembly.site, dict(assembly.full_models()["digits-0"])


def test_fp16_is_sgd_with_a_loss_scale_that_halves_and_doubles(image_config: Make, monkeypatch) -> None:
    site, start = halved(image_config)
    options = TrainOptions(seed=0, **{**SGD, "clip": 1.0}, epochs=12, max_steps=12, batch_size=8, lr=0.05)
    job = Job(client="digits-0", params=start, round=1, options=options)
    monkeypatch.setattr(descent, "LOSS_SCALE", 2.0**24)
    monkeypatch.setattr(descent, "GROWTH_STEPS", 3)
    (found,) = train([job], site)
    batches = list(batches_of(site.data["digits-0"].splits["train"], job, secret=None))
    wanted, scales = by_hand(start, site, options, batches, scale=2.0**24, growth=3)
    steps = [after / before for before, after in pairwise(scales)]
    assert {0.5, 1.0, 2.0} == set(steps), "it overflowed, and grew again"
    for key in start:
        torch.testing.assert_close(found.params[key], wanted[key], rtol=0, atol=0)
    assert found.metrics["skipped"] == steps.count(0.5) > 0 and found.metrics["steps"] == 12


def test_fp16_stays_near_fp32_and_begins_every_round_with_a_fresh_scale(image_config: Make) -> None:
    site, start = halved(image_config)
    plain = replace(site, fp16=False)
    options = TrainOptions(seed=0, **{**SGD, "clip": 1.0}, epochs=4, max_steps=4, batch_size=16, lr=0.05)
    job = Job(client="digits-0", params=start, round=1, options=options)
    (half,), (again,), (full,) = (train([job], own) for own in (site, site, plain))
    assert same_tensors(dict(half.params), dict(again.params)) and half.metrics["skipped"] == 0
    assert "skipped" not in full.metrics
    moved = math.sqrt(sum(float((full.params[key] - start[key]).square().sum()) for key in start))
    apart = math.sqrt(sum(float((full.params[key] - half.params[key]).square().sum()) for key in start))
    assert 0 < apart < 0.05 * moved


@pytest.mark.parametrize("sparsity", [0.97, 0.4])
def test_frozen_weights_keep_every_bit_in_fp16_even_where_steps_overflow(
    image_config: Make, sparsity: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, start = halved(image_config)
    draw = torch.Generator().manual_seed(4)
    masks = {key: torch.rand(tensor.shape, generator=draw) >= sparsity for key, tensor in start.items()}
    monkeypatch.setattr(descent, "LOSS_SCALE", 2.0**24)
    options = TrainOptions(
        seed=0, **SGD, epochs=10, max_steps=10, batch_size=8, lr=0.05, weight_decay=0.1, nesterov=True
    )
    (found,) = train([Job(client="digits-0", params=start, round=1, options=options, mask=masks)], site)
    assert 0 < found.metrics["skipped"] < 10
    for key, kept in masks.items():
        bits = [tensor.view(torch.int32) for tensor in (start[key], found.params[key])]
        assert torch.equal(bits[0][~kept], bits[1][~kept])
    assert any(not torch.equal(start[key], found.params[key]) for key in start)


@pytest.mark.slow
def test_a_run_in_fp16_goes_through_the_same_rounds(image_config: Make) -> None:
    settings = {"precision": "fp16", "mask": "random", "sparsity": 0.5, "eval_every": 1, "rounds": 2}
    result = run_config(image_config(name="whole", **settings))
    parts = run_config(image_config(name="parts", max_rounds=1, **settings))
    parts = resume_run(parts.folder)
    assert same_tensors(state(result.folder, round=2), state(parts.folder, round=2)) and audit_run(parts.folder).ok
    trained = [row for row in rows(result.folder) if row.get("split") == "train"]
    assert all(0 <= row["skipped"] < row["steps"] and math.isfinite(row["loss"]) for row in trained)
    assert len(trained) == 8
    assert result.summary["overall"]["final"]["test"]["accuracy"] > 0.2
