"""What low formats would do to the operands of a product, measured on a sample of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ProductSample"]


@dataclass(frozen=True)
class ProductSample:
    """One product, sampled once, as it comes out in one format against float32.

    Attributes:
        finite: whether all values of both operands were finite.
        underflow: share of nonzero operand values that become zero; the worse operand of the two.
        saturation: share of operand values cut to the largest code; the worse operand.
        median_error: median relative error of nonzero operand values; the worse operand.
        cosine: between the product in this format and in float32.
        noise: L2 norm of their difference over the norm in float32.
        norm_ratio: norm in this format over the norm in float32.
    """

    finite: bool
    underflow: float
    saturation: float
    median_error: float
    cosine: float
    noise: float
    norm_ratio: float
