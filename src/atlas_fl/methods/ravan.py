"""RAVAN: several heads of square blocks between frozen orthonormal factors, each with a factor of its own.

    W = W0 + s sum_i s_i B_i H_i A_i      i = 1 ... h, rows of A and columns of B orthonormal, H_i = 0, s_i = 1 at first
    H_i <- sum_k p_k s_ki H_ki,   s_i <- 1

Raje, Askin, Jhunjhunwala and Joshi, "Ravan: Multi-Head Low-Rank Adaptation for Federated Fine-Tuning", NeurIPS 2025,
arXiv:2506.05568, with its Gram-Schmidt initialisation. Differences: s is LoRA's scale, 1 in the paper; s_i and H_i go
up apart, h values more; clients that train some of the heads alone, by their means, are left out. Where the rank is
beyond a side of a layer, its factors are orthonormal the other way. Heads of tasks are averaged inside their task.
"""

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from atlas_fl.aggregation.matrices import Federation
from atlas_fl.errors import ConfigError
from atlas_fl.methods.core import FedAvgBetweenFactors
from atlas_fl.methods.knobs import Tried
from atlas_fl.methods.method import Aggregated, StepInputs
from atlas_fl.params import LORA_A, LORA_B, LORA_CORE, LORA_SCALE, ByClient, Params, ServerState, lora_modules
from atlas_fl.ranges import Range
from atlas_fl.rng import torch_generator


class FedAvgOfHeads(FedAvgBetweenFactors):
    """RAVAN: the average of all s_i H_i between orthonormal factors that the seed draws."""

    ravan_heads: Annotated[int, Range(least=1), Tried("ravan", values=(4, 2, 8, 1))] = 4
    """Heads of `ravan`, between which the rank is divided; a divisor of it."""

    name = "fedavg_of_heads"

    def begin(self, client_models: ByClient, _federation: Federation) -> tuple[ByClient, ServerState]:
        """Orthonormal factors, the same for everyone, with H_i = 0 and s_i = 1."""
        return {name: {**params, **self._first(params)} for name, params in client_models.items()}, {}

    def _first(self, params: Params) -> dict[str, Tensor]:
        heads, first = self.ravan_heads, dict[str, Tensor]()
        for module in lora_modules(params):
            a, b = params[module + LORA_A], params[module + LORA_B]
            if len(a) % heads:
                raise ConfigError(
                    f"--ravan-heads is {heads}, and {module} has rank {len(a)}; allowed: a divisor of it, such as 1"
                )
            draw = torch_generator(self.options.seed, "ravan", module)
            for end, like in ((LORA_A, a.T), (LORA_B, b)):
                basis = torch.nn.init.orthogonal_(torch.empty(like.shape), generator=draw)
                first[module + end] = (basis.T if end == LORA_A else basis).contiguous()
            first[module + LORA_CORE] = torch.zeros(heads, len(a) // heads, len(a) // heads)
            first[module + LORA_SCALE] = torch.ones(heads)
        return first

    def aggregate(self, inputs: StepInputs) -> Aggregated:
        """Average the products s_i H_i; all s_i are 1 then."""
        scaled = {name: dict(params) for name, params in inputs.updates.items()}
        for params in scaled.values():
            for key in [key for key in params if key.endswith(LORA_SCALE)]:
                core = key.removesuffix(LORA_SCALE) + LORA_CORE
                params |= {core: params[key][:, None, None] * params[core], key: torch.ones_like(params[key])}
        return super().aggregate(replace(inputs, updates=scaled))
