"""FedALT's rest of the world: for each client the weighted mean of all others, without itself.

    m_kl = p_l / sum_{j != k} p_j    l != k          m_kk = 0

over those who took part; who is alone keeps its model. Bian, Wang, Zhang and Xu, "FedALT: Federated Fine-Tuning through
Adaptive Local Training with Rest-of-World LoRA", AAAI 2026, arXiv:2503.11880, where the p are equal. A client never
goes on with this mean: it stands, frozen, beside the client's own adapter, and a gate weighs the two
(`methods.feddpa`; where the adapter of its own is kept: `methods.mr_mtl`). As in the authors' program
(jmbian/FedALT), whose models have no head of a task, adapters alone are sent: head and gate stay at the client.
"""

import numpy as np

from atlas_fl.aggregation.matrices import rows_over_sums
from atlas_fl.aggregation.rules import MixingContext, weighted_average
from atlas_fl.methods.averages import Averaging


class FedAvgOfOthers(Averaging):
    """Everyone gets the weighted mean of all others, without its own model; heads only inside their task."""

    name = "fedavg_of_others"

    def rule(self, step: MixingContext) -> np.ndarray:
        """The rows m_k."""
        rows = np.array(weighted_average(self.options, step))
        np.fill_diagonal(rows, np.where(step.present, 0.0, np.diag(rows)))
        return rows_over_sums(rows)
