"""FLoRA: all products join a part that everyone holds frozen, and adapters begin again.

    W <- W + sum_k w_k s_k B_k A_k            A as drawn and B = 0 for everyone's next round

over those who took part; any ranks. Wang, Shen, He, Sun, Wang and Lyu 2024, "FLoRA", arXiv:2409.05976. They draw A anew
each round; here it is the first draw again.
"""

from dataclasses import replace

import torch

from atlas_fl.methods.frozen_part import WithFrozenPart
from atlas_fl.methods.method import Aggregated, StepInputs
from atlas_fl.params import LORA_A, LORA_B


class FedAvgStacked(WithFrozenPart):
    """FLoRA: the sum of all products joins the frozen part, and adapters begin again; heads only inside their task."""

    name = "fedavg_stacked"
    begins_again = True

    def complete(self, done: Aggregated, inputs: StepInputs) -> Aggregated:
        """The products join the frozen part, and everyone has the adapter that it was sent, with B = 0."""
        completed = super().complete(done, inputs)
        if completed is done:
            return done
        models = {client: dict(params) for client, params in completed.client_models.items()}
        for client, params in models.items():
            for key, sent in inputs.client_models[client].items():
                if key.endswith((LORA_A, LORA_B)):
                    params[key] = sent if key.endswith(LORA_A) else torch.zeros_like(sent)
        return replace(completed, client_models=models)
