"""Scores by class, by hand."""

import numpy as np

from atlas_fl.data.metrics import by_class
from atlas_fl.experiment.summary import class_scores, histories

PLAN = {"data": [{"client": "c-0", "task": "c", "labels": {"cat": 3, "dog": 1, "owl": 0}}]}


def rows(*counts: tuple[list[int], ...], round: int = 2) -> list[dict[str, object]]:
    common = {"round": round, "task": "c", "split": "test"}
    return [
        {**common, "client": f"c-{index}", "classes": dict(zip(("hits", "examples", "predicted"), of_client))}
        for index, of_client in enumerate(counts)
    ]


def test_every_class_counts_its_own_examples_by_hand() -> None:
    labels = np.array([0, 0, 0, 1, 1])
    # predicted: 0, 0, 1, 1, 2
    logits = np.eye(3)[[0, 0, 1, 1, 2]]
    assert by_class(labels, logits) == {"hits": [2, 1, 0], "examples": [3, 2, 0], "predicted": [2, 2, 1]}


def test_clients_add_up_and_a_class_without_images_has_no_accuracy() -> None:
    found = histories(rows(([2, 1, 0], [3, 2, 0], [2, 2, 1]), ([0, 3, 0], [1, 4, 0], [1, 4, 0])))
    # cat: 2 of 4 and of 3 that were called so, dog: 4 of 6 and of 6, owl: none
    assert class_scores(list(found.values()), plan=PLAN) == {
        "classes": {
            "cat": {"examples": 4, "accuracy": 0.5, "recall": 0.5, "precision": 2 / 3, "f1": 4 / 7},
            "dog": {"examples": 6, "accuracy": 4 / 6, "recall": 4 / 6, "precision": 4 / 6, "f1": 4 / 6},
            "owl": {"examples": 0},
        }
    }


def test_the_last_round_counts_and_rows_without_counts_have_no_classes() -> None:
    first, last = ([0, 0, 0], [1, 0, 0], [0, 1, 0]), ([1, 0, 0], [1, 0, 0], [1, 0, 0])
    both = histories([*rows(first, round=1), *rows(last, round=2)])
    assert class_scores(list(both.values()), plan=PLAN)["classes"]["cat"] == {
        "examples": 1,
        "accuracy": 1.0,
        "recall": 1.0,
        "precision": 1.0,
        "f1": 1.0,
    }
    plain = {"round": 1, "client": "c-0", "task": "c", "split": "test", "primary": 0.5}
    assert class_scores(list(histories([plain]).values()), plan=PLAN) == {}
