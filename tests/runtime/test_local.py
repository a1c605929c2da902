from collections.abc import Mapping

import numpy as np
import pytest

from atlas_fl.client.batching import packs
from atlas_fl.client.job import Job
from atlas_fl.client.options import EvaluateOptions, FingerprintOptions, TrainOptions

TRAIN = TrainOptions(seed=0, batch_size=4)


def jobs_of(names: Mapping[str, object]) -> list[Job]:
    return [Job(client=name, params={}, round=1, options=options) for name, options in names.items()]


@pytest.mark.parametrize("max_tokens", [1, 40, 100, 10_000])
def test_a_pack_holds_the_tokens_that_it_may_on_average_and_no_job_is_lost(tiny_of, site_of, spec_of, max_tokens):
    names = [f"a-{i}" for i in range(7)]
    site = site_of(tiny_of("bert"), *(spec_of(name=name) for name in names), max_tokens=max_tokens)
    jobs = jobs_of(dict.fromkeys(names, TRAIN))
    found = list(packs(jobs, site))
    assert [job for pack in found for job in pack] == jobs
    sizes = {name: 4 * float(np.mean(site.data[name].splits["train"].lengths)) for name in names}
    for pack, after in zip(found, [*found[1:], []]):
        tokens = sum(sizes[job.client] for job in pack)
        assert tokens <= max_tokens or len(pack) == 1
        if after:
            assert tokens + sizes[after[0].client] > max_tokens, "the next job would have fitted"


def test_a_fingerprint_counts_both_halves_and_an_evaluation_bounds_itself(tiny_of, site_of, spec_of) -> None:
    names = ["a-0", "a-1"]
    site = site_of(tiny_of("bert"), *(spec_of(name=name, words=(3, 3)) for name in names), max_tokens=50)
    sketched = FingerprintOptions(kind="delta", sketch_dim=8, train=TRAIN, batches=1, steps=1)
    # five tokens an example: 4 examples each are 40 tokens together, both halves of both 80
    assert [len(pack) for pack in packs(jobs_of(dict.fromkeys(names, TRAIN)), site)] == [2]
    assert [len(pack) for pack in packs(jobs_of(dict.fromkeys(names, sketched)), site)] == [1, 1]
    assert list(packs([], site)) == []
    scored = EvaluateOptions(split="test")
    assert [len(pack) for pack in packs(jobs_of(dict.fromkeys(names, scored)), site)] == [2]
