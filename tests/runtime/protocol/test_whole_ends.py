"""Whole models between two ends: what comes out is what went in, and nothing is sent that the other end has."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from atlas_fl.client.job import Job, Update
from atlas_fl.client.options import EvaluateOptions, RidgeOptions, TrainOptions
from atlas_fl.errors import ProtocolError
from atlas_fl.params import Params, digest
from atlas_fl.runtime.protocol.model_sync import FullModelReceiver, FullModelSender, SharedModelCache
from atlas_fl.runtime.transport.frames import decode_frame, encode_frame
from atlas_fl.sparse.codec import values_size
from atlas_fl.sparse.masks import make_mask

HOME = {"b.weight": torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), "a.bias": torch.arange(7.0)}
HEAD = {"head.weight": torch.ones(3, 5), "head.bias": torch.zeros(3)}
TRAIN = TrainOptions(seed=0, max_steps=3)
MASK = {
    **make_mask("random", HOME, sparsity=0.8, seed=4),
    **{key: torch.zeros_like(own, dtype=torch.bool) for key, own in HEAD.items()},
}


class Ends:
    """A sender and a receiver with frames between them."""

    def __init__(self) -> None:
        self.sender = FullModelSender(common=SharedModelCache(home=digest(HOME)))
        self.receiver = FullModelReceiver(home=HOME)

    def given(self, action: str, params: Params, options: Any, mask: Any = None) -> tuple[Job, set[str]]:
        """The job as the receiver reads it, and the names of the tensors that were sent."""
        job = Job(client="site", params=params, round=1, options=options, mask=mask)
        head, tensors = decode_frame(encode_frame(*self.sender.job(action, job, number=1)))
        asked, found, _ = self.receiver.job(head, tensors, client="site")
        assert asked == action and same(found.params, params)
        return found, set(tensors)

    def answered(self, action: str, job: Job, params: Params) -> tuple[Params, dict[str, torch.Tensor]]:
        """The update as the sender reads it from an answer with this model, and the tensors that were sent."""
        update = Update(client="site", params=params, examples=5, metrics={"loss": 0.5})
        head, tensors = decode_frame(encode_frame(*self.receiver.update(action, update, job, number=1)))
        return self.sender.update(action, head, tensors, job=job).params, tensors


def same(left: Params, right: Params) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def moved(params: Params, mask: Params | None = None) -> dict[str, torch.Tensor]:
    return {key: own + 1 if mask is None else (own + 1).where(mask[key], own) for key, own in params.items()}


def test_of_a_dense_model_body_and_head_are_sent_where_they_are_not_held() -> None:
    ends, start = Ends(), {**HOME, **HEAD}
    job, sent = ends.given("ridge", start, RidgeOptions())
    assert sent == {"top/head.weight", "top/head.bias"}, "the body is that of the files"
    other = {**HOME, **moved(HEAD)}
    job, sent = ends.given("train", other, TRAIN)
    assert sent == {"top/head.weight", "top/head.bias"} and asdict(job.options) == asdict(TRAIN)
    trained, tensors = ends.answered("train", job, moved(other))
    assert same(trained, moved(other)) and len(tensors) == 5
    assert ends.given("evaluate", moved(other), EvaluateOptions(split="test"))[1] == set(), "trained here"
    mixed = moved(moved(other))
    assert len(ends.given("evaluate", mixed, EvaluateOptions(split="test"))[1]) == 4
    assert ends.given("train", mixed, TRAIN)[1] == set(), "it came already"
    assert same(ends.receiver.read_final_model(*ends.sender.final_model_message(mixed)), mixed)


def test_under_a_mask_its_values_travel_and_the_mask_once() -> None:
    ends, start = Ends(), {**HOME, **HEAD}
    job, sent = ends.given("train", start, TRAIN, MASK)
    assert sent == {"mask", "top/head.weight", "top/head.bias"}
    assert job.mask is not None and same(job.mask, MASK)
    assert asdict(job.options) == asdict(TRAIN)
    trained, tensors = ends.answered("train", job, moved(start, MASK))
    assert same(trained, moved(start, MASK))
    kept = sum(int(own.sum()) for own in MASK.values())
    assert kept == 7 and set(tensors) == {"metrics", "param/values"}
    assert tensors["param/values"].numel() == values_size(kept), "as the ledger counts"
    for action, own in (("evaluate", EvaluateOptions(split="test")), ("train", TRAIN)):
        again = moved(trained, MASK) if action == "evaluate" else moved(moved(trained, MASK), MASK)
        assert ends.given(action, again, own)[1] == {"values"}
    ends.sender.forget(), ends.receiver.forget()
    assert ends.given("train", trained, TRAIN, MASK)[1] == {"mask", "values", "top/head.weight", "top/head.bias"}


def test_the_body_is_not_altered_by_what_is_built_on_it() -> None:
    before, ends = {key: own.clone() for key, own in HOME.items()}, Ends()
    ends.given("train", moved({**HOME, **HEAD}, MASK), TRAIN, MASK)
    assert same(HOME, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"body": "0" * 64}, "names a model that is not here"),
        ({"masked": True}, "mask is not here"),
        ({"action": "rm"}, "action is 'rm'; allowed: fingerprint, importance, train, evaluate, ridge"),
        ({"options": {"seed": 0}}, "the server's train is"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    ends = Ends()
    head, tensors = ends.sender.job(
        "train", Job(client="site", params={**HOME, **HEAD}, round=1, options=TRAIN), number=1
    )
    with pytest.raises(ProtocolError, match=message):
        ends.receiver.job({**json.loads(json.dumps(head)), **change}, tensors, client="site")


def test_values_where_there_is_no_mask_and_a_body_that_was_altered_are_refused() -> None:
    ends, start = Ends(), {**HOME, **HEAD}
    job, _ = ends.given("train", start, TRAIN)
    head, tensors = ends.receiver.update(
        "train", Update(client="s", params=start, examples=1, metrics={}), job, number=1
    )
    values = {"metrics": tensors["metrics"], "param/values": torch.zeros(8, dtype=torch.uint8)}
    with pytest.raises(ProtocolError, match="values under a mask came where there is none"):
        ends.sender.update("train", head, values, job=job)
    head, tensors = ends.sender.job("train", replace(job, params=moved(start)), number=2)
    with pytest.raises(ProtocolError, match="another digest than the server named"):
        ends.receiver.job(head, {**tensors, "body/a.bias": torch.zeros(7)}, client="site")
