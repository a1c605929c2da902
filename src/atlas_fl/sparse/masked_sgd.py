"""SGD with momentum under a mask: only the weights that the mask keeps move.

    d <- m (g + decay theta),   b <- momentum b + (1 - dampening) d   (b <- d at first),
    theta <- theta - lr (d + momentum b  with Nesterov, b without)

There are two ways to one result. Where few weights are kept, they are gathered, updated in a compact tensor and written
back, and the momentum buffer has only them. Otherwise gradients are masked bit by bit, which leaves +0.0 where a weight
is frozen even if its gradient is NaN, and theta + 0.0 has the bits of theta. A mask of ones does what torch.optim.SGD
does, in its order.

`extract_momentum` and `load_momentum` carry the momentum from one round's optimizer to the next. Under a mask the
momentum of a frozen weight is +0.0 or not stored. So only that of kept weights is handed over, in the order of their
positions, and with zeros elsewhere the buffer is the same to the last bit.

`restore_frozen` keeps frozen weights bit for bit in the server's step. All clients have the same ones, so their mean
equals them; but in floating point a weighted sum of equal numbers may differ in the last bit, and then the two ends of
a connection that sends kept values alone would disagree.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atlas_fl.errors import CheckpointError, ConfigError, ModelError
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

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class _UpdateMode:
    """Way to step the weights of one parameter: some of them, all under bits, or all."""

    index: Tensor | None = None
    bits: Tensor | None = None


def _update_mode(parameter: Tensor, mask: Tensor) -> _UpdateMode:
    num_kept = int(torch.count_nonzero(mask))
    if num_kept == mask.numel():
        return _UpdateMode()
    mask = mask.to(parameter.device)
    if num_kept <= FEW * mask.numel() and parameter.is_contiguous():
        return _UpdateMode(index=mask.flatten().nonzero()[:, 0])
    return _UpdateMode(bits=-mask.to(_INTEGERS[parameter.element_size()]))  # all bits where a weight is kept


class SparseSGDM(torch.optim.Optimizer):
    """SGD with momentum under a mask, for named parameters; schedulers, gradient scalers and state dicts work as usual.

    `masks` has a bool tensor for every parameter: one without is an error, not a weight that moves freely. Frozen
    weights keep every bit, whatever the decay, the momentum or their gradients. With a mask of ones every step is that
    of torch.optim.SGD, to the last bit.

    Raises:
        ConfigError: a number out of range.
        ModelError: the masks do not fit the parameters.
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        *,
        masks: Mask,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        for word, number in numbers.items():
            if not number >= 0:
                raise ConfigError(f"{word} is {number}; it must be 0 or above")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ConfigError(f"Nesterov needs momentum above 0 and no dampening; they are {momentum} and {dampening}")
        check_mask(masks, named)
        self._modes = {parameter: _update_mode(parameter, masks[name]) for name, parameter in named.items()}
        self._names = {parameter: name for name, parameter in named.items()}
        super().__init__(list(named.values()), numbers | {"dampening": dampening, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the kept weights that have a gradient; what the closure returns, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_parameter(parameter, group)
        return loss

    def is_gathered(self, parameter: Tensor) -> bool:
        """Return whether this parameter's momentum is that of its kept weights alone, (kept,)."""
        return self._mode_of(parameter).index is not None

    def _update_parameter(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        mode, gradient, decay = self._mode_of(parameter), parameter.grad, group["weight_decay"]
        assert gradient is not None
        if mode.index is not None:
            # Of the ways to gather and to put back, these two use every thread, and torch has them deterministic.
            values = parameter.take(mode.index)
            self._fused_step(parameter, values, gradient.take(mode.index), group, decay)
            parameter.view(-1).index_copy_(0, mode.index, values)
            return
        if mode.bits is not None:
            gradient = gradient.add(parameter, alpha=decay) if decay else gradient.clone()
            gradient.view(mode.bits.dtype).bitwise_and_(mode.bits)
            decay = 0.0
            if parameter.is_contiguous():  # the fused kernel knows no strides
                self._fused_step(parameter, parameter, gradient.contiguous(), group, decay)
                return
        if decay:
            gradient = gradient.add(parameter, alpha=decay)
        if group["momentum"] != 0:
            buffer, first = self._buffer(parameter, gradient)
            if first:
                buffer.copy_(gradient)
            else:
                buffer.mul_(group["momentum"]).add_(gradient, alpha=1 - group["dampening"])
            gradient = gradient.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        parameter.add_(gradient, alpha=-group["lr"])

    def _fused_step(
        self, parameter: Tensor, value: Tensor, gradient: Tensor, group: Mapping[str, Any], decay: float
    ) -> None:
        """A step of this parameter's values in one pass, as in torch.optim.SGD(fused=True), to make up for the mask."""
        buffer, first = self._buffer(parameter, gradient) if group["momentum"] != 0 else (None, False)
        torch._fused_sgd_(
            [value],
            [gradient],
            [] if buffer is None else [buffer],
            weight_decay=decay,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=False,
            is_first_step=first,
        )

    def _mode_of(self, parameter: Tensor) -> _UpdateMode:
        if parameter not in self._modes:
            raise ModelError(f"a parameter of shape {tuple(parameter.shape)} has no mask; give one for each parameter")
        return self._modes[parameter]

    def _buffer(self, parameter: Tensor, gradient: Tensor) -> tuple[Tensor, bool]:
        """The buffer, and whether it is new and holds nothing yet."""
        state = self.state[parameter]
        first = BUFFER not in state
        if first:
            state[BUFFER] = torch.empty_like(gradient)
        buffer: Tensor = state[BUFFER]
        if buffer.shape != gradient.shape:
            raise CheckpointError(
                f"the momentum of {self._names[parameter]!r} has {buffer.numel()} values, its mask keeps "
                f"{gradient.numel()}; load it with the mask that it was saved with"
            )
        return buffer, first


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
    return isinstance(optimizer, SparseSGDM) and optimizer.is_gathered(parameter)
