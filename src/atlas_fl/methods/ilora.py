"""ILoRA: adapters that begin in the frozen weights, averaged as one product, of which every rank has the first columns.

    W0 = Q R,   B = Q[:, :r],  A = R[:r] / s                        before round one, with r the rank of the client
    h = (W0 - Q[:, :r] R[:r]) x + s B A x                           so that it computes with W0 when it begins
    sum_k p_k s_k B_k A_k = Q R,   B = Q[:, :r],  A = R[:r] / s     after every round

R has a positive diagonal, so that QR is unique, and a client of rank 4 has the first directions of one of rank 16.
What Q R has beyond a client's rank is cut off there. Where the sum has fewer columns that are independent, B goes on
with unit vectors, made orthogonal. Gradients are corrected as in SCAFFOLD (`methods.scaffold`), under
AdamW: c - c_k is cut to the rank of the client, and c_k counts as zero in rows that it does not have.

Zhou, Liu and Shang, "ILoRA: Federated Learning with Low-Rank Adaptation for Heterogeneous Client Aggregation", CVPR
2026, arXiv:2511.16069, by reports of its equations: only a part of the paper was read, and no program of its authors is
public. Differences: the paper's A has no factor 1 / s; averages are by examples; how ranks meet in the control variates
is not in these reports; the correction is added behind clipping; heads are corrected too, and averaged inside their
task. A client without others keeps what it trained. The clients know W0, so nobody is sent the frozen part.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from atlas_fl.aggregation.lora_product import RELATIVE_RANK
from atlas_fl.aggregation.matrices import Federation
from atlas_fl.methods.fedsb import completed
from atlas_fl.methods.frozen_part import WithFrozenPart
from atlas_fl.methods.method import Aggregated, StepInputs
from atlas_fl.methods.server_optimizers import body_cohort
from atlas_fl.params import LORA_A, LORA_B, ByClient, Params, ServerState, lora_modules, params_by_client

START = "start"
"""The entry of the server state: the adapter with which each client began, which it takes off the frozen weights."""


class FedAvgByQr(WithFrozenPart):
    """The average of products as Q R, of which each client has the directions of its rank; heads only inside tasks."""

    name = "fedavg_by_qr"
    makes_frozen = True

    def begin_in_weights(
        self, client_models: ByClient, _federation: Federation, weights: Callable[[str], Tensor]
    ) -> tuple[ByClient, ServerState]:
        """Everyone's model with the first directions of the frozen weights."""
        models = {client: dict(params) for client, params in client_models.items()}
        for module in lora_modules(next(iter(models.values()))):
            self._set_directions(models, module, weights(module).double())
        start = {
            client: {key: one for key, one in params.items() if key.endswith((LORA_A, LORA_B)) and one.numel()}
            for client, params in models.items()
        }
        return models, {START: start}

    def frozen_part(self, server_state: ServerState, client: str = "") -> Params:
        """The part that the client takes off the frozen weights."""
        start = params_by_client(server_state, START).get(client, {})
        return {key: -one if key.endswith(LORA_B) else one for key, one in start.items()}

    def complete(self, done: Aggregated, inputs: StepInputs) -> Aggregated:
        """The average of the heads, and the directions of the average of the products."""
        everyone = body_cohort(inputs, self.options)
        if everyone is None:
            return done
        models = {client: dict(params) for client, params in done.client_models.items()}
        for module in lora_modules(next(iter(inputs.updates.values()))):
            total = self._of_module(module, inputs, everyone)
            self._set_directions(models, module, total.b @ total.a)
        return replace(done, client_models=models)

    def _set_directions(self, models: dict[str, dict[str, Tensor]], module: str, matrix: Tensor) -> None:
        """Set A and B of these models to the first directions of a matrix (d_out, d_in), float64."""
        q, upper = torch.linalg.qr(matrix)
        sizes = upper.diagonal()
        q = q * torch.where(sizes < 0, -1.0, 1.0)
        num_sound = int((sizes.abs() > RELATIVE_RANK * matrix.norm()).long().cumprod(0).sum())
        made: dict[int, dict[str, Tensor]] = {}
        for params in models.values():
            rank = len(params[module + LORA_A])
            if rank and rank not in made:
                b = completed(q[:, : min(rank, num_sound)], rank)
                a = b.double().T @ matrix / self.options.scale(rank)
                made[rank] = {module + LORA_A: a.float().contiguous(), module + LORA_B: b}
            params |= made.get(rank, {})
