"""FLoRA: all products join a part that everyone holds frozen, and adapters begin again.

    W <- W + sum_k w_k s_k B_k A_k            A as drawn and B = 0 for everyone's next round

over those who took part; any ranks. Wang, Shen, He, Sun, Wang and Lyu 2024, "FLoRA", arXiv:2409.05976. They draw A anew
each round; here it is the first draw again.
"""

from dataclasses import replace

import torch
from torch import Tensor

from atlas_fl.methods.frozen_part import WithFrozenPart
from atlas_fl.methods.method import Aggregated, StepInputs
from atlas_fl.params import LORA_A, LORA_B, Params


class FedAvgStacked(WithFrozenPart):
    """FLoRA: the sum of all products joins the frozen part, and adapters begin again; heads only inside their task."""

    name = "fedavg_stacked"
    begins_again = True

    def complete(self, done: Aggregated, inputs: StepInputs) -> Aggregated:
        """The products join the frozen part, and everyone has the adapter that it was sent, with B = 0."""
        completed = super().complete(done, inputs)
        if completed is done:
            return done
        models = {
            client: {**params, **_begin_again(inputs.client_models[client])}
            for client, params in completed.client_models.items()
        }
        return replace(completed, client_models=models)


def _begin_again(sent: Params) -> dict[str, Tensor]:
    """The adapter of this model as it was drawn: A as it was sent, B = 0."""
    return {
        key: tensor if key.endswith(LORA_A) else torch.zeros_like(tensor)
        for key, tensor in sent.items()
        if key.endswith((LORA_A, LORA_B))
    }
