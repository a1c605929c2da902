"""APFL: FedAvg, and every client's own model interpolated with the shared one, with a trained weight.

    a v + (1 - a) w          v and a train, a kept in [0, 1]; w the shared model as it was sent

Deng, Kamani and Mahdavi 2020, "Adaptive personalized federated learning", arXiv:2003.13461. `--second-weight` is the
first a.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from atlas_fl.methods.second_model import SecondModel
from atlas_fl.params import Params

WEIGHT = "second.weight"
"""The name under which a model holds its a, a number of float32."""


class Apfl(SecondModel):
    """An own model v and its weight a."""

    kind = "interpolated"

    def initial(self, start: Params) -> Params:
        """The model that everyone starts with, and a."""
        return {**start, WEIGHT: torch.tensor(self.second_weight)}

    def combine(self, own: Params, shared: Params, gate: Params) -> Params:
        """a v + (1 - a) w."""
        del gate
        share = own[WEIGHT]
        return {key: value + (1 - share) * (shared[key] - value) for key, value in own.items() if key != WEIGHT}

    def after_step(self, leaves: Mapping[str, Tensor]) -> None:
        """Put a back between 0 and 1."""
        if WEIGHT in leaves:
            leaves[WEIGHT].detach().clamp_(0.0, 1.0)
