"""The momentum of SGD between two rounds: taken out of one optimizer, and put into the next.

Under a mask a frozen weight's momentum is +0.0 or not held at all (`sparse.optimizer`). So only that of kept weights is
handed over, in the order of their places, and with zeros in the others the buffer is the same to the last bit.
"""

import torch
from torch import Tensor

from atlas_fl.sparse.choose import Mask
from atlas_fl.sparse.optimizer import BUFFER, SparseSGDM
from atlas_fl.types import Params


def momentum_of(optimizer: torch.optim.Optimizer, named: Params, *, masks: Mask | None) -> dict[str, Tensor]:
    """Every parameter's buffer by name, on the CPU; under a mask its kept values alone, (kept,).

    There is none of a parameter that has not moved, or of which no weight is kept.
    """
    found = {}
    for name, parameter in named.items():
        buffer = optimizer.state.get(parameter, {}).get(BUFFER)
        if buffer is None or (masks is not None and not masks[name].any()):
            continue
        if masks is not None and not _is_gathered(optimizer, parameter):
            buffer = buffer[masks[name].to(buffer.device)]
        found[name] = buffer.detach().cpu()
    return found


def put_momentum(optimizer: torch.optim.Optimizer, named: Params, held: Params, *, masks: Mask | None) -> None:
    """Let the optimizer go on with this momentum, which `momentum_of` gave of one like it; others begin anew."""
    for name, values in held.items():
        parameter = named[name]
        buffer = values.to(parameter.device, copy=True)  # it moves in place, and the round may have to be repeated
        if masks is not None and not _is_gathered(optimizer, parameter):
            buffer = torch.zeros_like(parameter, requires_grad=False)
            buffer[masks[name].to(parameter.device)] = values.to(parameter.device)
        optimizer.state[parameter][BUFFER] = buffer


def _is_gathered(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    return isinstance(optimizer, SparseSGDM) and optimizer.is_gathered(parameter)
