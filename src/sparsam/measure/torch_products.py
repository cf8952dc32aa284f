"""The products in fp16, int8 and float8 that torch itself offers, to be timed beside Sparsam's.

Training uses none of them: on many CPUs they are references that take seconds for what others do in milliseconds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsam.kernels.formats import FP8, FP16, INT8
from sparsam.measure.product_profile import ProductPath

__all__ = ["TORCH_PATHS"]


def _half(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Both operands cast to fp16."""
    return F.linear(a.half(), b.half()).to(dtype)


def _packed_int8(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 with a scale per row, b packed for the kernel each time, as a weight that has changed must be."""
    one, other = INT8.operand.quantise(a), INT8.operand.quantise(b)
    assert one.scale is not None
    assert other.scale is not None
    packed = torch.ops.onednn.qlinear_prepack(other.codes, None)
    zeros = torch.zeros(len(b), dtype=torch.int64)
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        one.codes, 1.0, 0, packed, other.scale.view(-1), zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y.mul_(one.scale).to(dtype)


def _scaled_float8(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """float8 with a scale per tensor."""
    one, other = FP8.operand.quantise(a), FP8.operand.quantise(b)
    assert one.scale is not None
    assert other.scale is not None
    y = torch._scaled_mm(one.codes, other.codes.t(), one.scale, other.scale, out_dtype=torch.bfloat16)
    return y.to(dtype)


TORCH_PATHS = {
    "fp16, torch linear": ProductPath(FP16, _half),
    "int8, torch onednn.qlinear": ProductPath(INT8, _packed_int8),
    "fp8, torch _scaled_mm": ProductPath(FP8, _scaled_float8),
}
