"""Corrections that clients add to their gradients: SCAFFOLD's control variates; FedDyn's from the server state.

SCAFFOLD's is what a client's gradient lacks of the mean gradient of all:

    c_k = mean over the steps of client k's last round of its gradients, clipped and not corrected
    c   = (1 / N) sum over all N clients of c_k
    g  <- g + c - c_k                          in every step of the next round

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020, arXiv:1910.06378. Under SGD c_k is their option II, `c_k - c + (x - y_k) / (K lr)`, and it means something
under any optimizer and schedule. Who has not trained yet has c_k = 0, so round one is FedAvg. A head's c is over the
clients of its task, the only ones that it is averaged with. In personal rounds nobody is corrected.

A client measures c_k while it trains (`client.optimizer.GradientMean`) and adds c - c_k behind clipping
(`client.optimizer.gradient_chain`). FedDyn's corrections are computed in `aggregation.feddyn`, and added there too.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from atlas_fl.aggregation.feddyn import dynamic_corrections
from atlas_fl.config import Config
from atlas_fl.config.methods import rule_of
from atlas_fl.experiment.state import FederationState
from atlas_fl.params import HEAD, ByClient, Params


def round_corrections(
    config: Config, state: FederationState, tasks: Mapping[str, str], clients: Collection[str]
) -> dict[str, Params]:
    """What is added to the gradients of these clients in the round after this state; empty where nothing is."""
    if state.round >= config.training.rounds - config.mixing.personal_rounds:
        return {}
    if rule_of(config) == "fedavg_dynamic":
        return dynamic_corrections(state.server_state, clients, alpha=config.training.proximal_mu)
    return corrections(state.of("control"), tasks, clients)


def corrections(controls: ByClient, tasks: Mapping[str, str], clients: Collection[str]) -> dict[str, Params]:
    """c - c_k of these clients, float32 by parameter; empty before anybody has a control.

    `tasks` are those of all clients of the run, by name.
    """
    means = _means(controls, tasks)
    return {
        name: {
            key: (mean - controls.get(name, {}).get(key, torch.zeros(()))).float()
            for (key, group), mean in means.items()
            if group in ("", tasks[name])
        }
        for name in clients
        if means
    }


def _means(controls: ByClient, tasks: Mapping[str, str]) -> dict[tuple[str, str], Tensor]:
    """By parameter, and for heads by task: the mean over all its clients, float64."""
    sums: dict[tuple[str, str], Tensor] = {}
    for name in sorted(controls):
        for key, value in controls[name].items():
            group = key, tasks[name] if key.startswith(HEAD) else ""
            sums[group] = sums[group] + value.double() if group in sums else value.double()
    sizes = {task: sum(other == task for other in tasks.values()) for task in tasks.values()} | {"": len(tasks)}
    return {(key, task): total / sizes[task] for (key, task), total in sums.items()}
