"""Fed-SB: LoRA-SB, whose square R between frozen B and A is all that trains, and averages exactly.

    G = sum_k grad_W L_k(W0)                                summed over the batches of the clients of round one
    -eta sign(G) = U S V^T,   B = U_r,  A = V_r^T,  R = S_r / s          the first step of AdamW on all weights, rank r
    W = W0 + s B R A,   R <- sum_k p_k R_k

Singhal, Ponkshe, Vartak, Varshney and Vepakomma 2025, "Fed-SB", arXiv:2502.15436; LoRA-SB: Ponkshe et al. 2024,
arXiv:2411.19557. Differences: gradients are of all batches of round one, in which only heads train, where theirs are of
a thousandth of the examples before it; eta is a share of the adapters' rate (`--first-step`), where theirs is the first
rate of the warm-up; p are shares of the examples, theirs are equal. A client that is asked sends as many values as the
adapted layers hold, once, and needs (d_in, d_in) more for each while it measures. Heads are averaged in their task.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from atlas_fl.aggregation.matrices import Federation
from atlas_fl.methods.core import FedAvgBetweenFactors
from atlas_fl.methods.knobs import Tried
from atlas_fl.methods.method import Aggregated, Report, ReportTensor, RoundStart, StepInputs, tensors_of
from atlas_fl.params import LORA_A, LORA_B, LORA_CORE, ByClient, Params, ServerState, lora_modules, ranks
from atlas_fl.ranges import Range


class FedAvgOfCores(FedAvgBetweenFactors):
    """Fed-SB: the average of R, between the singular vectors of the clients' first gradient."""

    first_step: Annotated[float, Range(above=0), Tried("fedsb", values=(0.1, 0.01, 1.0, 0.03))] = 0.1
    """Share of the learning rate that the first step of all weights is as large as, from which Fed-SB's factors are."""

    name = "fedavg_of_cores"
    steps_on = True
    extra_passes = "passes over the training examples: those of round one again, for gradients"
    report = "weight_gradients"
    report_words = "in round one the gradient of the adapted layers' weights, as large as these"

    def begin(self, client_models: ByClient, _federation: Federation) -> tuple[ByClient, ServerState]:
        """The drawn models with R = 0, so that the weights are the frozen ones."""
        models = {name: dict(params) for name, params in client_models.items()}
        for params in models.values():
            params |= {module + LORA_CORE: torch.zeros(1, rank, rank) for module, rank in ranks(params).items()}
        return models, {}

    def ask(self, round: RoundStart) -> Collection[str]:
        """Everyone who trains, until there are factors."""
        return () if "gradient" in round.server_state else super().ask(round)

    @classmethod
    def measure(cls, report: Report) -> Mapping[str, Params]:
        """The gradient at the frozen weights."""
        return {client: report.gradient(client) for client in report.clients}

    @classmethod
    def report_tensors(cls, model: Params, *, classes: int) -> Mapping[str, ReportTensor]:
        """A gradient of the shape of each adapted layer."""
        del classes
        return {
            m: ReportTensor(shape=(len(model[m + LORA_B]), model[m + LORA_A].shape[1])) for m in lora_modules(model)
        }

    def record_reports(self, server_state: ServerState, reports: ByClient) -> ServerState:
        """The sum of all gradients."""
        if not reports:
            return server_state
        sent = [reports[client] for client in sorted(reports)]
        return {
            "gradient": {name: torch.stack([one[name].double() for one in sent]).sum(0).float() for name in sent[0]}
        }

    def complete(self, done: Aggregated, inputs: StepInputs) -> Aggregated:
        """The average; once there is a gradient, everyone gets the factors that follow from it."""
        done = super().complete(done, inputs)
        first, models = next(iter(inputs.client_models.values())), done.client_models
        if any(bool(one.any()) for key, one in first.items() if key.endswith(LORA_CORE)):
            return done
        for module, gradient in tensors_of(done.server_state, "gradient").items():
            rank = len(first[module + LORA_A])
            eta = self.first_step * self.options.lr / self.options.scale(rank)
            made = factors_of(module, gradient, rank, eta=eta)
            models = {
                name: {**params, **{key: made[key] for key in made if key in params}} for name, params in models.items()
            }
        return replace(done, client_models=models)


def factors_of(module: str, gradient: Tensor, rank: int, *, eta: float) -> dict[str, Tensor]:
    """B = U_r, A = V_r^T and R = S_r of -eta sign(G); the first large value of each row of A is positive.

    Where the matrix has less than this rank, factors go on orthonormal, beside zeros in R.
    """
    left, values, right = torch.linalg.svd(-eta * gradient.double().sign(), full_matrices=False)
    num_kept = int((values[:rank] > 1e-6 * values[0]).sum())
    right = right[:num_kept]
    # not the largest: many are equal but for rounding
    large = right.abs() > 0.5 * right.abs().amax(1, keepdim=True)
    signs = right.gather(1, large.int().argmax(1, keepdim=True))[:, 0].sign()
    core = torch.zeros(1, rank, rank)
    core[0, :num_kept, :num_kept] = values[:num_kept].diag()
    return {
        module + LORA_A: completed((signs[:, None] * right).T, rank).T.contiguous(),
        module + LORA_B: completed(left[:, :num_kept] * signs, rank),
        module + LORA_CORE: core,
    }


def completed(basis: Tensor, rank: int) -> Tensor:
    """(d, rank): these orthonormal columns, then what is left of the unit vectors; zeros beyond d."""
    d, num_kept = basis.shape
    units = torch.eye(d, min(rank, d) - num_kept, dtype=basis.dtype)
    columns, upper = torch.linalg.qr(torch.cat([basis, units], dim=1))
    return torch.nn.functional.pad(columns * upper.diagonal().sign(), (0, max(rank - d, 0))).float().contiguous()
