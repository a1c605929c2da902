"""SGD with momentum under a mask: only the weights that the mask keeps move.

    d <- g + decay theta,   b <- momentum b + (1 - dampening) d   (b <- d at first),
    theta <- theta - lr m (d + momentum b  with Nesterov, b without)

`freeze` puts back what the mask m freezes, bit for bit, behind every step of an optimizer of torch. There no weight's
step depends on another weight, so the kept ones move as they do where everything moves.

`extract_momentum` and `load_momentum` carry the momentum from one round's optimizer to the next: under a mask that of
kept weights alone, in the order of their positions. That of the others moves nothing.

`restore_frozen` keeps frozen weights bit for bit in the server's step. All clients have the same ones, so their mean
equals them; but in floating point a weighted sum of equal numbers may differ in the last bit, and then the two ends of
a connection that sends kept values alone would disagree.
"""

from collections.abc import Mapping
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


BUFFER = "momentum_buffer"


def freeze(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], masks: Mask) -> None:
    """Let the optimizer move only what the masks keep: after each of its steps the others have their bits of now.

    Raises `ModelError` where the masks do not fit the parameters.
    """
    check_mask(masks, named)
    kept = {leaf: masks[name].to(leaf.device) for name, leaf in named.items() if not masks[name].all()}
    frozen = {leaf: leaf.detach().clone() for leaf in kept}

    @torch.no_grad()
    def put_back(*_: Any) -> None:
        for leaf, values in frozen.items():
            if leaf.grad is not None:
                torch.where(kept[leaf], leaf, values, out=leaf)

    optimizer.register_step_post_hook(put_back)


class SparseSGDM(torch.optim.SGD):
    """torch's SGD under a mask, for named parameters and with its settings; schedulers and scalers work as usual.

    `masks` has a bool tensor for every parameter. Frozen weights keep every bit, whatever the decay, the momentum or
    their gradients. Raises `ModelError` where the masks do not fit the parameters.
    """

    def __init__(self, named: Mapping[str, Tensor], *, masks: Mask, **settings: Any) -> None:
        check_mask(masks, named)
        # what is frozen as a whole has no momentum, and a fused step takes that of all its parameters or of none
        super().__init__([{"params": [leaf for name, leaf in named.items() if masks[name].any()]}], **settings)
        freeze(self, named, masks)


def extract_momentum(optimizer: torch.optim.Optimizer, named: Params, *, masks: Mask | None) -> dict[str, Tensor]:
    """Every parameter's buffer by name, on the CPU; under a mask its kept values alone, (kept,).

    There is none of a parameter that has not moved, or of which no weight is kept.
    """
    buffers = {}
    for name, parameter in named.items():
        buffer = optimizer.state.get(parameter, {}).get(BUFFER)
        if buffer is None or (masks is not None and not masks[name].any()):
            continue
        if masks is not None:
            buffer = buffer[masks[name].to(buffer.device)]
        buffers[name] = buffer.detach().cpu()
    return buffers


def load_momentum(optimizer: torch.optim.Optimizer, named: Params, momentum: Params, *, masks: Mask | None) -> None:
    """Let the optimizer go on with this momentum, which `extract_momentum` gave of one like it; others begin anew."""
    for name, values in momentum.items():
        parameter = named[name]
        buffer = values.to(parameter.device, copy=True)  # it moves in place, and the round may have to be repeated
        if masks is not None:
            buffer = torch.zeros_like(parameter, requires_grad=False)
            buffer[masks[name].to(parameter.device)] = values.to(parameter.device)
        optimizer.state[parameter][BUFFER] = buffer
