"""Diagonal Fisher information: how sensitive a model's predictions are to each weight.

    F_j = E_x E_{y ~ p(y|x)} (d log p(y|x) / d theta_j)^2

The square stands inside the mean over examples. The square of a batch's mean gradient is another number,
mu^2 + sigma^2 / B, and ranks weights differently. With `labels="true"` y is the label of the data: the empirical Fisher
information, which does not approximate the first (Kunstner, Balles and Hennig 2019).

The sums of squared per-example gradients are computed without holding the gradient of every example. A matrix W that is
used as `y = x W^T` has, for example n with T tokens, the gradient G_n = B_n^T A_n: A_n (T, d_in) are the inputs,
B_n (T, d_out) the gradients of the outputs. One batched pass gives both for all examples, and both are small.
sum_n G_n^2 is then accumulated tile by tile of W, one example after another, in a buffer that stays in the cache. Only
for T = 1 there is a shorter form, sum_n B_n^2 (x) A_n^2. The per-example gradients of all other parameters (biases,
norms, embeddings, a patch projection) are small and come from `torch.func.vmap`.

Goodfellow 2015, "Efficient Per-Example Gradient Computations", has the sums for dense layers; here they have tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import conv2d, linear, unfold
from torch.overrides import TorchFunctionMode

from atlas_fl.errors import BudgetError, ConfigError, DataError, ModelError
from atlas_fl.params import Params
from atlas_fl.rng import Seed, generator
from atlas_fl.sparse.masks import select_params

TILE = 1 << 18
"""Values of a matrix whose sums and products every core of a CPU holds in its cache, a megabyte each."""

_ATTENTION = RLock()

Objective: TypeAlias = Callable[[Params, Tensor, Tensor], Tensor]
"""(weights, input, draw) of one example -> the number whose gradient is squared."""

MatrixUse: TypeAlias = tuple[str, int]
"""The i-th place where a matrix is used."""

UnfoldOptions: TypeAlias = Mapping[str, Any]
"""Options with which `unfold` cuts the input of a convolution; empty for a linear layer."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product with a matrix, for one example."""

    shape: tuple[int, ...]
    windows: UnfoldOptions


@dataclass(frozen=True, kw_only=True)
class ForwardTrace:
    """Products and memory of a model's forward pass on one example."""

    products: Mapping[MatrixUse, Product]
    """Every product with a matrix that is used in nothing but products."""
    bytes_per_example: int
    """Memory that grows with every example that is computed at once."""

    @property
    def matrices(self) -> list[str]:
        """Parameters whose squares are taken from inputs and output gradients."""
        return sorted({name for name, _ in self.products})


class _ProductRecorder(TorchFunctionMode):
    """Sees every operation of a forward pass: what is multiplied by a matrix, and what else the matrices are used for.

    `deltas`, zeros of the shapes of the products, are added to them: their gradients are those of the products.
    """

    def __init__(self, weights: Params, deltas: Mapping[MatrixUse, Tensor] | None = None) -> None:
        super().__init__()
        self.names = {id(weight): name for name, weight in weights.items()}
        self.deltas = deltas or {}
        self.inputs: dict[MatrixUse, Tensor] = {}
        self.products: dict[MatrixUse, Product] = {}
        self.elsewhere: set[str] = set()
        self.counts: dict[str, int] = {}
        self.bytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            return result  # a shape, a dtype: no use of a weight
        self.bytes += result.numel() * result.element_size()
        windows = _unfold_options(func, args)
        name = self.names.get(id(args[1])) if windows is not None else None
        others = [arg for position, arg in enumerate(args) if name is None or position != 1]
        self.elsewhere |= {self.names[id(arg)] for arg in _flatten([*others, kwargs]) if id(arg) in self.names}
        if name is None or windows is None:
            return result
        use = (name, self.counts.get(name, 0))
        self.counts[name] = use[1] + 1
        self.inputs[use], self.products[use] = args[0], Product(shape=tuple(result.shape), windows=windows)
        return result + self.deltas[use] if use in self.deltas else result


def _unfold_options(func: Any, args: Sequence[Any]) -> UnfoldOptions | None:
    """Options by which the input of this call becomes tokens; None for no product with a matrix known here."""
    if func is linear:
        return {} if len(args) > 1 else None
    # nn.Conv2d gives all of input, weight, bias, stride, padding, dilation and groups by position
    if func is not conv2d or len(args) != 7 or args[0].dim() != 4 or args[6] != 1 or isinstance(args[4], str):
        return None
    return {"kernel_size": tuple(args[1].shape[2:]), "stride": args[3], "padding": args[4], "dilation": args[5]}


def _flatten(values: Sequence[Any]) -> list[Any]:
    values = [one for value in values for one in (value.values() if isinstance(value, dict) else [value])]
    return [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]


@contextmanager
def math_attention() -> Iterator[None]:
    """Attention as products and a softmax, which `vmap` can follow.

    torch keeps this choice for the whole process, so one thread has it at a time: of two at once, one would put back
    what the other had chosen, and every later attention of the process would be computed so.
    """
    with _ATTENTION, sdpa_kernel(SDPBackend.MATH):
        yield


def capture(
    objective: Objective, params: Params, names: Sequence[str], *, inputs: Tensor, draws: Tensor
) -> ForwardTrace:
    """Trace of one example: run forward on the first of `inputs`, watching every parameter in `names`."""
    recorders: list[_ProductRecorder] = []

    def record(traced: Params, value: Tensor, draw: Tensor) -> Tensor:
        with _ProductRecorder(traced) as tap:
            result = objective({**params, **traced}, value, draw)
        recorders.append(tap)
        return result

    chosen = {name: params[name] for name in names}
    with math_attention():
        vmap(record, in_dims=(None, 0, 0))(chosen, inputs[:1], draws[:1])
    tap = recorders[0]
    products = {use: product for use, product in tap.products.items() if use[0] not in tap.elsewhere}
    matrices = {name for name, _ in products}
    rest = sum(tensor.numel() * tensor.element_size() for name, tensor in chosen.items() if name not in matrices)
    # Twice: what the forward pass leaves has gradients of its size, and a gradient is squared into another tensor.
    return ForwardTrace(products=products, bytes_per_example=2 * (tap.bytes + rest))


def add_per_example_squares(
    objective: Objective,
    params: Params,
    sums: Mapping[str, Tensor],
    *,
    trace: ForwardTrace,
    inputs: Tensor,
    draws: Tensor,
) -> None:
    """Add sum_n (d f(x_n) / d theta)^2 over the examples of `inputs`, all at once, to the float64 `sums` in place.

    Raises:
        ModelError: with these inputs the model uses its matrices otherwise than the layout says.
    """
    matrices = {name: params[name] for name in trace.matrices}
    rest = {name: params[name] for name in sums if name not in matrices}

    def objective_with_inputs(
        deltas: Mapping[MatrixUse, Tensor], traced: Params, value: Tensor, draw: Tensor
    ) -> tuple[Tensor, dict[MatrixUse, Tensor]]:
        with _ProductRecorder(matrices, deltas) as tap:
            result = objective({**params, **traced}, value, draw)
        if tap.elsewhere or tap.products != trace.products:
            raise ModelError("this model does not compute every example the same way; give one that does")
        return result, tap.inputs

    deltas = {use: params[use[0]].new_zeros(product.shape) for use, product in trace.products.items()}
    with math_attention():
        per_example = vmap(grad(objective_with_inputs, argnums=(0, 1), has_aux=True), in_dims=(None, None, 0, 0))
        (products, others), values = per_example(deltas, rest, inputs, draws)
    for name, gradient in others.items():
        sums[name].add_(gradient.square().sum(0))
    for name in matrices:
        uses = {use: product.windows for use, product in trace.products.items() if use[0] == name}
        left = torch.cat([_out_tokens(products[use], windows) for use, windows in uses.items()], dim=1)
        right = torch.cat([_in_tokens(values[use], windows) for use, windows in uses.items()], dim=1)
        _add_products(sums[name].flatten(1), left, right)


def _out_tokens(values: Tensor, windows: UnfoldOptions) -> Tensor:
    if windows:
        values = values.movedim(2, -1)  # (N, 1, d_out, height, width) -> (N, 1, height, width, d_out)
    return values.reshape(len(values), -1, values.shape[-1])  # (N, T, d_out)


def _in_tokens(values: Tensor, windows: UnfoldOptions) -> Tensor:
    tokens = unfold(values.flatten(0, 1), **windows).mT if windows else values
    return tokens.reshape(len(values), -1, tokens.shape[-1])  # (N, T, d_in)


def _add_products(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add sum_n (left_n^T right_n)^2 to `total`, (d_out, d_in) float64.

    `left` is (N, T, d_out), `right` is (N, T, d_in).
    """
    left, right = _drop_zero_gradients(left, right)
    if left.shape[1] == 1:
        total.add_(left[:, 0].square().t() @ right[:, 0].square())
        return
    rows = max(1, TILE * torch.get_num_threads() // right.shape[2]) if total.device.type == "cpu" else len(total)
    for tile, left_rows in zip(torch.split(total, rows), torch.split(left, rows, dim=2), strict=True):
        squares = torch.zeros_like(tile, dtype=left.dtype)
        product = torch.empty_like(squares)
        for left_tokens, right_tokens in zip(left_rows.mT, right, strict=True):
            torch.mm(left_tokens, right_tokens, out=product)
            squares.addcmul_(product, product)
        tile.add_(squares)


def _drop_zero_gradients(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens whose gradients are not all zero: behind the last attention a model may read one of them alone."""
    is_nonzero = left[0].ne(0).any(1)
    if bool(is_nonzero.all()) or bool(left[:, ~is_nonzero].any()):
        return left, right
    return left[:, is_nonzero], right[:, is_nonzero]


LogitsFn: TypeAlias = Callable[[Params, Tensor], Tensor]
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


def fisher_scores(
    logits: LogitsFn,
    params: Params,
    *,
    names: Iterable[str],
    inputs: Tensor,
    labels: Literal["sampled", "true"] = "sampled",
    targets: Tensor | None = None,
    seed: Seed = 0,
    memory_bytes: int = MEMORY_BYTES,
) -> Fisher:
    """The summed Fisher information of the parameters `names` over the examples in `inputs`, (n, ...).

    Labels are drawn from the model by a stream of each example's own, `(seed, position)`. The examples are computed in
    chunks that take about `memory_bytes` beside the model and twice its size for sums. Chunks change rounding alone.

    Raises:
        BudgetError: not even one example fits into `memory_bytes`.
        DataError: true labels are wanted and not given, or not one for each example.
        ModelError: the model has no parameter of that name.
    """
    chosen = sorted(select_params(params, names))
    weights = {name: tensor.detach() for name, tensor in params.items()}
    draws, objective = _label_draws(logits, len(inputs), labels=labels, targets=targets, seed=seed)
    draws = draws.to(inputs.device)
    sums = {name: torch.zeros(weights[name].shape, dtype=torch.float64, device=weights[name].device) for name in chosen}
    if len(inputs):
        trace = capture(objective, weights, chosen, inputs=inputs, draws=draws)
        if trace.bytes_per_example > memory_bytes:
            raise BudgetError(
                f"the gradient of one example takes {trace.bytes_per_example} bytes and {memory_bytes} are allowed;"
                " allow more"
            )
        size = memory_bytes // trace.bytes_per_example
        for start in range(0, len(inputs), size):
            part = slice(start, start + size)
            add_per_example_squares(objective, weights, sums, trace=trace, inputs=inputs[part], draws=draws[part])
    return Fisher(sums={name: tensor.to(weights[name].dtype) for name, tensor in sums.items()}, examples=len(inputs))


def logits_of_module(module: nn.Module, read: Callable[..., Tensor] = lambda output: output) -> LogitsFn:
    """The logits of a module as a function of its weights; `read` finds them in what it returns.

    The module is to be in evaluation mode: dropout has no place in a sensitivity.
    """
    return lambda params, inputs: read(functional_call(module, dict(params), (inputs,)))


def label_uniforms(seed: Seed, count: int) -> Float64[np.ndarray, " examples"]:
    """A number in [0, 1) for each example, which settles its label."""
    return np.array([generator(seed, "label", example).random() for example in range(count)], np.float64)


def draw_label(logits: Tensor, uniform: Tensor) -> Tensor:
    """The class at which the cumulated probability passes the uniform number; logits (classes,), a scalar int64."""
    reached = logits.detach().double().softmax(-1).cumsum(-1) <= uniform
    return reached.sum().clamp(max=logits.shape[-1] - 1)  # rounding may end the sum below one


def _label_draws(
    logits: LogitsFn, count: int, *, labels: str, targets: Tensor | None, seed: Seed
) -> tuple[Tensor, Objective]:
    """Numbers that settle the label of each example, and log p of one example given its number."""

    def log_prob(params: Params, value: Tensor, draw: Tensor) -> Tensor:
        class_logits = logits(params, value[None])[0]
        label = draw_label(class_logits, draw) if labels == "sampled" else draw
        return class_logits.log_softmax(-1).gather(0, label[None])[0]

    if labels == "sampled":
        return torch.from_numpy(label_uniforms(seed, count)), log_prob
    if labels != "true":
        raise ConfigError(f"labels are {labels!r}; they are 'sampled' from the model or 'true'")
    if targets is None or targets.shape != (count,):
        shape = "none" if targets is None else f"{tuple(targets.shape)}"
        raise DataError(f"labels='true' needs one target for each of {count} examples, and there are {shape}")
    return targets.long(), log_prob
