"""Square blocks between frozen factors, which alone train and are averaged: Fed-SB and RAVAN.

    W = W0 + s sum_i s_i B_i H_i A_i              H_i (rank / heads, rank / heads) and s_i train, A and B are everyone's

As A and B are the same everywhere, the average of the products is the product of the averages, exactly, and a message
holds heads (rank / heads)^2 values a layer. Predictions and exports have A with the blocks in it (`models.lora`).
"""

from dataclasses import replace

from torch import Tensor

from atlas_fl.methods.averages import AveragingFactors
from atlas_fl.methods.method import Aggregated, RoundStart, StepInputs
from atlas_fl.models.lora import with_core
from atlas_fl.params import LORA_A, LORA_B, LORA_CORE, LORA_SCALE, ByClient, Params, lora_modules


class FedAvgBetweenFactors(AveragingFactors):
    """The average of the blocks; the factors keep their bits."""

    takes_newcomers = False
    holds_frozen = True
    across_machines = "has a factor between A and B, which no message across machines holds yet"

    def predict(self, round: RoundStart) -> ByClient:
        """Every model with its blocks multiplied into A."""
        return {name: merge_core(params) for name, params in round.client_models.items()}

    def complete(self, done: Aggregated, inputs: StepInputs) -> Aggregated:
        """The average, in which A and B are the very tensors that they were."""
        kept = {
            name: {key: one for key, one in params.items() if is_frozen(key, params)}
            for name, params in inputs.client_models.items()
        }
        models = {name: {**one, **kept[name]} if kept[name] else one for name, one in done.client_models.items()}
        return replace(done, client_models=models) if inputs.updates else done


def is_frozen(key: str, params: Params) -> bool:
    """Return whether this is a factor that blocks stand beside."""
    return key.endswith((LORA_A, LORA_B)) and key[: -len(LORA_A)] + LORA_CORE in params


def merge_core(params: Params) -> dict[str, Tensor]:
    """The same model without blocks."""
    plain = {key: tensor for key, tensor in params.items() if not key.endswith((LORA_CORE, LORA_SCALE))}
    return {**plain, **{module + LORA_A: with_core(params, module) for module in lora_modules(params)}}
