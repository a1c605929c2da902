"""FedTreeLoRA with its outside expert: a frozen adapter of everybody outside the cluster, weighed layer by layer.

    h = W0 x + lambda s B_in A_in x + (1 - lambda) s B_out A_out x      lambda in [0, 1], of each client and layer

"FedTreeLoRA", ICML 2026, arXiv:2603.13282. In every layer the adapter of the cluster (`methods.fedtreelora`) trains,
with lambda, which never leaves its client; A_out and B_out are the mean of the newest adapters of those outside the
cluster that took part, by examples. A layer in which all are one cluster has nothing outside, and so has none before
the tree is made. Differences: lambda begins at `--tree-weight`, which the paper's text at hand does not say, and stays
in its range by cutting it off after every step.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from atlas_fl import params
from atlas_fl.aggregation import rules
from atlas_fl.aggregation.matrices import rows_over_sums
from atlas_fl.methods.fedtreelora import CUTS, FedTreeLora
from atlas_fl.methods.frozen_part import WithFrozenPart
from atlas_fl.methods.knobs import Tried
from atlas_fl.methods.method import Aggregated, RoundStart, StepInputs
from atlas_fl.ranges import Range

OUTSIDE = "outside"
"""The entry of the server state: the adapter of everybody outside, by client."""


class FedTreeLoraOutside(FedTreeLora, WithFrozenPart):
    """Averages inside nested clusters, beside the frozen average of everybody outside."""

    tree_weight: Annotated[
        float, Range(least=0, most=1), Tried("fedtreelora_outside", values=(0.5, 0.75, 0.9, 0.25))
    ] = 0.5
    """Weight of the cluster's adapter, in the place of that of everybody outside, with which `fedtreelora_outside`
    begins in every layer."""

    name = "fedavg_in_tree_and_outside"
    differs = ""
    equal_ranks = True

    def frozen_part(self, server_state: params.ServerState, client: str = "") -> params.Params:
        """The adapter of everybody outside."""
        return params.params_by_client(server_state, OUTSIDE).get(client, {})

    def keep(self, round: RoundStart) -> params.TreesByClient:
        """Lambda by client and layer, of those where there is something outside."""
        known, gate = round.of("gate"), dict[str, Mapping[str, Tensor]]()
        for name in round.client_models:
            modules = params.lora_modules(self.frozen_part(round.server_state, name))
            start = {module + params.LORA_GATE: torch.tensor(self.tree_weight) for module in modules}
            gate[name] = {key: known.get(name, {}).get(key, weight) for key, weight in start.items()}
        return {"gate": gate}

    def complete(self, done: Aggregated, inputs: StepInputs) -> Aggregated:
        """The step of the clusters, and the averages of everybody outside."""
        if CUTS not in done.server_state or not inputs.updates:
            return done
        after, federation = inputs.after, inputs.federation
        models = rules.RoundModels(before=inputs.client_models, after=after, server_state=done.server_state)
        matrices = rules.mixing_matrices(self._others, federation, inputs.present, granularity="layer", models=models)
        mixed = rules.mix(after, matrices, federation.clients, self.options).by_client
        outside = {
            name: {
                key: one
                for key, one in mixed[name].items()
                if key.endswith((params.LORA_A, params.LORA_B)) and matrices(key)[k, k] == 0
            }
            for k, name in enumerate(federation.clients)
        }
        return replace(done, server_state={CUTS: done.server_state[CUTS], OUTSIDE: outside})

    def _others(self, step: rules.MixingContext) -> np.ndarray:
        """The shares of the examples of everybody outside the cluster; who has nobody there keeps its model."""
        return rows_over_sums(np.where(self.rule(step) > 0, 0.0, rules.weighted_average(self.options, step)))
