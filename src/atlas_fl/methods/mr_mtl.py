"""Models of one's own, pulled to a mixture of all: MR-MTL, and the part that FedAMP and FedALT share with it.

    w_k <- argmin F_k(w) + mu / 2 || w - wbar_k ||^2          wbar_k what the server has mixed (`--proximal-mu`)

A client goes on with its own model, and what the server mixes is sent as the anchor of its pull, or under
`--second-model stacked` as a frozen adapter beside its own. Liu, Hu, Wu and Smith 2022, "On privacy and personalization
in cross-silo federated learning", arXiv:2206.07902; Evgeniou and Pontil 2004.
"""

from atlas_fl.methods.feddpa import FedDpa
from atlas_fl.methods.method import RoundStart
from atlas_fl.methods.second_model import gates
from atlas_fl.params import ByClient, TreesByClient


class PersonalModels(FedDpa):
    """`--personal-models`: the server's mixture goes beside a client's own model."""

    role = "anchor"

    @property
    def _is_stacked(self) -> bool:
        return self.options.second_model == "stacked"

    def own_training(self, round: RoundStart) -> None:
        """None: the model of its own is the one that trains."""

    def send(self, round: RoundStart) -> TreesByClient:
        """The mixture of the last aggregation, as anchor or as companion."""
        return {"companion" if self._is_stacked else "anchor": round.server_models}

    def keep(self, round: RoundStart) -> TreesByClient:
        """The gates."""
        models = {name: round.client_models[name] for name in round.clients}
        return {"gate": gates(round, models, self.second_gate)}

    def predict(self, round: RoundStart) -> ByClient:
        """A client's own model, stacked on the mixture where it is its companion."""
        if not self._is_stacked:
            return {}
        return self.together(round, own=round.client_models, shared=round.server_models)
