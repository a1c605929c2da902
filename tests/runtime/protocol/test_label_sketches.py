"""The sketches of a client's labels that a server takes."""

from typing import Any

import pytest
import torch

from atlas_fl.client.fingerprint import FIRST, SECOND
from atlas_fl.client.job import Job, Update
from atlas_fl.client.label_covariance import LABELS
from atlas_fl.client.options import FingerprintOptions, TrainOptions
from atlas_fl.errors import ProtocolError
from atlas_fl.methods.method import ReportTensor
from atlas_fl.runtime.protocol.answer_schema import SCHEMAS, AnsweredRequest, check_answer
from atlas_fl.split.channel import Cut

UNIT = torch.zeros(8).index_fill(0, torch.tensor([3]), 1.0)


def request(*, labels: bool, cut: Cut | None = None, metadata: Any = None) -> AnsweredRequest:
    train = TrainOptions(seed=0)
    options = FingerprintOptions(kind="fisher", sketch_dim=8, train=train, batches=2, steps=2, labels=labels)
    job = Job(client="a-0", params={}, round=0, options=options, cut=cut)
    return AnsweredRequest(action="fingerprint", job=job, metadata=metadata, num_layers=None)


def update(labels: torch.Tensor) -> Update:
    params = {FIRST: UNIT, SECOND: UNIT, LABELS: labels}
    return Update(client="a-0", params=params, examples=0, metrics={"agreement": 1.0, "steps": 2.0, "loss": 0.5})


def test_it_is_expected_where_it_was_asked_for_and_from_no_cut_client() -> None:
    def tensors(asked: AnsweredRequest) -> Any:
        return SCHEMAS["fingerprint"](asked).tensors

    assert tensors(request(labels=True))[LABELS] == ReportTensor(shape=(8,))
    assert LABELS not in tensors(request(labels=False))
    assert LABELS not in tensors(request(labels=True, cut=Cut(blocks=1)))


@pytest.mark.parametrize("labels", [UNIT, torch.zeros(8)])
def test_a_unit_sketch_or_none_is_taken(labels: torch.Tensor) -> None:
    check_answer(request(labels=True), update(labels))


@pytest.mark.parametrize("factor", [2.0, 1e-2, 1e38])
def test_one_of_another_length_is_refused(factor: float) -> None:
    with pytest.raises(ProtocolError, match=r"^'?sketch\.labels'? (has length|holds values from) .*; allowed: "):
        check_answer(request(labels=True), update(UNIT * factor))
