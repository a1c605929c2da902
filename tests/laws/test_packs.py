"""Training and scoring in a pack give every client what it would get alone, whoever else is in the pack."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.local_training import train
from atlas_fl.client.options import EvaluateOptions, FingerprintOptions, ImportanceOptions, TrainOptions
from atlas_fl.client.registry import ACTIONS
from atlas_fl.runtime.local import LocalEngine

HARD = TrainOptions(
    seed=5,
    rounds=2,
    epochs=2,
    batch_size=4,
    lr=1e-2,
    schedule="linear",
    warmup=0.3,
    weight_decay=0.1,
    proximal_mu=0.3,
    clip=0.5,
    dropout=0.25,
)


def specs_of(spec_of) -> list:
    return [
        spec_of(name="a-0", labels=2, examples=8, ranks=(1, 4, 2)),
        spec_of(name="b-0", labels=5, examples=5, ranks=(3, 3, 3), pairs=True),
        spec_of(name="c-0", labels=0, examples=9, ranks=(4, 1, 1), words=(1, 3)),
        spec_of(name="d-0", labels=2, examples=1, ranks=(2, 2, 4)),
        spec_of(name="e-0", labels=3, examples=7, ranks=(2, 1, 3), words=(9, 14)),
    ]


def federation(tiny, site_of, spec_of, **changes: object) -> tuple[Site, list[Job]]:
    """Five clients that differ in everything that can differ: ranks, labels, examples, steps, lengths and options."""
    specs = specs_of(spec_of)
    site = site_of(tiny, *specs, **changes)
    options = [
        HARD,
        dataclasses.replace(HARD, epochs=1, schedule="cosine", dropout=0.0),
        dataclasses.replace(HARD, max_steps=2, seed=6, dropout=0.4),
        dataclasses.replace(HARD, clip=0.0, weight_decay=0.0),
        dataclasses.replace(HARD, trained_parts="B", batch_size=3, schedule="constant"),
    ]
    leaves = {name.rsplit(".", 1)[-1] for name in site.modules}
    return site, [
        Job(client=spec.name, params=tiny.params(spec, leaves, seed=i), round=1 + i % 2, options=own)
        for i, (spec, own) in enumerate(zip(specs, options, strict=True))
    ]


def by_client(updates: Sequence[Update]) -> dict[str, Update]:
    return {update.client: update for update in updates}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, atol: float = 1e-5) -> None:
    assert set(found) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=atol, rtol=1e-5, msg=key)


def test_training_in_a_pack_equals_training_alone(tiny, site_of, spec_of) -> None:
    site, jobs = federation(tiny, site_of, spec_of)
    together = train(jobs, site)
    assert [update.client for update in together] == [job.client for job in jobs]
    assert [update.metrics["steps"] for update in together] == [4, 2, 2, 2, 6]
    for job, update in zip(jobs, together, strict=True):
        (alone,) = train([job], site)
        assert_same(update.params, alone.params)
        assert update.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-5)
        assert update.examples == alone.examples == len(site.data[job.client].splits["train"])
        assert max(float((update.params[key] - job.params[key]).abs().max()) for key in job.params) > 5e-3


def test_in_float64_a_pack_of_all_linear_layers_equals_training_alone_to_twelve_digits(tiny, site_of, spec_of) -> None:
    """Adam magnifies the noise of gradients near zero, so only float64 tells noise from a gradient gone astray."""
    exact = dataclasses.replace(tiny.backbone, model=copy.deepcopy(tiny.backbone.model).double())
    site, jobs = federation(tiny, site_of, spec_of, targets=("all-linear",), backbone=exact)
    jobs = [dataclasses.replace(job, params={k: v.double() for k, v in job.params.items()}) for job in jobs]
    for job, update in zip(jobs, train(jobs, site), strict=True):
        assert_same(update.params, train([job], site)[0].params, atol=1e-10)


def test_the_order_of_clients_in_a_pack_changes_nothing_but_the_order_of_the_answers(tiny, site_of, spec_of) -> None:
    site, jobs = federation(tiny, site_of, spec_of)
    shuffled = [jobs[i] for i in (3, 0, 4, 2, 1)]
    first, second = train(jobs, site), train(shuffled, site)
    assert [update.client for update in second] == [job.client for job in shuffled]
    for client, update in by_client(first).items():
        assert_same(by_client(second)[client].params, update.params)


def test_two_jobs_of_one_client_train_apart(tiny_of, site_of, spec_of) -> None:
    tiny = tiny_of("bert")
    site, jobs = federation(tiny, site_of, spec_of)
    halves = [
        dataclasses.replace(jobs[0], options=dataclasses.replace(HARD, half=half), params=jobs[0].params)
        for half in (0, 1)
    ]
    for update, job in zip(train(halves, site), halves, strict=True):
        assert_same(update.params, train([job], site)[0].params)


def test_masks_make_a_difference_and_are_each_clients_own(tiny_of, site_of, spec_of) -> None:
    """Guards the laws above: with dropout ignored, or one mask for all, they would hold as well."""
    tiny = tiny_of("bert")
    site, jobs = federation(tiny, site_of, spec_of)
    plain = dataclasses.replace(jobs[0], options=dataclasses.replace(HARD, dropout=0.0))
    other = dataclasses.replace(jobs[0], options=dataclasses.replace(HARD, dropout=0.25, seed=6))
    results = [train([job], site)[0].params for job in (jobs[0], plain, other)]
    key = next(iter(jobs[0].params))
    assert (results[0][key] - results[1][key]).abs().max() > 1e-3
    assert (results[0][key] - results[2][key]).abs().max() > 1e-3


@pytest.mark.parametrize("max_tokens", [1, 40, 100_000])
def test_scores_do_not_depend_on_the_pack(tiny, site_of, spec_of, max_tokens: int) -> None:
    site, jobs = federation(tiny, site_of, spec_of, max_tokens=max_tokens)
    jobs = [dataclasses.replace(job, options=EvaluateOptions(split="test")) for job in jobs]
    for client, update in by_client(LocalEngine(site=site).run("evaluate", jobs)).items():
        job = next(job for job in jobs if job.client == client)
        alone = ACTIONS["evaluate"]([job], dataclasses.replace(site, max_tokens=100_000))[0]
        assert update.params is job.params
        assert update.metrics.keys() == alone.metrics.keys()
        for name in set(alone.metrics) - {"seconds"}:
            assert update.metrics[name] == pytest.approx(alone.metrics[name], abs=1e-5), name


OPTIONS = {
    "train": HARD,
    "evaluate": EvaluateOptions(split="validation"),
    "importance": ImportanceOptions(kind="gradient", train=HARD, batches=2),
    "fingerprint": FingerprintOptions(kind="delta", sketch_dim=64, train=HARD, batches=2, steps=4, stride=2),
}


def test_every_action_but_those_of_whole_models_is_tried() -> None:
    assert ACTIONS.keys() - OPTIONS.keys() == {"ridge", "scale", "sensitivity"}


@pytest.mark.parametrize("max_tokens", [1, 60, 100_000])
@pytest.mark.parametrize("action", sorted(OPTIONS))
def test_the_engine_answers_every_job_in_order_whatever_the_packs(
    tiny_of, site_of, spec_of, action: str, max_tokens: int
) -> None:
    tiny = tiny_of("bert")
    site, jobs = federation(tiny, site_of, spec_of, max_tokens=max_tokens)
    # A client of one example has no second half to take a fingerprint from.
    jobs = [dataclasses.replace(job, options=OPTIONS[action]) for job in jobs if job.client != "d-0"]
    told: list[tuple[str, int, int]] = []
    engine = LocalEngine(site=site, on_progress=lambda *news: told.append(news))
    updates = engine.run(action, jobs)
    assert [update.client for update in updates] == [job.client for job in jobs]
    assert told[-1] == (action, 4, 4)
    expected = ACTIONS[action](jobs, dataclasses.replace(site, max_tokens=100_000))
    for update, alone in zip(updates, expected, strict=True):
        assert_same(update.params, alone.params, atol=1e-4)
