"""Results that several runs of a process share: equal jobs at equal sites, and nothing else."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.options import EvaluateOptions, TrainOptions
from atlas_fl.models.prefix_cache import PrefixCache
from atlas_fl.runtime.local import LocalEngine
from atlas_fl.runtime.reuse import ReusedResults, ReusingEngine, site_key
from atlas_fl.split.channel import Cut

TRAIN = TrainOptions(seed=3, rounds=2, batch_size=4, lr=1e-2)


class CountingEngine:
    """What it was asked; each update is the job's own model, or with a site what it trains to."""

    def __init__(self, site: Site | None = None, **reported: Any) -> None:
        self.site, self.asked, self.reported = site, list[str](), reported

    def run(self, action: str, jobs: Sequence[Job]) -> list[Update]:
        self.asked.append(action)
        if self.site is not None:
            return LocalEngine(site=self.site).run(action, jobs)
        return [
            Update(client=job.client, params=job.params, examples=1, metrics={}, reported=self.reported) for job in jobs
        ]


@pytest.fixture
def site_and_job(tiny_of: Any, site_of: Any, spec_of: Any) -> tuple[Site, Job]:
    tiny, spec = tiny_of("bert"), spec_of(name="a-0", examples=9)
    site = site_of(tiny, spec)
    return site, Job(client="a-0", params=tiny.params(spec), round=1, options=TRAIN)


def asked_of(site: Site, *asked: tuple[str, Sequence[Job]], max_bytes: int | None = None, **reported: Any) -> list[str]:
    """The actions that an engine is left with of these that several runs ask for, one after another."""
    engine, results = CountingEngine(**reported), ReusedResults()
    with results.remember(**({} if max_bytes is None else {"max_bytes": max_bytes})):
        for action, jobs in asked:
            ReusingEngine(engine=engine, site=site, results=results).run(action, jobs)
    return engine.asked


def test_equal_jobs_are_computed_once_and_have_the_same_bits(site_and_job: tuple[Site, Job]) -> None:
    site, job = site_and_job
    engine, results = CountingEngine(site), ReusedResults()
    reusing = ReusingEngine(engine=engine, site=site, results=results)
    (alone,) = LocalEngine(site=site).run("train", [job])
    with results.remember():
        copied = dataclasses.replace(job, params={key: tensor.clone() for key, tensor in job.params.items()})
        updates = [reusing.run("train", [each])[0] for each in (job, copied)]
    assert engine.asked == ["train"]
    for update in updates:
        assert all(torch.equal(update.params[key], alone.params[key]) for key in alone.params)
        assert update.metrics["loss"] == alone.metrics["loss"]


def _another_weight(job: Job) -> Job:
    key = next(iter(job.params))
    return dataclasses.replace(job, params={**job.params, key: job.params[key] + 1e-7})


@pytest.mark.parametrize(
    ("other", "action"),
    [
        (_another_weight, "train"),
        (lambda job: dataclasses.replace(job, round=2), "train"),
        (lambda job: dataclasses.replace(job, options=dataclasses.replace(TRAIN, lr=2e-2)), "train"),
        (lambda job: dataclasses.replace(job, options=EvaluateOptions(split="test")), "evaluate"),
    ],
)
def test_another_job_is_computed(site_and_job: tuple[Site, Job], other: Callable[[Job], Job], action: str) -> None:
    site, job = site_and_job
    assert asked_of(site, ("train", [job]), (action, [other(job)])) == ["train", action]


def test_jobs_that_ran_with_others_are_not_those_that_ran_alone(tiny_of: Any, site_of: Any, spec_of: Any) -> None:
    tiny, specs = tiny_of("bert"), [spec_of(name="a-0", examples=9), spec_of(name="b-0", examples=5)]
    first, second = (Job(client=spec.name, params=tiny.params(spec), round=1, options=TRAIN) for spec in specs)
    packs = ([first], [first, second], [second, first])
    assert len(asked_of(site_of(tiny, *specs), *(("train", jobs) for jobs in packs))) == 3


def test_a_model_with_a_cut_is_always_computed(site_and_job: tuple[Site, Job]) -> None:
    site, job = site_and_job
    cut = dataclasses.replace(job, cut=Cut(blocks=1))
    assert asked_of(site, *[("train", [cut])] * 2) == ["train", "train"]


def test_the_key_of_a_site_follows_its_data_weights_and_limits(tiny_of: Any, site_of: Any, spec_of: Any) -> None:
    tiny = tiny_of("bert")
    site = site_of(tiny, spec_of(name="a-0", examples=9))
    assert site_key(site) == site_key(site_of(tiny, spec_of(name="a-0", examples=9)))
    others = [
        site_of(tiny, spec_of(name="a-0", examples=8)),
        site_of(tiny, spec_of(name="b-0", examples=9)),
        dataclasses.replace(site, max_tokens=site.max_tokens + 1),
        dataclasses.replace(site, bf16=True),
        dataclasses.replace(site, scale=lambda rank: 1.0 / rank),
    ]
    assert len({site_key(other) for other in [site, *others]}) == 1 + len(others)


def test_nothing_is_remembered_outside_and_the_oldest_goes_first(site_and_job: tuple[Site, Job]) -> None:
    site, job = site_and_job
    engine, results = CountingEngine(), ReusedResults()
    reusing = ReusingEngine(engine=engine, site=site, results=results)
    for _ in range(2):
        reusing.run("train", [job])
    assert len(engine.asked) == 2
    size = sum(tensor.nbytes for tensor in job.params.values())
    with results.remember(max_bytes=2 * size):
        for number in (1, 2, 3, 3, 1):
            reusing.run("train", [dataclasses.replace(job, round=number)])
    assert len(engine.asked) == 2 + 4, "round 1 made room for round 3"


def test_what_is_reported_beside_an_update_counts_in_the_size(site_and_job: tuple[Site, Job]) -> None:
    site, job = site_and_job
    halves = {f"{half}/{key}": tensor for key, tensor in job.params.items() for half in (1, 2)}
    size = sum(tensor.nbytes for tensor in job.params.values())
    for max_bytes, times in ((3 * size, 1), (3 * size - 1, 2)):
        assert len(asked_of(site, *[("train", [job])] * 2, max_bytes=max_bytes, halves=halves)) == times


def test_states_of_the_frozen_blocks_are_shared_by_runs_on_the_same_data(
    tiny_of: Any, site_of: Any, spec_of: Any
) -> None:
    tiny, results = tiny_of("bert"), ReusedResults()

    def site(examples: int = 9, **values: Any) -> Site:
        site = site_of(tiny, spec_of(name="a-0", examples=examples))
        return dataclasses.replace(
            site, **{"first_adapted": 1, "prefix_cache": PrefixCache(budget_bytes=1000), **values}
        )

    def cache(site: Site) -> PrefixCache:
        return results.with_prefix_cache(site).prefix_cache

    assert cache(alone := site()) is alone.prefix_cache
    with results.remember():
        first = cache(site())
        assert cache(site()) is first
        assert cache(site(max_tokens=17)) is first, "packs change nothing of them"
        for other in (
            site(examples=8),
            site(first_adapted=2),
            site(bf16=True),
            site(prefix_cache=PrefixCache(budget_bytes=2000)),
            site(prefix_cache=PrefixCache(budget_bytes=1000, chunk_tokens=7)),
            site(backbone=dataclasses.replace(tiny.backbone, model=_other_weights(tiny.backbone.model))),
        ):
            assert cache(site()) is not (shared := cache(other))
            assert shared is other.prefix_cache
    assert cache(alone) is alone.prefix_cache


def _other_weights(model: Any) -> Any:
    changed = copy.deepcopy(model)
    next(changed.parameters()).data[0] += 1e-3
    return changed
