"""Fingerprints against torch's autograd on the whole stock model, and the warm-up's laws."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from atlas_fl.client.batching import make_row
from atlas_fl.client.fingerprint import FIRST, SECOND, fingerprint, half_job, measure_parts
from atlas_fl.client.importance import batch_gradients, half_rows, head_leaves, last_weights, loss_gradient
from atlas_fl.client.job import Job
from atlas_fl.client.local_training import positions, train
from atlas_fl.client.options import FingerprintOptions, TrainOptions
from atlas_fl.clustering.sketch import combine_parts, sketch
from atlas_fl.models.loading import load_backbone

KINDS = ("delta", "fisher", "gradient")
TRAIN = TrainOptions(seed=2, batch_size=3, lr=5e-3, dropout=0.1)


def options(kind: str, **changes: object) -> FingerprintOptions:
    usual = {"sketch_dim": 64, "train": TRAIN, "batches": 2, "steps": 6, "stride": 3, "reliability": 2.0}
    return FingerprintOptions(kind=kind, **usual | changes)


def federation(tiny, site_of, spec_of, kind: str, **changes: object):
    specs = [
        spec_of(name="a-0", labels=3, examples=11, pairs=True),
        spec_of(name="b-0", labels=0, examples=8, ranks=(2, 2, 2)),
        spec_of(name="c-0", labels=2, examples=6),
    ]
    jobs = []
    for spec in specs:
        fresh = {key: own * 0 if key.endswith("lora_B") else own for key, own in tiny.params(spec).items()}
        jobs.append(Job(client=spec.name, params=fresh, round=0, options=options(kind, **changes)))
    return site_of(tiny, *specs), jobs


def stock_passes(tiny, site, job: Job, half: int) -> list[tuple[float, dict[str, Tensor]]]:
    """Each batch's loss, and its gradient with respect to every weight of the stock classifier with its head."""
    heads = {key.removeprefix("head."): value for key, value in job.params.items() if key.startswith("head.")}
    found = []
    for row in half_rows(job, site, half=half, count=job.options.batches):
        model = tiny.stock(next(reversed(heads.values())).shape[0])
        for name, value in heads.items():
            model.get_parameter(name).data.copy_(value)
        named = {"input_ids": row.ids} | ({"token_type_ids": row.types} if tiny.backbone.family.token_types else {})
        texts = [
            {name: tensor[None, start : stop + 1] for name, tensor in named.items()}
            for start, stop in zip(row.layout.starts, row.layout.ends, strict=True)
        ]
        logits, (labels,) = torch.cat([model(**text).logits for text in texts]), row.labels
        numbers = labels.is_floating_point()
        loss = mse_loss(logits[:, 0], labels) if numbers else cross_entropy(logits, labels)
        loss.backward()
        gradient = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        found.append((float(loss.detach()), gradient))
    return found


def test_batch_gradients_are_those_of_the_last_two_blocks_matrices_and_the_head(tiny, site_of, spec_of) -> None:
    site, jobs = federation(tiny, site_of, spec_of, "gradient")
    if tiny.name == "gpt2":
        site = dataclasses.replace(site, backbone=load_backbone(str(tiny.path), gradient_checkpointing=True))
    prefix = tiny.backbone.family.prefix + "."
    last = tuple(f"{tiny.backbone.family.blocks}.{i}." for i in (1, 2))
    for job in jobs[:2]:
        ours = [gradient for _, gradient in batch_gradients(job, site, half=0, blocks=2, count=2)]
        for mine, (_, theirs) in zip(ours, stock_passes(tiny, site, job, 0), strict=True):
            inside = {n.removeprefix(prefix): g for n, g in theirs.items() if n.startswith(prefix)}
            expected = {n: g for n, g in inside.items() if n.startswith(last) and n.endswith("weight") and g.ndim == 2}
            expected |= {f"head.{n}": g for n, g in theirs.items() if not n.startswith(prefix)}
            torch.testing.assert_close(dict(mine), expected, atol=1e-5, rtol=1e-4)
    assert not any(parameter.requires_grad for parameter in site.backbone.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gradient", "fisher"])
def test_the_sketch_is_of_the_mean_or_root_mean_square_of_the_stock_gradients(tiny_of, site_of, spec_of, kind) -> None:
    tiny = tiny_of("bert")
    site, jobs = federation(tiny, site_of, spec_of, kind)
    for job, update in zip(jobs, fingerprint(jobs, site), strict=True):
        passes = [stock_passes(tiny, site, job, half) for half in (0, 1)]
        assert update.metrics["loss"] == pytest.approx(np.mean([loss for half in passes for loss, _ in half]), rel=1e-4)
        for half, key in zip(passes, (FIRST, SECOND), strict=True):
            batches = [gradient for _, gradient in half]
            last = ("bert.encoder.layer.1.", "bert.encoder.layer.2.")
            matrices = [name for name, own in batches[0].items() if name.startswith(last) and own.ndim == 2]
            keys = [*matrices, *(name for name in batches[0] if name.startswith("classifier"))]
            stacks = {n: torch.stack([batch[n].double() for batch in batches]) for n in keys}
            folded = {n: s.mean(0) if kind == "gradient" else s.square().mean(0).sqrt() for n, s in stacks.items()}
            renamed = {n.removeprefix("bert.") if n.startswith("bert.") else f"head.{n}": v for n, v in folded.items()}
            expected = sketch(renamed, dim=64, seed=2)
            np.testing.assert_allclose(update.params[key].numpy(), expected, atol=2e-4)
        assert {k: v for k, v in update.params.items() if k not in (FIRST, SECOND)} == dict(job.params)


@pytest.mark.parametrize("tiny", ["bert"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_sketches_are_unit_vectors_and_a_clients_own(tiny, site_of, spec_of, kind: str) -> None:
    site, jobs = federation(tiny, site_of, spec_of, kind)
    updates = fingerprint(jobs, site)
    again = fingerprint(jobs[::-1], site)[::-1]
    for update, other, job in zip(updates, again, jobs, strict=True):
        assert update.client == other.client == job.client
        for key in (FIRST, SECOND):
            half = update.params[key]
            assert (half.shape, half.dtype) == ((64,), torch.float32)
            assert float(half.norm()) == pytest.approx(1, abs=1e-5)
            torch.testing.assert_close(half, other.params[key], atol=1e-3, rtol=1e-3)
        agreement = float(update.params[FIRST] @ update.params[SECOND])
        assert update.metrics["agreement"] == pytest.approx(agreement)
        assert agreement < 0.999, "both halves saw the same examples"


@pytest.mark.parametrize("kind", ["gradient", "fisher"])
def test_more_blocks_make_another_sketch_and_are_the_ones_that_are_read(tiny_of, site_of, spec_of, kind) -> None:
    sketches = []
    for blocks in (1, 2, 3):
        site, jobs = federation(tiny_of("bert"), site_of, spec_of, kind, blocks=blocks)
        sketches.append(fingerprint(jobs[:1], site)[0].params[FIRST])
        ((_, gradient),) = batch_gradients(jobs[0], site, half=0, blocks=blocks, count=1)
        assert {key.split(".")[2] for key in gradient if key.startswith("encoder.layer.")} == set("210"[:blocks])
    assert all(not torch.allclose(sketches[one], sketches[one - 1], atol=0.05) for one in (0, 1, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_examples_make_another_sketch_and_are_the_only_ones_used(tiny_of, site_of, spec_of, kind: str) -> None:
    found = {}
    for samples in (None, 11, 5):
        site, jobs = federation(tiny_of("bert"), site_of, spec_of, kind, samples=samples)
        found[samples] = fingerprint(jobs[:1], site)[0]
    assert torch.equal(found[None].params[FIRST], found[11].params[FIRST]), "a-0 has eleven examples"
    assert not torch.allclose(found[None].params[FIRST], found[5].params[FIRST], atol=0.02)
    assert not torch.allclose(found[None].params[SECOND], found[5].params[SECOND], atol=0.02)
    # Whatever else the client holds plays no part.
    chosen = [positions(11, "a-0", half_job(jobs[0], half).options, secret=None) for half in (0, 1)]
    assert [len(places) for places in chosen] == [3, 2]
    assert not set(chosen[0]) & set(chosen[1])
    data = site.data["a-0"].splits["train"]
    others = np.setdiff1d(np.arange(11), np.concatenate(chosen))
    spoilt = data.labels.copy()
    spoilt[others] = (spoilt[others] + 1) % 3
    tokens = dataclasses.replace(site.data["a-0"], splits={"train": dataclasses.replace(data, labels=spoilt)})
    again = fingerprint(jobs[:1], dataclasses.replace(site, data={**site.data, "a-0": tokens}))[0]
    assert torch.equal(found[5].params[FIRST], again.params[FIRST])
    assert torch.equal(found[5].params[SECOND], again.params[SECOND])


def test_the_halves_share_no_example_and_leave_none_out(tiny_of, site_of, spec_of) -> None:
    site, jobs = federation(tiny_of("bert"), site_of, spec_of, "gradient", batches=4)
    data = site.data["a-0"].splits["train"]
    known = [data.take(np.array([i])).ids.tobytes() for i in range(len(data))]
    assert len(set(known)) == 11
    seen = []
    for half in (0, 1):
        rows = list(half_rows(jobs[0], site, half=half, count=4))
        assert [len(row.labels[0]) for row in rows] == [3, 3], "two batches of three hold the half"
        bounds = [(row.ids.numpy(), *ends) for row in rows for ends in zip(row.layout.starts, row.layout.ends)]
        seen.append({known.index(ids[start : stop + 1].tobytes()) for ids, start, stop in bounds})
    assert seen == [{0, 2, 4, 6, 8, 10}, {1, 3, 5, 7, 9}]


@pytest.mark.parametrize("kind", ["gradient", "fisher"])
def test_a_small_client_takes_no_batch_twice_and_has_the_sketch_of_many(tiny_of, site_of, spec_of, kind: str) -> None:
    site, jobs = federation(tiny_of("bert"), site_of, spec_of, kind, samples=6, batches=9)
    taken = fingerprint(jobs[:1], site)[0]
    data, asked = site.data["a-0"].splits["train"], jobs[0].options
    for half, name in enumerate((FIRST, SECOND)):
        assert sum(1 for _ in half_rows(jobs[0], site, half=half, count=9, most=3)) == 1
        index = positions(11, "a-0", dataclasses.replace(TRAIN, half=half, most=3), secret=None)
        rows = [make_row([data.take(np.roll(index, turn))], site) for turn in range(3)] * 3
        leaves, head = last_weights(site.backbone, asked.blocks), head_leaves(jobs[0], site)
        parts, _ = measure_parts([loss_gradient(row, site, leaves, head) for row in rows], asked)
        np.testing.assert_allclose(taken.params[name].numpy(), combine_parts(parts.values()), atol=1e-5)


@pytest.mark.parametrize("tiny", ["bert", "gpt2", "qwen2"], indirect=True)
def test_delta_trains_b_and_the_head_of_both_halves_and_answers_their_mean(tiny, site_of, spec_of) -> None:
    site, jobs = federation(tiny, site_of, spec_of, "delta", steps=3)
    for job, update in zip(jobs, fingerprint(jobs, site), strict=True):
        halves, losses = [], []
        for half in (0, 1):
            own = dataclasses.replace(TRAIN, half=half, epochs=3, max_steps=3, trained_parts="B")
            trained = train([dataclasses.replace(job, options=own)], site)[0]
            halves.append(trained.params)
            losses.append(trained.metrics["loss"])
        for key, start in job.params.items():
            found = update.params[key]
            if key.endswith("lora_A"):
                assert torch.equal(found, start)
                continue
            torch.testing.assert_close(found, (halves[0][key] + halves[1][key]) / 2, atol=1e-5, rtol=1e-4)
            assert not torch.equal(found, start)
        for half, key in zip(halves, (FIRST, SECOND), strict=True):
            expected = sketch({k: v for k, v in half.items() if k.endswith("lora_B")}, dim=64, seed=2)
            np.testing.assert_allclose(update.params[key].numpy(), expected, atol=1e-3)
        assert update.metrics["steps"] == 3
        assert update.metrics["loss"] == pytest.approx(sum(losses) / 2, rel=1e-4)


def test_the_warm_up_of_a_client_ends_when_its_halves_agree_and_goes_on_for_the_others(
    tiny_of, site_of, spec_of
) -> None:
    site, jobs = federation(tiny_of("bert"), site_of, spec_of, "delta", steps=3)
    looks = [fingerprint([job], site)[0].metrics["agreement"] for job in jobs]
    between = sorted(looks)[0] / 2 + sorted(looks)[1] / 2
    longer = [dataclasses.replace(job, options=options("delta", steps=8, reliability=between)) for job in jobs]
    updates = fingerprint(longer, site)
    for update, first in zip(updates, looks, strict=True):
        assert update.metrics["steps"] == 3 if first >= between else update.metrics["steps"] in (6, 8)
    never = [dataclasses.replace(job, options=options("delta", steps=8)) for job in jobs]
    assert [update.metrics["steps"] for update in fingerprint(never, site)] == [8, 8, 8]
