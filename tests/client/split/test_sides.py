"""A client's side and the server's, with nothing but bytes between them, are the whole model, also in one process."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch

from atlas_fl.client import batching
from atlas_fl.client.job import Job, Site, Update
from atlas_fl.client.options import EvaluateOptions, FingerprintOptions, TrainOptions
from atlas_fl.client.registry import ACTIONS, CLIENT_SIDE, SERVER_SIDE
from atlas_fl.client.split_client import ClientSide, client_side_of
from atlas_fl.client.split_server import ServerHalf, merge_updates
from atlas_fl.errors import ProtocolError
from atlas_fl.models.loading import load_backbone
from atlas_fl.split.channel import Cut
from atlas_fl.split.codec import add_noise, decode_rows, encode_rows, simulated_secret
from atlas_fl.split.model import client_forward, load_client_part, server_forward
from atlas_fl.storage.tensors import encode_tensors
from tests.laws.test_packs import HARD
from tests.split.test_noise import error, noise_of, seeded, taken_off

PLAIN = TrainOptions(seed=5, batch_size=4, lr=1e-2)
LOOK = FingerprintOptions(kind="fisher", sketch_dim=16, train=PLAIN, batches=1, steps=0)


class Direct:
    """The way to a half in the same process."""

    def __init__(self, half: ServerHalf) -> None:
        self.half, self.asked = half, list[tuple[str, int, Mapping[str, bytes]]]()

    def __call__(self, what: str, done: int, payloads: Mapping[str, bytes]) -> Mapping[str, bytes]:
        self.asked.append((what, done, payloads))
        return self.half.ask(what, done, payloads)


def over_the_cut(action: str, job: Job, tiny, site: Site) -> tuple[Update, ClientSide, ServerHalf]:
    half = SERVER_SIDE[action](job, site)
    update, crossing = below(job, tiny, site, action, half)
    return merge_updates(half.side, update, half.end(crossing.closing)), crossing, half


def below(job: Job, tiny, site: Site, action: str, half: ServerHalf) -> tuple[Update, ClientSide]:
    """What the client makes of the job with no more than its part of the model."""
    crossing = client_side_of(half.side.below, site, indices=half.places, server=Direct(half))
    part = dataclasses.replace(site, backbone=load_client_part(str(tiny.path), blocks=job.cut.blocks))
    return CLIENT_SIDE[action](half.side.below, part, crossing), crossing


def federation(tiny, site_of, spec_of, cuts: Sequence[Cut], **options) -> tuple[Site, list[Job]]:
    specs = [
        spec_of(name="a-0", labels=2, examples=8, ranks=(1, 4, 2)),
        spec_of(name="b-0", labels=5, examples=5, ranks=(3, 3, 3), pairs=True),
        spec_of(name="c-0", labels=0, examples=9, ranks=(4, 1, 1), words=(1, 3)),
    ][: len(cuts)]
    site, settings = site_of(tiny, *specs), dataclasses.replace(HARD, hash_loaded=True, **options)
    jobs = [
        Job(client=spec.name, params=tiny.params(spec, seed=i), round=1 + i, options=settings, cut=cut)
        for i, (spec, cut) in enumerate(zip(specs, cuts, strict=True))
    ]
    return site, jobs


def whole(action: str, job: Job, site: Site) -> Update:
    (update,) = ACTIONS[action]([dataclasses.replace(job, cut=None)], site)
    return update


def assert_same_model(found: Update, expected: Update) -> None:
    assert {**found.metrics, "seconds": 0} == {**expected.metrics, "seconds": 0}
    assert found.params.keys() == expected.params.keys()
    assert all(torch.equal(found.params[key], expected.params[key]) for key in expected.params)


def assert_same(found: Update, expected: Update) -> None:
    assert_same_model(found, expected)
    assert (found.loaded, found.keys, found.examples) == (expected.loaded, expected.keys, expected.examples)
    assert dict(found.crossed) == dict(expected.crossed)


@pytest.mark.parametrize("tiny", ["bert", "gpt2", "qwen2"], indirect=True)
@pytest.mark.parametrize(("blocks", "head"), [(1, "client"), (2, "server")])
def test_two_machines_end_in_the_bits_of_the_whole_model_and_the_bytes_of_the_simulation(
    tiny, site_of, spec_of, blocks: int, head
) -> None:
    site, jobs = federation(tiny, site_of, spec_of, [Cut(blocks=blocks, head=head)] * 3)
    for job in jobs:
        found, crossing, half = over_the_cut("train", job, tiny, site)
        assert_same_model(found, whole("train", job, site))
        assert_same(found, *ACTIONS["train"]([job], site))
        assert half.side.below.params.keys() | half.side.above.keys() == job.params.keys()
        assert not half.side.below.params.keys() & half.side.above.keys()
        told = [payloads for _, _, payloads in crossing.server.asked] + [crossing.closing]
        up = sum(size for (_, way), size in found.crossed.items() if way == "up")
        assert up == sum(len(message) for payloads in told for message in payloads.values())


class Wire(torch.autograd.Function):
    """Rows as they arrive, and their gradients as they arrive."""

    @staticmethod
    def forward(ctx, rows, there, back):
        ctx.back = back
        return there(rows)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.back(gradient), None, None


def features_over_wire(cut: Cut, row, backbone, _body, *, secret: bytes) -> torch.Tensor:
    """Features of a whole model whose rows go through messages at its cut: what a cut is, in one graph."""

    def up(rows: torch.Tensor, *, kind: str) -> torch.Tensor:
        return down(add_noise(rows, noise=cut.noise, secret=secret, kind=kind) if cut.noise else rows)

    def down(rows: torch.Tensor) -> torch.Tensor:
        return decode_rows(encode_rows(rows, wire=cut.wire))[0].to(rows.dtype)

    hidden = client_forward(backbone, row.ids, row.types, row.layout, blocks=cut.blocks)
    rows = Wire.apply(hidden, partial(up, kind="activation"), down)
    features = server_forward(backbone, rows, row.layout, blocks=cut.blocks)
    return features if cut.head == "server" else Wire.apply(features, down, partial(up, kind="gradient"))


@pytest.mark.parametrize("how", ["int8", "noise", "no clip", "checkpointing", "bf16", "fp16"])
@pytest.mark.parametrize("head", ["server", "client"])
def test_whatever_the_wire_and_the_step_it_is_the_whole_model_whose_rows_take_it(
    tiny_of, site_of, spec_of, monkeypatch, head, how: str
) -> None:
    # ELECTRA projects its embeddings, so that under autocast its rows are of bf16.
    tiny, wires = tiny_of("electra" if how == "bf16" else "bert"), {"int8": {"wire": "int8"}, "noise": {"noise": 0.1}}
    cut = Cut(blocks=1, head=head, **wires.get(how, {}))
    site, (job,) = federation(tiny, site_of, spec_of, [cut], **({"clip": 0.0} if how == "no clip" else {}))
    if how == "checkpointing":
        site = dataclasses.replace(site, backbone=load_backbone(str(tiny.path), gradient_checkpointing=True))
    site = dataclasses.replace(site, bf16=how == "bf16", fp16=how == "fp16")
    found = over_the_cut("train", job, tiny, site)[0]
    assert_same(found, *ACTIONS["train"]([job], site))
    monkeypatch.setattr(
        batching, "features_of_row", partial(features_over_wire, cut, secret=simulated_secret(0, "a-0"))
    )
    assert_same_model(found, whole("train", job, site))


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("head", ["server", "client"])
def test_steps_that_overflow_in_fp16_are_skipped_on_both_sides(
    tiny_of, site_of, spec_of, monkeypatch, head, clip: float
) -> None:
    tiny = tiny_of("bert")
    site, (job,) = federation(tiny, site_of, spec_of, [Cut(blocks=1, head=head)], clip=clip)
    site = dataclasses.replace(site, fp16=True)
    usual = whole("train", job, site)
    monkeypatch.setattr("atlas_fl.client.optimizer.LOSS_SCALE", 2.0**18)
    found, expected = over_the_cut("train", job, tiny, site)[0], whole("train", job, site)
    assert_same_model(found, expected)
    assert found.metrics["loss"] != usual.metrics["loss"]
    assert any(not torch.equal(found.params[key], own) for key, own in job.params.items())


@pytest.mark.parametrize("action", ["train", "fingerprint", "evaluate"])
def test_the_server_does_not_take_a_sites_noise_off_with_all_that_it_knows(tiny_of, site_of, spec_of, action) -> None:
    """It knows the job, every seed of the run and so the secrets of its simulation; the site has one of its own."""
    tiny, told = tiny_of("bert"), {"train": PLAIN, "fingerprint": LOOK, "evaluate": EvaluateOptions(split="test")}
    site, (job,) = federation(tiny, site_of, spec_of, [Cut(blocks=1)])
    simulated, secret = simulated_secret(0, job.client), bytes(range(32))
    job = dataclasses.replace(job, options=told[action])
    noisy = dataclasses.replace(job, cut=Cut(blocks=1, noise=1.0))
    own = dataclasses.replace(site, secrets={job.client: secret})
    rows, arrived = (first_rows(action, asked, own, tiny) for asked in (job, noisy))
    assert error(arrived, rows) == pytest.approx(1, rel=0.2)
    for guess in (seeded(tuple(rows.shape)), noise_of(rows, secret=simulated)):
        assert error(taken_off(arrived, guess, noise=1.0), rows) > 0.8
    assert error(taken_off(arrived, noise_of(rows, secret=secret), noise=1.0), rows) < 1e-4
    in_simulation = add_noise(first_rows(action, job, site, tiny), noise=1.0, secret=simulated, kind="activation")
    assert torch.equal(first_rows(action, noisy, site, tiny), in_simulation)


def first_rows(action: str, job: Job, site: Site, tiny) -> torch.Tensor:
    """What the server gets first of a job."""
    _, crossing, _ = over_the_cut(action, job, tiny, site)
    return decode_rows(crossing.server.asked[0][2]["0/activation"])[0]


@pytest.mark.parametrize("max_tokens", [1, 4096])
@pytest.mark.parametrize("head", ["server", "client"])
def test_scores_over_the_cut_are_those_of_the_whole_model(tiny_of, site_of, spec_of, head, max_tokens: int) -> None:
    tiny = tiny_of("bert")
    site, jobs = federation(tiny, site_of, spec_of, [Cut(blocks=1, head=head), Cut(blocks=2, head=head)])
    site = dataclasses.replace(site, max_tokens=max_tokens)
    for job in jobs:
        asked = dataclasses.replace(job, options=EvaluateOptions(split="test"))
        found, _, _ = over_the_cut("evaluate", asked, tiny, site)
        assert_same_model(found, whole("evaluate", asked, site))
        assert_same(found, *ACTIONS["evaluate"]([asked], site))
        assert found.params is asked.params


@pytest.mark.parametrize("head", ["server", "client"])
def test_labels_are_smoothed_over_a_cut_as_without_one(tiny_of, site_of, spec_of, head) -> None:
    site, (job,) = federation(tiny_of("bert"), site_of, spec_of, [Cut(blocks=1, head=head)], label_smoothing=0.25)
    found = over_the_cut("train", job, tiny_of("bert"), site)[0]
    assert_same_model(found, whole("train", job, site))


ROWS, LENGTHS = torch.zeros(4, 32), torch.tensor([1, 3], dtype=torch.int32)


@pytest.mark.parametrize(
    ("rows", "lengths", "labels", "message"),
    [
        (b"junk", None, None, "cannot be read"),
        (torch.zeros(4, 31), LENGTHS, torch.tensor([0, 1]), "sent rows"),
        (ROWS, torch.tensor([1, 2], dtype=torch.int32), torch.tensor([0, 1]), "sent rows"),
        (ROWS, torch.tensor([5, -1], dtype=torch.int32), torch.tensor([0, 1]), "sent rows"),
        (torch.zeros(99, 32), torch.tensor([99], dtype=torch.int32), torch.tensor([0]), "sent rows"),
        (ROWS, torch.tensor([1, 3]), torch.tensor([0, 1]), "sent rows"),
        (ROWS, LENGTHS, torch.tensor([0, 2]), "sent labels"),
        (ROWS, LENGTHS, torch.tensor([0, -1]), "sent labels"),
        (ROWS, LENGTHS, torch.tensor([0]), "sent labels"),
        (ROWS, LENGTHS, torch.tensor([0.0, 1.0]), "sent labels"),
        (ROWS, LENGTHS, None, "sent no label"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_computed_with(
    tiny_of, site_of, spec_of, rows, lengths, labels, message: str
) -> None:
    site, (job,) = federation(tiny_of("bert"), site_of, spec_of, [Cut(blocks=1)])
    half = SERVER_SIDE["train"](job, site)
    sent = rows if isinstance(rows, bytes) else encode_rows(rows, wire="fp32", extra={"lengths": lengths})
    payloads = {"0/activation": sent}
    if labels is not None:
        payloads["0/label"] = encode_tensors({"labels": labels})
    with pytest.raises(ProtocolError, match=message) as error:
        half.read("loss", 0, payloads)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([0, 1]),
        torch.zeros(2, 3),
        torch.zeros(1, 2),
        torch.zeros(2, 2, dtype=torch.int64),
        torch.full((2, 2), 0.5),
        torch.full((2, 2), torch.nan),
    ],
)
def test_of_several_labels_a_cut_takes_zeros_and_ones_alone(tiny_of, site_of, spec_of, labels) -> None:
    site, (job,) = federation(tiny_of("bert"), site_of, spec_of, [Cut(blocks=1)])
    held = site.data[job.client]
    task = dataclasses.replace(held.task, multilabel=True)
    site = dataclasses.replace(site, data={job.client: dataclasses.replace(held, task=task)})
    rows = {"0/activation": encode_rows(ROWS, wire="fp32", extra={"lengths": LENGTHS})}
    for sent, is_refused in ((labels, True), (torch.tensor([[0.0, 1.0], [0.0, 0.0]]), False)):
        half = SERVER_SIDE["train"](job, site)
        payloads = {**rows, "0/label": encode_tensors({"labels": sent})}
        if is_refused:
            with pytest.raises(ProtocolError, match="sent labels"):
                half.read("loss", 0, payloads)
        else:
            assert half.read("loss", 0, payloads).labels.equal(sent)


def test_questions_out_of_turn_and_work_that_is_missing_are_refused(tiny_of, site_of, spec_of) -> None:
    tiny = tiny_of("bert")
    site, (job,) = federation(tiny, site_of, spec_of, [Cut(blocks=1)])
    _, crossing, half = over_the_cut("train", job, tiny, site)
    for what, done in (("loss", 99), ("gradient", half.side.done)):
        with pytest.raises(ProtocolError, match=f"asks for '{what}' after {done} steps, and loss after"):
            half.read(what, done, {})
    with pytest.raises(ProtocolError, match="goes on after its"):
        half.read("loss", half.side.done, crossing.server.asked[1][2])
    with pytest.raises(ProtocolError, match="ends after 0 of"):
        SERVER_SIDE["train"](job, site).end({})
    scored = SERVER_SIDE["evaluate"](dataclasses.replace(job, options=EvaluateOptions(split="test")), site)
    with pytest.raises(ProtocolError, match="sent 0 of"):
        scored.end({})
