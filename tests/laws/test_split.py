"""A model that is cut in two trains as the whole one does, and what crosses the cut is what is counted."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from atlas_fl.client import split_client, split_server
from atlas_fl.client.batching import Dropout, collate_packed, dropout_masks, forward_to_heads, read_logits
from atlas_fl.client.draws import Draws
from atlas_fl.client.job import Job, Prompts, Site, Update
from atlas_fl.client.local_training import batches, example_loss
from atlas_fl.client.local_training import train as train_whole
from atlas_fl.client.options import EvaluateOptions, TrainOptions
from atlas_fl.client.registry import ACTIONS
from atlas_fl.models.attention import make_layout
from atlas_fl.models.backbone import head_logits
from atlas_fl.models.loading import load_backbone
from atlas_fl.models.lora import Adapters, attach_adapters
from atlas_fl.models.tokenization import TextEncoder
from atlas_fl.split import channel, codec
from atlas_fl.split.channel import Cut
from atlas_fl.split.codec import WIRES, decode_rows, encode_rows
from atlas_fl.split.model import client_forward, load_client_part, select_client_side, server_forward
from atlas_fl.storage.tensors import encode_tensors
from tests.laws.test_packs import HARD, specs_of

PLAIN = TrainOptions(seed=5, batch_size=4, lr=1e-2)
train, evaluate = ACTIONS["train"], ACTIONS["evaluate"]


def federation(tiny, site_of, spec_of, cuts: Sequence[Cut | None]) -> tuple[Site, list[Job]]:
    """Clients that differ in ranks, labels, examples and steps; one for each cut."""
    specs = specs_of(spec_of)[: len(cuts)]
    site = site_of(tiny, *specs)
    return site, [
        Job(client=spec.name, params=tiny.params(spec, seed=i), round=1 + i % 2, options=HARD, cut=cut)
        for i, (spec, cut) in enumerate(zip(specs, cuts, strict=True))
    ]


def uncut(jobs: Sequence[Job]) -> list[Job]:
    return [dataclasses.replace(job, cut=None) for job in jobs]


def trained_whole(jobs: Sequence[Job], site: Site) -> list[Update]:
    """Each alone, as a cut client is."""
    return [update for job in uncut(jobs) for update in train_whole([job], site)]


def recut(jobs: Sequence[Job], **changes: object) -> list[Job]:
    return [dataclasses.replace(job, cut=job.cut and dataclasses.replace(job.cut, **changes)) for job in jobs]


def assert_bits(found: Sequence[Update], expected: Sequence[Update]) -> None:
    for update, other in zip(found, expected, strict=True):
        assert update.metrics["loss"] == other.metrics["loss"]
        assert all(torch.equal(update.params[key], other.params[key]) for key in other.params), update.client


@pytest.mark.parametrize(("blocks", "head"), [(0, "client"), (1, "server"), (2, "client")])
def test_training_over_a_cut_ends_in_the_bits_of_training_without(tiny, site_of, spec_of, blocks: int, head) -> None:
    site, jobs = federation(tiny, site_of, spec_of, [Cut(blocks=blocks, head=head)] * 3)
    found = train(jobs, site)
    assert_bits(found, trained_whole(jobs, site))
    assert all(update.crossed["activation", "up"] > 0 for update in found)


def test_a_pack_may_mix_other_cuts_and_whole_models(tiny, site_of, spec_of) -> None:
    cuts = [Cut(blocks=1), None, Cut(blocks=2, head="client"), Cut(blocks=0)]
    site, jobs = federation(tiny, site_of, spec_of, cuts)
    found = train(jobs, site)
    assert_bits(found, trained_whole(jobs, site))
    assert [update.client for update in found] == [job.client for job in jobs]
    assert [bool(update.crossed) for update in found] == [True, False, True, True]


@pytest.mark.parametrize("how", ["checkpointing", "bf16"])
def test_a_cut_model_may_be_checkpointed_or_computed_in_bf16(tiny, site_of, spec_of, how: str) -> None:
    site, jobs = federation(tiny, site_of, spec_of, [Cut(blocks=1), Cut(blocks=2, head="client")])
    if how == "bf16":
        site = dataclasses.replace(site, bf16=True)
    else:
        site = dataclasses.replace(site, backbone=load_backbone(str(tiny.path), gradient_checkpointing=True))
    found = train(jobs, site)
    assert_bits(found, trained_whole(jobs, site))
    assert found[0].crossed == train(jobs, dataclasses.replace(site, bf16=False))[0].crossed


class Halves:
    """Two machines: every client has a part of its own, read from the files; one server has all the rest."""

    def __init__(self, tiny, site: Site, jobs: Sequence[Job], blocks: int) -> None:
        self.site, self.jobs, self.blocks = site, jobs, blocks
        self.part = dataclasses.replace(site, backbone=load_client_part(str(tiny.path), blocks=blocks))
        names = [select_client_side(site.backbone, job.params, blocks=blocks, head=False) for job in jobs]
        self.below = [leaves({k: job.params[k] for k in own}) for job, own in zip(jobs, names, strict=True)]
        rest = [[k for k in job.params if k not in own] for job, own in zip(jobs, names, strict=True)]
        self.above = [leaves({k: job.params[k] for k in own}) for job, own in zip(jobs, rest, strict=True)]

    def client(self, k: int, batch, done: int) -> Tensor:
        row = collate_packed([batch], device=torch.device("cpu"))
        adapters = Adapters(
            clients=[self.below[k]],
            segments=row.segments,
            sequences=row.pooled,
            scale=self.site.scale,
            dropout_mask=masks([self.jobs[k]], done),
        )
        with attach_adapters(self.part.modules, adapters):
            return client_forward(self.part.backbone, row.ids, row.types, row.layout, blocks=self.blocks)

    def server(self, sent: Sequence[bytes], data, done: int) -> tuple[list[float], list[bytes]]:
        """The losses, and the gradient that goes back to every client; the server's own are in its leaves."""
        rows = [decode_rows(message)[0].requires_grad_() for message in sent]
        row = collate_packed(data, device=torch.device("cpu"))  # of it, the server uses lengths and labels alone
        upper = {name: module for name, module in self.site.modules.items() if name + ".lora_A" in self.above[0]}
        mask = masks(self.jobs, done)
        adapters = Adapters(
            clients=self.above, segments=row.segments, sequences=row.pooled, scale=self.site.scale, dropout_mask=mask
        )
        layout = make_layout([int(n) for batch in data for n in batch.lengths])
        with attach_adapters(upper, adapters):
            found = server_forward(self.site.backbone, torch.cat(rows), layout, blocks=self.blocks)
            losses = []
            for k, own in enumerate(torch.split(found, list(row.counts))):
                drop = None if mask is None else mask(k, "head", tuple(own.shape))
                read = own if drop is None else own * drop
                losses.append(example_loss(head_logits(self.site.backbone, self.above[k], read), row.labels[k]))
            torch.stack(losses).sum().backward()
        return [float(loss.detach()) for loss in losses], [encode_rows(own.grad, wire="fp32") for own in rows]


def leaves(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.clone().requires_grad_() for key, value in params.items()}


def masks(jobs: Sequence[Job], done: int):
    sources = [
        Dropout(
            p=job.options.dropout,
            draws=Draws(client=job.client, seed=job.options.seed, secret=None),
            path=(job.round, done),
        )
        for job in jobs
    ]
    return dropout_masks(sources, device=torch.device("cpu"))


def descend(params: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for leaf in params.values():
            if leaf.grad is not None:
                leaf -= 0.002 * leaf.grad
                leaf.grad = None


@pytest.mark.parametrize(("blocks", "dropout"), [(0, 0.25), (1, 0.0), (2, 0.25)])
def test_two_machines_have_the_losses_and_gradients_of_one_for_five_steps(
    tiny, site_of, spec_of, blocks: int, dropout: float
) -> None:
    site, jobs = federation(tiny, site_of, spec_of, [None] * 3)
    options = dataclasses.replace(HARD, dropout=dropout, epochs=5, batch_size=8)
    jobs = [dataclasses.replace(job, options=options) for job in jobs]
    halves, whole = Halves(tiny, site, jobs, blocks), [leaves(job.params) for job in jobs]
    data = [list(batches(site.data[job.client].splits["train"], job, secret=None))[:5] for job in jobs]
    for done in range(5):
        now = [own[done] for own in data]
        row, mask = collate_packed(now, device=torch.device("cpu")), masks(jobs, done)
        with forward_to_heads(row, whole, site, mask=mask) as features:
            logits, labels = read_logits(site.backbone, whole, features, mask=mask), row.labels
            expected = [example_loss(own, wanted) for own, wanted in zip(logits, labels, strict=True)]
            torch.stack(expected).sum().backward()
        crossing = [halves.client(k, batch, done) for k, batch in enumerate(now)]
        losses, back = halves.server([encode_rows(rows, wire="fp32") for rows in crossing], now, done)
        for rows, message in zip(crossing, back, strict=True):
            if rows.requires_grad:
                rows.backward(decode_rows(message)[0])
        assert losses == pytest.approx([float(loss.detach()) for loss in expected], rel=1e-5, abs=1e-5)
        for k, own in enumerate(whole):
            parts = halves.below[k] | halves.above[k]
            assert set(parts) == set(own)
            for key, leaf in own.items():
                size = max(1.0, float(leaf.grad.abs().max()))
                # what two orders of sums differ by in one step is in the parameters of the next
                torch.testing.assert_close(parts[key].grad, leaf.grad, atol=1e-5 * size * (done + 1), rtol=0)
            descend(parts)
            descend(own)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("head", ["server", "client"])
def test_what_is_counted_is_what_was_encoded(tiny_of, site_of, spec_of, monkeypatch, wire, head) -> None:
    sent: Counter[str] = Counter()

    def spy(encoder, kind):
        def counted(*args, **how):
            message = encoder(*args, **how)
            sent[kind] += len(message)
            return message

        return counted

    for module in (channel, codec):
        monkeypatch.setattr(module, "encode_rows", spy(encode_rows, "rows"))
    for module in (split_client, split_server):
        monkeypatch.setattr(module, "encode_tensors", spy(encode_tensors, "tensors"))
    site, jobs = federation(tiny_of("bert"), site_of, spec_of, [Cut(blocks=1, wire=wire, head=head), None])
    crossed = train(jobs, site)[0].crossed
    rows = sum(size for (kind, _), size in crossed.items() if kind in ("activation", "gradient"))
    assert rows == sent["rows"] > 0
    assert sum(crossed.values()) - rows == sent["tensors"] > 0
    if head == "server":
        rest = {("label", "up"), ("control", "up"), ("control", "down")}
        assert set(crossed) == {("activation", "up"), ("gradient", "down"), *rest}
    else:
        assert {kind for kind, _ in crossed} == {"activation", "gradient", "control"}  # no label leaves its client
        assert crossed["gradient", "up"] < crossed["gradient", "down"]
        assert crossed["activation", "down"] < crossed["activation", "up"]


def test_the_bytes_of_a_step_by_hand(tiny_of, site_of, spec_of) -> None:
    """Twelve examples of two words and two special tokens, 48 tokens of width 32, in one step."""
    spec = spec_of(name="a-0", examples=12, words=(2, 2))
    site = site_of(tiny_of("bert"), spec)
    options = dataclasses.replace(PLAIN, batch_size=12, clip=0.0)
    job = Job(client="a-0", params=tiny_of("bert").params(spec), round=1, options=options, cut=Cut(blocks=1))
    rows = 48 * 32 * 4
    lengths = '"lengths":{"dtype":"I32","shape":[12],"data_offsets":[6144,6192]}}'
    header = len('{"rows":{"dtype":"F32","shape":[48,32],"data_offsets":[0,6144]},' + lengths)
    labels = len('{"labels":{"dtype":"I64","shape":[12],"data_offsets":[0,96]}}')
    assert (header, labels) == (130, 61)
    assert train([job], site)[0].crossed == {
        ("activation", "up"): 8 + 136 + rows + 12 * 4,
        ("gradient", "down"): 8 + 64 + rows,  # {"rows":{"dtype":"F32","shape":[48,32],"data_offsets":[0,6144]}} has 64
        ("label", "up"): 8 + 64 + 12 * 8,
    }


def test_no_gradient_comes_down_to_a_client_that_trains_nothing(tiny_of, site_of, spec_of) -> None:
    site, jobs = federation(tiny_of("bert"), site_of, spec_of, [Cut(blocks=0), Cut(blocks=1)])
    whole, part = train(jobs, site)
    assert ("gradient", "down") not in whole.crossed
    assert ("gradient", "down") in part.crossed


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_a_coarse_wire_moves_a_loss_a_little_and_is_really_there(tiny, site_of, spec_of, wire) -> None:
    site, jobs = federation(tiny, site_of, spec_of, [Cut(blocks=1)] * 3)
    exact, coarse = train(jobs, site), train(recut(jobs, wire=wire), site)
    for own, other in zip(exact, coarse, strict=True):
        assert own.metrics["loss"] != other.metrics["loss"]
        assert other.metrics["loss"] == pytest.approx(own.metrics["loss"], rel=0.1)
        assert all(tensor.isfinite().all() for tensor in other.params.values())
        assert other.crossed["activation", "up"] < 0.7 * own.crossed["activation", "up"]


def test_a_client_has_the_noise_of_its_own_secret_in_training_and_in_scores(tiny_of, site_of, spec_of) -> None:
    site, jobs = federation(tiny_of("bert"), site_of, spec_of, [Cut(blocks=1, noise=0.3)] * 3)
    asked = [dataclasses.replace(job, options=EvaluateOptions(split="test")) for job in jobs]
    secrets = {"a-0": bytes(32), "b-0": b"b" * 32, "c-0": bytes(32)}
    other = dataclasses.replace(site, secrets={**secrets, "b-0": b"x" * 32})
    site = dataclasses.replace(site, secrets=secrets)
    for action, work in ((train, jobs), (evaluate, asked)):
        found, again = action(work, site), action(work, site)
        assert_bits(found, again)
        a, b, c = zip(found, action(work, other), strict=True)
        assert_bits(*([update] for update in a))
        assert_bits(*([update] for update in c))
        assert b[0].metrics["loss"] != b[1].metrics["loss"]


@pytest.mark.parametrize("head", ["server", "client"])
def test_scores_over_a_cut_are_those_without_and_their_bytes_are_counted(tiny, site_of, spec_of, head) -> None:
    site, jobs = federation(tiny, site_of, spec_of, [Cut(blocks=1, head=head), None, Cut(blocks=2)])
    jobs = [dataclasses.replace(job, options=EvaluateOptions(split="test", outcomes=True)) for job in jobs]
    found, expected = evaluate(jobs, site), [update for job in uncut(jobs) for update in evaluate([job], site)]
    for update, other in zip(found, expected, strict=True):
        assert all(
            torch.equal(update.reported["outcomes"][key], own) for key, own in other.reported["outcomes"].items()
        )
        assert update.classes == other.classes
        assert {k: v for k, v in update.metrics.items() if k != "seconds"} == {
            k: v for k, v in other.metrics.items() if k != "seconds"
        }
        assert not other.crossed
    tokens = [int(site.data[job.client].splits["test"].lengths.sum()) for job in jobs]
    assert found[0].crossed["activation", "up"] > tokens[0] * 32 * 4
    assert not found[1].crossed
    assert ("gradient", "down") not in found[2].crossed
    assert (("label", "up") in found[0].crossed) == (head == "server")


def test_clients_that_write_are_cut_as_those_that_classify(writer_of, site_of, spec_of) -> None:
    from tests.laws.test_writing import federation as writers

    tiny = writer_of("gpt2")
    site, jobs = writers(tiny, site_of, spec_of)
    cut = [dataclasses.replace(job, cut=Cut(blocks=1 + i % 2)) for i, job in enumerate(jobs)]
    found = train(cut, site)
    assert_bits(found, trained_whole(jobs, site))
    assert all(update.crossed["label", "up"] > 0 for update in found)


def test_a_client_with_a_cut_writes_no_answers(writer_of, site_of, spec_of) -> None:
    from tests.laws.test_writing import federation as writers

    tiny = writer_of("gpt2")
    site, jobs = writers(tiny, site_of, spec_of)
    name = "prompt-0"
    asked = TextEncoder(tokenizer=tiny.backbone.tokenizer, max_length=8).prompts(["w1 w2"])
    prompts = {"test": Prompts(encoded=asked, references=("w3",))}
    site = dataclasses.replace(site, data={name: dataclasses.replace(site.data[name], prompts=prompts)})
    job = dataclasses.replace(jobs[-1], options=EvaluateOptions(split="test", new_tokens=2))
    (whole,), (cut,) = evaluate([job], site), evaluate([dataclasses.replace(job, cut=Cut(blocks=1))], site)
    assert {key for key in whole.metrics if key not in cut.metrics} == {"rouge1", "rouge2", "rougeL", "exact_match"}
    assert cut.metrics["loss"] == whole.metrics["loss"]
