"""What a plan needs of a cut client, measured on both sides of its cut, is that of the whole model to the bit."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from atlas_fl.client.job import Job, Site
from atlas_fl.client.options import FingerprintOptions, ImportanceOptions, TrainOptions
from atlas_fl.client.registry import ACTIONS, SERVER_SIDE
from atlas_fl.errors import ProtocolError
from atlas_fl.split.channel import Cut
from atlas_fl.storage.tensors import encode_tensors
from tests.client.split.test_sides import assert_same, assert_same_model, below, over_the_cut

TRAIN = TrainOptions(seed=2, batch_size=3, lr=5e-3)


def options_of(what: str) -> FingerprintOptions | ImportanceOptions:
    action, _, kind = what.partition(" ")
    if action == "importance":
        return ImportanceOptions(kind=kind, train=TRAIN, batches=3)
    usual = {"sketch_dim": 64, "batches": 2, "steps": 5, "stride": 2, "reliability": 2.0, "samples": 9}
    return FingerprintOptions(kind=kind, train=TRAIN, **usual)


@pytest.fixture
def cut_client(client_of) -> Callable[..., tuple[str, Site, Job]]:
    """The action that measures this, a site, and its client's job."""

    def get(what: str, cut: Cut, name: str = "bert") -> tuple[str, Site, Job]:
        site, params = client_of(name, labels=3, examples=11, ranks=(1, 4, 2), pairs=True)
        return action_of(what), site, Job(client="a-0", params=params, round=0, options=options_of(what), cut=cut)

    return get


def action_of(what: str) -> str:
    return what.partition(" ")[0]


WHATS = ("fingerprint fisher", "fingerprint gradient", "importance gradient", "importance rngwp")


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize(("blocks", "head"), [(1, "client"), (2, "server")])
@pytest.mark.parametrize("name", ["bert", "qwen2"])
def test_measured_over_the_cut_it_is_the_whole_models(tiny_of, cut_client, name, blocks, head, what) -> None:
    """The site holds the blocks below its cut and nothing else; a fingerprint of two blocks reaches it at cut 2."""
    action, site, job = cut_client(what, Cut(blocks=blocks, head=head), name)
    (whole,) = ACTIONS[action]([dataclasses.replace(job, cut=None)], site)
    (simulated,) = ACTIONS[action]([job], site)
    found, _, _ = over_the_cut(action, job, tiny_of(name), site)
    assert_same_model(simulated, whole)
    assert_same(found, simulated)


@pytest.mark.parametrize("what", WHATS)
@pytest.mark.parametrize(("wire", "head"), [({"wire": "int8"}, "client"), ({"noise": 0.1}, "server")])
def test_whatever_the_wire_it_is_what_the_simulation_measures(tiny_of, cut_client, wire, head, what: str) -> None:
    action, site, job = cut_client(what, Cut(blocks=2, head=head, **wire))
    (simulated,) = ACTIONS[action]([job], site)
    found, _, _ = over_the_cut(action, job, tiny_of("bert"), site)
    assert_same(found, simulated)
    (whole,) = ACTIONS[action]([dataclasses.replace(job, cut=None)], site)
    assert any(not torch.equal(found.params[key], whole.params[key]) for key in whole.params)


def test_a_fingerprint_of_the_last_blocks_sends_rows_and_labels_and_gets_nothing_back(tiny_of, cut_client) -> None:
    action, site, job = cut_client("fingerprint fisher", Cut(blocks=1))
    found, crossing, _ = over_the_cut(action, job, tiny_of("bert"), site)
    assert set(found.crossed) == {("activation", "up"), ("label", "up")}
    assert [what for what, _, _ in crossing.server.asked] == ["loss"] * 2 * job.options.batches


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("fingerprint fisher", {"parts": torch.zeros(1, 64, dtype=torch.float64)}),
        ("fingerprint fisher", {"parts": torch.zeros(6, 64)}),
        ("fingerprint fisher", {}),
        ("fingerprint gradient", {"parts": torch.full((6, 64), torch.nan, dtype=torch.float64)}),
        ("importance rngwp", {"importance": torch.zeros(3, 3, dtype=torch.float64)}),
    ],
)
def test_what_a_client_cannot_have_measured_is_refused(tiny_of, cut_client, what: str, message) -> None:
    action, site, job = cut_client(what, Cut(blocks=2))
    _, _, half = over_the_cut(action, job, tiny_of("bert"), site)
    again = SERVER_SIDE[action](job, site)
    _, crossing = below(job, tiny_of("bert"), site, action, again)
    closing = {key: sent for key, sent in crossing.closing.items() if not key.endswith("fingerprint")}
    payload = encode_tensors(message)
    with pytest.raises(ProtocolError, match=r"a-0 sent (parts of a sketch|importance) through its cut"):
        again.end({**closing, "0/fingerprint": payload, "1/fingerprint": payload})
    with pytest.raises(ProtocolError, match="ends after 0 of"):
        SERVER_SIDE[action](job, site).end({})
    with pytest.raises(ProtocolError, match="asks for 'agree'"):
        SERVER_SIDE[action](job, site).read("agree", 0, {})
    assert half.side.crossed["fingerprint", "up"] > 0


@pytest.mark.parametrize("what", WHATS)
def test_where_a_model_lies_in_memory_changes_no_bit(client_of, what: str) -> None:
    """A model out of a message lies at any address, a simulated one where torch allocates."""
    site, params = client_of(labels=0, examples=9, ranks=(4, 1, 1))
    job = Job(client="a-0", params=params, round=0, options=options_of(what))
    odd = {key: torch.cat([torch.zeros(1), own.reshape(-1)])[1:].view(own.shape) for key, own in job.params.items()}
    assert all(tensor.data_ptr() % 8 for tensor in odd.values())
    action, other = action_of(what), dataclasses.replace(job, params=odd)
    assert_same(ACTIONS[action]([other], site)[0], ACTIONS[action]([job], site)[0])
