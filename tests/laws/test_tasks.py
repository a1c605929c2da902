"""What holds for every registered task, every partition and every metric."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from atlas_fl.data.cleaning import check_no_leak, deduplicate
from atlas_fl.data.clients import ClientData, make_clients
from atlas_fl.data.embedded import EMBEDDED
from atlas_fl.data.metrics import scores
from atlas_fl.data.partition import PARTITIONS
from atlas_fl.data.registry import TASKS
from atlas_fl.data.task import METRICS, Rows, Source, TaskData, forget
from atlas_fl.storage.assets import embedded_dir

SOURCE = Source(cache_dir=embedded_dir())
NAMES = [task.name for task in EMBEDDED]


@cache
def load(name: str) -> TaskData:
    return TASKS[name].load(SOURCE)


def splits(name: str) -> tuple[Rows, Rows, Rows]:
    data = load(name)
    return data.train, data.validation, data.test


def clients_of(
    name: str, partition: str, *, seed: int = 42, clients: int = 9, test_mix: str = "own"
) -> tuple[ClientData, ...]:
    return make_clients(
        [TASKS[name]],
        SOURCE,
        clients_per_task=8 if name == "amazon" else clients,  # 3,469 rows are there, and nine clients need 3,870
        samples=200,
        validation_samples=100,
        test_samples=130,
        partition=partition,
        dirichlet_alpha=0.1,
        seed=seed,
        shuffle_labels=False,
        test_mix=test_mix,
    )


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_task_says_what_it_is(name: str) -> None:
    task = TASKS[name]
    assert task.name == name
    assert "/" not in name
    assert task.metric in METRICS
    assert len(task.label_names) == (0 if task.is_regression else task.num_labels)
    assert task.is_regression == (task.metric == "pearson")
    assert task.note


@pytest.mark.parametrize("name", NAMES)
def test_splits_have_no_duplicate_and_no_leak(name: str) -> None:
    check_no_leak(load(name).splits)
    for rows in splits(name):
        assert len(deduplicate(rows)) == len(rows) > 0


@pytest.mark.parametrize("name", NAMES)
def test_splits_are_the_same_whenever_they_are_read(name: str) -> None:
    first_read = splits(name)
    forget()
    again = TASKS[name].load(SOURCE)
    for first, second in zip(first_read, (again.train, again.validation, again.test)):
        assert (first.text, first.pair) == (second.text, second.pair)
        assert first.label.tolist() == second.label.tolist()


@pytest.mark.parametrize("name", [name for name in NAMES if TASKS[name].has_classes])
def test_every_split_holds_every_class_in_about_the_same_share(name: str) -> None:
    task = TASKS[name]
    shares = [np.bincount(rows.label, minlength=task.num_labels) / len(rows) for rows in splits(name)]
    assert min(map(min, shares)) > 0
    assert np.ptp(shares, axis=0).max() < 0.01
    assert {rows.label.dtype for rows in splits(name)} == {np.dtype(np.int64)}


@pytest.mark.parametrize("partition", sorted(PARTITIONS))
@pytest.mark.parametrize("name", NAMES)
def test_nine_default_clients_share_nothing_and_see_two_classes(name: str, partition: str) -> None:
    # of product reviews with two ratings that differ there are too few for nine
    clients = clients_of(name, partition, clients=8 if name == "amazon_ratings" else 9)
    total = sum(len(client.train) for client in clients)
    assert total == 200 * len(clients)
    for client in clients:
        assert len(np.unique(client.train.label)) >= 2
        assert (len(client.validation), len(client.test)) == (100, 130)
    given = [
        key
        for client in clients
        for rows in (client.train, client.validation, client.test)
        for key in zip(rows.text, rows.pair or rows.text)
    ]
    assert len(set(given)) == len(given) == total + 230 * len(clients)


@pytest.mark.parametrize("partition", sorted(PARTITIONS))
def test_a_partition_is_a_function_of_the_seed(partition: str) -> None:
    first, same, other = (clients_of("trec", partition, seed=seed, clients=3) for seed in (1, 1, 2))
    assert [c.train.text for c in first] == [c.train.text for c in same]
    assert [c.test.text for c in first] == [c.test.text for c in same]
    assert [c.train.text for c in first] != [c.train.text for c in other]


@pytest.mark.parametrize("partition", sorted(PARTITIONS))
@pytest.mark.parametrize("name", [name for name in NAMES if TASKS[name].has_classes])
def test_balanced_test_splits_have_as_many_of_each_class_as_any_dealing_could(name: str, partition: str) -> None:
    clients = clients_of(name, partition, test_mix="balanced")
    counts = np.stack([np.bincount(one.test.label, minlength=TASKS[name].num_labels) for one in clients])
    supply = np.bincount(splits(name)[2].label, minlength=TASKS[name].num_labels)
    assert (counts.sum(axis=1) == 130).all() and (counts.sum(axis=0) <= supply).all()
    assert (np.ptp(counts, axis=0) <= 1).all(), "every client has as many of a class"
    is_short = counts.sum(axis=0) < counts.sum(axis=0).max() - 1
    assert (counts.sum(axis=0)[is_short] == supply[is_short]).all(), "a class has less where all its rows are dealt"
    assert np.ptp(counts[:, ~is_short], axis=1).max() <= 1


@pytest.mark.parametrize("name", sorted(name for name in TASKS if not TASKS[name].writes))
def test_perfect_predictions_reach_the_top_of_the_tasks_metric(name: str) -> None:
    task = TASKS[name]
    if task.is_regression:
        labels = np.linspace(0, 5, 30, dtype=np.float32)
        logits = labels[:, None]
    else:
        labels = np.arange(30) % task.num_labels
        logits = 20 * np.eye(task.num_labels, dtype=np.float32)[labels]
    found = scores(task, labels, logits)
    assert found["primary"] == pytest.approx(1.0)
    assert found["loss"] == pytest.approx(0.0, abs=1e-6)
    assert all(np.isfinite(list(found.values())))


def test_a_missing_cache_is_an_error_and_no_skip(tmp_path: Path) -> None:
    for name in NAMES:
        with pytest.raises(Exception, match="run `atlas fetch embedded`"):
            TASKS[name].load(Source(cache_dir=tmp_path))
