import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from atlas_fl.client.job import Job, Update
from atlas_fl.client.options import OPTIONS, EvaluateOptions, TrainOptions
from atlas_fl.errors import ProtocolError
from atlas_fl.methods.fedpac import summarize
from atlas_fl.methods.method import ReportTensor
from atlas_fl.methods.registry import RULES
from atlas_fl.methods.shrinkage import NUMBERS
from atlas_fl.params import flatten_by_client
from atlas_fl.runtime.protocol.answer_schema import (
    CORRELATIONS,
    LARGEST_FEATURE,
    LARGEST_WEIGHT,
    SCHEMAS,
    SCORES,
    SECONDS,
    AnsweredRequest,
    Range,
    check_answer,
    check_tensors,
)
from atlas_fl.runtime.protocol.client_metadata import ClientMetadata


def test_every_action_has_a_schema() -> None:
    assert SCHEMAS.keys() == OPTIONS.keys()


@pytest.mark.parametrize("kind", SCORES)
def test_every_score_has_a_range_that_nothing_huge_is_in(kind: str) -> None:
    for name, own in {**SCORES[kind], **CORRELATIONS}.items():
        assert own.holds(1.0)
        if name != "perplexity":  # that of a guess among many words is as large as they are many
            assert not own.holds(1e300), name
        assert own.holds(math.nan) is own.may_be_undefined
    assert not SCORES[kind]["primary"].may_be_undefined


def test_a_wide_range_has_no_room_at_its_narrow_end() -> None:
    wide = Range(most=1e78)
    assert [wide.holds(value) for value in (-1.0, -1e-9, 0.0, 1e78, 1.1e78)] == [False, True, True, True, False]
    assert not SECONDS.holds(-1.0)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(3), r"'t' is \(3,\) torch.float32; allowed: \(2,\) torch.float32"),
        (torch.ones(2).double(), "torch.float64; allowed"),
        (torch.tensor([0.5, math.nan]), "holds values from nan to nan; allowed: 0 to 1"),
        (torch.tensor([0.5, 2.0]), "holds values from 0.5 to 2; allowed: 0 to 1"),
    ],
)
def test_a_tensor_is_of_its_shape_dtype_and_range(tensor: torch.Tensor, message: str) -> None:
    schemas = {"t": ReportTensor(shape=(2,), least=0.0, most=1.0)}
    check_tensors({"t": torch.tensor([0.0, 1.0])}, schemas)
    with pytest.raises(ProtocolError, match=message):
        check_tensors({"t": tensor}, schemas)


REPORTS = ("none", *sorted({rule.report for rule in RULES.values()} - {"none"}))
LABELS = np.array([0, 0, 2, 0, 2])
MODEL = {"q.lora_A": torch.ones(2, 5), "q.lora_B": torch.zeros(4, 2), "head.weight": torch.ones(3, 4)}
SPLITS = ("train", "validation", "test")
COUNTED = {"examples": dict.fromkeys(SPLITS, 5), "labels": dict.fromkeys(SPLITS, (3.0, 0.0, 2.0)), "lengths": {}}
METADATA = ClientMetadata(
    task="mine", num_labels=3, metric="accuracy", label_names=("a", "b", "c"), max_length=9, **COUNTED
)
TRAINED = Update(client="a", params=MODEL, examples=5, metrics={"loss": 0.5, "seconds": 1.0, "steps": 2.0})


def asked_for(report: str) -> AnsweredRequest:
    job = Job(client="a", params=MODEL, round=4, options=TrainOptions(seed=0, report=report))
    return AnsweredRequest(action="train", job=job, metadata=METADATA, num_layers=3)


def reported(report: str) -> dict[str, dict[str, torch.Tensor]]:
    """The reports of an honest client; its class of place 1 has no example."""
    if report == "halves":
        return {report: flatten_by_client({"first": MODEL, "second": MODEL})}
    if report == "weight_gradients":
        return {report: {"q": torch.ones(4, 5)}}
    if report == "variances":
        return {report: {name: torch.tensor(0.5) for name in NUMBERS}}
    features = torch.arange(20.0).reshape(5, 4)
    return {} if report == "none" else {report: dict(summarize(features, LABELS, num_labels=3))}


@pytest.mark.parametrize("report", REPORTS)
def test_an_answer_brings_the_report_that_its_job_asked_for_and_no_other(report: str) -> None:
    check_answer(asked_for(report), replace(TRAINED, reported=reported(report)))
    for other in set(REPORTS) - {report}:
        with pytest.raises(ProtocolError, match=rf"its report \({report}\): it (lacks|has unknown) '"):
            check_answer(asked_for(report), replace(TRAINED, reported=reported(other)))


def test_scores_bring_no_report() -> None:
    job = Job(client="a", params=MODEL, round=4, options=EvaluateOptions(split="test"))
    request = AnsweredRequest(action="evaluate", job=job, metadata=METADATA, num_layers=3)
    names = (*SCORES["classes"], "seconds")
    counts = dict.fromkeys(("hits", "examples", "predicted"), METADATA.labels["test"])
    scored = replace(TRAINED, metrics=dict.fromkeys(names, 0.5), classes=counts)
    check_answer(request, scored)
    twice = replace(scored, classes={**counts, "predicted": [5, 1, 0]})
    with pytest.raises(ProtocolError, match="it takes an example for two classes"):
        check_answer(request, twice)
    several = dict.fromkeys((*SCORES["labels"], "seconds"), 0.5)
    labels = replace(request, metadata=replace(METADATA, multilabel=True, metric="micro_f1"))
    check_answer(labels, replace(twice, metrics=several))
    with pytest.raises(ProtocolError, match="it lacks the metrics micro_f1"):
        check_answer(labels, scored)
    with pytest.raises(ProtocolError, match=r"its report \(none\): it has unknown 'class_features'"):
        check_answer(request, replace(scored, reported=reported("class_features")))


def put(key: str, value: Any) -> Callable[[dict[str, torch.Tensor]], Any]:
    """This tensor in the place of that of the name, or what a function makes of it."""
    return lambda tensors: tensors.update({key: value(tensors[key]) if callable(value) else value})


FAULTS: Mapping[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "one half": (
        "halves",
        lambda tensors: [tensors.pop(f"second/{key}") for key in MODEL],
        "it lacks 'second/q.lora_A', 'second/q.lora_B', 'second/head.weight'; allowed: 6 tensors",
    ),
    "a half without its head": ("halves", lambda tensors: tensors.pop("first/head.weight"), "lacks 'first/head.weigh"),
    "a third half": ("halves", put("third/q.lora_A", torch.ones(2, 5)), "it has unknown 'third/q.lora_A'"),
    "another rank": ("halves", put("first/q.lora_B", torch.zeros(4, 3)), r"'first/q.lora_B' is \(4, 3\) .*: \(4, 2\)"),
    "float64": ("halves", put("second/q.lora_A", torch.Tensor.double), "torch.float64; allowed"),
    "NaN": ("halves", put("first/q.lora_A", lambda t: t * math.nan), "from nan to nan; allowed: -1e\\+06 to 1e\\+06"),
    "infinity": ("halves", put("second/head.weight", lambda t: t * math.inf), "holds values from inf"),
    "huge weights": ("halves", put("first/q.lora_A", lambda t: t * 2 * LARGEST_WEIGHT), "holds values from 2e\\+06"),
    "no counts": ("class_features", lambda tensors: tensors.pop("counts"), "it lacks 'counts'; allowed: 3 tensors"),
    "text beside it": ("class_features", put("texts", torch.zeros(9, dtype=torch.uint8)), "it has unknown 'texts'"),
    "other counts": (
        "class_features",
        put("counts", torch.tensor([2, 1, 2])),
        r"\[2, 1, 2\]; allowed: the \[3, 0, 2\] that",
    ),
    "negative counts": ("class_features", put("counts", torch.tensor([6, -3, 2])), r"counts are \[6, -3, 2\]"),
    "counts in float32": ("class_features", put("counts", torch.Tensor.float), "'counts' is .* torch.float32; allowed"),
    "a class more": ("class_features", put("means", torch.zeros(4, 4)), r"'means' is \(4, 4\) .*: \(3, 4\)"),
    "another width": ("class_features", put("means", torch.zeros(3, 5)), r"'means' is \(3, 5\) .*: \(3, 4\)"),
    "means that are none": ("class_features", put("means", lambda t: t / 0), "'means' holds values from nan"),
    "huge means": ("class_features", put("means", lambda t: t + 2 * LARGEST_FEATURE), "'means' holds values from 2e"),
    "negative variances": ("class_features", put("variances", lambda t: -t), "'variances' holds values from -"),
    "infinite variances": ("class_features", put("variances", lambda t: t / 0), "'variances' holds values from nan"),
    "a mean of nobody": ("class_features", put("means", lambda t: t + 1), "means of a class without examples are not"),
    "a variance of nobody": ("class_features", put("variances", lambda t: t + 1), "variances of a class without exam"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_report_that_does_not_fit_is_refused(fault: str) -> None:
    report, change, message = FAULTS[fault]
    honest = reported(report)
    check_answer(asked_for(report), replace(TRAINED, reported=honest))
    change(honest[report])
    with pytest.raises(ProtocolError, match=message) as error:
        check_answer(asked_for(report), replace(TRAINED, reported=honest))
    assert "\n" not in str(error.value)


def test_who_has_registered_no_classes_has_no_class_features() -> None:
    request = replace(asked_for("class_features"), metadata=replace(METADATA, num_labels=1))
    with pytest.raises(ProtocolError, match="task mine has no classes; join with a task that has some"):
        check_answer(request, replace(TRAINED, reported=reported("class_features")))
