"""One matrix product in given number formats, and the formats that a linear layer's three products can have.

A linear layer multiplies three times: y = x W^T (forward), dx = dy W (input gradient), dW = dy^T x (weight gradient).
`Products` names a format for each. Sums are kept in float32 and weights stay what they are; only operands are rounded.

An operand becomes codes, and a scale for each row or for all of it: codes are multiplied, and the product is scaled. A
device that has the format multiplies the codes themselves. Elsewhere they are multiplied in a wider type that holds all
of them exactly, at no gain in speed, and `arithmetic` says "simulated". The layer: `format_linear`.
"""

from __future__ import annotations

import contextlib
import difflib
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparsam import formats
from sparsam.formats import Format, non_finite

__all__ = [
    "BF16",
    "FP8",
    "FP8_ROWS",
    "FP16",
    "FP32",
    "INT8",
    "MX_FP8",
    "PRODUCTS",
    "PRODUCT_FORMATS",
    "TF32",
    "ProductFormat",
    "Products",
    "arithmetic",
    "autocast_on",
    "block_dtype",
    "finish",
    "no_autocast",
    "operand",
    "product",
    "product_format",
]

INT32_TERMS = (2**31 - 1) // 127**2  # so many products of int8 codes never overflow an int32
PRODUCTS = ("forward", "input_gradient", "weight_gradient")


@dataclass(frozen=True)
class ProductFormat:
    """The number format of one matrix product.

    Attributes:
        name: as recipes and reports write it.
        operand: of weights and activations.
        gradient: of gradients with respect to a layer's output, which spread further.
        weight: of weights where it is another than that of activations; None: the same.

    Source: Micikevicius et al. 2022, arXiv:2209.05433 (E4M3 for weights and activations, E5M2 for gradients).
    """

    name: str
    operand: Format
    gradient: Format
    weight: Format | None = None

    @property
    def of_weight(self) -> Format:
        """The format of a weight."""
        return self.weight or self.operand

    @property
    def bits(self) -> int:
        """Bits of an operand, by which formats are ordered: fewer is lower."""
        return self.operand.bits

    def __str__(self) -> str:
        return self.name


FP32 = ProductFormat("fp32", formats.FP32, formats.FP32)
TF32 = ProductFormat("tf32", formats.TF32, formats.TF32)
BF16 = ProductFormat("bf16", formats.BF16, formats.BF16)
FP16 = ProductFormat("fp16", formats.FP16, formats.FP16)
FP8 = ProductFormat("fp8", formats.E4M3, formats.E5M2)
FP8_ROWS = ProductFormat("fp8_rows", formats.E4M3_ROWS, formats.E4M3_ROWS)
MX_FP8 = ProductFormat("mx_fp8", formats.MX_E4M3, formats.MX_E4M3)
INT8 = ProductFormat("int8", formats.INT8_ROWS, formats.INT8_ROWS)
PRODUCT_FORMATS = (FP32, TF32, BF16, FP16, FP8, FP8_ROWS, MX_FP8, INT8)


class Products(NamedTuple):
    """The formats of a linear layer's three products."""

    forward: ProductFormat
    input_gradient: ProductFormat
    weight_gradient: ProductFormat


def product_format(name: str) -> ProductFormat:
    """The format that a recipe calls by this name. Code passes the constants themselves.

    Raises:
        ValueError: no format of products has this name.
    """
    for one in PRODUCT_FORMATS:
        if one.name == name:
            return one
    known = [one.name for one in PRODUCT_FORMATS]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else "Use one of them."
    raise ValueError(f"format: expected one of {', '.join(known)}, got {name!r}. {hint}")


def arithmetic(format: ProductFormat, device: torch.device, blocks: bool = False) -> Literal["real", "simulated"]:
    """Whether products are multiplied in the format itself on this device, or only rounded to it.

    fp32 and bf16 are real everywhere, fp16 on every device but a CPU, int8 on a CPU. All else is simulated, on GPUs
    too: their units for 8-bit numbers and tf32 are not used here.

    Args:
        format: of the product.
        device: where it runs.
        blocks: ask about block-sparse weights: their kernels know fp32 and bf16.
    """
    working = block_dtype(format) if blocks else _working_dtype(format.operand, format.gradient, device)
    return "real" if working.itemsize * 8 == format.bits else "simulated"


def product(
    a: Tensor, b: Tensor, left: Format, right: Format, bias: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """a b^T with both operands rounded along their last dimension. Autograd and autocast play no part.

    Codes are exact in the type that they are multiplied in. Sums are kept in float32; those of int8 on a CPU in
    int32, exactly. Everywhere else products of 8-bit and bf16 codes leave torch as bfloat16, as under autocast: before
    they are scaled, they are rounded once to 8 bits.

    A value that is not finite makes the product NaN (or infinity, where the format knows it) in its row; in all rows if
    the format has one scale for the tensor. It is never cut to the largest code.

    Args:
        a: floating point (M, R), any strides.
        b: floating point (N, R), on the same device.
        left: format of a.
        right: format of b.
        bias: (N), added to the scaled product.
        dtype: of the result.

    Returns:
        (M, N).

    Raises:
        ValueError: an operand is no floating-point matrix, or the last dimensions differ.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"product: expected operands of (M, R) and (N, R), got {shapes}. Transpose or reshape them.")
    working = _working_dtype(left, right, a.device)
    with torch.no_grad(), no_autocast(a.device):
        (codes, rows), (others, columns) = operand(a, left, working), operand(b, right, working)
        result = _int8_product(codes, others) if working == torch.int8 else torch.mm(codes, others.mT)
        return finish(result, rows, columns, bias, dtype)


def operand(x: Tensor, format: Format, working: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A matrix as codes of a format, in the type that they are multiplied in, and their scale: (rows, 1), () or None.

    Scales of blocks are powers of two and go into the codes. Where a value is not finite, the scale is NaN.
    """
    if format.scale_covers == "nothing":
        same = format.dtype == working and format.bits == 8 * working.itemsize  # TF32 is kept in float32
        return (x.to(working) if same else format.round(x, dtype=working)), None
    finite = torch.isfinite(x) if non_finite(x) else None
    if format.scale_covers == "block":
        return format.round(x if finite is None else x.where(finite, torch.nan), dtype=working), None
    scale = format.scale_of(x)
    assert scale is not None
    x = x if x.dtype == torch.float64 else x.to(torch.float32)
    if finite is None:
        return format.round(x / scale, scale=1.0, dtype=working), scale  # the codes, as fast as `round` decodes them
    codes = format.round(x.where(finite, 0.0) / scale, scale=1.0, dtype=working)
    lost = ~finite.all() if scale.dim() == 0 else ~finite.all(-1, keepdim=True)
    return codes, scale.masked_fill(lost, torch.nan)


def finish(
    result: Tensor, rows: Tensor | None, columns: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """A product (M, N) of codes, to which nobody else holds on, times scales of its rows and columns, plus the bias."""
    if rows is not None or columns is not None or result.dtype != dtype:
        result = result.to(torch.float32)
    if rows is not None:
        result.mul_(rows)
    if columns is not None:
        result.mul_(columns.reshape(-1))
    if bias is not None:
        result.add_(bias)
    return result.to(dtype)


def _int8_product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T of int8 codes, exact for each piece of the reduced dimension."""
    total = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for left, right in zip(a.split(INT32_TERMS, 1), b.split(INT32_TERMS, 1), strict=True):
        # torch multiplies strides other than a matrix's or its transpose's wrongly, and a single term too
        left, right = left.contiguous(), right.contiguous()
        total += torch._int_mm(left, right.mT) if left.shape[1] > 1 else left.float() @ right.float().mT
    return total


def _working_dtype(left: Format, right: Format, device: torch.device) -> torch.dtype:
    """The type that codes of these formats are multiplied in: it holds all of them."""
    if left.integer and right.integer and device.type == "cpu":
        return torch.int8
    if all(one.mantissa_bits <= 7 for one in (left, right)):
        return torch.bfloat16
    if left.dtype == right.dtype == torch.float16 and device.type != "cpu":
        return torch.float16
    return torch.float32


def block_dtype(format: ProductFormat) -> torch.dtype:
    """The type that kernels of blocks, which know two, multiply codes of this format in: it holds all of them."""
    narrow = all(one.mantissa_bits <= 7 for one in (format.operand, format.gradient))
    return torch.bfloat16 if narrow else torch.float32


def autocast_on(device: torch.device) -> bool:
    """Whether autocast is on for tensors of this device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def no_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Autocast would turn float32 products into its own."""
    return torch.autocast(device.type, enabled=False) if autocast_on(device) else contextlib.nullcontext()
