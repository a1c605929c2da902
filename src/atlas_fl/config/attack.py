"""The settings of simulated hostile clients."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AttackConfig:
    """Hostile clients, in simulations alone: what they do, and what they do not harm under a robust rule."""

    attack: Literal["none", "label_flip", "sign_flip", "scale", "model_replacement", "noise"] = "none"
    """What the attackers do: train on reversed labels, send their change reversed, times 30, or with noise of 10 times
    its size, or replace the average by a random model."""
    attackers: tuple[str, ...] = ()
    """Who attacks: clients by name, or a number of them, drawn by the seed; their scores are left out of `honest` in
    summary.json."""
    attack_scale: float | None = None
    """Size of the attack in the place of its own: 1 of `sign_flip`, 30 of `scale`, 10 of `noise`, and what outweighs
    all others of `model_replacement`."""
