"""FedEx-LoRA: averaged factors, and a frozen rest that makes the average of the products exact.

    W <- W + sum_k w_k s B_k A_k - s Bbar Abar          Abar and Bbar for everyone's next round

with Bbar = sum_k w_k B_k and Abar = sum_k w_k A_k over those who took part. Singhal, Ponkshe and Vepakomma 2024,
arXiv:2410.09432.
"""

from torch import Tensor

from atlas_fl.aggregation.lora_product import Factors, residual
from atlas_fl.methods.frozen_part import WithFrozenPart


class FedAvgWithResidual(WithFrozenPart):
    """FedEx-LoRA: averaged factors, and what they lack of the average of the products joins the frozen part."""

    name = "fedavg_with_residual"
    equal_ranks = True

    def new_factors(self, a: list[Tensor], b: list[Tensor], weights: list[float]) -> Factors:
        """sum_k w_k s B_k A_k - s Bbar Abar."""
        return residual(a, b, self.options.scale(len(a[0])), weights)
