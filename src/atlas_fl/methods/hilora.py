"""HiLoRA: an adapter of all, one of each cluster and one of each client, trained one after the other.

    h = W0 x + s B_r A_r x + s B_c A_c x + s B A x             r of all, c of the cluster, the last of the client

Each level trains while those before it are frozen. The first two are averages of products, cut to the rank, of all and
inside clusters; the last, in the personal rounds, stays at its client. To the loss of a client is added

    gamma || U^T B ||_F^2                                      U the columns of the frozen B_r and B_c, at length 1

Clusters follow from the clients' B in the rounds of the first level, for every adapted layer:

    E_k <- lambda E_k + (1 - lambda) B_k / || B_k ||_F         U_k an orthonormal basis of E_k, of r columns
    d_kl = mean over layers of 1 - || U_k^T U_l ||_F^2 / r     S_kl = exp(-d_kl^2 / (2 sigma^2)), sigma the median d
    K = argmax of l_{K+1} - l_K, 2 <= K <= 10                  l_1 <= l_2 ... of the normalised Laplacian, S_kk = 0

Peng, Zou, Zeng, Li, Chen, Li and Wang, "HiLoRA: Hierarchical Low-Rank Adaptation for Personalized Federated Learning",
CVPR 2026, arXiv:2603.02785, by reports of its equations: only a part of the paper was read, and no program of its
authors is public. Differences: a level ends by its number of rounds alone, there also where its last step is small;
gamma is one number for both frozen levels; A and B share the singular values of an average, there all of them are in A;
eigenvectors become clusters by a pivoted QR decomposition (Damle, Minden and Ying 2019, arXiv:1708.07481), since the
reports do not say how; a level begins with the first draw of A. Heads go on from level to level and are averaged inside
their task, and inside clusters once there are any. A client of which no B is known has a cluster of its own. The choice
of a cluster by clients that come later is left out.
"""

import math
from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from scipy.linalg import qr

from atlas_fl.aggregation.matrices import Federation, Groups, Square
from atlas_fl.methods.cfl import CLUSTERS, AveragingInState, clusters_by_client, clusters_in
from atlas_fl.methods.frozen_part import WithFrozenPart
from atlas_fl.methods.knobs import Tried
from atlas_fl.methods.method import Aggregated, StepInputs, tensors_of
from atlas_fl.methods.second_model import stack
from atlas_fl.models.lora import init_adapters
from atlas_fl.params import LORA_A, LORA_B, Params, ServerState, params_by_client, ranks, subtree
from atlas_fl.ranges import Range

BASES, LEVELS = "bases", "levels"
"""Entries of the server state: E_k by client until there are clusters, then the frozen levels of each cluster."""
MOST_CLUSTERS = 10


def spectral_clusters(distances: Square) -> Groups:
    """The clusters of distances (n, n), as many as the eigengap says; one of fewer than three or of equal clients."""
    n = len(distances)
    sigma = float(np.median(distances[np.triu_indices(n, 1)])) if n > 2 else 0.0
    if sigma <= 0.0:
        return np.zeros(n, np.int64)
    affinity = np.exp(-(distances**2) / (2 * sigma**2)) * (1 - np.eye(n))
    root = 1 / np.sqrt(affinity.sum(axis=1))
    values, vectors = np.linalg.eigh(np.eye(n) - root[:, None] * affinity * root)
    count = 2 + int(np.argmax(np.diff(values)[1 : min(MOST_CLUSTERS, n - 1)]))
    leading = root[:, None] * vectors[:, :count]
    _, _, pivots = qr(leading.T, pivoting=True, mode="economic")
    left, _, right = np.linalg.svd(leading[pivots[:count]].T)
    return np.asarray(np.abs(leading @ (left @ right)).argmax(axis=1), np.int64)


class FedAvgInLevels(AveragingInState, WithFrozenPart):
    """HiLoRA: averages of all, then of clusters beside the frozen one, from which personal rounds go on."""

    root_share: Annotated[float, Range(above=0, below=1), Tried("hilora", values=(0.5, 0.25, 0.75))] = 0.5
    """Share of the rounds up to the last aggregation in which HiLoRA's adapter of all trains, rounded up; in the others
    that of each cluster does."""
    basis_decay: Annotated[float, Range(least=0, below=1)] = 0.9
    """Weight of earlier rounds in the directions of B by which HiLoRA finds clusters."""
    orthogonality: Annotated[float, Range(least=0), Tried("hilora", values=(0.1, 0.01, 1.0))] = 0.0
    """Weight of HiLoRA's pull that keeps the columns of B orthogonal to those of the frozen levels."""

    name = "fedavg_in_levels"
    equal_ranks = True
    in_factors = False
    fixed: ClassVar = {"space": "product", "within": "all"}

    def frozen_part(self, server_state: ServerState, client: str = "") -> Params:
        """The levels that have ended, of this client's cluster."""
        levels = subtree(server_state, LEVELS)
        return tensors_of(levels, str(int(tensors_of(server_state, CLUSTERS)[client]))) if levels else {}

    def complete(self, done: Aggregated, inputs: StepInputs) -> Aggregated:
        """The averages; at the end of a level they are frozen, and adapters begin again."""
        if not inputs.updates:
            return done
        state, levels = inputs.server_state, subtree(inputs.server_state, LEVELS)
        if not levels:
            state = {BASES: self._bases(inputs)}
        last = self.options.last_aggregation
        if inputs.round < (last if levels else math.ceil(self.root_share * last)):
            return replace(done, server_state=state)
        federation, models = inputs.federation, done.client_models
        clusters = clusters_in(subtree(state, CLUSTERS), federation) if levels else self._clusters(state, federation)
        frozen = {}
        for client, cluster in zip(federation.clients, map(str, clusters.tolist()), strict=True):
            own = {key: t for key, t in models[client].items() if key.endswith((LORA_A, LORA_B)) and t.numel()}
            frozen[cluster] = stack(own, tensors_of(levels, cluster), weights=(1.0, 1.0), scale=self.options.scale)
        dims = {module: (own[module + LORA_A].shape[1], len(own[module + LORA_B])) for module in ranks(own)}
        fresh = init_adapters(dims, ranks(own), seed=self.options.seed)
        return replace(
            done,
            server_state={CLUSTERS: clusters_by_client(federation, clusters), LEVELS: frozen},
            client_models={client: {**params, **fresh} for client, params in models.items()},
        )

    def _bases(self, inputs: StepInputs) -> dict[str, Params]:
        """E_k of every client that has sent anything."""
        bases: dict[str, Params] = {**params_by_client(inputs.server_state, BASES)}
        for client, params in inputs.updates.items():
            units = {key: b / b.norm().clamp_min(1e-30) for key, b in params.items() if key.endswith(LORA_B)}
            known = bases.get(client, units)
            bases[client] = {key: torch.lerp(unit, known[key], self.basis_decay) for key, unit in units.items()}
        return bases

    def _clusters(self, server_state: ServerState, federation: Federation) -> Groups:
        """The clusters of the clients in their order; who has no basis is alone."""
        bases = params_by_client(server_state, BASES)
        known = [k for k, client in enumerate(federation.clients) if client in bases]
        layers = []
        for key in (key for key, basis in next(iter(bases.values())).items() if basis.numel()):
            spans = torch.stack([torch.linalg.qr(bases[federation.clients[k]][key].double())[0] for k in known])
            layers.append(1 - torch.einsum("kdr,lds->klrs", spans, spans).square().sum((2, 3)) / spans.shape[2])
        clusters = np.arange(len(federation.clients)) + len(known)
        clusters[known] = spectral_clusters(torch.stack(layers).mean(0).numpy())
        return clusters
