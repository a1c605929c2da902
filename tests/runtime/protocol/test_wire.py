import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from atlas_fl.client.job import Job, Update
from atlas_fl.client.options import (
    OPTIONS,
    EvaluateOptions,
    FingerprintOptions,
    ImportanceOptions,
    RidgeOptions,
    ScaleOptions,
    SensitivityOptions,
    TrainOptions,
)
from atlas_fl.client.registry import ACTIONS
from atlas_fl.errors import ProtocolError
from atlas_fl.params import digest
from atlas_fl.runtime.protocol.messages import (
    as_bytes,
    as_tensor,
    job_head,
    read_job,
    read_packed,
    read_update,
    update_message,
    write_packed,
)
from atlas_fl.split.channel import Cut

TRAIN = TrainOptions(seed=3, max_steps=4, lr=0.1 + 0.2, schedule="cosine", trained_parts="B", half=1)
JOBS: dict[str, Any] = {
    "train": TRAIN,
    "fingerprint": FingerprintOptions(kind="delta", sketch_dim=8, train=TRAIN, batches=2, steps=3),
    "importance": ImportanceOptions(kind="rngwp", train=TRAIN, batches=2),
    "evaluate": EvaluateOptions(split="validation", new_tokens=3),
    "ridge": RidgeOptions(),
    "scale": ScaleOptions(examples=5),
    "sensitivity": SensitivityOptions(seed=3, examples=4, labels="true", names=("a", "b")),
}
CUT = Cut(blocks=2, wire="int8", noise=0.1, head="client")
PARAMS = {"a.lora_A": torch.randn(2, 3), "head.b": torch.randn(4)}
UPDATE = Update(client="site-1", params=PARAMS, examples=5, metrics={})


def job_of(action: str) -> Job:
    return Job(client="site-1", params=PARAMS, round=2, options=JOBS[action])


def test_every_action_can_travel() -> None:
    assert set(OPTIONS) == set(ACTIONS) == set(JOBS)


@pytest.mark.parametrize("cut", [None, CUT])
@pytest.mark.parametrize("action", JOBS)
def test_a_job_arrives_as_it_left(action: str, cut: Cut | None) -> None:
    job = replace(job_of(action), cut=cut)
    head = job_head(action, job, number=1, cut_info=None)
    assert read_job(json.loads(json.dumps(head)), PARAMS, client="site-1") == (action, job, None)


@pytest.mark.parametrize(
    "change",
    [
        {"action": "rm"},
        {"action": None},
        {"round": "2"},
        {"options": None},
        {"options": {}},
        {"options": {"seed": 1}},
        {"options": {**vars(TRAIN), "seed": "x"}},
        {"options": {**vars(TRAIN), "schedule": "steep"}},
        {"options": {**vars(TRAIN), "frozen": [1]}},
        {"options": {**vars(TRAIN), "more": 1}},
        {"cut": {}},
        {"cut": 2},
        {"cut": {**vars(CUT), "wire": "fp4"}},
    ],
)
def test_a_job_that_is_none_is_refused(change: dict[str, Any]) -> None:
    head, params = job_head("train", job_of("train"), number=1, cut_info=None), PARAMS
    with pytest.raises(ProtocolError, match=r"the server's .* is .*; allowed: .*; install the same atlas-fl"):
        read_job({**json.loads(json.dumps(head)), **change}, params, client="site-1")


def test_an_update_arrives_as_it_left() -> None:
    job = job_of("train")
    trained = {key: tensor + 1 for key, tensor in PARAMS.items()}
    metrics = {"loss": math.nan, "seconds": 0.1}
    crossed = {("activation", "up"): 7, ("gradient", "down"): 5}
    update = replace(UPDATE, params=trained, metrics=metrics, loaded="ab" * 32, keys=2, crossed=crossed)
    head, tensors = update_message(update, job, number=1)
    found = read_update(json.loads(json.dumps(head)), tensors, job=job)
    assert digest(found.params) == digest(trained)
    assert math.isnan(found.metrics["loss"]) and found.metrics["seconds"] == 0.1
    assert replace(found, params={}, metrics={}) == replace(update, params={}, metrics={})


def test_a_report_travels_beside_the_model_and_is_no_part_of_it() -> None:
    job, half = job_of("train"), {"first/a.lora_A": torch.ones(2, 3), "second/a.lora_A": torch.zeros(2, 3)}
    model, reported = PARAMS | {"head.b": torch.zeros(4)}, {"halves": half}
    update = replace(UPDATE, params=model, reported=reported)
    head, tensors = update_message(update, job, number=1)
    found = read_update(json.loads(json.dumps(head)), tensors, job=job)
    assert digest(found.reported["halves"]) == digest(half) and found.params.keys() == PARAMS.keys()
    assert read_update(head, update_message(replace(update, reported={}), job, number=1)[1], job=job).reported == {}


def test_a_model_that_has_not_changed_is_not_sent_back() -> None:
    job = job_of("evaluate")
    head, tensors = update_message(UPDATE, job, number=1)
    assert list(tensors) == ["metrics"]
    assert read_update(head, tensors, job=job).params is PARAMS


EMPTY = {"metrics": torch.zeros(0, dtype=torch.float64)}
ONE = {"metrics": torch.zeros(1, dtype=torch.float64)}
CROSSED = (None, [7], [["activation", "up"]], [["rm", "up", 1]], [["label", "up", -1]], [[[], "up", 1]])


@pytest.mark.parametrize(
    ("change", "tensors"),
    [
        ({"metrics": None}, EMPTY),
        ({"metrics": ["a", "b"]}, ONE),
        ({"metrics": [1]}, ONE),
        ({}, {}),
        ({}, {"metrics": torch.zeros(0)}),
        ({"examples": -1}, EMPTY),
        ({"examples": True}, EMPTY),
        ({"loaded": "x"}, EMPTY),
        ({"loaded": 3}, EMPTY),
        ({"keys": None}, EMPTY),
        *(({"crossed": crossed}, EMPTY) for crossed in CROSSED),
    ],
)
def test_an_update_that_is_none_is_refused(change: dict[str, Any], tensors: Any) -> None:
    job = job_of("train")
    head, _ = update_message(UPDATE, job, number=1)
    with pytest.raises(ProtocolError, match="the answer is no update"):
        read_update({**head, **change}, tensors, job=job)


def test_counts_by_class_travel_with_the_scores_and_must_hold_together() -> None:
    job, counts = job_of("evaluate"), {"hits": [1, 0, 2], "examples": [2, 1, 2], "predicted": [1, 1, 2]}
    update = replace(UPDATE, classes=counts)
    head, tensors = update_message(update, job, number=1)
    head = json.loads(json.dumps(head))
    assert read_update(head, tensors, job=job).classes == counts
    plain, _ = update_message(replace(update, classes={}), job, number=1)
    assert plain["classes"] is None and read_update(plain, tensors, job=job).classes == {}
    lies: list[dict[str, Any]] = [{"hits": own} for own in ([1, 0], [1, 0, -2], [1.0, 0, 2], [1, 2, 1], [2, 0, 2])]
    lies += [{"examples": [2, 1, 6]}, {"predicted": [1, 1, 6]}, {"predicted": [1, 1]}]
    for found in [[], {"hits": [1]}, {"hits": [1, 0, 2], "examples": [2, 1, 2]}, *({**counts, **lie} for lie in lies)]:
        with pytest.raises(ProtocolError, match=r"the counts by class are|the answer is no update: classes"):
            read_update({**head, "classes": found}, tensors, job=job)


@pytest.mark.parametrize("messages", [{}, {"": b""}, {"b": b"12", "a": b"", "c": bytes(300)}])
def test_packed_messages_arrive_as_they_left(messages: dict[str, bytes]) -> None:
    found = read_packed(write_packed(messages))
    assert found == messages and list(found) == list(messages)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\x00\x00",
        b"\xff\xff\xff\xff{}",
        *(len(sizes).to_bytes(4, "big") + sizes + b"12" for sizes in (b"", b"[]", b"{", b"{}", b"\xff")),
        *(
            len(sizes).to_bytes(4, "big") + sizes + b"12"
            for sizes in (b'{"a":1}', b'{"a":3}', b'{"a":3,"b":-1}', b'{"a":true,"b":1}', b'{"a":2.0}', b'{"a":"2"}')
        ),
    ],
)
def test_packed_messages_of_other_sizes_than_they_say_are_refused(packed: bytes) -> None:
    (name,) = write_packed({})
    with pytest.raises(ProtocolError, match="messages have other sizes than they say"):
        read_packed({name: as_tensor(packed) if packed else torch.empty(0, dtype=torch.uint8)})
    with pytest.raises(ProtocolError, match="no row of bytes"):
        read_packed({})
    assert as_bytes(write_packed({"a": b"12"})[name]) == b'\x00\x00\x00\x08{"a": 2}12'
