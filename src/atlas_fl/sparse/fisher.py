"""How sensitive a model's predictions are to each weight: the diagonal of its Fisher information, per example.

    F_j = E_x E_{y ~ p(y|x)} (d log p(y|x) / d theta_j)^2

The square stands inside the mean. The square of a batch's mean gradient is another number, mu^2 + sigma^2 / B, and
ranks weights otherwise. With `labels="true"` y is the label of the data: the empirical Fisher information, which is not
an approximation of the first (Kunstner, Balles and Hennig 2019).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.func import functional_call

from atlas_fl.errors import BudgetError, ConfigError, DataError
from atlas_fl.rng import generator
from atlas_fl.sparse.choose import chosen_of
from atlas_fl.sparse.squares import Layout, OfExample, add_squares, look
from atlas_fl.types import Params

Logits: TypeAlias = Callable[[Params, Tensor], Tensor]
"""(all weights, inputs (n, ...)) -> logits (n, classes); examples may not influence each other."""

MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, eq=False)
class Fisher:
    """Sums over examples of squared gradients, so that those of several clients add up."""

    sums: Params
    examples: int

    @property
    def mean(self) -> dict[str, Tensor]:
        """F_j: the sums over the number of examples."""
        return {name: tensor / self.examples for name, tensor in self.sums.items()}


def total(parts: Iterable[Fisher]) -> Fisher:
    """The Fisher information over the examples of all parts together, in float64 in the order of the parts."""
    parts = list(parts)
    if not parts or any(part.sums.keys() != parts[0].sums.keys() for part in parts):
        raise ConfigError(f"{len(parts)} Fisher informations do not add up; take one or more of the same parameters")
    sums = {
        name: torch.stack([part.sums[name].double() for part in parts]).sum(0).to(tensor.dtype)
        for name, tensor in parts[0].sums.items()
    }
    return Fisher(sums=sums, examples=sum(part.examples for part in parts))


def fisher(
    logits: Logits,
    params: Params,
    *,
    names: Iterable[str],
    inputs: Tensor,
    labels: Literal["sampled", "true"] = "sampled",
    targets: Tensor | None = None,
    seed: int = 0,
    ids: Sequence[int] | None = None,
    memory_bytes: int = MEMORY_BYTES,
    method: Literal["layers", "examples"] = "layers",
) -> Fisher:
    """The summed Fisher information of the parameters `names` over the examples in `inputs`, (n, ...).

    Labels are drawn from the model by a stream of each example's own, `(seed, id)`; `ids` are 0, 1, ... unless given,
    so that parts of a data set get what the whole gets. The examples are computed in chunks that take about
    `memory_bytes` beside the model and twice its size for sums. Chunks change rounding alone.
    `method="examples"` forms the gradient of every example: slow, and the reference.

    Raises:
        BudgetError: not even one example fits into `memory_bytes`.
        DataError: true labels are wanted and not given, or not one for each example.
        ModelError: the model has no parameter of that name.
    """
    chosen = sorted(chosen_of(params, names))
    own = {name: tensor.detach() for name, tensor in params.items()}
    draws, of_example = _draws(logits, len(inputs), labels=labels, targets=targets, seed=seed, ids=ids)
    draws = draws.to(inputs.device)
    sums = {name: torch.zeros(own[name].shape, dtype=torch.float64, device=own[name].device) for name in chosen}
    if len(inputs):
        layout = _layout(of_example, own, chosen, inputs=inputs, draws=draws, method=method)
        size = chunk_size(layout.bytes_per_example, memory_bytes)
        for start in range(0, len(inputs), size):
            part = slice(start, start + size)
            add_squares(of_example, own, sums, layout=layout, inputs=inputs[part], draws=draws[part])
    return Fisher(sums={name: tensor.to(own[name].dtype) for name, tensor in sums.items()}, examples=len(inputs))


def chunk_size(bytes_per_example: int, memory_bytes: int) -> int:
    """How many examples are computed at once."""
    if bytes_per_example > memory_bytes:
        raise BudgetError(
            f"the gradient of one example takes {bytes_per_example} bytes and {memory_bytes} are allowed; allow more"
        )
    return memory_bytes // max(1, bytes_per_example)


def of_module(module: nn.Module, read: Callable[..., Tensor] = lambda output: output) -> Logits:
    """The logits of a module as a function of its weights; `read` finds them in what it returns.

    The module is to be in evaluation mode: dropout has no place in a sensitivity.
    """
    return lambda params, inputs: read(functional_call(module, dict(params), (inputs,)))


def uniforms(seed: int, ids: Sequence[int]) -> Float64[np.ndarray, " examples"]:
    """A number in [0, 1) for each example, which settles its label."""
    return np.array([generator(seed, "label", int(one)).random() for one in ids], np.float64)


def draw_label(logits: Tensor, uniform: Tensor) -> Tensor:
    """The class at which the cumulated probability passes the uniform number; logits (classes,), a scalar int64."""
    reached = logits.detach().double().softmax(-1).cumsum(-1) <= uniform
    return reached.sum().clamp(max=logits.shape[-1] - 1)  # rounding may end the sum below one


def _draws(
    logits: Logits, count: int, *, labels: str, targets: Tensor | None, seed: int, ids: Sequence[int] | None
) -> tuple[Tensor, OfExample]:
    """What settles the label of each example, and log p of one example given that."""

    def log_prob(params: Params, value: Tensor, draw: Tensor) -> Tensor:
        found = logits(params, value[None])[0]
        label = draw_label(found, draw) if labels == "sampled" else draw
        return found.log_softmax(-1).gather(0, label[None])[0]

    if labels == "sampled":
        ids = range(count) if ids is None else ids
        if len(ids) != count:
            raise DataError(f"{count} examples have {len(ids)} ids; give one for each")
        return torch.from_numpy(uniforms(seed, ids)), log_prob
    if labels != "true":
        raise ConfigError(f"labels are {labels!r}; they are 'sampled' from the model or 'true'")
    if targets is None or targets.shape != (count,):
        found = "none" if targets is None else f"{tuple(targets.shape)}"
        raise DataError(f"labels='true' needs one target for each of {count} examples, and there are {found}")
    return targets.long(), log_prob


def _layout(
    of_example: OfExample, params: Params, names: Sequence[str], *, inputs: Tensor, draws: Tensor, method: str
) -> Layout:
    layout = look(of_example, params, names, inputs=inputs, draws=draws)
    if method == "layers":
        return layout
    if method != "examples":
        raise ConfigError(f"the method is {method!r}; it is 'layers' or 'examples'")
    inside = sum(params[name].numel() * params[name].element_size() for name in layout.matrices)
    return Layout(products={}, bytes_per_example=layout.bytes_per_example + 2 * inside)
