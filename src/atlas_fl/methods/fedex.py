"""FedEx-LoRA: averaged factors, and a frozen rest that makes the average of the products exact.

    W <- W + sum_k w_k s B_k A_k - s Bbar Abar          Abar and Bbar for everyone's next round

with Bbar = sum_k w_k B_k and Abar = sum_k w_k A_k over those who took part. Singhal, Ponkshe and Vepakomma 2024,
arXiv:2410.09432.
"""

from torch import Tensor

from atlas_fl.aggregation.exact_average import Factors, check_one_rank, residual
from atlas_fl.aggregation.matrices import Federation
from atlas_fl.methods.frozen_part import WithFrozenPart
from atlas_fl.methods.method import FACTORS, PublishedMethod
from atlas_fl.params import LORA_A, ByClient, lora_modules


class FedAvgWithResidual(WithFrozenPart):
    """FedEx-LoRA: averaged factors, and what they lack of the average of the products joins the frozen part."""

    name = "fedavg_with_residual"
    needs = "equal ranks"

    def new_factors(self, a: list[Tensor], b: list[Tensor], weights: list[float]) -> Factors:
        """sum_k w_k s B_k A_k - s Bbar Abar."""
        return residual(a, b, self.options.scale(len(a[0])), weights)

    def check(self, models: ByClient, federation: Federation) -> None:
        """Raise ConfigError where the ranks of clients differ."""
        for module in lora_modules(models[federation.clients[0]]):
            check_one_rank([len(models[client][module + LORA_A]) for client in federation.clients])


FEDEX = PublishedMethod(
    summary="FedEx-LoRA: averaged factors, and a frozen rest that makes it exact (arXiv:2410.09432).",
    rule="fedavg_with_residual",
    settings=FACTORS,
    equal_ranks=True,
)
