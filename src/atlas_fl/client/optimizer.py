"""The optimizer step of a client: clip, FedProx and other client-side terms, mask, AdamW or SGD, as a chain.

    unscale -> clip -> client terms -> mask -> AdamW | SGD (momentum, Nesterov)

`gradient_chain` is all up to the terms; `make_optimizer` is the mask and the optimizer. The two are apart because
clients that share adapters average their gradients in between (`client.local_training`). Packs of adapters, whole
models and both sides of a cut model take their steps here.

A term is what a federated algorithm adds to the objective of a client, as a function from a tensor's name and value to
a gradient. `TERMS` is where an algorithm registers one; every client that trains adds all of them. Terms act behind
clipping: they are not data, and of a cut model each side adds its own part without a message.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from atlas_fl.client.options import TrainOptions
from atlas_fl.errors import ConfigError
from atlas_fl.params import LORA_B, Params
from atlas_fl.sparse.masked_sgd import SparseSGDM, freeze
from atlas_fl.sparse.masks import Mask

Term: TypeAlias = Callable[[str, Tensor], Tensor]
"""(name, value of a parameter) -> the gradient of the term there, of its shape, which is added to that of the loss."""


TermOf: TypeAlias = Callable[[TrainOptions, Params], Term | None]
"""(options, the anchor, by default the model at the start of the round) -> the term; None where it is switched off.

The seed of the options is of this client and round.
"""


def fedprox(options: TrainOptions, anchor: Params) -> Term | None:
    """FedProx: the gradient mu (w - w_start) of `mu / 2 ||w - w_start||^2` (Li et al. 2020, arXiv:1812.06127).

    With an anchor of its own in the place of w_start it is the term of MR-MTL (Liu et al. 2022, arXiv:2206.07902).
    """
    mu = options.proximal_mu
    return None if mu == 0 else lambda name, value: mu * (value - anchor[name])


def apart_from(frozen: Params, *, weight: float) -> Term:
    """HiLoRA: the gradient 2 gamma U U^T B of `gamma ||U^T B||_F^2`, U the columns of the frozen B at length 1."""
    spans = {key: torch.nn.functional.normalize(b, dim=0) for key, b in frozen.items() if key.endswith(LORA_B)}
    return lambda name, value: (
        2 * weight * spans[name] @ (spans[name].T @ value) if name in spans else torch.zeros_like(value)
    )


TERMS: dict[str, TermOf] = {"fedprox": fedprox}
"""Every term by the name of its algorithm. One of a plug-in acts wherever the plug-in is named."""


def client_terms(options: TrainOptions, leaves: Params, anchor: Params = MappingProxyType({})) -> list[Term]:
    """The terms that these options switch on, around this anchor, or where it says nothing around the leaves as now.

    The values are copied only where there is a term.
    """
    if not any(term_of(options, leaves) for term_of in TERMS.values()):
        return []
    start = {name: anchor.get(name, leaf).detach().to(leaf.device, copy=True) for name, leaf in leaves.items()}
    terms = (term_of(options, start) for term_of in TERMS.values())
    return [term for term in terms if term is not None]


LOSS_SCALE = 2.0**10
"""First scale of a client's loss under fp16, which ends at 65504 and has 6e-5 as its least normal number
(Micikevicius et al. 2018). Less than is usual, because a round has few steps and each overflow costs one."""
GROWTH_STEPS = 100
"""Steps without overflow after which the scale of a whole model's loss doubles: fewer than the 2,000 of torch, because
every round begins with a fresh one."""


Transform: TypeAlias = Callable[[Params, Tensor | None], bool]
"""(leaves, norms) -> whether the step is taken. It changes the gradients of the leaves in place.

`norms` are those of all gradients, as scaled as these, of a model of which the leaves are only one side; None where
they are the whole.
"""


class LossScale:
    """The scale of one client's loss in one round, for gradients in fp16; 1 where it is not enabled.

    A step whose gradients overflow is left out and halves the scale. With `grows`, `GROWTH_STEPS` steps in a row
    without overflow double it (Micikevicius et al. 2018, arXiv:1710.03740). Scales are powers of two, so they change no
    digit of what neither overflows nor vanishes.
    """

    def __init__(self, *, enabled: bool, grows: bool = False) -> None:
        self.value = LOSS_SCALE if enabled else 1.0
        self.skipped = 0
        """Steps that were left out."""
        self._enabled, self._grows, self._sound_steps = enabled, grows, 0

    def unscale(self, leaves: Params, norms: Tensor | None = None) -> bool:
        """Divide the gradients by the scale; False where one of them, or of these norms of others, is not finite."""
        if not self._enabled:
            return True
        gradients = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
        for gradient in gradients:
            gradient.div_(self.value)
        if not all(bool(one.isfinite().all()) for one in (*gradients, *([] if norms is None else [norms]))):
            self.value, self.skipped, self._sound_steps = self.value / 2, self.skipped + 1, 0
            return False
        self._sound_steps += 1
        if self._grows and self._sound_steps == GROWTH_STEPS:
            self.value, self._sound_steps = 2 * self.value, 0
        return True


def gradient_norms(leaves: Params) -> Tensor:
    """The norm of every gradient, (leaves,) float32, in the order of the leaves."""
    gradients = [leaf.grad for leaf in leaves.values() if leaf.grad is not None]
    return torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(0)


class GradientMean:
    """The mean of a client's gradients over the steps of a round, as they are before its terms: SCAFFOLD's control."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._steps = 0

    def add(self, leaves: Params) -> None:
        """Count the gradients of a step."""
        self._steps += 1
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                gradient = leaf.grad.detach().float()
                self._sums[name] = self._sums[name] + gradient if name in self._sums else gradient.clone()

    def mean(self) -> dict[str, Tensor]:
        """The mean by parameter, float32 on the CPU; empty without steps."""
        return {name: (total / self._steps).cpu() for name, total in self._sums.items()}


def gradient_chain(
    leaves: Params,
    options: TrainOptions,
    scale: LossScale,
    *,
    anchor: Params = MappingProxyType({}),
    correction: Params = MappingProxyType({}),
    frozen: Params = MappingProxyType({}),
    mean: GradientMean | None = None,
) -> Transform:
    """unscale -> clip -> client terms, for a round that begins with the leaves as they are now.

    `mean` is told the gradients behind clipping; the `correction` is added to them. `frozen` is what stands beside the
    leaves.
    """
    constants = {name: value.to(leaves[name]) for name, value in correction.items() if name in leaves}
    terms = client_terms(options, leaves, anchor)
    if options.orthogonality and frozen:
        terms.append(apart_from(frozen, weight=options.orthogonality))

    def transform(leaves: Params, norms: Tensor | None) -> bool:
        if norms is not None:
            norms = norms / scale.value
        if not scale.unscale(leaves, norms):
            return False
        if options.clip > 0:
            norms = gradient_norms(leaves) if norms is None else norms
            torch.nn.utils.clip_grads_with_norm_(list(leaves.values()), options.clip, torch.linalg.vector_norm(norms))
        if mean is not None:
            mean.add(leaves)
        for term in terms:
            _add_term(term, leaves)
        for name, constant in constants.items():
            gradient = leaves[name].grad
            if gradient is not None:
                gradient.add_(constant)
        return True

    return transform


def _add_term(term: Term, leaves: Params) -> None:
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            gradient = term(name, leaf.detach())
            if not isinstance(gradient, Tensor):
                raise ConfigError(
                    f"a client term gave {type(gradient).__name__} for {name}; it must return a tensor of its shape"
                )
            leaf.grad.add_(gradient)


def make_optimizer(
    leaves: Params, options: TrainOptions, *, masks: Mask | None = None, skips: bool = False
) -> torch.optim.Optimizer:
    """mask -> AdamW or SGD, for these leaves by name, which may be none. What the mask freezes keeps every bit.

    `skips` says that a loss scale may leave steps out.
    """
    parameters = [{"params": list(leaves.values())}]
    if options.optimizer == "adamw":
        fuses = all(leaf.device.type in ("cpu", "cuda") for leaf in leaves.values())
        adamw = torch.optim.AdamW(
            parameters, lr=options.lr, weight_decay=options.weight_decay, fused=fuses or None, foreach=None
        )
        if masks is not None:
            freeze(adamw, leaves, masks)
        return adamw
    # The fused kernel gives the bits of the others in half the time, but after a first step that was left out it goes
    # on with momentum that nobody wrote (torch 2.13).
    settings: dict[str, Any] = {
        "lr": options.lr,
        "momentum": options.momentum,
        "nesterov": options.nesterov,
        "weight_decay": options.weight_decay,
        "fused": not skips,
        "foreach": skips,
    }
    if masks is not None:
        return SparseSGDM(leaves, masks=masks, **settings)
    return torch.optim.SGD(parameters, **settings)
