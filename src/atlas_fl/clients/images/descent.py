"""How whole weights move: SGD under a mask or without one, from a loss that is scaled where gradients are fp16.

A step whose scaled gradients overflow is left out and halves the scale; many in a row without one double it
(Micikevicius et al. 2018, arXiv:1710.03740).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atlas_fl.clients.member import LOSS_SCALE
from atlas_fl.sparse.choose import Mask
from atlas_fl.sparse.momentum import put_momentum
from atlas_fl.sparse.optimizer import SparseSGDM
from atlas_fl.types import Params

GROWTH_STEPS = 100
"""Steps without overflow after which the scale doubles: fewer than the 2,000 of torch, because every round begins with
a fresh one."""


def sgd(
    leaves: Params,
    *,
    lr: float,
    masks: Mask | None,
    held: Params,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    scaled: bool,
) -> torch.optim.Optimizer:
    """The optimizer of these weights, which goes on with the momentum that is held of them.

    `scaled` says that a loss scale may leave steps out. The fused kernel gives the bits of the others in half the time,
    but after a first step that was left out it goes on with momentum that nobody wrote (torch 2.13).
    """
    settings: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    optimizer: torch.optim.Optimizer
    if masks is None:
        optimizer = torch.optim.SGD(list(leaves.values()), lr=lr, fused=not scaled, foreach=scaled, **settings)
    else:
        optimizer = SparseSGDM(leaves, masks=masks, lr=lr, **settings)
    put_momentum(optimizer, leaves, held, masks=masks)
    return optimizer


def loss_scaler(device: torch.device, *, enabled: bool) -> torch.amp.GradScaler:
    """The loss scale of one client in one round; one that is not enabled does nothing."""
    return torch.amp.GradScaler(device.type, init_scale=LOSS_SCALE, growth_interval=GROWTH_STEPS, enabled=enabled)


@dataclass(kw_only=True)
class Descent:
    """What moves one client's weights in one round."""

    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    clip: float
    """Largest norm of the gradient; 0 for any."""
    skipped: int = 0
    """Steps that were left out."""

    def move(self, loss: Tensor, leaves: Sequence[Tensor]) -> None:
        """A step down the gradient of this loss, where it is finite."""
        scale = self.scaler.get_scale()
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.unscale_(self.optimizer)
        if self.clip > 0:
            torch.nn.utils.clip_grad_norm_(leaves, self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < scale
        self.optimizer.zero_grad(set_to_none=True)
