"""The block-sparse operations in plain PyTorch, on any device: the oracle of the tests, and what runs without a kernel.

It computes with the scattered dense weight, so it is never faster than dense and nothing calls it so.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparsam.kernels.index import BlockIndex, blocks_from_dense, dense_from_blocks

__all__ = [
    "activate",
    "activation_gradient",
    "attention",
    "backward",
    "block_mean",
    "dense_gradient",
    "forward",
    "scores",
]

_SQRT_HALF = 0.5**0.5
_INV_SQRT_2PI = 0.3989422804014327
_SQRT_2_OVER_PI = 0.7978845608028654
_TANH_CUBIC = 0.044715  # Hendrycks and Gimpel 2016, arXiv:1606.08415


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """act(x) for one of the names in `cpu.ACTIVATIONS`."""
    match activation:
        case "none":
            return x
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "silu":
            return F.silu(x)
    raise ValueError(f"expected an activation of none, relu, relu2, gelu, gelu_tanh, silu, got {activation!r}.")


def activation_gradient(grad: torch.Tensor, pre: torch.Tensor | None, activation: str) -> torch.Tensor:
    """grad * act'(pre), computed in float32 for narrower types and returned in grad's dtype."""
    if activation == "none" or pre is None:
        return grad
    x = pre if pre.dtype == torch.float64 else pre.float()
    match activation:
        case "relu":
            slope = (x > 0).to(x.dtype)
        case "relu2":
            slope = 2 * F.relu(x)
        case "gelu":
            slope = 0.5 * (1 + torch.erf(x * _SQRT_HALF)) + x * _INV_SQRT_2PI * torch.exp(-0.5 * x * x)
        case "gelu_tanh":
            inner = _SQRT_2_OVER_PI * (x + _TANH_CUBIC * x**3)
            tanh = torch.tanh(inner)
            slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * _SQRT_2_OVER_PI * (1 + 3 * _TANH_CUBIC * x**2)
        case "silu":
            sigmoid = torch.sigmoid(x)
            slope = sigmoid * (1 + x * (1 - sigmoid))
        case _:
            raise ValueError(f"expected an activation of relu, relu2, gelu, gelu_tanh, silu, got {activation!r}.")
    return (grad.to(x.dtype) * slope).to(grad.dtype)


def forward(
    x: torch.Tensor,
    values: torch.Tensor,
    index: BlockIndex,
    out_features: int,
    bias: torch.Tensor | None,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, pre) of x (T, K): act(x W^T + bias) and the value before the activation, both (T, N) of x's dtype."""
    weight = dense_from_blocks(values.to(x.dtype), index.block_row, index.block_col, out_features, x.shape[1])
    pre = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    return activate(pre, activation), pre


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    values: torch.Tensor,
    index: BlockIndex,
    pre: torch.Tensor | None,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dvalues, dbias) for grad (T, N): dx of x's dtype, dvalues of values' dtype, dbias of x's dtype."""
    grad = activation_gradient(grad, pre, activation)
    weight = dense_from_blocks(values.to(x.dtype), index.block_row, index.block_col, grad.shape[1], x.shape[1])
    _, rows, cols = values.shape
    dvalues = blocks_from_dense(grad.mT @ x, index.block_row, index.block_col, rows, cols)
    return grad @ weight, dvalues.to(values.dtype), grad.sum(0)


def scores(
    grad: torch.Tensor, x: torch.Tensor, rows: int, cols: int, pre: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """Mean |dense weight gradient| of every (rows, cols) block: float32 (RB, CB). Padding is not averaged over."""
    grad = activation_gradient(grad, pre, activation)
    return block_mean(dense_gradient(grad, x).float().abs(), rows, cols)


def dense_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient (N, K) of the dense weight for grad (T, N) and x (T, K), in float32 or wider.

    Narrow operands are widened first: rounding the sums over tokens would make ties of what growth has to rank.
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    product: torch.Tensor = grad.to(wide).mT @ x.to(wide)
    return product


def block_mean(dense: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Mean of each (rows, cols) block of a (N, K) matrix; edge blocks average over what lies inside: (RB, CB)."""
    out_features, in_features = dense.shape
    sums = F.pad(dense, (0, -in_features % cols, 0, -out_features % rows))
    sums = sums.view(-(-out_features // rows), rows, -(-in_features // cols), cols).sum((1, 3))
    height = torch.full((sums.shape[0], 1), float(rows), device=dense.device)
    width = torch.full((1, sums.shape[1]), float(cols), device=dense.device)
    height[-1] -= -out_features % rows
    width[:, -1] -= -in_features % cols
    mean: torch.Tensor = sums / (height * width)
    return mean


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Softmax attention over (B, H, T, D). On CPU by plain products: SDPA's backward there is the slower one."""
    if q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    tokens = q.shape[-2]
    weights = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        weights = weights.masked_fill(future, float("-inf"))
    wide = torch.promote_types(weights.dtype, torch.float32)
    out: torch.Tensor = weights.softmax(-1, dtype=wide).to(v.dtype) @ v
    return out
