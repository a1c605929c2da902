from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import sklearn.metrics

from atlas_fl.data.metrics import auroc, by_class, calibration_error, class_table, scores
from atlas_fl.data.task import Source, Task, TaskData
from atlas_fl.rng import generator


def no_data(source: Source) -> TaskData:
    raise AssertionError(Path(source.cache_dir))


def task(num_labels: int, metric: Any = "accuracy") -> Task:
    return Task(name="t", num_labels=num_labels, metric=metric, load=no_data)


@pytest.mark.parametrize("num_labels", [2, 3, 6])
def test_classification_agrees_with_scikit_learn(num_labels: int) -> None:
    rng = generator(5, num_labels)
    labels = rng.integers(num_labels, size=90)
    logits = rng.normal(size=(90, num_labels)) + 1.5 * np.eye(num_labels)[labels]
    found = scores(task(num_labels), labels, logits.astype(np.float32))
    predicted = logits.argmax(axis=1)
    average: Any = "binary" if num_labels == 2 else "macro"
    ranked: Any = logits[:, 1] if num_labels == 2 else scipy.special.softmax(logits, axis=1)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert found == pytest.approx(
        {
            "loss": sklearn.metrics.log_loss(labels, probabilities),
            "ece": calibration_error_bin_by_bin(probabilities.max(axis=1), predicted == labels),
            "accuracy": sklearn.metrics.accuracy_score(labels, predicted),
            "f1": sklearn.metrics.f1_score(labels, predicted, average=average),
            "precision": sklearn.metrics.precision_score(labels, predicted, average=average),
            "recall": sklearn.metrics.recall_score(labels, predicted, average=average),
            "macro_f1": sklearn.metrics.f1_score(labels, predicted, average="macro"),
            "balanced_accuracy": sklearn.metrics.balanced_accuracy_score(labels, predicted),
            "auroc": sklearn.metrics.roc_auc_score(
                labels, ranked - logits[:, 0] if num_labels == 2 else ranked, multi_class="ovr"
            ),
            "mcc": sklearn.metrics.matthews_corrcoef(labels, predicted),
            "primary": sklearn.metrics.accuracy_score(labels, predicted),
        },
        rel=1e-6,
    )


def calibration_error_bin_by_bin(confidence: np.ndarray, is_hit: np.ndarray) -> float:
    total = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            total += inside.mean() * abs(is_hit[inside].mean() - confidence[inside].mean())
    return total


def test_calibration_by_hand() -> None:
    # .9 and .92 share the bin (13/15, 14/15]: one of two right, .91 said; .6 is right, alone in (8/15, 9/15].
    found = calibration_error(np.asarray([0.9, 0.92, 0.6]), np.asarray([True, False, True]))
    assert found == pytest.approx(2 / 3 * 0.41 + 1 / 3 * 0.4)
    assert calibration_error(np.asarray([1.0, 1.0]), np.asarray([True, True])) == 0
    assert np.isnan(calibration_error(np.asarray([np.nan, 1.0]), np.asarray([True, True])))


def test_regression_agrees_with_scipy() -> None:
    rng = generator(6)
    labels = rng.integers(0, 6, size=80).astype(np.float32)
    predicted = (labels + rng.normal(size=80)).astype(np.float32).round(1)  # with ties
    found = scores(task(1, "pearson"), labels, predicted[:, None])
    assert found == pytest.approx(
        {
            "loss": np.mean((labels - predicted) ** 2),
            "pearson": scipy.stats.pearsonr(labels.astype(np.float64), predicted.astype(np.float64))[0],
            "spearman": scipy.stats.spearmanr(labels, predicted)[0],
            "primary": found["pearson"],
        },
        rel=1e-6,
    )


def test_by_hand() -> None:
    # Predictions 1 1 0 1 on labels 1 0 0 1: two true positives, one false one, one true negative.
    logits = np.asarray([[0, 1], [0, 1], [1, 0], [0, 1]], dtype=np.float32)
    found = scores(task(2, "f1"), np.asarray([1, 0, 0, 1]), logits)
    right, wrong = np.log(1 + np.exp(-1.0)), np.log(1 + np.exp(1.0))
    assert found["loss"] == pytest.approx((3 * right + wrong) / 4)
    assert (found["accuracy"], found["recall"]) == (0.75, 1.0)
    assert found["precision"] == pytest.approx(2 / 3)
    assert found["primary"] == found["f1"] == pytest.approx(0.8)
    assert found["mcc"] == pytest.approx(1 / 3**0.5)


def test_a_constant_prediction_has_no_mcc_and_no_f1() -> None:
    logits = np.tile(np.float32([2, 0]), (4, 1))
    found = scores(task(2, "mcc"), np.asarray([0, 0, 0, 1]), logits)
    assert (found["accuracy"], found["mcc"], found["f1"], found["precision"], found["primary"]) == (0.75, 0, 0, 0, 0)


@pytest.mark.parametrize(("labels", "predicted"), [([1.0, 2.0], [3.0, 3.0]), ([1.0, 1.0], [2.0, 3.0])])
def test_the_correlation_with_a_constant_is_undefined_and_so_absent(
    labels: list[float], predicted: list[float]
) -> None:
    found = scores(task(1, "pearson"), np.float32(labels), np.float32(predicted)[:, None])
    assert set(found) == {"loss", "primary"}
    assert found["primary"] == 0


def test_huge_logits_give_a_finite_loss() -> None:
    found = scores(task(2), np.asarray([0, 1]), np.asarray([[3e4, -3e4], [3e4, -3e4]], dtype=np.float32))
    assert found["loss"] == pytest.approx(3e4)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("row", [(NAN, 1.0), (1.0, NAN), (NAN, NAN), (INF, 0.0), (-INF, -INF)])
def test_logits_that_are_no_numbers_are_a_wrong_answer_to_every_label(row: tuple[float, float]) -> None:
    """To argmax a NaN is the largest: a row of NaN was class 0, and the accuracy of class 0 was 1."""
    for label in (0, 1):
        found = scores(task(2), np.array([label, label]), np.array([row, row], dtype=np.float32))
        assert {name: found[name] for name in ("accuracy", "f1", "precision", "recall", "primary")} == dict.fromkeys(
            ("accuracy", "f1", "precision", "recall", "primary"), 0.0
        )
        assert not np.isfinite(found["loss"])


def test_a_class_that_is_excluded_by_minus_infinity_is_no_broken_row() -> None:
    found = scores(task(2), np.array([1]), np.array([[-INF, 0.0]], dtype=np.float32))
    assert (found["accuracy"], found["loss"]) == (1.0, 0.0)


def test_one_broken_row_of_four_by_hand() -> None:
    """Three of four are right; of class 1 one of two is found, and nothing else is called so."""
    logits = np.array([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [NAN, NAN]], dtype=np.float32)
    found = scores(task(2), np.array([0, 0, 1, 1]), logits)
    assert (found["accuracy"], found["precision"], found["recall"]) == (0.75, 1.0, 0.5)
    assert found["f1"] == pytest.approx(2 / 3)
    none = [0, 0, 1, 2]  # the broken row as a third class, which no label has
    assert found["mcc"] == pytest.approx(sklearn.metrics.matthews_corrcoef([0, 0, 1, 1], none))


def test_a_prediction_that_is_no_number_has_the_worst_correlation() -> None:
    labels = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    for value in (NAN, INF):
        found = scores(task(1, "pearson"), labels, np.array([[1.0], [2.0], [value]], dtype=np.float32))
        assert (found["pearson"], found["spearman"], found["primary"]) == (-1.0, -1.0, -1.0)
        assert not np.isfinite(found["loss"])


def test_images_that_give_no_numbers_are_hits_of_no_class() -> None:
    logits = np.array([[NAN, NAN], [2.0, 0.0]], dtype=np.float32)
    assert by_class(np.array([0, 0]), logits) == {
        "hits": [1, 0],
        "examples": [2, 0],
        "predicted": [1, 0],
    }


def test_tables_by_class_agree_with_scikit_learn() -> None:
    rng = generator(9)
    labels, logits = rng.integers(3, size=60), rng.normal(size=(60, 4))
    counts = by_class(labels, logits)
    expected = sklearn.metrics.precision_recall_fscore_support(
        labels, logits.argmax(axis=1), labels=range(4), zero_division=0
    )
    table = class_table(**{name: np.asarray(values) for name, values in counts.items()})
    found = [table["precision"], table["recall"], table["f1"], counts["examples"]]
    assert np.asarray(found) == pytest.approx(np.asarray(expected))


def test_scores_of_a_positive_class_are_those_of_scikit_learn() -> None:
    rng = generator(10)
    labels, logits = rng.integers(3, size=60), rng.normal(size=(60, 3))
    for positive, of_class in enumerate(sklearn.metrics.f1_score(labels, logits.argmax(axis=1), average=None)):
        found = scores(replace(task(3, "f1"), positive=positive), labels, logits)
        assert found["primary"] == found["f1"] == pytest.approx(of_class)
        assert found["macro_f1"] == pytest.approx(
            sklearn.metrics.f1_score(labels, logits.argmax(axis=1), average="macro")
        )


def test_the_area_by_hand() -> None:
    # of the pairs of a 1 (.4, .8) and a 0 (.1, .4, .9) .4 wins once and ties once, .8 wins twice: 3.5 of 6
    score = np.asarray([0.1, 0.4, 0.9, 0.4, 0.8])
    labels = np.asarray([0, 0, 0, 1, 1])
    assert auroc(labels, np.stack([-score, score], axis=1)) == pytest.approx(3.5 / 6)
    # of three classes one has no example, and the mean is over the others: both are ordered the wrong way round
    assert auroc(np.asarray([0, 2]), np.asarray([[0, 0, 1.0], [1, 0, 0.0]])) == 0
    assert auroc(np.asarray([0, 1]), np.asarray([[0, NAN], [0, 1.0]])) == 0


def test_without_examples_of_two_classes_there_is_no_area_and_the_score_is_that_of_chance() -> None:
    found = scores(task(2, "auroc"), np.asarray([1, 1]), np.asarray([[0, 1], [1, 0]], dtype=np.float32))
    assert "auroc" not in found
    assert (found["primary"], found["balanced_accuracy"]) == (0.5, 0.5)
