import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from atlas_fl.data.clients import ClientData, label_statistics, majority
from atlas_fl.data.task import Rows, Task
from atlas_fl.errors import ProtocolError
from atlas_fl.runtime.protocol import client_metadata
from atlas_fl.runtime.protocol.client_metadata import SPLITS, metadata_of, placeholder_client, read_metadata


def client_of(name: str, task: Task, seed: int) -> ClientData:
    draw = np.random.default_rng(seed)

    def rows(count: int) -> Rows:
        if task.multilabel:
            own = draw.integers(2, size=(count, task.num_labels)).astype(np.float32)
            return Rows(text=("secret",) * count, label=own)
        labels = draw.integers(task.num_labels, size=count) if task.has_classes else draw.normal(3, 2, size=count)
        return Rows(text=("secret",) * count, label=labels if task.has_classes else labels.astype(np.float32))

    return ClientData(name=name, task=task, train=rows(13), validation=rows(13), test=rows(13), left_out=7)


def task_of(num_labels: int, *, multilabel: bool = False) -> Task:
    names = tuple(f"l{k}" for k in range(num_labels)) if num_labels > 1 else ()
    metric: Any = "pearson" if num_labels == 1 else "micro_f1" if multilabel else "accuracy"
    return Task(
        name="t",
        num_labels=num_labels,
        multilabel=multilabel,
        metric=metric,
        label_names=names,
        load=lambda _: pytest.fail("read"),
    )


@pytest.fixture
def told(tiny_of: Callable[..., Any], site_of: Callable[..., Any], spec_of: Any) -> Callable[[int], Any]:
    """(client, tokens, what it tells) of a task with so many labels."""

    def get(num_labels: int, *, multilabel: bool = False) -> Any:
        site = site_of(tiny_of("bert"), spec_of(name="t-0", labels=num_labels, examples=13))
        client = client_of("t-0", task_of(num_labels, multilabel=multilabel), seed=num_labels)
        return client, site.data["t-0"], json.loads(json.dumps(metadata_of(client, site.data["t-0"])))

    return get


@pytest.mark.parametrize(("num_labels", "multilabel"), [(3, False), (1, False), (4, True)])
def test_a_stand_in_has_the_numbers_and_nothing_else(
    num_labels: int, multilabel: bool, told: Callable[..., Any]
) -> None:
    client, tokens, data = told(num_labels, multilabel=multilabel)
    assert "secret" not in json.dumps(data)
    stand, stand_tokens = placeholder_client("t-0", read_metadata(data))
    assert set(stand.train.text) == {""}
    assert not stand_tokens.splits["train"].ids.any()
    assert stand_tokens.examples == tokens.examples
    for split, own in tokens.splits.items():
        assert sorted(stand_tokens.splits[split].lengths) == sorted(own.lengths)
    own, other = label_statistics([client])[0], label_statistics([stand])[0]
    if num_labels == 1:
        assert other.pop("labels") == pytest.approx(own.pop("labels"), rel=1e-5)
    assert own == other
    assert majority(stand.train) == majority(client.train)
    assert stand.task.multilabel is multilabel
    assert stand.train.label.shape == client.train.label.shape
    assert stand.left_out == 7


def test_stand_ins_of_odd_and_even_numbers_keep_mean_and_deviation(told: Callable[[int], Any]) -> None:
    _, _, data = told(1)
    for count in (2, 3, 8, 13):
        data["examples"]["test"] = count
        data["lengths"]["test"] = [[4, 0, count]]
        label = placeholder_client("t-0", read_metadata(data))[0].test.label
        assert (len(label), label.mean(), label.std()) == pytest.approx((count, *data["labels"]["test"]), rel=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"examples": {"train": 12, "validation": 13, "test": 13}},
        {"examples": {"train": 10**12, "validation": 13, "test": 13}},
        {"lengths": {split: [[10**9, 0, 13]] for split in SPLITS}},
        {"lengths": {split: [[4, 5, 13]] for split in SPLITS}},
        {"lengths": {split: [[0, 0, 13]] for split in SPLITS}},
        {"lengths": {"train": [[4, 0, 13]]}},
        {"lengths": [[4, 0, 13]]},
        {"lengths": "x"},
        {"labels": {}},
        {"labels": {split: [13, 0] for split in SPLITS}},
        {"labels": {split: [-1, 14, 0] for split in SPLITS}},
        {"num_labels": 10**9},
        {"max_length": 10**9},
        {"max_length": 0},
        {"label_names": ["a", "b", "c" * 1000]},
        {"num_labels": None},
        {"metric": "guess"},
        {"task": "a\nb"},
        {"label_names": ["a", "b", "\x1b[2J"]},
        {"label_names": 3},
    ],
)
def test_a_census_that_does_not_hold_together_is_refused(change: dict[str, Any], told: Callable[[int], Any]) -> None:
    _, _, data = told(3)
    with pytest.raises(ProtocolError, match="what the client tells of its data"):
        read_metadata({**data, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"labels": {split: [14, 0, 0] for split in SPLITS}},
        {"labels": {split: [0.5, 0, 0] for split in SPLITS}},
        {"num_labels": 1, "label_names": [], "labels": {split: [1, 1] for split in SPLITS}},
        {"images": True},
        {"multilabel": "yes"},
    ],
)
def test_so_is_one_of_several_labels(change: dict[str, Any], told: Callable[..., Any]) -> None:
    _, _, data = told(3, multilabel=True)
    assert read_metadata(data).multilabel
    with pytest.raises(ProtocolError, match="what the client tells of its data"):
        read_metadata({**data, **change})


def test_a_stand_in_of_many_labels_takes_no_more_memory_than_is_allowed(
    told: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, data = told(3, multilabel=True)
    monkeypatch.setattr(client_metadata, "MOST_MULTILABELS", 3 * 13 - 1)
    with pytest.raises(ProtocolError, match=r"labels\.train are of 13 times 3; allowed: 38"):
        read_metadata(data)


def test_whatever_is_sent_as_a_census_crashes_nothing(told: Callable[[int], Any]) -> None:
    _, _, data = told(3)
    draw, values = random.Random(0), [None, -1, 0, 10**30, 0.5, "", "x", [], [[]], {}, {"train": 1}, [1, 2], True]
    refused = 0
    for _ in range(500):
        changed = {**data, draw.choice(list(data)): draw.choice(values)}
        try:
            placeholder_client("t-0", read_metadata(changed))
        except ProtocolError:
            refused += 1
    assert 400 < refused < 500, "most of these values fit nowhere, and some are as good as the true ones"


def test_a_stand_in_takes_memory_for_examples_and_none_for_tokens(told: Callable[[int], Any]) -> None:
    """As many as a site may claim, 500 tokens each: 24 bytes an example and split."""
    _, _, data = told(3)
    count = client_metadata.MOST_EXAMPLES
    data |= {"examples": dict.fromkeys(SPLITS, count), "lengths": {split: [[500, 0, count]] for split in SPLITS}}
    data |= {"labels": {split: [count, 0, 0] for split in SPLITS}}
    census = read_metadata(data)
    tracemalloc.start()
    try:
        client, tokens = placeholder_client("t-0", census)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tokens.splits["test"].offsets[-1] == 500 * count
    assert len(client.train) == count
    assert held < 25 * 3 * count
    assert peak < 40 * 3 * count


def test_a_stand_in_for_text_counts_what_is_to_be_predicted(told: Callable[[int], Any]) -> None:
    _, _, data = told(1)
    data |= {"num_labels": 0, "metric": "accuracy", "lengths": {split: [[9, 4, 3], [7, 2, 10]] for split in SPLITS}}
    encoded = placeholder_client("t-0", read_metadata(data))[1].splits["train"]
    assert sorted(encoded.num_targets) == [2] * 10 + [4] * 3
    assert encoded.target_mask is not None
    assert len(encoded.target_mask) == encoded.offsets[-1] == 97
