"""Multi-Task Averaging: every model pulled to all others by one strength, in proportion to its own noise.

    W = (I + gamma / n diag(N) L)^-1,    L = a (n I - 1 1^T)              W y are the estimates
    constant   a = 2 / mean_{k != l} || y_k - y_l ||^2
    minimax    a = 2 / max_{k, l} || y_k - y_l ||^2
    measured   a = 1 / tau^2,  tau^2 = mean_k K_kk - mean_{k != l} K_kl    (`methods.kriging`)

Feldman, Gupta and Frigyik, "Multi-Task Averaging", NIPS 2012, and "Revisiting Stein's Paradox: Multi-Task Averaging",
JMLR 15, 2014: the first two, with gamma = 1. The inverse is, with the variance between clients v = 1 / (gamma a),

    W_kl = (k = l) v / (v + N_k) + N_k / (v + N_k) m_l,    m_l proportional to 1 / (v + N_l)

so it is also the empirical best linear predictor of the model with one common mean: Fay and Herriot, "Estimates of
income for small places: an application of James-Stein procedures to census data", JASA 74, 1979. They find v by
moments; halves measure it without the noise that the distances of `constant` and `minimax` hold.

Different from the papers: their y_k are numbers, means of samples, and N_k a sample variance over its number. Here y_k
is the mean of what both halves have changed in the adapters (product space) or the head, all values together: squared
distances and noise are summed over values, as Marienwald, Fermanian and Blanchard do with this rule (AISTATS 2021). The
largest distance stands for their interval of means. W is found once, and holds for models of later rounds. Where no
model differs from another it is the average by examples.
"""

from typing import Annotated, Literal

import numpy as np

from atlas_fl.aggregation.distances import gram_distances
from atlas_fl.aggregation.matrices import HalfGram, Square, Vector
from atlas_fl.methods.knobs import KNOB, Tried
from atlas_fl.methods.kriging import FromHalves, variance_between
from atlas_fl.ranges import Range

TINY = 1e-12
"""Share of the largest total variance below which one is rounding."""


def means_and_errors(gram: HalfGram) -> tuple[Square, Square]:
    """Inner products of the means of both halves, and of half their differences, from those of the halves."""
    n = len(gram) // 2
    same, other = gram[:n, :n] + gram[n:, n:], gram[:n, n:] + gram[n:, :n]
    return (same + other) / 4, (same - other) / 4


def shrinkage_rows(variance: float, noise: Vector, shares: Vector) -> Square:
    """W for this variance between clients; the shares of the examples where there is neither variance nor noise."""
    total = variance + noise
    if total.max() <= 0:
        return np.tile(shares, (len(shares), 1))
    total = np.maximum(total, TINY * total.max())
    mean = 1 / total / (1 / total).sum()
    kept = variance / total
    return np.asarray(np.diag(kept) + np.outer(1 - kept, mean))


class MultiTaskAveraging(FromHalves):
    """Multi-Task Averaging of models, by the noise of split halves (Feldman et al. 2012, 2014; `--mta-similarity`)."""

    mta_similarity: Annotated[Literal["constant", "minimax", "measured"], KNOB] = "constant"
    """Similarity of clients under `mta`: from the mean distance of two, from the largest one, or from halves."""
    mta_gamma: Annotated[float, Range(above=0), Tried("mta", "mta_minimax", values=(1.0, 0.5, 2.0, 0.25))] = 1.0
    """Strength of the pull under `mta`; 1 in its papers."""

    name = "mta"
    differs = "models for means of samples, noise from halves"

    def predict_rows(self, gram: HalfGram, examples: Vector) -> Square:
        """W of these clients; a client alone keeps its model."""
        n = len(examples)
        if n < 2:
            return np.eye(n)
        means, errors = means_and_errors(gram)
        squares = gram_distances(means)
        variances = {
            "constant": squares.sum() / (n * (n - 1)) / 2,
            "minimax": squares.max() / 2,
            "measured": max(0.0, variance_between(gram)),
        }
        noise = np.maximum(np.diag(errors), 0.0)
        return shrinkage_rows(float(variances[self.mta_similarity]) / self.mta_gamma, noise, examples / examples.sum())
