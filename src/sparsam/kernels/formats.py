"""One matrix product in given number formats, and the linear layer made of three of them, dense and block-sparse.

A linear layer multiplies three times: y = x W^T (forward), dx = dy W (input gradient), dW = dy^T x (weight gradient).
`Products` names a format for each. Sums are kept in float32 and weights stay what they are; only operands are rounded.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import NamedTuple

from sparsam import formats
from sparsam.formats import Format

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
    "product_format",
]

PRODUCTS = ("forward", "input_gradient", "weight_gradient")


@dataclass(frozen=True)
class ProductFormat:
    """The number format of one matrix product.

    Attributes:
        name: as recipes and reports write it.
        operand: of weights and activations.
        gradient: of gradients with respect to a layer's output, which spread further.

    Source: Micikevicius et al. 2022, arXiv:2209.05433 (E4M3 for weights and activations, E5M2 for gradients).
    """

    name: str
    operand: Format
    gradient: Format

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
