"""FedSVD: B trained and averaged, and then A the right singular vectors of B A, so that its rows are orthonormal.

    U S V^T = Bbar A,   A <- V^T[:r],   B <- U[:, :r] S[:r]                 A is not trained, Bbar = sum_k p_k B_k

B A stays what it was, since its rank is at most r. Lee, Park, Lee, Wagner, Seong, Bocklet, Lee and Hwang, "FedSVD:
Adaptive Orthogonalization for Private Federated Learning with LoRA", NeurIPS 2025, arXiv:2505.12805, after every round
as in the authors' runs. A module whose B A is of less than full rank stays as it is: they take some orthonormal rows
for the rest. B alone comes up, both go down, and B trains at FFA-LoRA's rate. The first A is as drawn; a client without
others has no server step. The private gradients (DP-SGD) that the method is made for are left out.
"""

from dataclasses import replace

import torch
from torch import Tensor

from atlas_fl.aggregation.lora_product import RELATIVE_RANK, row_signs
from atlas_fl.methods.averages import AveragingFactors
from atlas_fl.methods.method import Aggregated, StepInputs
from atlas_fl.params import LORA_A, LORA_B, lora_modules


def orthonormal_rows(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A with orthonormal rows and B of the same product, of the same dtype; the very same below full rank.

    The largest entry of every row of A is positive.
    """
    basis, upper = torch.linalg.qr(a.double().T)
    left, sizes, right = torch.linalg.svd(b.double() @ upper.T, full_matrices=False)
    if len(sizes) < len(a) or sizes[-1] <= RELATIVE_RANK * sizes[0]:
        return a, b
    rows = right @ basis.T
    signs = row_signs(rows)
    return (signs[:, None] * rows).to(a.dtype), (left * (sizes * signs)).to(b.dtype).contiguous()


class FedAvgOrthonormal(AveragingFactors):
    """The average of factors, taken apart anew so that the rows of A are orthonormal; heads only inside their task."""

    name = "fedavg_orthonormal"
    moves_untrained = True

    def complete(self, done: Aggregated, inputs: StepInputs) -> Aggregated:
        """The factors that all have in common, taken apart anew."""
        if not inputs.updates or len(inputs.federation.clients) < 2:
            return done
        common = done.client_models[inputs.federation.clients[0]]
        new: dict[str, Tensor] = {}
        for module in lora_modules(common):
            new[module + LORA_A], new[module + LORA_B] = orthonormal_rows(
                common[module + LORA_A], common[module + LORA_B]
            )
        return replace(done, client_models={client: {**params, **new} for client, params in done.client_models.items()})
