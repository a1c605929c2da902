"""FedDyn's server step: the average of the models, moved on by the mean of what each client has changed in all rounds.

    e_k <- e_k + (w'_k - w_k)                        of who took part, at first e_k = 0; w_k as sent, w'_k as trained
    x    = sum_k p_k w'_k + sum_k q_k e_k            p_k over those who took part, q_k over all, by examples
    g   <- g + alpha (w - w_k) + alpha e_k           in every step of a client

Acar, Zhao, Matas, Mattina, Whatmough and Saligrama, "Federated Learning Based on Dynamic Regularization", ICLR 2021,
arXiv:2111.04263, algorithm 1. Their gradient of client k is -alpha e_k and their h is -alpha sum_k q_k e_k, so that
x is their mean of models minus h / alpha, and alpha (`--proximal-mu`) is nowhere in the step; their shares are equal.
A client alone with its model, or head, has no e_k. A and B are summed apart, and need equal ranks.
"""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from atlas_fl.aggregation.matrices import Federation
from atlas_fl.methods.averages import AveragingFactors
from atlas_fl.methods.method import SECOND_TENSORS, Aggregated, RoundStart, StepInputs
from atlas_fl.methods.server_optimizers import Cohort, cohort_keys, cohorts
from atlas_fl.params import ByClient, Params, ServerState, TreesByClient, params_by_client

CHANGES = "changes"
"""Where the server state has the e_k, by client and parameter, float32; absent before round one."""


class FedAvgDynamic(AveragingFactors):
    """The average, moved on by the mean of all changes of all clients; heads only inside their task."""

    name = "fedavg_dynamic"
    across_machines = SECOND_TENSORS

    def send(self, round: RoundStart) -> TreesByClient:
        """alpha e_k, float32: what is added to each client's gradients besides the proximal term."""
        if round.is_personal:
            return {}
        return {"correction": dynamic_corrections(round.server_state, round.clients, alpha=self.options.proximal_mu)}

    def complete(self, done: Aggregated, inputs: StepInputs) -> Aggregated:
        """x by cohort, and the changes of all clients."""
        options, federation, updates = self.options, inputs.federation, inputs.updates
        held = inputs.client_models
        whole = {one.name: one for one in cohorts(federation, [True] * len(federation.clients), options)}
        changes = {client: dict(params) for client, params in params_by_client(done.server_state, CHANGES).items()}
        models = {client: dict(params) for client, params in done.client_models.items()} if updates else {}
        for cohort in cohorts(federation, inputs.present, options):
            clients = [federation.clients[k] for k in cohort.members]
            for key in cohort_keys(held[clients[0]], cohort, options):
                for client in (client for client in clients if client in updates):
                    change = updates[client][key].double() - held[client][key].double()
                    kept = changes.setdefault(client, {})
                    kept[key] = (change + kept[key].double() if key in kept else change).float().cpu()
                mean = _mean_change(changes, key, whole[cohort.name], federation)
                model = (done.client_models[clients[0]][key].double() + mean).to(held[clients[0]][key].dtype)
                for client in clients:
                    models[client][key] = model
        state: ServerState = {CHANGES: changes} if changes else done.server_state
        return replace(done, server_state=state, client_models={**done.client_models, **models})


def _mean_change(changes: ByClient, key: str, cohort: Cohort, federation: Federation) -> Tensor:
    """sum_k q_k e_k in float64, in the order of the clients."""
    total = torch.zeros((), dtype=torch.float64)
    for k, weight in cohort.weights.items():
        change = changes.get(federation.clients[k], {}).get(key)
        if change is not None:
            total = total + weight * change.double()
    return total


def dynamic_corrections(server_state: ServerState, clients: Collection[str], *, alpha: float) -> dict[str, Params]:
    """alpha e_k of these clients, float32: what is added to each one's gradients besides the proximal term."""
    changes = params_by_client(server_state, CHANGES)
    return {client: {key: alpha * e for key, e in changes[client].items()} for client in clients if client in changes}
