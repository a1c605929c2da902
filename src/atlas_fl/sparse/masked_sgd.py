"""SGD with momentum under a mask: only the weights that the mask keeps move.

    d <- m (g + decay theta),   b <- momentum b + (1 - dampening) d   (b <- d at first),
    theta <- theta - lr (d + momentum b  with Nesterov, b without)

Where few weights are kept, they are gathered, updated in a compact tensor and written back, and the momentum buffer has
only them. Otherwise gradients are +0.0 where a weight is frozen, even if they are NaN, and theta + 0.0 has the bits of
theta. Parameters that move as a whole are torch's.

`extract_momentum` and `load_momentum` carry the momentum from one round's optimizer to the next. Under a mask the
momentum of a frozen weight is +0.0 or not stored. So only that of kept weights is handed over, in the order of their
positions, and with zeros elsewhere the buffer is the same to the last bit.

`restore_frozen` keeps frozen weights bit for bit in the server's step. All clients have the same ones, so their mean
equals them; but in floating point a weighted sum of equal numbers may differ in the last bit, and then the two ends of
a connection that sends kept values alone would disagree.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from atlas_fl.params import ByClient, Params
from atlas_fl.sparse.masks import Mask, check_mask


def restore_frozen(aggregated: ByClient, before: ByClient, mask: Mask) -> dict[str, Params]:
    """The mixed models, with those weights that the mask freezes as each client held them.

    Clients that share a tensor before and after go on sharing it.
    """
    restored: dict[tuple[int, int], Tensor] = {}

    def restore(key: str, new: Tensor, old: Tensor) -> Tensor:
        if (id(new), id(old)) not in restored:
            restored[id(new), id(old)] = old if new is old else new.where(mask[key].to(new.device), old)
        return restored[id(new), id(old)]

    return {
        name: {key: restore(key, tensor, before[name][key]) for key, tensor in params.items()}
        for name, params in aggregated.items()
    }


FEW = 0.25
"""Up to this share of kept weights, gathering them is faster than passing over all."""

BUFFER = "momentum_buffer"


class SparseSGDM(torch.optim.SGD):
    """torch's SGD under a mask, for named parameters and with its settings; schedulers and scalers work as usual.

    `masks` has a bool tensor for every parameter. Frozen weights keep every bit, whatever the decay, the momentum or
    their gradients. Raises `ModelError` where the masks do not fit the parameters.
    """

    def __init__(self, named: Mapping[str, Tensor], *, masks: Mask, **settings: Any) -> None:
        check_mask(masks, named)
        self._masks = {leaf: masks[name].to(leaf.device) for name, leaf in named.items() if not masks[name].all()}
        # of parameters whose momentum is that of their kept weights alone, (kept,)
        self.indices = {
            leaf: mask.flatten().nonzero()[:, 0]
            for leaf, mask in self._masks.items()
            if int(torch.count_nonzero(mask)) <= FEW * mask.numel() and leaf.is_contiguous()
        }
        super().__init__(list(named.values()), **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the kept weights that have a gradient; what the closure returns, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = {leaf: leaf.grad for leaf in self._masks if leaf.grad is not None}
        for group in self.param_groups:
            for leaf in (leaf for leaf in group["params"] if leaf in gradients):
                self._step_masked(leaf, gradients[leaf], group)
                leaf.grad = None
        super().step()
        for leaf, gradient in gradients.items():
            leaf.grad = gradient
        return loss

    def _step_masked(self, leaf: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        index, decay = self.indices.get(leaf), group["weight_decay"]
        if index is None:
            values = leaf.contiguous()
            gradient = gradient.add(leaf, alpha=decay) if decay else gradient
            gradient = gradient.masked_fill(~self._masks[leaf], 0.0).contiguous()
            decay = 0.0
        else:
            # Of the ways to gather and to put back, these two use every thread, and torch has them deterministic.
            values, gradient = leaf.take(index), gradient.take(index)
        buffers, is_first = [], BUFFER not in self.state[leaf]
        if group["momentum"] != 0:
            buffers = [self.state[leaf].setdefault(BUFFER, torch.empty_like(gradient))]
        torch._fused_sgd_(
            [values],
            [gradient],
            buffers,
            weight_decay=decay,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=False,
            is_first_step=is_first,
        )
        if index is None:
            leaf.copy_(values)
        else:
            leaf.view(-1).index_copy_(0, index, values)


def extract_momentum(optimizer: torch.optim.Optimizer, named: Params, *, masks: Mask | None) -> dict[str, Tensor]:
    """Every parameter's buffer by name, on the CPU; under a mask its kept values alone, (kept,).

    There is none of a parameter that has not moved, or of which no weight is kept.
    """
    buffers = {}
    for name, parameter in named.items():
        buffer = optimizer.state.get(parameter, {}).get(BUFFER)
        if buffer is None or (masks is not None and not masks[name].any()):
            continue
        if masks is not None and not _is_gathered(optimizer, parameter):
            buffer = buffer[masks[name].to(buffer.device)]
        buffers[name] = buffer.detach().cpu()
    return buffers


def load_momentum(optimizer: torch.optim.Optimizer, named: Params, momentum: Params, *, masks: Mask | None) -> None:
    """Let the optimizer go on with this momentum, which `extract_momentum` gave of one like it; others begin anew."""
    for name, values in momentum.items():
        parameter = named[name]
        buffer = values.to(parameter.device, copy=True)  # it moves in place, and the round may have to be repeated
        if masks is not None and not _is_gathered(optimizer, parameter):
            buffer = torch.zeros_like(parameter, requires_grad=False)
            buffer[masks[name].to(parameter.device)] = values.to(parameter.device)
        optimizer.state[parameter][BUFFER] = buffer


def _is_gathered(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    return isinstance(optimizer, SparseSGDM) and parameter in optimizer.indices
