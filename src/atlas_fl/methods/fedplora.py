"""Fed-PLoRA: an adapter of rank R is R modules of rank one, of which each client trains as many as its rank says.

    s B A = sum_j s B_j A_j                                             j = 1 ... R, the largest rank of all clients
    K_k: r_k of the R modules, drawn by client k for every round
    W_k = W0 + sum over j not in K_k of s B_j A_j                       frozen, while k trains the modules in K_k
    A_j <- sum_{k in Q_j} p_k A_kj / sum_{k in Q_j} p_k                 B_j alike,   Q_j = clients that trained j

Zhang, Hu and Xu, "Heterogeneous Federated Fine-Tuning with Parallel One-Rank Adaptation", ICLR 2026, arXiv:2602.16936
(Select-N-Fold). A module that nobody trained stays as it was. Folding is exact: everyone begins with the whole adapter,
and with one rank for all it is FedIT. Differences: shares are by examples, where the paper's are equal; in the first
round everyone trains its first modules, whose products are all zero; a layer may have a rank of its own, and takes the
modules that come first in the client's order. Heads are averaged inside their task.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from atlas_fl.aggregation.matrices import Federation, bounded_weights
from atlas_fl.methods.frozen_part import WithFrozenPart
from atlas_fl.methods.method import Aggregated, StepInputs, tensors_of
from atlas_fl.params import LORA_A, LORA_B, ByClient, Params, ServerState, lora_modules, params_by_client, ranks
from atlas_fl.rng import generator

WHOLE, CHOSEN, DRAWS = "whole", "chosen", "draws"
"""Where the server state has all modules, by client and layer the places of those that it trains, and how often they
were drawn."""


def draw_modules(own: Mapping[str, int], whole: Mapping[str, int], *, seed: int, draw: int, client: str) -> Params:
    """The places of the modules that a client trains after a draw, ascending, by layer, in which there are so many.

    All layers follow one order of the places.
    """
    order = generator(seed, "fedplora", draw, client).permutation(max(whole.values(), default=0))
    return {
        layer: torch.from_numpy(np.sort([j for j in order.tolist() if j < whole[layer]][:rank]).astype(np.int64))
        for layer, rank in own.items()
    }


class FedAvgByRankOne(WithFrozenPart):
    """Fed-PLoRA: modules of rank one, averaged over those that trained them; the others stand frozen at a client."""

    name = "fedavg_by_rank_one"

    def init(self, client_models: ByClient) -> ServerState:
        """The modules of the largest rank, of which every client holds the first."""
        whole: dict[str, Tensor] = {}
        for params in client_models.values():
            for module in lora_modules(params):
                if module + LORA_A not in whole or len(params[module + LORA_A]) > len(whole[module + LORA_A]):
                    whole |= {module + end: params[module + end] for end in (LORA_A, LORA_B)}
        chosen = {
            name: {m: torch.arange(r) for m, r in ranks(params).items()} for name, params in client_models.items()
        }
        return {WHOLE: whole, CHOSEN: chosen, DRAWS: torch.tensor(0)}

    def complete(self, done: Aggregated, inputs: StepInputs) -> Aggregated:
        """The average of every module over those that trained it; clients get the modules of the next round."""
        if not inputs.updates or not done.server_state:
            return done
        whole, count = self._averages(done.server_state, inputs.updates, inputs.federation), done.server_state[DRAWS]
        assert isinstance(count, Tensor), "draws are counted"
        sizes, draw = ranks(whole), int(count) + 1
        chosen = {
            name: draw_modules(ranks(params), sizes, seed=self.options.seed, draw=draw, client=name)
            for name, params in inputs.client_models.items()
        }
        models = {name: {**done.client_models[name], **self._take(whole, chosen[name])} for name in chosen}
        state: ServerState = {WHOLE: whole, CHOSEN: chosen, DRAWS: torch.tensor(draw)}
        return replace(done, server_state=state, client_models=models)

    def frozen_part(self, server_state: ServerState, client: str = "") -> Params:
        """The modules that this client does not train."""
        whole, chosen = tensors_of(server_state, WHOLE), params_by_client(server_state, CHOSEN)
        others = {
            module: torch.tensor(sorted(set(range(rank)) - set(chosen[client][module].tolist())), dtype=torch.int64)
            for module, rank in ranks(whole).items()
        }
        return self._take(whole, {module: places for module, places in others.items() if len(places)})

    def _take(self, whole: Params, places: Params) -> dict[str, Tensor]:
        """These modules of the whole as an adapter of their number."""
        taken: dict[str, Tensor] = {}
        for module, index in places.items():
            a, b = whole[module + LORA_A], whole[module + LORA_B]
            factor = self._ratio(len(a), len(index))
            taken |= {module + LORA_A: a[index], module + LORA_B: factor * b.index_select(1, index)}
        return taken

    def _ratio(self, rank: int, other: int) -> float:
        """s of the first rank over that of the other."""
        return self.options.scale(rank) / self.options.scale(other) if rank and other else 1.0

    def _averages(self, state: ServerState, updates: ByClient, federation: Federation) -> dict[str, Tensor]:
        """All modules after the round."""
        chosen, averages = params_by_client(state, CHOSEN), tensors_of(state, WHOLE)
        for key, old in averages.items():
            module, is_b = key.removesuffix(LORA_A).removesuffix(LORA_B), key.endswith(LORA_B)
            rows = (old.T if is_b else old).double()
            places = {client: chosen[client][module] for client in federation.clients if client in updates}
            shares = self._shares(places, federation, len(rows))
            new = torch.where(shares.any(dim=0)[:, None], 0.0, rows)
            for share, (client, index) in zip(shares, places.items(), strict=True):
                own = updates[client][key].double()
                own = self._ratio(len(index), len(rows)) * own.T if is_b else own
                new.index_add_(0, index, share[index, None] * own)
            averages[key] = (new.T if is_b else new).to(old.dtype).contiguous()
        return averages

    def _shares(self, places: Params, federation: Federation, count: int) -> Tensor:
        """(clients, modules): the share of each client in each module that it trained."""
        shares = np.zeros((len(places), count))
        weights = dict(zip(federation.clients, federation.weights, strict=True))
        for own, (client, index) in zip(shares, places.items(), strict=True):
            own[index.numpy()] = weights[client]
        for column in shares.T:
            bounded = bounded_weights(column[column > 0], self.options.max_share)
            column[column > 0] = bounded / max(bounded.sum(), 1e-300)
        return torch.from_numpy(shares)
