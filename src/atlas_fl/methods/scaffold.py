"""SCAFFOLD: gradients corrected by what a client's own lacks of the mean gradient of all.

    c_k = mean over the steps of client k's last round of its gradients, clipped and not corrected
    c   = (1 / N) sum over all N clients of c_k
    g  <- g + c - c_k                          in every step of the next round

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020, arXiv:1910.06378. Under SGD c_k is their option II, `c_k - c + (x - y_k) / (K lr)`, and it means something
under any optimizer and schedule. Who has not trained yet has c_k = 0, so round one is FedAvg. A head's c is over the
clients of its task, the only ones that it is averaged with. In personal rounds nobody is corrected.

A client measures c_k while it trains (`client.optimizer.GradientMean`) and adds c - c_k behind clipping
(`client.optimizer.gradient_chain`).
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from atlas_fl.methods.method import FACTORS, Part, PublishedMethod, RoundStart
from atlas_fl.params import HEAD, ByClient, Params, TreesByClient


class ControlVariates(Part):
    """`--control-variates`: c - c_k beside every model; c_k comes back with the update as its `control`."""

    def send(self, round: RoundStart) -> TreesByClient:
        """c - c_k of the clients of the round; nothing in personal rounds."""
        if round.is_personal:
            return {}
        return {"correction": corrections(round.of("control"), round.tasks, round.clients)}


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


SCAFFOLD = PublishedMethod(
    summary="SCAFFOLD: gradients corrected by the mean of all (Karimireddy et al. 2020, arXiv:1910.06378).",
    differs="whole models; controls are mean gradients, clipped (option II under plain SGD)",
    rule="fedavg",
    settings={"control_variates": True, **FACTORS},
    equal_ranks=True,
)
