"""Metrics of predictions in numpy: loss, accuracy, F1, MCC, calibration, Pearson, Spearman, ROUGE, counts by class.

A new one also enters `experiment.summary.METRICS` and `runtime.protocol.answer_schema.CLASS_SCORES`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float, Shaped

from atlas_fl.data.task import Labels, Task

Array = np.ndarray[Any, np.dtype[Any]]

FurtherMetric: TypeAlias = Callable[[Task, Labels, Array], float | None]
"""(task, labels (n,), logits (n, labels)) -> a further score of one client's examples; None where a task has none."""
FURTHER_METRICS: dict[str, FurtherMetric] = {}
"""Metrics of plug-ins by name; they stand beside the scores of a task and decide nothing."""

CHANCE = {"auroc": 0.5}
"""The primary score where the metric is undefined, and that is not 0."""
CONFIDENCE_BINS = 15
"""As many as Guo et al. take for their tables."""


def scores(task: Task, labels: Shaped[Array, "n ..."], logits: Float[Array, "n labels"]) -> dict[str, float]:
    """Every score of the task by name, with the task's own metric once more as `primary`; undefined ones are absent.

    Classes: loss (mean cross-entropy, nats), ece (`calibration_error`), accuracy, mcc, and f1, precision and recall of
    the task's positive class or of class 1 if there are two classes, else the mean over the classes that occur (macro),
    which is macro_f1; balanced_accuracy is the mean recall over the classes that the labels have, and auroc is that of
    `auroc`, undefined where the labels have one class; `primary` then is .5, that of chance. Regression: loss (mean
    squared error), pearson, spearman. A constant correlates with nothing: its correlation is undefined and `primary`
    then is 0.

    Several labels (n, labels), each taken where its logit is above 0: loss (mean binary cross-entropy, nats), accuracy
    (rows without a wrong label), micro_f1 of all labels of all rows, macro_f1, the mean over the labels, and auroc.

    Outputs that are no numbers have no loss and are never right: such an example counts as wrong (`predicted_classes`),
    and correlations with such predictions are the worst that there are, -1.
    """
    assert len(labels) == len(logits) > 0, "scores need one row of logits per label, and at least one"
    if task.multilabel:
        wide = logits.astype(np.float64)
        with np.errstate(invalid="ignore"):
            loss = float(np.mean(np.logaddexp(0, wide) - labels * wide))
        counts = {name: np.asarray(count) for name, count in by_class(labels, logits).items()}
        hits, answers = counts["hits"].sum(), counts["examples"].sum() + counts["predicted"].sum()
        area = auroc(labels, wide)
        metrics = {
            "loss": loss,
            "accuracy": float((predicted_labels(labels, logits) == labels).all(axis=1).mean()),
            "micro_f1": float(2 * hits / answers) if answers else 0.0,
            "macro_f1": float(np.mean(class_table(**counts)["f1"])),
            **({} if area is None else {"auroc": area}),
        }
    else:
        metrics = _regression(labels, logits[:, 0]) if task.is_regression else _classification(task, labels, logits)
    further = {name: metric(task, labels, logits) for name, metric in FURTHER_METRICS.items()}
    metrics |= {name: float(value) for name, value in further.items() if value is not None and math.isfinite(value)}
    return {**metrics, "primary": metrics.get(task.metric, CHANCE.get(task.metric, 0.0))}


def writing_scores(judged: Float[Array, "tokens 2"]) -> dict[str, float]:
    """Scores of written text from each token's loss (nats) and whether it was the likeliest: all tokens count once.

    Loss is the mean over tokens, perplexity its exponential (that of a guess among V equally likely tokens is V), and
    accuracy the share of tokens that the model would have written itself; it decides (`data.task.Metric`).
    """
    assert len(judged) > 0, "scores need at least one token"
    loss, accuracy = (float(mean) for mean in judged.astype(np.float64).mean(axis=0))
    with np.errstate(over="ignore"):  # beyond e^709 it is infinite, and rows leave that out
        perplexity = float(np.exp(loss))
    return {"loss": loss, "perplexity": perplexity, "accuracy": accuracy, "primary": accuracy}


def rouge(references: Sequence[str], written: Sequence[str]) -> dict[str, float]:
    """Mean ROUGE-1, ROUGE-2 and ROUGE-L F1 of what was written, by the package `rouge-score`, without stemming.

    Beside them the share of texts that are the reference but for case and spacing (`exact_match`). ROUGE's words are
    runs of a-z and 0-9 in lower case; texts in other scripts have none and score 0.
    C.-Y. Lin, ROUGE: a package for automatic evaluation of summaries, 2004.
    """
    from rouge_score.rouge_scorer import RougeScorer  # two seconds that other runs need not pay

    names = ("rouge1", "rouge2", "rougeL")
    scorer = RougeScorer(names)
    scored = [scorer.score(reference, text) for reference, text in zip(references, written, strict=True)]
    exact = [one.casefold().split() == other.casefold().split() for one, other in zip(references, written)]
    means = {name: float(np.mean([one[name].fmeasure for one in scored])) for name in names}
    return {**means, "exact_match": float(np.mean(exact))}


def _classification(task: Task, labels: Labels, logits: Array) -> dict[str, float]:
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):  # a row of infinities has no loss
        shifted = wide - wide.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis=1))
    loss = float(np.mean(log_sum - shifted[np.arange(len(labels)), labels]))
    predicted = predicted_classes(wide)
    ece = calibration_error(np.exp(-log_sum), predicted == labels)
    counts = of_confusion(confusion(labels, predicted, logits.shape[1]), positive=task.positive)
    area = auroc(labels, shifted - log_sum[:, None])
    return {"loss": loss, "ece": ece, **counts, **({} if area is None else {"auroc": area})}


def predicted_labels(labels: Labels, logits: Float[Array, "n labels"]) -> Labels:
    """The labels whose logits are above 0, (n, labels) bool; all wrong in a row where a logit is no finite number."""
    is_finite = np.isfinite(logits).all(axis=1, keepdims=True)
    return np.asarray(np.where(is_finite, logits > 0, labels == 0))


def auroc(labels: Shaped[Array, "n ..."], score: Float[Array, "n labels"]) -> float | None:
    """Area under the ROC curve: the share of pairs of one of a class and one of others that the class's score orders.

    Equal scores count half. Of two classes it is that of class 1, of more, and of several labels (n, labels), the mean
    over those (one versus rest) for which there are such pairs, and None without any. Scores that are no numbers order
    nothing right: 0.
    """
    values = []
    for label in [1] if labels.ndim == 1 and score.shape[1] == 2 else range(score.shape[1]):
        is_class = labels == label if labels.ndim == 1 else labels[:, label] == 1
        positives = int(is_class.sum())
        if 0 < positives < len(labels):
            _, place, counts = np.unique(score[:, label], return_inverse=True, return_counts=True)
            ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
            above = float(ranks[is_class].sum()) - positives * (positives + 1) / 2
            values.append(above / (positives * (len(labels) - positives)))
    if not values:
        return None
    return float(np.mean(values)) if not np.isnan(score).any() else 0.0


def calibration_error(confidence: Float[Array, " n"], is_hit: Shaped[Array, " n"]) -> float:
    """Expected calibration error: how far confidence is from accuracy, the mean over examples of bins of confidence.

    Bins of equal width hold (lower, upper]. Guo et al. 2017, "On calibration of modern neural networks",
    arXiv:1706.04599, eq. 3. Of a logit that is no number it is none.

    Args:
        confidence: the probability of the class that is predicted.
        is_hit: whether that class is the right one.
    """
    if not np.isfinite(confidence).all():
        return float("nan")
    bins = np.ceil(confidence * CONFIDENCE_BINS).astype(np.int64)
    gaps = np.bincount(bins, weights=is_hit - confidence, minlength=CONFIDENCE_BINS + 1)
    return float(np.abs(gaps).sum() / len(confidence))


def predicted_classes(logits: Float[Array, "n labels"]) -> Labels:
    """The class of the largest logit of every row, (n,) int64; `labels`, which is no class, where that is no number.

    To `argmax` a NaN is the largest, so that a row of NaN would be class 0.
    """
    return np.asarray(np.where(np.isfinite(logits.max(axis=1)), logits.argmax(axis=1), logits.shape[1]))


def confusion(labels: Labels, predicted: Labels, num_labels: int) -> Array:
    """Counts of class i (row) predicted as class j (column), (num_labels, num_labels + 1) int64.

    The last column is of examples without a prediction.
    """
    columns = num_labels + 1
    return np.bincount(labels * columns + predicted, minlength=num_labels * columns).reshape(num_labels, columns)


def by_class(labels: Labels, logits: Float[Array, "n labels"]) -> dict[str, list[int]]:
    """Examples of every class in order, those that were recognised (`hits`), and those that were taken for it."""
    if labels.ndim == 2:
        predicted = predicted_labels(labels, logits)
        sums = {"hits": predicted & (labels == 1), "examples": labels, "predicted": predicted}
        return {name: each.sum(axis=0).astype(np.int64).tolist() for name, each in sums.items()}
    counts = confusion(labels, predicted_classes(logits), logits.shape[1])
    taken = counts.sum(axis=0)[:-1]
    return {"hits": np.diag(counts).tolist(), "examples": counts.sum(axis=1).tolist(), "predicted": taken.tolist()}


def class_table(*, hits: Array, examples: Array, predicted: Array) -> dict[str, list[float]]:
    """Recall, precision and F1 of every class from `by_class`; a ratio of nothing is 0, as in scikit-learn."""
    right, actual = hits.astype(np.float64), examples.astype(np.float64)
    precision, f1 = _ratio(right, predicted), _ratio(2 * right, actual + predicted)
    return {"recall": _ratio(right, actual).tolist(), "precision": precision.tolist(), "f1": f1.tolist()}


def of_confusion(counts: Array, *, positive: int | None = None) -> dict[str, float]:
    """The scores of a confusion matrix, of which f1, precision and recall are those of a `positive` class if one is.

    A ratio of nothing is 0, as in scikit-learn.
    """
    hits = np.diag(counts).astype(np.float64)
    actual = counts.sum(axis=1).astype(np.float64)
    # of the classes, and at the end of none
    answers = counts.sum(axis=0).astype(np.float64)
    predicted = answers[: len(actual)]
    precision, recall = _ratio(hits, predicted), _ratio(hits, actual)
    f1 = _ratio(2 * hits, actual + predicted)
    occurring = np.flatnonzero(actual + predicted)
    one = 1 if positive is None and len(counts) == 2 else positive
    chosen = occurring if one is None else np.asarray([one])
    return {
        "accuracy": float(hits.sum() / counts.sum()),
        "f1": float(f1[chosen].mean()),
        "precision": float(precision[chosen].mean()),
        "recall": float(recall[chosen].mean()),
        "macro_f1": float(f1[occurring].mean()) if len(occurring) else 0.0,
        "balanced_accuracy": float(recall[actual > 0].mean()),
        "mcc": _mcc(hits.sum(), actual, answers),
    }


def _mcc(hits: float, actual: Array, answers: Array) -> float:
    # J. Gorodkin, Comparing two K-category assignments by a K-category correlation coefficient, 2004.
    total = actual.sum()
    covariance = hits * total - actual @ answers[: len(actual)]
    spread = (total**2 - answers @ answers) * (total**2 - actual @ actual)
    return float(covariance / np.sqrt(spread)) if spread > 0 else 0.0


def _ratio(above: Array, below: Array) -> Array:
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _regression(labels: Labels, predicted: Array) -> dict[str, float]:
    x, y = labels.astype(np.float64), predicted.astype(np.float64)
    with np.errstate(invalid="ignore"):
        metrics = {"loss": float(np.mean((x - y) ** 2))}
    if not np.isfinite(y).all():
        return {**metrics, "pearson": -1.0, "spearman": -1.0}
    if np.ptp(x) > 0 and np.ptp(y) > 0:
        from scipy.stats import rankdata  # a second that other tasks need not pay

        metrics["pearson"] = _correlation(x, y)
        metrics["spearman"] = _correlation(rankdata(x), rankdata(y))
    return metrics


def _correlation(x: Array, y: Array) -> float:
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip(x @ y / np.sqrt((x @ x) * (y @ y)), -1.0, 1.0))
