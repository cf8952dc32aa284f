"""The linear layer whose three products have a number format each, dense and block-sparse.

Shape letters: T tokens (rows of x), K in, N out, S slots of (R, C) blocks, RB x CB the grid.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsam.kernels.checks import check_linear, refuse_second_order
from sparsam.kernels.formats import (
    BF16,
    FP32,
    ProductFormat,
    Products,
    autocast_on,
    block_dtype,
    finish,
    no_autocast,
    operand,
    product,
)
from sparsam.kernels.index import BlockIndex, blocks_from_dense, dense_from_blocks
from sparsam.kernels.operands import as_rows
from sparsam.kernels.ops import block_linear
from sparsam.kernels.reference import activate, dense_gradient

__all__ = ["format_block_linear", "format_linear"]

_SECOND_ORDER = "Leave formats unset where gradients of gradients are needed."


def format_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, products: Products, activation: str = "none"
) -> Tensor:
    """act(x W^T + bias), where this product and those of its gradients have formats of their own.

    With bf16 for all three it is torch's own layer under autocast, bit for bit; with fp32 for all, torch's own layer
    without. Otherwise the weight gradient is rounded to the weight's type only, the bias is added to the scaled product
    and its gradient is a sum in float32. Nothing is kept for the backward but x and the weight as they are.

    Args:
        x: floating point (..., K).
        weight: floating point (N, K).
        bias: (N) or None.
        products: the three formats.
        activation: as `block_linear` knows them, applied to the result.

    Returns:
        (..., N). Under autocast in its type, or float32 if the forward product is fp32; otherwise in x's type.

    Raises:
        ValueError: shapes do not fit, x is not floating point; or the backward is asked for with create_graph=True.
    """
    if not x.is_floating_point() or x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"format_linear: expected floating-point x of (..., K) and a weight of (N, K), got {x.dtype} of "
            f"{tuple(x.shape)} and {tuple(weight.shape)}. Cast or reshape them."
        )
    dtype, plain = _output_dtype(x, products.forward), _plain_dtype(products)
    if plain is None:
        y = _format_linear(x, weight, bias, products, dtype)
    elif plain == dtype == torch.bfloat16 and autocast_on(x.device):
        y = F.linear(x, weight, bias)  # autocast keeps the cast weight for layers that share it
    else:
        with no_autocast(x.device):
            y = F.linear(x.to(plain), weight.to(plain), None if bias is None else bias.to(plain)).to(dtype)
    return activate(y, activation)


def format_block_linear(
    x: Tensor,
    values: Tensor,
    index: BlockIndex,
    out_features: int,
    bias: Tensor | None,
    activation: str,
    products: Products,
    probe: Tensor | None = None,
) -> Tensor:
    """`format_linear` with a weight of which only some blocks exist, as `block_linear` takes it.

    Scales are those of the dense weight, in which absent blocks are zeros. What formats cost here is the way through
    that dense weight, once for each product with scales. The probe sees what it sees without formats: x and dy as they
    are.

    Args:
        x, values, index, out_features, bias, activation, probe: as in `block_linear`.
        products: the three formats.

    Returns:
        (..., N), of the type that `format_linear` gives.

    Raises:
        ValueError: as `block_linear`.
    """
    if not x.is_floating_point():
        raise ValueError(f"format_block_linear: expected a floating-point x, got {x.dtype}. Cast it first.")
    check_linear(x, values, index, out_features, bias, activation, probe, name="format_block_linear")
    dtype, plain = _output_dtype(x, products.forward), _plain_dtype(products)
    if plain is None:
        return activate(_format_blocks(x, values, bias, probe, products, out_features, dtype, index), activation)
    with no_autocast(x.device):
        return block_linear(x.to(plain), values, index, out_features, bias, activation, probe).to(dtype)


# Formats read numbers off the device and would be traced as what they were: a compiled model breaks its graph here.
@torch.compiler.disable
def _format_linear(x: Tensor, weight: Tensor, bias: Tensor | None, products: Products, dtype: torch.dtype) -> Tensor:
    return _Linear.apply(x, weight, bias, products, dtype)  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """x W^T + bias and its gradients, dense."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: Products, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products, ctx.bias_dtype = products, None if bias is None else bias.dtype
        how = products.forward
        return product(as_rows(x), weight, how.operand, how.of_weight, bias, dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_second_order("format_linear", _SECOND_ORDER)
        x, weight = ctx.saved_tensors
        grad = as_rows(grads[0])
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            how = ctx.products.input_gradient
            dx = product(grad, weight.mT, how.gradient, how.operand, dtype=x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            how = ctx.products.weight_gradient
            dweight = product(grad.mT, as_rows(x).mT, how.gradient, how.operand, dtype=weight.dtype)
        return dx, dweight, _dbias(ctx, grad), None, None


@torch.compiler.disable
def _format_blocks(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    probe: Tensor | None,
    products: Products,
    out_features: int,
    dtype: torch.dtype,
    index: BlockIndex,
) -> Tensor:
    return _BlockLinear.apply(x, values, bias, probe, products, out_features, dtype, *index)  # type: ignore[no-any-return]


class _BlockLinear(torch.autograd.Function):
    """x W^T + bias and its gradients, the weight in blocks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        bias: Tensor | None,
        probe: Tensor | None,
        products: Products,
        out_features: int,
        dtype: torch.dtype,
        *addresses: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, values, *addresses)
        ctx.products, ctx.shape = products, (out_features, x.shape[-1])
        ctx.bias_dtype, ctx.probe_shape = None if bias is None else bias.dtype, None if probe is None else probe.shape
        index, how = BlockIndex(*addresses), products.forward
        with no_autocast(x.device):
            codes, rows = operand(as_rows(x), how.operand, block_dtype(how))
            blocks, columns = _block_operand(values, index, ctx.shape, how)
            y = block_linear(codes, blocks, index, out_features)
            return finish(y, rows, columns, bias, dtype).view(*x.shape[:-1], out_features)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_second_order("format_block_linear", _SECOND_ORDER)
        x, values, *addresses = ctx.saved_tensors
        index, grad, tokens = BlockIndex(*addresses), as_rows(grads[0]), as_rows(x)
        dx = dvalues = dprobe = None
        with no_autocast(x.device):
            if ctx.needs_input_grad[0]:
                dx = _blocks_dx(grad, values, index, ctx.shape, ctx.products.input_gradient, x.dtype).view(x.shape)
            if ctx.needs_input_grad[1]:
                dvalues = _blocks_dvalues(grad, tokens, values, index, ctx.shape, ctx.products.weight_gradient)
            if ctx.needs_input_grad[3]:
                tokens = tokens.to(grad.dtype)  # as autocast had made it
                if tuple(ctx.probe_shape) == ctx.shape:
                    dprobe = dense_gradient(grad, tokens).float()
                else:
                    none = grad.new_empty(0)
                    dprobe = torch.ops.sparsam.block_scores(grad, tokens, values, none, *index, "none")
        return dx, dvalues, _dbias(ctx, grad), dprobe, None, None, None, *(None,) * len(index)


def _dbias(ctx: Any, grad: Tensor) -> Tensor | None:
    """A sum over tokens in float32, whatever the formats."""
    return grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None


def _blocks_dx(
    grad: Tensor, values: Tensor, index: BlockIndex, shape: tuple[int, int], how: ProductFormat, dtype: torch.dtype
) -> Tensor:
    """dy W, (T, K)."""
    codes, rows = operand(grad, how.gradient, block_dtype(how))
    blocks, columns = _block_operand(values, index, shape, how, transposed=True)
    unread = codes.new_zeros(codes.shape[0], shape[1])
    dx, _, _ = _block_gradients(codes, unread, blocks, index, (True, False, False))
    return finish(dx, rows, columns, None, dtype)


def _blocks_dvalues(
    grad: Tensor, x: Tensor, values: Tensor, index: BlockIndex, shape: tuple[int, int], how: ProductFormat
) -> Tensor:
    """The blocks (S, R, C) of dy^T x, zero in dead slots and padding."""
    working = block_dtype(how)
    codes, rows = operand(grad.mT, how.gradient, working)
    others, columns = operand(x.mT, how.operand, working)
    unread = values.to(torch.float32)  # of the type that the sums shall come in
    _, dvalues, _ = _block_gradients(codes.mT.contiguous(), others.mT.contiguous(), unread, index, (False, True, False))
    if rows is not None or columns is not None:
        scales = finish(dvalues.new_ones(shape), rows, columns, None, torch.float32)
        dvalues = dvalues * blocks_from_dense(scales, *index[:2], *values.shape[1:])
    return dvalues.to(values.dtype)


def _block_gradients(
    grad: Tensor, x: Tensor, values: Tensor, index: BlockIndex, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    none = grad.new_empty(0)
    return torch.ops.sparsam.block_linear_backward(grad, x, values, none, *index, "none", *wanted)  # type: ignore[no-any-return]


def _block_operand(
    values: Tensor, index: BlockIndex, shape: tuple[int, int], how: ProductFormat, transposed: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The blocks of a weight, or of its transpose, as codes at their old places, and the scale."""
    working = block_dtype(how)
    if how.of_weight.scale_covers == "nothing":
        return operand(values, how.of_weight, working)
    dense = dense_from_blocks(values, *index[:2], *shape)
    codes, scale = operand(dense.mT if transposed else dense, how.of_weight, working)
    return blocks_from_dense(codes.mT if transposed else codes, *index[:2], *values.shape[1:]), scale


def _plain_dtype(products: Products) -> torch.dtype | None:
    """The one type that all three products have without any rounding of operands, if there is one."""
    for format in (BF16, FP32):
        if all(one.name == format.name for one in products):
            return format.operand.dtype
    return None


def _output_dtype(x: Tensor, forward: ProductFormat) -> torch.dtype:
    if x.dtype == torch.float64 or not autocast_on(x.device):
        return x.dtype  # autocast leaves float64 alone too
    return torch.float32 if forward.name == FP32.name else torch.get_autocast_dtype(x.device.type)
