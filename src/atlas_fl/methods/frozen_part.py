"""A part that all clients hold frozen beside their adapters, to which every round adds: FLoRA and FedEx-LoRA.

    h = W0 x + s B A x + s_w B_w A_w x          (A_w, B_w) what all hold frozen

W itself stays as it is: clients compute with their adapter stacked on the factors of the frozen part. What a round
adds is sent; who has missed some is sent the whole. Heads are averaged inside their task. A client without others keeps
what it trained.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from atlas_fl.aggregation.lora_product import Factors, add_factors, from_adapter, stack_products, to_adapter
from atlas_fl.methods.averages import Averaging
from atlas_fl.methods.method import SECOND_TENSORS, Aggregated, RoundStart, StepInputs, tensors_of
from atlas_fl.methods.second_model import SecondModel, stack
from atlas_fl.methods.server_optimizers import Cohort, body_cohort
from atlas_fl.params import LORA_A, LORA_B, LORA_GATE, ByClient, Params, ServerState, TreesByClient, lora_modules

RESIDUAL, NEWEST = "residual", "newest"
"""Where the server state has what everyone holds frozen, and what of it the newest round has added."""


class FrozenCompanion(SecondModel):
    """The role of the frozen part at a client: its companion, beside the only adapter that trains."""

    kind = "frozen"

    def combine(self, own: Params, shared: Params, gate: Params) -> Params:
        """The adapter stacked on the frozen part, both with all of their weight, or by a number w of each layer.

        Then the adapter has w and the frozen part 1 - w. A router of the model (`methods.fedlease`) weighs both by the
        input, without an offset.
        """
        routers = {key: torch.nn.functional.pad(own[key], (0, 1)) for key in own if key.endswith(LORA_GATE)}
        for key, weight in gate.items():
            b = key.removesuffix(LORA_GATE) + LORA_B
            own, shared = {**own, b: weight * own[b]}, {**shared, b: (1 - weight) * shared[b]}
        return {**stack(own, shared, weights=(1.0, 1.0), scale=self.options.scale), **routers}

    def after_step(self, leaves: Mapping[str, Tensor]) -> None:
        """Keep the weights of layers in [0, 1]."""
        with torch.no_grad():
            for weight in (leaf for key, leaf in leaves.items() if key.endswith(LORA_GATE) and not leaf.ndim):
                weight.clamp_(0.0, 1.0)


class WithFrozenPart(Averaging):
    """FedAvg of factors or a fresh start, and a frozen part that makes the average of the products exact."""

    in_factors = True
    takes_newcomers = False
    across_machines = SECOND_TENSORS
    holds_frozen = True
    fixed: ClassVar = {"space": "factors", "within": "all"}

    def new_factors(self, a: list[Tensor], b: list[Tensor], weights: list[float]) -> Factors:
        """Addition of clients with these factors and weights to one module; by default the sum of their products."""
        return stack_products(a, b, [self.options.scale(len(factor)) for factor in a], weights)

    def send(self, round: RoundStart) -> TreesByClient:
        """The frozen part."""
        frozen = {name: self.frozen_part(round.server_state, name) for name in round.clients}
        return {"companion": frozen} if any(frozen.values()) else {}

    def predict(self, round: RoundStart) -> ByClient:
        """Every model stacked on the frozen part."""
        companion, gate = FrozenCompanion(self.options), self.keep(round).get("gate", {})
        frozen = {name: self.frozen_part(round.server_state, name) for name in round.client_models}
        return {
            name: companion.combine(params, frozen[name], gate.get(name, {})) if frozen[name] else params
            for name, params in round.client_models.items()
        }

    def complete(self, done: Aggregated, inputs: StepInputs) -> Aggregated:
        """The average of the factors, and the frozen part with what this round adds."""
        everyone = body_cohort(inputs, self.options)
        if everyone is None:
            return done
        scale = self.options.scale
        newest: dict[str, Tensor] = {}
        whole: dict[str, Tensor] = {}
        for module in lora_modules(next(iter(inputs.updates.values()))):
            new = self._of_module(module, inputs, everyone)
            newest |= to_adapter(module, new, scale)
            frozen = from_adapter(module, self.frozen_part(done.server_state), scale, like=new)
            whole |= to_adapter(module, add_factors(frozen, new), scale)
        return replace(done, server_state={RESIDUAL: whole, NEWEST: newest})

    def _of_module(self, module: str, inputs: StepInputs, cohort: Cohort) -> Factors:
        """Addition of the updates to one module; clients that carry no adapter there add nothing."""
        updates = inputs.updates
        weights = {inputs.federation.clients[k]: weight for k, weight in cohort.weights.items()}
        clients = [client for client in weights if len(updates[client][module + LORA_A])]
        if not clients:
            client = next(iter(weights))
            return Factors(a=updates[client][module + LORA_A].double(), b=updates[client][module + LORA_B].double())
        a, b = ([updates[client][module + end] for client in clients] for end in (LORA_A, LORA_B))
        return self.new_factors(a, b, [weights[client] for client in clients])

    def frozen_part(self, server_state: ServerState, client: str = "") -> Params:
        """Frozen part, an adapter with A (R, d_in) and B (d_out, R), float32; empty before round one."""
        del client
        return tensors_of(server_state, RESIDUAL)

    def newest_part(self, server_state: ServerState, client: str = "") -> Params:
        """The part that the newest round has added, which is sent; all of it where every round freezes others."""
        has_sum = NEWEST in server_state
        return tensors_of(server_state, NEWEST) if has_sum else self.frozen_part(server_state, client)
