"""Weights of a frozen model in other types than float32: bf16, fp16, or torchao's integers of eight bits and NF4.

Weights are held in such a type and not computed in it. A layer's matrix becomes a plain tensor in the type of the
arithmetic (`--precision`) when the layer computes, in the forward pass and again in the backward pass, so that one
matrix at a time has its full size. States between layers, adapters, heads and moments are what they are on float32.

Held so are the matrices of linear layers and of embeddings; norms and biases are rounded and stay in float32. Of
`int8` (a scale for each row) and `nf4` (a scale for 64 values; Dettmers et al. 2023, "QLoRA", arXiv:2305.14314) only
linear layers inside the model have the small type, and embeddings are bf16.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import gcd
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from atlas_fl.storage.extras import import_extra

FLOAT_TYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.bfloat16,
    "nf4": torch.bfloat16,
}
"""By `--base-weights` the type that files are read in, and that stays where no smaller one does."""

Matrix: TypeAlias = Tensor | Callable[[], Tensor]
"""A layer's weight (d_in, d_out) in the type of the arithmetic, or the function that makes it of what is held."""


def to_int8(weight: Tensor) -> Tensor:
    """The matrix as integers of eight bits with a scale for each row."""
    torchao = _torchao()
    quantised: Tensor = torchao.Int8Tensor.from_hp(weight, granularity=torchao.PerRow())
    return quantised


def to_nf4(weight: Tensor) -> Tensor:
    """The matrix in NF4 with a scale for 64 values, or for fewer where their number is no multiple of 64."""
    block = gcd(weight.numel(), 64)
    quantised: Tensor = _torchao().to_nf4(weight, block, gcd(weight.numel() // block, 256))
    return quantised


def _torchao() -> Any:
    remedy = ", or take --base-weights bf16"
    return import_extra("torchao.quantization", extra="quant", asked="--base-weights int8 and nf4 need", remedy=remedy)


QUANTISERS: Mapping[str, Callable[[Tensor], Tensor]] = {"int8": to_int8, "nf4": to_nf4}
"""By `--base-weights`, the function from a matrix in float32 to a quantised one."""


def hold_weights(model: nn.Module, held: str) -> None:
    """Hold the model's weights in this type; the model is changed. Raises `ConfigError` where torchao is missing."""
    from transformers.pytorch_utils import Conv1D

    quantise = QUANTISERS.get(held)
    for module in model.modules():
        is_linear = isinstance(module, (nn.Linear, Conv1D))
        for name, parameter in module.named_parameters(recurse=False):
            rounded = parameter.data.to(FLOAT_TYPES[held])
            if name == "weight" and is_linear and quantise is not None:
                module.weight = nn.Parameter(quantise(rounded.float()), requires_grad=False)
            elif name == "weight" and (is_linear or isinstance(module, nn.Embedding)):
                parameter.data = rounded
            else:
                parameter.data = rounded.float()
        if is_linear:
            module.forward = partial(_forward, module)
        elif isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda _module, _ids, rows: rows.float())


def dense(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A held weight as a plain tensor of this dtype."""
    if not hasattr(weight, "__tensor_flatten__"):
        return weight.to(dtype)
    plain: Tensor = weight.get_original_weight() if hasattr(weight, "get_original_weight") else weight.dequantize()
    return plain.to(dtype)


def matrix_of(weight: Tensor, dtype: torch.dtype, *, transposed: bool) -> Matrix:
    """The matrix of a layer's weight for a product in this dtype; `transposed` where the layer holds (d_out, d_in)."""

    def read() -> Tensor:
        plain = dense(weight, dtype)
        return plain.T if transposed else plain

    return read if hasattr(weight, "__tensor_flatten__") or weight.dtype != dtype else read()


def read_matrix(matrix: Matrix) -> Tensor:
    """The matrix as a plain tensor, (d_in, d_out)."""
    return matrix if isinstance(matrix, Tensor) else matrix()


def arithmetic_of(x: Tensor) -> torch.dtype:
    """The dtype that a layer computes in: autocast's, or that of its input."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _FrozenProduct(torch.autograd.Function):
    """`x W + b` of a matrix that is made anew in the backward pass; it and the bias get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        ctx.matrix = matrix
        out = x @ read_matrix(matrix)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad @ read_matrix(ctx.matrix).T, None, None


def frozen_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = True) -> Tensor:
    """`x W + b` of a frozen layer, whose plain matrix no backward pass keeps."""
    dtype = arithmetic_of(x)
    matrix = matrix_of(weight, dtype, transposed=transposed)
    return matrix_product(x.to(dtype), matrix, None if bias is None else bias.to(dtype))


def matrix_product(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """`x W + b` of a frozen matrix in the dtype of `x`."""
    apply: Callable[..., Tensor] = _FrozenProduct.apply
    return apply(x, matrix, bias)


def _forward(module: Any, x: Tensor) -> Tensor:
    """The output of a linear layer whose weight is held in another type."""
    if module.weight.requires_grad:  # a plain tensor in the place of the held one, whose own gradient is asked for
        out: Tensor = type(module).forward(module, x)
        return out
    return frozen_product(x, module.weight, module.bias, transposed=isinstance(module, nn.Linear))
