"""Diagonal Fisher information: how sensitive a model's predictions are to each weight.

    F_j = E_x E_{y ~ p(y|x)} (d log p(y|x) / d theta_j)^2

The square stands inside the mean over examples, so that every example has a backward pass of its own. The square of a
batch's mean gradient is another number, mu^2 + sigma^2 / B, and ranks weights differently. With `targets` y is the
label of the data: the empirical Fisher information, which does not approximate the first (Kunstner, Balles and Hennig
2019).
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from atlas_fl.errors import DataError
from atlas_fl.params import Params
from atlas_fl.rng import Seed, generator
from atlas_fl.sparse.masks import select_params

LogitsFn: TypeAlias = Callable[[Params, Tensor], Tensor]
"""(all weights, inputs (1, ...)) -> logits (1, classes)."""


def fisher_scores(
    logits: LogitsFn,
    params: Params,
    *,
    names: Iterable[str],
    inputs: Tensor,
    targets: Tensor | None = None,
    seed: Seed = 0,
) -> dict[str, Tensor]:
    """The Fisher information of the parameters `names`, n F_j: summed over the examples in `inputs`, (n, ...).

    Sums of several clients add up. Labels are the `targets` (n,), or drawn from the model by a stream of each example's
    own, `(seed, position)`.

    Raises:
        DataError: there is not one target for each example.
        ModelError: the model has no parameter of that name.
    """
    if targets is not None and targets.shape != (len(inputs),):
        raise DataError(f"each of {len(inputs)} examples needs one target, and there are {tuple(targets.shape)}")
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in sorted(select_params(params, names).items())}
    sums = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in leaves.items()}
    draws = label_uniforms(seed, len(inputs))
    for index, uniform in enumerate(draws):
        with torch.enable_grad():
            class_logits = logits({**params, **leaves}, inputs[index : index + 1])[0]
            label = draw_label(class_logits, uniform) if targets is None else targets[index]
            log_prob = class_logits.log_softmax(-1)[int(label)]
        for name, gradient in zip(leaves, torch.autograd.grad(log_prob, list(leaves.values())), strict=True):
            sums[name] += gradient.double().square()
    return {name: total.to(params[name].dtype) for name, total in sums.items()}


def label_uniforms(seed: Seed, count: int) -> Float64[np.ndarray, " examples"]:
    """A number in [0, 1) for each example, which settles its label."""
    return np.array([generator(seed, "label", example).random() for example in range(count)], np.float64)


def draw_label(logits: Tensor, uniform: float) -> int:
    """The class at which the cumulated probability passes the uniform number; logits (classes,)."""
    reached = logits.detach().double().softmax(-1).cumsum(-1) <= uniform
    return min(int(reached.sum()), len(logits) - 1)  # rounding may end the sum below one
