"""SCAFFOLD: gradients corrected by what a client's own lacks of the mean gradient of all.

    c_k = mean over the steps of client k's last round of its gradients, clipped and not corrected
    c   = sum over all clients of p_k c_k      p_k shares of the examples
    g  <- g + c - c_k                          in every step of the next round

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020, arXiv:1910.06378. Theirs is the mean of clients, with p_k = 1 / N in models and gradients; here both are by
examples, so that rounds end where the objective of FedAvg has its least value. Under SGD c_k is their option II,
`c_k - c + (x - y_k) / (K lr)`. Their theorems are about SGD; c_k means something under any optimizer and schedule. Who
has not trained yet has c_k = 0, so round one is FedAvg. A head's c is over the clients of its task, the only ones that
it is averaged with. In personal rounds nobody is corrected.

A client measures c_k while it trains (`client.optimizer.GradientMean`) and adds c - c_k behind clipping
(`client.optimizer.gradient_chain`).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from atlas_fl.aggregation.matrices import bounded_weights
from atlas_fl.methods.method import Part, RoundStart
from atlas_fl.params import HEAD, ByClient, Params, TreesByClient


class ControlVariates(Part):
    """`--control-variates`: c - c_k beside every model; c_k comes back with the update as its `control`."""

    def send(self, round: RoundStart) -> TreesByClient:
        """c - c_k of the clients of the round; nothing in personal rounds."""
        if round.is_personal:
            return {}
        shares = shares_by_group(round.tasks, round.examples, max_share=self.options.max_share)
        models = {name: round.client_models[name] for name in round.clients}
        return {"correction": corrections(round.of("control"), round.tasks, models, shares)}


def shares_by_group(
    tasks: Mapping[str, str], examples: Mapping[str, int], *, max_share: float = 1.0
) -> dict[str, dict[str, float]]:
    """Shares of the examples by client, of all clients under the empty name and of those of each task."""
    shares = {}
    for group in ("", *dict.fromkeys(tasks.values())):
        names = [name for name, task in tasks.items() if group in ("", task)]
        weights = bounded_weights(np.array([examples[name] for name in names], np.float64), max_share)
        shares[group] = dict(zip(names, (weights / weights.sum()).tolist(), strict=True))
    return shares


def corrections(
    controls: ByClient, tasks: Mapping[str, str], models: ByClient, shares: Mapping[str, Mapping[str, float]]
) -> dict[str, Params]:
    """c - c_k of the clients with these models, float32 by parameter; empty before anybody has a control.

    `tasks` are those of all clients of the run, by name. Of a client of lower rank it has the rows that this one has.
    """
    means = _means(controls, tasks, shares)
    return {
        name: {
            key: (_resized(mean, params[key].shape) - controls.get(name, {}).get(key, torch.zeros(()))).float()
            for (key, group), mean in means.items()
            if group in ("", tasks[name])
        }
        for name, params in models.items()
        if means
    }


def _resized(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor cut to this shape, and zero where it is smaller."""
    more = [(0, wanted - size) for size, wanted in zip(tensor.shape, shape, strict=True)]
    return torch.nn.functional.pad(tensor, [amount for sides in reversed(more) for amount in sides])


def _means(
    controls: ByClient, tasks: Mapping[str, str], shares: Mapping[str, Mapping[str, float]]
) -> dict[tuple[str, str], Tensor]:
    """By parameter, and for heads by task: the weighted mean over all its clients, float64."""
    means: dict[tuple[str, str], Tensor] = {}
    for name in sorted(controls):
        for key, value in controls[name].items():
            task = tasks[name] if key.startswith(HEAD) else ""
            mean = means.get((key, task), torch.zeros_like(value, dtype=torch.float64))
            largest = torch.Size(map(max, zip(mean.shape, value.shape)))
            means[key, task] = _resized(mean, largest) + shares[task][name] * _resized(value.double(), largest)
    return means
