"""Models of one's own, pulled to a mixture of all: MR-MTL, and the part that FedAMP shares with it.

    w_k <- argmin F_k(w) + mu / 2 || w - wbar_k ||^2          wbar_k what the server has mixed (`--proximal-mu`)

A client goes on with its own model, and what the server mixes is sent as the anchor of its pull (under `--second-model
stacked` it is a frozen adapter: `methods.fedalt`). Liu, Hu, Wu and Smith 2022, "On privacy and personalization in
cross-silo federated learning", arXiv:2206.07902; Evgeniou and Pontil 2004.
"""

from atlas_fl.methods.method import RoundStart
from atlas_fl.methods.second_model import SecondModel
from atlas_fl.params import TreesByClient


class PersonalModels(SecondModel):
    """`--personal-models`: the server's mixture goes beside a client's own model."""

    role = "anchor"

    def own_training(self, round: RoundStart) -> None:
        """None: the model of its own is the one that trains."""

    def send(self, round: RoundStart) -> TreesByClient:
        """The mixture of the last aggregation as anchor."""
        return {"anchor": round.server_models}
