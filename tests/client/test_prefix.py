"""Clients whose lowest blocks carry no adapters: one forward pass of these for each example, and the same bits."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch

from atlas_fl.client.batching import collate_packed, forward, make_row
from atlas_fl.client.evaluation import evaluate
from atlas_fl.client.importance import batch_gradients
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.local_training import train
from atlas_fl.client.options import EvaluateOptions, ImportanceOptions, TrainOptions
from atlas_fl.models.loading import load_backbone
from atlas_fl.models.prefix_cache import PrefixCache
from tests.client.split.test_sides import assert_same_model

TRAIN = TrainOptions(seed=3, rounds=2, epochs=2, batch_size=4, lr=1e-2, dropout=0.2)
BUDGETS = (0, 4000, 10**9)
"""Nothing is kept, some chunks are, all are."""


def federation(tiny, site_of, spec_of, **changes: object) -> tuple[Site, list[Job]]:
    """Three clients of a model of three blocks with adapters in the last one."""
    specs = [
        spec_of(name="a-0", labels=2, examples=9, ranks=(1, 1, 2)),
        spec_of(name="b-0", labels=5, examples=5, ranks=(1, 1, 4), pairs=True),
        spec_of(name="c-0", labels=0, examples=7, ranks=(1, 1, 3), words=(1, 3)),
    ]
    site = site_of(tiny, *specs, first_adapted=2, **changes)
    jobs = [Job(client=spec.name, params=upper(tiny.params(spec), site), round=1, options=TRAIN) for spec in specs]
    return site, jobs


def upper(params: dict[str, torch.Tensor], site: Site) -> dict[str, torch.Tensor]:
    """The parameters of the adapted modules, and the head."""
    return {key: t for key, t in params.items() if key.startswith("head.") or key[: key.rindex(".")] in site.modules}


def with_budget(site: Site, budget_bytes: int) -> Site:
    return dataclasses.replace(site, prefix_cache=PrefixCache(budget_bytes=budget_bytes))


def scored(jobs: list[Job], split: str) -> list[Job]:
    return [dataclasses.replace(job, options=EvaluateOptions(split=split)) for job in jobs]


def two_rounds(jobs: list[Job], site: Site) -> list[list[Update]]:
    """Scores, training, scores, training again from the same models in another order of examples, scores."""
    rounds = [evaluate(scored(jobs, "validation"), site)]
    for number in (1, 2):
        rounds.append(train([dataclasses.replace(job, round=number) for job in jobs], site))
        models = {update.client: update.params for update in rounds[-1]}
        trained = [dataclasses.replace(job, params=models[job.client]) for job in jobs]
        rounds += [evaluate(scored(trained, split), site) for split in ("validation", "train", "test")]
    return rounds


def assert_same_bits(found: list[list[Update]], expected: list[list[Update]]) -> None:
    for one, other in zip(found, expected, strict=True):
        for update, same in zip(one, other, strict=True):
            assert_same_model(update, same)


@contextmanager
def counted_tokens(site: Site) -> Iterator[Counter[int]]:
    """Tokens that each block has computed, by its number."""
    counts = Counter[int]()
    with ExitStack() as hooks:
        for at, block in enumerate(site.backbone.blocks):
            hook = block.register_forward_pre_hook(lambda _, args, at=at: counts.update({at: args[0].shape[1]}))
            hooks.callback(hook.remove)
        yield counts


@pytest.mark.parametrize("tiny", ["bert", pytest.param("qwen2", marks=pytest.mark.slow)], indirect=True)
def test_models_and_scores_are_the_same_bits_under_every_budget(tiny, site_of, spec_of) -> None:
    site, jobs = federation(tiny, site_of, spec_of)
    none, some, every = (two_rounds(jobs, with_budget(site, budget)) for budget in BUDGETS)
    assert_same_bits(some, none)
    assert_same_bits(every, none)
    moved = zip(jobs, none[1], strict=True)
    assert min(float((update.params[key] - job.params[key]).abs().max()) for job, update in moved for key in job.params)


@pytest.mark.slow
def test_what_is_kept_is_computed_once_and_the_rest_again(tiny_of, site_of, spec_of) -> None:
    site, jobs = federation(tiny_of("bert"), site_of, spec_of)
    every = sum(int(data.lengths.sum()) for tokens in site.data.values() for data in tokens.splits.values())
    for budget in BUDGETS:
        own = with_budget(site, budget)
        with counted_tokens(own) as counts:
            two_rounds(jobs, own)
        assert counts[0] == counts[1]
        assert (counts[0] == every) == (budget == BUDGETS[-1])
        assert counts[2] > every
        assert own.prefix_cache.used_bytes <= budget
    assert own.prefix_cache.used_bytes == every * 32 * 4


def test_states_are_those_of_stock_transformers(tiny, site_of, spec_of) -> None:
    site, _ = federation(tiny, site_of, spec_of)
    site = with_budget(site, 10**9)
    batch = site.data["a-0"].splits["train"].take(np.array([6, 0, 3, 3]))
    row = make_row([batch], site)
    assert row.prefix is not None and row.prefix_blocks == 2
    model = tiny.stock().base_model
    for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids = torch.from_numpy(batch.ids[None, start:stop])
        stock = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[2]
        torch.testing.assert_close(row.prefix[start:stop], stock[0], atol=2e-5, rtol=1e-4)


def test_logits_and_gradients_are_those_of_the_whole_model_in_one_row(tiny, site_of, spec_of) -> None:
    site, jobs = federation(tiny, site_of, spec_of)
    batches = [site.data[job.client].splits["train"].take(np.arange(4)) for job in jobs]
    found = []
    for row in (make_row(batches, site), collate_packed(batches, device=site.backbone.device)):
        leaves = [{key: t.clone().requires_grad_() for key, t in job.params.items()} for job in jobs]
        with forward(row, leaves, site) as logits:
            torch.cat([one.square().flatten() for one in logits]).sum().backward()
        found.append((logits, [leaf.grad for own in leaves for leaf in own.values()]))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-3, rtol=1e-2)


def test_nothing_below_the_first_adapter_is_random(tiny_of, site_of, spec_of) -> None:
    """BERT's own dropout is .1 in its config; the frozen model is in evaluation mode, also where it is checkpointed."""
    tiny = tiny_of("bert")
    checkpointed = load_backbone(str(tiny.path), gradient_checkpointing=True)
    states = []
    for backbone in (tiny.backbone, checkpointed, checkpointed):
        site, jobs = federation(tiny, site_of, spec_of, backbone=backbone)
        drops = [module for module in backbone.model.modules() if isinstance(module, torch.nn.Dropout)]
        assert drops and all(module.p > 0 and not module.training for module in drops)
        row = make_row([site.data[job.client].splits["train"].take(np.arange(5)) for job in jobs], site)
        assert row.prefix is not None
        states.append(row.prefix)
    assert torch.equal(states[0], states[1]) and torch.equal(states[1], states[2])


def test_the_same_bits_with_all_layers_adapted(tiny_of, site_of, spec_of) -> None:
    tiny = tiny_of("gpt2")
    site, jobs = federation(tiny, site_of, spec_of, targets=("all-linear",))
    leaves = {name.rsplit(".", 1)[-1] for name in site.modules}
    specs = [spec_of(name=job.client, labels=2, ranks=(1, 1, 2)) for job in jobs[:1]]
    jobs = [dataclasses.replace(jobs[0], params=upper(tiny.params(specs[0], leaves), site))]
    assert_same_bits(two_rounds(jobs, with_budget(site, 10**9)), two_rounds(jobs, with_budget(site, 0)))


@pytest.mark.slow
def test_checkpointed_blocks_train_the_same_model(tiny_of, site_of, spec_of) -> None:
    tiny = tiny_of("bert")
    site, jobs = federation(tiny, site_of, spec_of)
    plain = dataclasses.replace(site, first_adapted=1)
    lean = dataclasses.replace(plain, backbone=load_backbone(str(tiny.path), gradient_checkpointing=True))
    jobs = [
        dataclasses.replace(job, params=upper(tiny.params(spec_of(name="x", labels=labels, ranks=(1, 2, 2))), plain))
        for job, labels in zip(jobs, (2, 5, 0), strict=True)
    ]
    assert_same_bits(two_rounds(jobs, lean), two_rounds(jobs, plain))


def test_a_fingerprint_of_blocks_below_the_first_adapted_one_has_their_gradients(tiny_of, site_of, spec_of) -> None:
    site, jobs = federation(tiny_of("bert"), site_of, spec_of)
    job = dataclasses.replace(jobs[0], options=ImportanceOptions(kind="gradient", train=TRAIN, batches=1))
    whole = dataclasses.replace(site, first_adapted=0)
    for blocks in (1, 2):
        ((loss, found),) = batch_gradients(job, site, half=0, blocks=blocks, count=1)
        ((other, expected),) = batch_gradients(job, whole, half=0, blocks=blocks, count=1)
        assert found.keys() == expected.keys()
        assert {name.split(".")[2] for name in found if "layer" in name} == {str(3 - at) for at in range(1, blocks + 1)}
        torch.testing.assert_close(loss, other, atol=1e-5, rtol=1e-5)
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, expected[key], atol=1e-4, rtol=1e-3)
