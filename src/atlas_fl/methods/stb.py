"""Similarity tests: every model shrunk to the average of those that a test takes for its neighbours.

    D_kl = max(0, K_kk + K_ll - 2 K_kl)                       squared distance of theta_k and theta_l, without noise
    V_k  = {l: D_kl <= zeta N_k}, with k itself
    g_k  = c zeta (|V_k| - 1) / ((1 + c zeta) (|V_k| - 1) + 1)
    m_kl = (k = l) g_k + (1 - g_k) (l in V_k) / |V_k|

Marienwald, Fermanian and Blanchard, "High-Dimensional Multi-Task Averaging and Application to Kernel Mean Embedding",
AISTATS 2021, as STB-theory in the authors' code (github.com/Han1Mar/stb_kme, `compute_STB_neighbors` and
`compute_STB_weight`); with c = 0 it is their STB-0. With c = 1 and equal noise it minimises the bound
(1 - m_kk)^2 zeta N + N sum_l m_kl^2 of the risk over weights on V_k. They choose zeta (up to 3) and c (up to .5) by
validation.

K and N are those of `methods.kriging`, from split halves, where the paper has unbiased distances of kernel means from
samples. The tests are not symmetric: each client's own noise is its measure. Neighbours are found once, and hold for
models of later rounds. Blanchard, Fermanian and Marienwald, "Estimation of multiple mean vectors in high dimension",
arXiv:2403.15038, have weights for neighbours of unequal noise, and a second rule (Q-aggregation, an upper bound of
the risk minimised over all convex weights); both are left out.
"""

from typing import Annotated

import numpy as np

from atlas_fl.aggregation.matrices import HalfGram, Square, Vector
from atlas_fl.methods.knobs import Tried
from atlas_fl.methods.kriging import FromHalves, measure
from atlas_fl.ranges import Range


def neighbour_rows(covariance: Square, noise: Vector, *, zeta: float, c: float) -> Square:
    """The rows m_k."""
    own = np.diag(covariance)
    near = np.maximum(own[:, None] + own[None, :] - 2 * covariance, 0.0) <= zeta * noise[:, None]
    near |= np.eye(len(near), dtype=bool)
    sizes = near.sum(axis=1)
    kept = c * zeta * (sizes - 1) / ((1 + c * zeta) * (sizes - 1) + 1)
    return np.asarray(np.diag(kept) + ((1 - kept) / sizes)[:, None] * near)


class SimilarityTests(FromHalves):
    """Models shrunk to the average of neighbours that a test finds (AISTATS 2021; `--stb-zeta`, `--stb-c`)."""

    stb_zeta: Annotated[float, Range(least=0), Tried("stb", values=(1.0, 0.5, 2.0, 3.0))] = 1.0
    """Largest squared distance of a neighbour under `stb`, as a multiple of the client's own noise."""
    stb_c: Annotated[float, Range(least=0), Tried("stb", values=(0.5, 0.2, 1.0, 0.0))] = 0.5
    """Weight of a neighbour's distance under `stb`: the larger, the more a client keeps of its own."""

    name = "stb"
    differs = "models for means of samples, noise from halves; zeta and c are settings, there chosen on validation"

    def predict_rows(self, gram: HalfGram, _examples: Vector) -> Square:
        """The rows m_k; numbers of examples count by the noise alone."""
        return neighbour_rows(*measure(gram), zeta=self.stb_zeta, c=self.stb_c)
