"""James-Stein: all models shrunk to their common mean by one factor, which the noise of split halves says.

    w_k <- xi + s (w_k - xi),    xi = mean_l w_l
    s = max(0, 1 - (n - 1 - 2 / d) / sum_k || y_k - mean_l y_l ||^2 / N_k)

James and Stein, "Estimation with quadratic loss", Berkeley Symposium 1961; to a common mean and in its positive part
Efron and Morris, "Data analysis using Stein's estimator and its generalizations", JASA 70, 1975, with
s = 1 - (n - 3) / (sum_k (y_k - mean y)^2 / N_k) for n numbers. It is what Multi-Task Averaging is compared with by its
authors (JMLR 15, 2014).

Different: models are vectors, with n d values of which d are the mean's, so that (n - 1) d - 2 stands in the place of
n - 3, and N_k / d is the noise of one value. d is the number of values over which the noise spreads,
tr(S)^2 / tr(S^2) with S its covariance, from products of the clients' half differences e_k:

    d = mean_{k != l} N_k N_l / mean_{k != l} < e_k, e_l >^2

y_k and N_k are those of `methods.mta`. With d = 1 it is the formula for numbers.
"""

import numpy as np

from atlas_fl.aggregation.matrices import HalfGram, Square, Vector
from atlas_fl.methods.kriging import FromHalves
from atlas_fl.methods.mta import means_and_errors


def shrinkage(gram: HalfGram) -> float:
    """The factor s from the inner products of halves; 1 of a client without noise or without others."""
    means, errors = means_and_errors(gram)
    n, noise = len(means), np.diag(errors)
    if n < 2 or noise.min() <= 0:
        return 1.0
    centre = np.eye(n) - 1 / n
    spread = float((np.diag(centre @ means @ centre) / noise).sum())
    pairs = ~np.eye(n, dtype=bool)
    inverse_dimension = float(np.square(errors)[pairs].mean() / np.outer(noise, noise)[pairs].mean())
    strength = max(0.0, n - 1 - 2 * inverse_dimension)
    return max(0.0, 1 - strength / spread) if spread > 0 else 0.0


class JamesStein(FromHalves):
    """Models shrunk to their common mean by the positive-part James-Stein factor, by the noise of split halves."""

    name = "james_stein"
    differs = "models for means of samples, noise from halves; the dimension of the noise is measured"

    def predict_rows(self, gram: HalfGram, examples: Vector) -> Square:
        """s I + (1 - s) / n."""
        n, kept = len(examples), shrinkage(gram)
        return np.asarray(kept * np.eye(n) + (1 - kept) / n)
