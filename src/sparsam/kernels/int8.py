"""The linear layer of int8 codes, dense and in blocks: what every faster path must reproduce, in plain PyTorch.

Shape letters: T tokens (rows of x), K in, N out, S blocks of (R, C).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsam.formats import SMALLEST_AMAX
from sparsam.kernels.formats import INT32_TERMS, no_autocast
from sparsam.kernels.index import dense_from_blocks

__all__ = ["int8_block_linear", "int8_linear", "quantise_rows", "quantise_tensor"]

_TERMS = 2**24 // 127**2  # so many products of codes are summed exactly in float32


def int8_block_linear(
    x_q: Tensor,
    x_scale: Tensor,
    values: Tensor,
    scale: Tensor,
    block_row: Tensor,
    block_col: Tensor,
    bias: Tensor | None,
    out_features: int,
) -> Tensor:
    """y[t, n] = x_scale[t] * scale[n] * sum_k x_q[t, k] * w_q[n, k] + bias[n], where only some blocks of w_q exist.

    The sum is exact in int32, then rounded once to float32, and scaled by x_scale, then by scale, then the bias is
    added. It never saturates on the way, whatever the machine's byte products do.

    Args:
        x_q: int8 (T, K), codes from -127 to 127.
        x_scale: float32 (T, 1), or a single one for all rows. A row whose scale is NaN or infinite comes out so.
        values: int8 (S, R, C), as `SparseLinear.values`. What edge blocks hold beyond K or N, and what dead slots hold,
            counts for nothing.
        scale: float32 (N), of each output row, shared by all of its blocks; never 0.
        block_row, block_col: int32 (S), where each block is; -1 = dead slot.
        bias: float32 (N) or None.
        out_features: N.

    Returns:
        float32 (T, N).

    Raises:
        ValueError: a shape or type does not fit, or K is so large that an int32 may overflow.
    """
    if values.dim() != 3 or values.dtype != torch.int8 or x_q.dim() != 2:
        raise ValueError(
            f"int8_block_linear: expected x_q of (T, K) and int8 values of (S, R, C), got {tuple(x_q.shape)} and "
            f"{values.dtype} of {tuple(values.shape)}. Quantise the layer with sparsam.quantise."
        )
    weight = dense_from_blocks(values, block_row, block_col, out_features, x_q.shape[1])
    return int8_linear(x_q, x_scale, weight, scale, bias)


def int8_linear(x_q: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """`int8_block_linear` with a dense weight.

    Args:
        x_q, x_scale, scale, bias: as there.
        weight: int8 (N, K), codes from -127 to 127.

    Returns:
        float32 (T, N).

    Raises:
        ValueError: as there.
    """
    if x_q.dtype != torch.int8 or weight.dtype != torch.int8 or x_q.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"int8_linear: expected int8 codes of (T, K) and (N, K), got {x_q.dtype} of {tuple(x_q.shape)} and "
            f"{weight.dtype} of {tuple(weight.shape)}. Quantise x with quantise_rows or quantise_tensor."
        )
    if x_q.shape[1] > INT32_TERMS:
        raise ValueError(
            f"int8_linear: expected at most {INT32_TERMS} input features, got {x_q.shape[1]}: an int32 may overflow. "
            "Leave the layer in floating point."
        )
    total = torch.zeros(x_q.shape[0], weight.shape[0], dtype=torch.int32, device=x_q.device)
    with no_autocast(x_q.device):
        # not torch._int_mm: on CPUs without VNNI its byte products may saturate
        for left, right in zip(x_q.split(_TERMS, 1), weight.split(_TERMS, 1), strict=True):
            total += (left.float() @ right.float().mT).int()
    y = total.float() * x_scale * scale
    return y if bias is None else y + bias.float()


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of activations, each row by its own largest magnitude: no row depends on its neighbours.

    The codes are those of `formats.INT8_ROWS`. Nothing is read off the device, so it can be compiled and exported.

    Args:
        x: floating point (T, K).

    Returns:
        int8 (T, K) and float32 (T, 1). Where a row is not finite, its codes are 0 or +-127 and its scale is not finite,
        so that its products are NaN.
    """
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True)
    scale = amax.clamp(min=SMALLEST_AMAX) / 127
    return _codes(x, scale), scale


def quantise_tensor(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of activations by a scale that calibration has found; larger values saturate, NaN makes its row NaN.

    Args:
        x: floating point (T, K).
        scale: float32 (), finite and above zero.

    Returns:
        int8 (T, K) and float32 (T, 1).
    """
    x = x.float()
    poison = (x * 0).sum(-1, keepdim=True)  # 0, or NaN where the row holds what is not finite
    return _codes(x, scale), scale + poison


def _codes(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).round().clamp(-127, 127).nan_to_num(0.0).to(torch.int8)
