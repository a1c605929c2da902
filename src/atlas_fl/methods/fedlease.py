"""FedLEASE with its router: an expert of every cluster at every client, and a router over all M of them.

    h = W0 x + s sum_j w_j(x) B_j A_j x          w by the M largest of 2 M - 1 outputs of G x (`models.lora`)

The first M outputs lead to the expert of the client's own cluster, so that between one and M experts count. The own
expert and G, of every adapted layer, train and are averaged inside the cluster; the other experts are frozen.

Wang, Bian, Zhang and Xu 2025, "Adaptive LoRA Experts Allocation and Selection for Federated Fine-Tuning", NeurIPS 2025,
arXiv:2509.15087. G is drawn as in the authors' program (lei-wang-link/FedLEASE: uniform, as A is, without a bias), but
one draw for all, where theirs has one for each client. As there a client goes into round one with its own adapter of
the warm-up, and with other experts that are zero; of the paper itself only parts were read. Differences:
averages are by examples, there equal; heads train and are averaged inside task and cluster, there they stay as drawn;
the warm-up does not train A (`--fingerprint delta`). A cluster of which nobody takes part keeps its expert.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from atlas_fl.aggregation.matrices import Federation, cluster_labels, group_ids
from atlas_fl.methods.averages import FedAvgCluster
from atlas_fl.methods.cfl import CLUSTERS, clusters_by_client, clusters_in
from atlas_fl.methods.frozen_part import WithFrozenPart
from atlas_fl.methods.method import Aggregated, StepInputs, tensors_of
from atlas_fl.params import LORA_A, LORA_B, LORA_GATE, ByClient, Params, ServerState, lora_modules, subtree
from atlas_fl.rng import torch_generator

EXPERTS = "experts"
"""The entry of the server state: the adapter of every cluster, by its number; absent of one cluster."""


class FedAvgClusterRouted(FedAvgCluster, WithFrozenPart):
    """Averages inside clusters, beside the frozen experts of all other clusters and a router over them."""

    name = "fedavg_cluster_routed"
    equal_ranks = True
    not_a_sum = "holds experts of other clusters frozen"

    def begin(self, client_models: ByClient, federation: Federation) -> tuple[ByClient, ServerState]:
        """Everyone's model with a router, beside experts that are zero; of one cluster as they are."""
        clusters = group_ids(cluster_labels(federation.clusters))
        count = len(set(clusters.tolist()))
        if count < 2:
            return client_models, {}
        models = {name: {**params, **self._router(params, 2 * count - 1)} for name, params in client_models.items()}
        first = _expert(models[federation.clients[0]])
        experts = {str(k): {key: torch.zeros_like(value) for key, value in first.items()} for k in range(count)}
        return models, {EXPERTS: experts, CLUSTERS: clusters_by_client(federation, clusters)}

    def _router(self, params: Params, outputs: int) -> dict[str, Tensor]:
        """G of every adapted layer, (outputs, d_in)."""
        router = {}
        for module in lora_modules(params):
            draw, d_in = torch_generator(self.options.seed, "router", module), params[module + LORA_A].shape[1]
            bound = 1 / math.sqrt(d_in)
            router[module + LORA_GATE] = torch.empty(outputs, d_in).uniform_(-bound, bound, generator=draw)
        return router

    def frozen_part(self, server_state: ServerState, client: str = "") -> Params:
        """The experts of all other clusters, stacked in their order."""
        experts, clusters = subtree(server_state, EXPERTS), tensors_of(server_state, CLUSTERS)
        if not experts:
            return {}
        others = [tensors_of(experts, str(k)) for k in range(len(experts)) if k != int(clusters[client])]
        return {key: torch.cat([one[key] for one in others], dim=int(key.endswith(LORA_B))) for key in others[0]}

    def complete(self, done: Aggregated, inputs: StepInputs) -> Aggregated:
        """The averages, and the experts of those clusters of which someone took part."""
        experts = dict(subtree(inputs.server_state, EXPERTS))
        if not experts:
            return done
        clusters = clusters_in(subtree(inputs.server_state, CLUSTERS), inputs.federation)
        for client, cluster in zip(inputs.federation.clients, clusters.tolist(), strict=True):
            if client in inputs.updates:
                experts[str(cluster)] = _expert(done.client_models[client])
        return replace(done, server_state={**inputs.server_state, EXPERTS: experts})


def _expert(model: Params) -> dict[str, Tensor]:
    """The factors of all layers."""
    return {key: value for key, value in model.items() if key.endswith((LORA_A, LORA_B))}
