"""Ditto: FedAvg, and every client's own model pulled to the shared one.

    v_k <- argmin F_k(v) + lambda / 2 || v - w ||^2          w the shared model as it was sent (`--second-weight`)

Li, Hu, Beirami and Smith 2021, "Ditto: Fair and robust federated learning through personalization", arXiv:2012.04221.
"""

from atlas_fl.methods.second_model import SecondModel


class Ditto(SecondModel):
    """An own model v, trained with the pull lambda / 2 || v - w ||^2."""

    kind = "proximal"
    role = "anchor"
