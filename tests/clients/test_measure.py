"""What a plan needs of a cut client, measured on both sides of its cut, is that of the whole model to the bit."""

import dataclasses

import pytest
import torch

from atlas_fl.clients import ACTIONS
from atlas_fl.clients.base import Job, Site, Update
from atlas_fl.clients.fingerprint import FingerprintOptions
from atlas_fl.clients.importance import ImportanceOptions
from atlas_fl.clients.train import TrainOptions
from atlas_fl.split.step import Cut
from tests.clients.test_sides import over_the_cut

TRAIN = TrainOptions(seed=2, batch_size=3, lr=5e-3)


def options_of(what: str) -> FingerprintOptions | ImportanceOptions:
    action, _, kind = what.partition(" ")
    if action == "importance":
        return ImportanceOptions(kind=kind, train=TRAIN, batches=3)
    return FingerprintOptions(
        kind=kind, sketch_dim=64, train=TRAIN, batches=2, steps=5, stride=2, reliability=2.0, samples=9
    )


def client(tiny, site_of, spec_of, what: str, cut: Cut) -> tuple[Site, Job]:
    spec = spec_of(name="a-0", labels=3, examples=11, ranks=(1, 4, 2), pairs=True)
    return site_of(tiny, spec), Job(client="a-0", params=tiny.params(spec), round=0, options=options_of(what), cut=cut)


def assert_same(found: Update, expected: Update) -> None:
    assert {**found.metrics, "seconds": 0} == {**expected.metrics, "seconds": 0}
    assert list(found.params) == list(expected.params)
    assert all(torch.equal(found.params[key], expected.params[key]) for key in expected.params)


WHATS = ("fingerprint delta", "fingerprint fisher", "fingerprint gradient", "importance gradient", "importance rngwp")


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize(("blocks", "head"), [(1, "client"), (1, "server"), (2, "client"), (2, "server")])
def test_measured_over_the_cut_it_is_the_whole_models(tiny, site_of, spec_of, what: str, blocks: int, head) -> None:
    site, job = client(tiny, site_of, spec_of, what, Cut(blocks=blocks, head=head))
    action = what.partition(" ")[0]
    (whole,) = ACTIONS[action]([dataclasses.replace(job, cut=None)], site)
    (simulated,) = ACTIONS[action]([job], site)
    found, crossing, half = over_the_cut(action, job, tiny, site)
    assert_same(simulated, whole)
    assert_same(found, whole)
    assert dict(found.crossed) == dict(simulated.crossed)
