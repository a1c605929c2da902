"""FedALT's rest of the world: for each client the weighted mean of all others, without itself.

    mean = sum_l p_l w_l / sum_l p_l                      over those who took part
    s_k = p_k / sum_l p_l                                 0 of who took no part
    others_k = (mean - s_k w_k) / (1 - s_k)               w_k where k is alone

The server needs the mean alone, so that it may be a secure sum, and each client takes itself out of it. A client never
goes on with the others' mean: it stands, frozen, beside the client's own adapter, and a gate weighs the two
(`methods.feddpa`). Bian, Wang, Zhang and Xu, "FedALT: Federated Fine-Tuning through Adaptive Local Training with
Rest-of-World LoRA", AAAI 2026, arXiv:2503.11880, where the p are equal. As in the authors' program (jmbian/FedALT),
whose models have no head of a task, adapters alone are sent: head and gate stay at the client.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from atlas_fl.methods.averages import Averaging
from atlas_fl.methods.feddpa import FedDpa
from atlas_fl.methods.method import Aggregated, RoundStart, StepInputs
from atlas_fl.params import SHARE, ByClient, TreesByClient, params_by_client, shared_params


def shares_in_mean(done: Aggregated, inputs: StepInputs) -> Mapping[str, float]:
    """The share of every client in the mean of the adapters that a step has made; empty where it has made none."""
    if inputs.shares is not None:
        return inputs.shares
    row = done.rows["adapters"][[0]][0] if any(inputs.present) else []  # everyone's is the same
    return dict(zip(inputs.federation.clients, row))


class FedAvgOfOthers(Averaging):
    """The weighted mean of all, of which everyone learns its own share, to take itself out; heads inside their task."""

    name = "fedavg_of_others"
    not_a_sum = ""

    def complete(self, done: Aggregated, inputs: StepInputs) -> Aggregated:
        """The step with the share s_k of every client; those of before where there is no new mean."""
        shares = shares_in_mean(done, inputs)
        if not shares:
            return done
        state = {client: {SHARE: torch.tensor(float(share))} for client, share in shares.items()}
        return replace(done, server_state={SHARE: state})


class PersonalAdapters(FedDpa):
    """`--personal-models` with `--second-model stacked`: what the server mixes stands frozen beside the own adapter."""

    tells_share = True

    def own_training(self, round: RoundStart) -> None:
        """None: the model of its own is the one that trains."""

    def _companions(self, round: RoundStart) -> ByClient:
        """The shared part of the last aggregation, with each client's share in it where the method knows that."""
        means = {name: shared_params(mean, self.options.share) for name, mean in round.server_models.items()}
        shares = params_by_client(round.server_state, SHARE)
        return {name: {**mean, **shares.get(name, {})} for name, mean in means.items()}

    def send(self, round: RoundStart) -> TreesByClient:
        """The mixture of the last aggregation as companion."""
        return {"companion": self._companions(round)}

    def keep(self, round: RoundStart) -> TreesByClient:
        """The gates."""
        return {"gate": self.gates(round, {name: round.client_models[name] for name in round.clients})}

    def predict(self, round: RoundStart) -> ByClient:
        """A client's own model, stacked on the mixture."""
        return self.together(round, own=round.client_models, shared=self._companions(round))
