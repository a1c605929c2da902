"""Temperature scaling: the logits of a task's clients divided by a number that fits their validation examples.

    T = argmin_T  mean_i -log softmax(z_i / T)[y_i],    1/2 <= T <= 16

z_i are logits of each client's own model, of all clients of the task: of sixty examples of one client whose validation
happens to be all right T would be far too small. The largest logit stays the largest, so that no prediction changes; a
model that fits its training examples too well gives T > 1 (Guo et al., "On calibration of modern neural networks",
2017, arXiv:1706.04599). T is fitted at the end of a run and is in the weights and the bias of the head's last layer:
what is exported is what was scored, and clients that share a model still do.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch.nn.functional import cross_entropy

from atlas_fl.params import ByClient, Params, is_last_layer

TEMPERATURE = "temperature"
"""The kind of what is known of a client after the last round, and the name of its only tensor."""
LEAST, MOST = 0.5, 16.0


def fit_temperatures(outcomes: Mapping[str, Params], tasks: Mapping[str, str]) -> dict[str, Params]:
    """T of each client's task from `outputs` (examples, classes) and `labels` (examples,), those that are numbers."""
    fitted: dict[str, Params] = {}
    for task in sorted({tasks[name] for name in outcomes}):
        members = [name for name in outcomes if tasks[name] == task]
        z = torch.cat([outcomes[name]["outputs"] for name in members]).double()
        is_sound = z.isfinite().all(dim=1)
        found = _best(z[is_sound], torch.cat([outcomes[name]["labels"] for name in members]).long()[is_sound])
        fitted |= {name: {TEMPERATURE: torch.tensor(found, dtype=torch.float64)} for name in members}
    return fitted


def _best(z: torch.Tensor, y: torch.Tensor) -> float:
    if not len(z):
        return 1.0
    found = minimize_scalar(
        lambda log_t: float(cross_entropy(z * math.exp(-log_t), y)), bounds=np.log([LEAST, MOST]), method="bounded"
    )
    return math.exp(found.x)


def with_temperatures(models: ByClient, temperatures: Mapping[str, Params]) -> ByClient:
    """The models with the temperatures of their clients in their heads; one without a temperature is the very same."""
    return {
        name: {
            key: tensor / temperatures[name][TEMPERATURE].to(tensor) if is_last_layer(key) else tensor
            for key, tensor in params.items()
        }
        if name in temperatures
        else params
        for name, params in models.items()
    }
