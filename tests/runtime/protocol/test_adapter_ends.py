"""Adapters between two ends: what comes out is what went in, and only tensors that the other end lacks are sent."""

from dataclasses import replace

import pytest
import torch

from atlas_fl.client.job import Job, Update
from atlas_fl.client.options import EvaluateOptions, TrainOptions
from atlas_fl.errors import ProtocolError
from atlas_fl.params import Params
from atlas_fl.runtime.protocol.model_sync import AdapterReceiver, AdapterSender
from atlas_fl.runtime.transport.frames import decode_frame, encode_frame

A, B, HEAD = "q.lora_A", "q.lora_B", "head.weight"
START: Params = {A: torch.ones(2, 5), B: torch.zeros(3, 2), HEAD: torch.ones(4, 3)}
TURNS = TrainOptions(seed=0, rounds=6, trained_parts="alternate")


class Ends:
    """A sender and a receiver with frames between them."""

    def __init__(self) -> None:
        self.sender, self.receiver = AdapterSender(), AdapterReceiver()

    def given(self, params: Params, *, round: int, action: str = "train") -> tuple[Job, set[str]]:
        """The job as it came, and the names of the tensors that were sent."""
        options = TURNS if action == "train" else EvaluateOptions(split="test")
        job = Job(client="site", params=params, round=round, options=options)
        head, tensors = decode_frame(encode_frame(*self.sender.job(action, job, number=1)))
        _, came, _ = self.receiver.job(head, tensors, client="site")
        assert same(came.params, params)
        return job, set(tensors)

    def answered(self, job: Job, params: Params) -> set[str]:
        """The names of the tensors that come back; the server has the whole trained model of them."""
        update = Update(client="site", params=params, examples=5, metrics={"loss": 0.5})
        head, tensors = decode_frame(encode_frame(*self.receiver.update("train", update, job, number=1)))
        assert same(self.sender.update("train", head, tensors, job=job).params, params)
        return {key.removeprefix("param/") for key in tensors} - {"metrics"}


def same(left: Params, right: Params) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def plus(params: Params, *keys: str) -> dict[str, torch.Tensor]:
    return {key: tensor + 1 if key in keys else tensor.clone() for key, tensor in params.items()}


def test_one_factor_goes_in_either_direction_and_both_to_who_missed_a_round() -> None:
    ends = Ends()
    job, sent = ends.given(START, round=1)
    assert sent == {A, B, HEAD}
    assert ends.answered(job, plus(START, B, HEAD)) == {B, HEAD}
    mixed = plus(plus(START, B, HEAD), B, HEAD)
    assert ends.given(mixed, round=1, action="evaluate")[1] == {B, HEAD}
    job, sent = ends.given(mixed, round=2)
    assert sent == set()
    assert ends.answered(job, plus(mixed, A, HEAD)) == {A, HEAD}
    later = plus(plus(mixed, A, HEAD), A, B, HEAD)  # two rounds went by
    assert ends.given(later, round=5)[1] == {A, B, HEAD}


def test_class_means_go_with_every_job_that_has_some_and_reports_come_back() -> None:
    ends, means = Ends(), {"means": torch.ones(4, 3), "seen": torch.tensor([True, False, True, True])}
    options = replace(TURNS, trained_parts="all")
    for round, names in ((1, {A, B, HEAD}), (2, set[str]())):
        job = Job(client="site", params=START, round=round, options=options, sent={"centroids": means})
        head, tensors = decode_frame(encode_frame(*ends.sender.job("train", job, number=1)))
        assert set(tensors) == names | {"sent/centroids/means", "sent/centroids/seen"}
        _, came, _ = ends.receiver.job(head, tensors, client="site")
        assert same(came.sent["centroids"], means) and same(came.params, START)
    update = Update(
        client="site", params=plus(START, A), examples=5, metrics={}, reported={"x": {"counts": torch.ones(4)}}
    )
    head, tensors = decode_frame(encode_frame(*ends.receiver.update("train", update, came, number=1)))
    found = ends.sender.update("train", head, tensors, job=came)
    assert same(found.reported["x"], update.reported["x"]) and same(found.params, update.params)
    plain = Job(client="site", params=START, round=3, options=options)
    assert ends.receiver.job(*ends.sender.job("train", plain, number=2), client="site")[1].sent == {}


def test_an_end_that_holds_nothing_is_sent_everything() -> None:
    ends = Ends()
    ends.given(START, round=1)
    ends.sender.forget()
    ends.receiver.forget()
    assert ends.given(plus(START, B), round=2)[1] == {A, B, HEAD}


def test_a_tensor_that_does_not_train_and_comes_back_is_refused() -> None:
    ends = Ends()
    job, _ = ends.given(START, round=1)
    whole = replace(job, options=replace(TURNS, trained_parts="all"))
    update = Update(client="site", params=plus(START, A, B), examples=5, metrics={})
    message = ends.receiver.update("train", update, whole, number=1)
    with pytest.raises(ProtocolError, match=r"q\.lora_A came back and does not train in round 1; install the same"):
        ends.sender.update("train", *message, job=job)


def test_a_model_of_which_the_rest_is_not_here_is_refused() -> None:
    ends = Ends()
    ends.given(START, round=1)
    job = Job(client="site", params=plus(START, B), round=1, options=TURNS)
    head, tensors = ends.sender.job("train", job, number=2)
    assert set(tensors) == {B}
    with pytest.raises(ProtocolError, match="names a model that is not here"):
        AdapterReceiver().job(head, tensors, client="site")
    with pytest.raises(ProtocolError, match="another digest than the server named; the message was altered"):
        ends.receiver.job(head, {B: tensors[B] + 1}, client="site")
