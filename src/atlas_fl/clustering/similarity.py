"""How alike two clients are, with the noise of their own fingerprints taken out.

Every client sends two sketches from disjoint halves of its examples. The cosine across halves, c_kl, is free of the
noise that the halves do not share; c_kk tells how much of a sketch is signal, and Spearman's correction for
attenuation (1904) divides it out: `rho_kl = c_kl / sqrt(c_kk c_ll)` is 1 where two clients differ no more than
each differs from itself.
"""

import numpy as np

NOTHING = 1e-6
"""A row shorter than this beside unit sketches is rounding error of float32 and has no direction."""


def unit_rows(rows: np.ndarray) -> np.ndarray:
    """Rows of unit norm, float64 (n, d); a row of (nearly) nothing becomes zero."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.where(norms > NOTHING, rows / np.maximum(norms, NOTHING), 0.0)


def prepare(sketches: np.ndarray, *, offset: np.ndarray | float = 0.0) -> np.ndarray:
    """Unit rows, float64 (n, d), of unit sketches less an offset (d,).

    The offset is the mean over clients where the fingerprint is centred. Each half is centred by its own mean:
    a common mean would carry noise from one half into the other and spoil c_kk.
    """
    return unit_rows(unit_rows(np.asarray(sketches, dtype=np.float64)) - offset)


def cross_similarity(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Cosines across halves, (n, n) symmetrised: `c_kl = (cos(first_k, second_l) + cos(first_l, second_k)) / 2`.

    The diagonal is the reliability of each client, not 1.
    """
    cosines = unit_rows(first) @ unit_rows(second).T
    return np.asarray((cosines + cosines.T) / 2)


def reliability(cross: np.ndarray) -> np.ndarray:
    """c_kk, (n,): the agreement of each client's own halves."""
    return np.diag(cross).copy()


def corrected_similarity(cross: np.ndarray, *, floor: float = 0.0) -> np.ndarray:
    """Noise-corrected similarity rho (n, n) in [-1, 1] with ones on the diagonal.

    Reliabilities below `floor` are raised to it. Where one is not positive rho is undefined, and 0 stands for it:
    no evidence that the two are alike. Noise can push rho past 1, hence the clipping.
    """
    own = np.maximum(reliability(cross), floor)
    scale = np.sqrt(np.outer(np.maximum(own, 0.0), np.maximum(own, 0.0)))
    rho = np.divide(cross, scale, out=np.zeros_like(cross), where=scale > 0)
    np.fill_diagonal(rho, 1.0)
    return np.asarray(np.clip(rho, -1.0, 1.0))
