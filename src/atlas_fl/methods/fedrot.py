"""FedRot-LoRA: averages of A and B that each client's factors are rotated for, towards those that it was sent.

    R*_k = the rotation R that minimises || R^T A_k - A ||, in the other rounds || B_k R - B ||       A, B as sent
    R_k  = the rotation nearest to (1 - lambda) I + lambda R*_k                       lambda: --rotation-strength
    A   <- sum_k p_k R_k^T A_k,   B <- sum_k p_k B_k R_k

B_k A_k is what it was, since R_k is orthogonal. The rotation nearest to U S V^T is U diag(1, ..., 1, det U V) V^T, and
R*_k is the one nearest to A_k A^T or B_k^T B. Zhang, Kim, Cha and Vikalo, "FedRot-LoRA: Mitigating Rotational
Misalignment in Federated LoRA", ICML 2026, arXiv:2602.23638. In even rounds A is aligned, in odd ones
B, and in the first none, as in the authors' code, whose default is the orthogonal matrix without the bound on its
determinant. Their clients rotate before they send; here the server does, with the same bytes and what it has anyway. A
client without others is not rotated.
"""

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from atlas_fl.methods.averages import AveragingFactors
from atlas_fl.methods.knobs import Tried
from atlas_fl.methods.method import Aggregated, StepInputs
from atlas_fl.params import LORA_A, LORA_B, Params, lora_modules
from atlas_fl.ranges import Range


def nearest_rotation(matrix: Tensor) -> Tensor:
    """The orthogonal matrix of determinant 1 that is nearest to this one."""
    left, sizes, right = torch.linalg.svd(matrix)
    signs = torch.ones_like(sizes)
    signs[-1] = torch.linalg.det(left @ right).sign()
    rotation: Tensor = (left * signs) @ right
    return rotation


def align(params: Params, sent: Params, *, by: str, strength: float) -> dict[str, Tensor]:
    """The model with factors rotated towards those that were sent, by A or by B (`LORA_A`, `LORA_B`)."""
    new = dict(params)
    for module in lora_modules(params):
        a, b = (params[module + end].double() for end in (LORA_A, LORA_B))
        reference = sent[module + by].double()
        best = nearest_rotation(a @ reference.T if by == LORA_A else b.T @ reference)
        turn = nearest_rotation((1 - strength) * torch.eye(len(a)).to(a) + strength * best)
        new[module + LORA_A] = (turn.T @ a).to(params[module + LORA_A].dtype)
        new[module + LORA_B] = (b @ turn).to(params[module + LORA_B].dtype)
    return new


class FedAvgRotated(AveragingFactors):
    """The average of factors that are rotated towards those that were sent (`--rotation-strength`); heads by task."""

    rotation_strength: Annotated[float, Range(least=0, most=1), Tried("fedrot", values=(0.5, 0.25, 0.75, 1.0))] = 0.5
    """Strength with which `fedrot` rotates each client's factors towards those that it was sent: 0 is none, 1 all."""

    name = "fedavg_rotated"

    def aggregate(self, inputs: StepInputs) -> Aggregated:
        """The average of the rotated updates."""
        if inputs.round > 1 and len(inputs.federation.clients) > 1:
            by, strength = LORA_A if inputs.round % 2 == 0 else LORA_B, self.rotation_strength
            updates = {
                client: align(params, inputs.client_models[client], by=by, strength=strength)
                for client, params in inputs.updates.items()
            }
            inputs = replace(inputs, updates=updates)
        return super().aggregate(inputs)
