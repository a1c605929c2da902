"""FedALT's rest of the world: for each client the weighted mean of all others, without itself.

    m_kl = p_l / sum_{j != k} p_j    l != k          m_kk = 0

over those who took part; who is alone keeps its model. Bian, Wang, Zhang and Xu, "FedALT: Federated Fine-Tuning through
Adaptive Local Training with Rest-of-World LoRA", AAAI 2026, arXiv:2503.11880, where the p are equal. A client never
goes on with this mean: it stands, frozen, beside the client's own adapter, and a gate weighs the two
(`client.second_model`, stacked).
"""

import numpy as np

from atlas_fl.aggregation.strategies import MixingContext, Strategy, StrategyOptions, mixing_strategy, weighted_average


def fedavg_of_others(options: StrategyOptions) -> Strategy:
    """Everyone gets the weighted mean of all others, without its own model; heads only inside their task."""
    average = weighted_average(options)

    def rule(step: MixingContext) -> np.ndarray:
        rows = np.array(average(step))
        np.fill_diagonal(rows, np.where(step.present, 0.0, np.diag(rows)))
        sums = rows.sum(axis=1, keepdims=True)
        return np.where(sums > 0, rows / np.where(sums > 0, sums, 1.0), np.eye(len(rows)))

    return mixing_strategy("fedavg_of_others", rule, options, arrival=average)
