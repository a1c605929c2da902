"""Accuracy by class, by hand."""

import numpy as np

from atlas_fl.data.metrics import by_class
from atlas_fl.experiment.summary import class_scores, histories

PLAN = {"data": [{"client": "c-0", "task": "c", "labels": {"cat": 3, "dog": 1, "owl": 0}}]}


def rows(*counts: tuple[list[int], list[int]], round: int = 2) -> list[dict[str, object]]:
    common = {"round": round, "task": "c", "split": "test"}
    return [
        {**common, "client": f"c-{index}", "classes": {"hits": hits, "examples": examples}}
        for index, (hits, examples) in enumerate(counts)
    ]


def test_every_class_counts_its_own_examples_by_hand() -> None:
    labels = np.array([0, 0, 0, 1, 1])
    # predicted: 0, 0, 1, 1, 2
    logits = np.eye(3)[[0, 0, 1, 1, 2]]
    assert by_class(labels, logits) == {"hits": [2, 1, 0], "examples": [3, 2, 0]}


def test_clients_add_up_and_a_class_without_images_has_no_accuracy() -> None:
    found = histories(rows(([2, 1, 0], [3, 2, 0]), ([0, 3, 0], [1, 4, 0])))
    # cat: 2 of 4, dog: 4 of 6, owl: none
    assert class_scores(list(found.values()), plan=PLAN) == {
        "classes": {
            "cat": {"examples": 4, "accuracy": 0.5},
            "dog": {"examples": 6, "accuracy": 4 / 6},
            "owl": {"examples": 0},
        }
    }


def test_the_last_round_counts_and_rows_without_counts_have_no_classes() -> None:
    both = histories([*rows(([0, 0, 0], [1, 0, 0]), round=1), *rows(([1, 0, 0], [1, 0, 0]), round=2)])
    assert class_scores(list(both.values()), plan=PLAN)["classes"]["cat"] == {"examples": 1, "accuracy": 1.0}
    plain = {"round": 1, "client": "c-0", "task": "c", "split": "test", "primary": 0.5}
    assert class_scores(list(histories([plain]).values()), plan=PLAN) == {}
