"""Models between two ends: what comes out is what went in, and only tensors that the other end lacks are sent."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from atlas_fl.client.job import Job, Update
from atlas_fl.client.options import EvaluateOptions, RidgeOptions, TrainOptions
from atlas_fl.errors import ProtocolError
from atlas_fl.params import Params
from atlas_fl.runtime.protocol.model_sync import DigestCache, Receiver, Sender, SenderState
from atlas_fl.runtime.transport.frames import decode_frame, encode_frame
from atlas_fl.sparse.codec import values_size
from atlas_fl.sparse.masks import calibrate_mask

HOME = {"b.weight": torch.randn(6, 5, generator=torch.Generator().manual_seed(0)), "a.bias": torch.arange(7.0)}
HEAD = {"head.weight": torch.ones(3, 5), "head.bias": torch.zeros(3)}
WHOLE = {**HOME, **HEAD}
TRAIN = TrainOptions(seed=0, max_steps=3)
TEST = EvaluateOptions(split="test")
MASK = {
    **calibrate_mask(dict, HOME, names=HOME, strategy="random", sparsity=0.8, seed=4),
    **{key: torch.zeros_like(own, dtype=torch.bool) for key, own in HEAD.items()},
}
A, B, TOP = "q.lora_A", "q.lora_B", "head.weight"
START: Params = {A: torch.ones(2, 5), B: torch.zeros(3, 2), TOP: torch.ones(4, 3)}
TURNS = TrainOptions(seed=0, rounds=6, trained_parts="alternate")


class Ends:
    """A sender and a receiver with frames between them; with `home` of whole models."""

    def __init__(self, home: Params | None = None) -> None:
        self.sender = Sender(common=SenderState(home=DigestCache().digests(home or {})))
        self.receiver = Receiver(home=home or {})

    def given(self, action: str, params: Params, options: Any, *, round: int = 1, **parts: Any) -> tuple[Job, set[str]]:
        """The job as the receiver reads it, and the names of the tensors that were sent."""
        job = Job(client="site", params=params, round=round, options=options, **parts)
        head, tensors = decode_frame(encode_frame(*self.sender.job(action, job, number=1)))
        asked, found, _ = self.receiver.job(head, tensors, client="site")
        assert asked == action and same(found.params, params)
        return found, set(tensors)

    def answered(self, job: Job, params: Params) -> dict[str, torch.Tensor]:
        """The tensors that come back; the server has the whole trained model of them."""
        update = Update(client="site", params=params, examples=5, metrics={"loss": 0.5})
        head, tensors = decode_frame(encode_frame(*self.receiver.update("train", update, job, number=1)))
        assert same(self.sender.update("train", head, tensors, job=job).params, params)
        return {key.removeprefix("param/"): own for key, own in tensors.items() if key != "metrics"}


def same(left: Params, right: Params) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def moved(params: Params, mask: Params | None = None) -> dict[str, torch.Tensor]:
    return {key: own + 1 if mask is None else (own + 1).where(mask[key], own) for key, own in params.items()}


def plus(params: Params, *keys: str) -> dict[str, torch.Tensor]:
    return {key: tensor + 1 if key in keys else tensor.clone() for key, tensor in params.items()}


def test_of_a_dense_model_what_is_not_held_is_sent() -> None:
    ends = Ends(HOME)
    _, sent = ends.given("ridge", WHOLE, RidgeOptions())
    assert sent == HEAD.keys(), "the body is that of the files"
    other = {**HOME, **moved(HEAD)}
    job, sent = ends.given("train", other, TRAIN)
    assert sent == HEAD.keys() and asdict(job.options) == asdict(TRAIN)
    assert len(ends.answered(job, moved(other))) == 4
    assert ends.given("evaluate", moved(other), TEST)[1] == set(), "trained here"
    mixed = moved(moved(other))
    assert len(ends.given("evaluate", mixed, TEST)[1]) == 4
    assert ends.given("train", mixed, TRAIN)[1] == set(), "it came already"


@pytest.mark.parametrize("home", [HOME, {}], ids=["whole models", "adapters"])
def test_at_the_end_all_goes_that_is_not_in_the_files(home: Params) -> None:
    """Who comes for it may be another process than the one that has the model already."""
    ends, model = Ends(home), {**HOME, **moved(HEAD)}
    ends.given("train", model, TRAIN)
    head, tensors = ends.sender.final_model_message(model)
    assert tensors.keys() == model.keys() - home.keys()
    assert same(Receiver(home=home).read_final_model(head, tensors), model)
    assert Receiver().read_final_model({"kind": "done", "model": False}, {}) == {}


def test_under_a_mask_its_values_travel_and_the_mask_once() -> None:
    ends = Ends(HOME)
    job, sent = ends.given("train", WHOLE, TRAIN, mask=MASK)
    assert sent == {"mask", *HEAD}
    assert job.mask is not None and same(job.mask, MASK)
    assert asdict(job.options) == asdict(TRAIN)
    trained = moved(WHOLE, MASK)
    tensors = ends.answered(job, trained)
    kept = sum(int(own.sum()) for own in MASK.values())
    assert kept == 7 and set(tensors) == {"values"}
    assert tensors["values"].numel() == values_size(kept), "as the ledger counts"
    again = moved(trained, MASK)
    assert ends.given("evaluate", again, TEST)[1] == {"values"}
    assert ends.given("train", moved(again, MASK), TRAIN)[1] == {"values"}
    ends.sender.forget()
    ends.receiver.forget()
    assert ends.given("train", trained, TRAIN, mask=MASK)[1] == {"mask", "values", *HEAD}


def test_the_body_is_not_altered_by_what_is_built_on_it() -> None:
    before, ends = {key: own.clone() for key, own in HOME.items()}, Ends(HOME)
    ends.given("train", moved(WHOLE, MASK), TRAIN, mask=MASK)
    assert same(HOME, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": "0" * 64}, "names a model that is not here"),
        ({"model": "0" * 64}, "another digest than the server named; the message was altered"),
        ({"masked": True}, "mask is not here"),
        ({"action": "rm"}, "action is 'rm'; allowed: fingerprint, importance, train, evaluate, ridge"),
        ({"options": {"seed": 0}}, "the server's train is"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    ends = Ends(HOME)
    head, tensors = ends.sender.job("train", Job(client="site", params=WHOLE, round=1, options=TRAIN), number=1)
    with pytest.raises(ProtocolError, match=message):
        ends.receiver.job({**json.loads(json.dumps(head)), **change}, tensors, client="site")


def test_values_where_there_is_no_mask_and_a_body_that_was_altered_are_refused() -> None:
    ends = Ends(HOME)
    job, _ = ends.given("train", WHOLE, TRAIN)
    update = Update(client="s", params=moved(WHOLE), examples=1, metrics={})
    head, tensors = ends.receiver.update("train", update, job, number=1)
    values = {"metrics": tensors["metrics"], "param/values": torch.zeros(8, dtype=torch.uint8)}
    with pytest.raises(ProtocolError, match="values under a mask came where there is none"):
        ends.sender.update("train", head, values, job=job)
    head, tensors = ends.sender.job("train", replace(job, params=moved(WHOLE)), number=2)
    with pytest.raises(ProtocolError, match="another digest than the server named"):
        ends.receiver.job(head, {**tensors, "a.bias": torch.zeros(7)}, client="site")


def test_one_factor_goes_in_either_direction_and_both_to_who_missed_a_round() -> None:
    ends = Ends()
    job, sent = ends.given("train", START, TURNS)
    assert sent == {A, B, TOP}
    assert ends.answered(job, plus(START, B, TOP)).keys() == {B, TOP}
    mixed = plus(plus(START, B, TOP), B, TOP)
    assert ends.given("evaluate", mixed, TEST)[1] == {B, TOP}
    job, sent = ends.given("train", mixed, TURNS, round=2)
    assert sent == set()
    assert ends.answered(job, plus(mixed, A, TOP)).keys() == {A, TOP}
    later = plus(plus(mixed, A, TOP), A, B, TOP)  # two rounds went by
    assert ends.given("train", later, TURNS, round=5)[1] == {A, B, TOP}
    ends.sender.forget()
    ends.receiver.forget()
    assert ends.given("train", plus(later, B), TURNS, round=6)[1] == {A, B, TOP}


def test_class_means_go_with_every_job_that_has_some_and_reports_come_back() -> None:
    ends, means = Ends(), {"means": torch.ones(4, 3), "seen": torch.tensor([True, False, True, True])}
    options = replace(TURNS, trained_parts="all")
    for round, names in ((1, {A, B, TOP}), (2, set[str]())):
        came, sent = ends.given("train", START, options, round=round, sent={"centroids": means})
        assert sent == names | {"sent/centroids/means", "sent/centroids/seen"}
        assert same(came.sent["centroids"], means)
    reported = {"x": {"counts": torch.ones(4)}}
    update = Update(client="site", params=plus(START, A), examples=5, metrics={}, reported=reported)
    head, tensors = decode_frame(encode_frame(*ends.receiver.update("train", update, came, number=1)))
    found = ends.sender.update("train", head, tensors, job=came)
    assert same(found.reported["x"], update.reported["x"]) and same(found.params, update.params)
    assert ends.given("train", START, options, round=3)[0].sent == {}


def test_a_tensor_that_does_not_train_and_comes_back_is_refused() -> None:
    ends = Ends()
    job, _ = ends.given("train", START, TURNS)
    whole = replace(job, options=replace(TURNS, trained_parts="all"))
    update = Update(client="site", params=plus(START, A, B), examples=5, metrics={})
    message = ends.receiver.update("train", update, whole, number=1)
    with pytest.raises(ProtocolError, match=r"q\.lora_A came back and does not train in round 1; install the same"):
        ends.sender.update("train", *message, job=job)


def test_a_model_of_which_the_rest_is_not_here_is_refused() -> None:
    ends = Ends()
    ends.given("train", START, TURNS)
    job = Job(client="site", params=plus(START, B), round=1, options=TURNS)
    head, tensors = ends.sender.job("train", job, number=2)
    assert set(tensors) == {B}
    with pytest.raises(ProtocolError, match="names a model that is not here"):
        Receiver().job(head, tensors, client="site")
