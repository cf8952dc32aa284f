"""Blocks of one weight as CSR products of torch (MKL), for float32: single weights leave a block kernel nothing to do.

Shape letters: T tokens, K in, N out, S slots.
"""

from __future__ import annotations

import functools
import warnings

import torch

from sparsam.kernels import reference
from sparsam.kernels.index import BlockIndex

__all__ = ["backward", "fits", "forward"]


def fits(x: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether these operands of `block_linear` can take this way."""
    return (
        values.shape[-1] == values.shape[-2] == 1
        and x.dtype == values.dtype == torch.float32
        and x.numel() > 0
        and values.numel() > 0
        and torch.backends.mkl.is_available()
    )


def forward(
    x: torch.Tensor,
    values: torch.Tensor,
    index: BlockIndex,
    out_features: int,
    bias: torch.Tensor | None,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, pre) of x (T, K): act(x W^T + bias) and the value before the activation, both (T, N)."""
    weight = _by_row(values, index, x.shape[1])
    # MKL reads one row of T numbers for each weight, so tokens go innermost
    pre = (weight @ x.mT.contiguous()).mT.contiguous()
    if bias is not None:
        pre.add_(bias)
    return reference.activate(pre, activation), pre


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    values: torch.Tensor,
    index: BlockIndex,
    pre: torch.Tensor | None,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dvalues, dbias) for grad (T, N); dead slots get zero."""
    grad = reference.activation_gradient(grad, pre, activation)
    tokens_inside = grad.mT.contiguous()
    dx = (_by_column(values, index, grad.shape[1]) @ tokens_inside).mT.contiguous()
    places = _by_row(values, index, x.shape[1])
    # beta = 0: the places count, not what stands there
    entries = torch.sparse.sampled_addmm(places, tokens_inside, x.mT.contiguous().mT, beta=0.0).values()
    dvalues = torch.zeros_like(values, memory_format=torch.contiguous_format)
    dvalues.view(-1)[index.row_slots[: entries.shape[0]].long()] = entries
    return dx, dvalues, grad.sum(0)


def _by_row(values: torch.Tensor, index: BlockIndex, in_features: int) -> torch.Tensor:
    """W (N, K) in CSR."""
    return _csr(values, index.row_start, index.row_slots, index.block_col, in_features)


def _by_column(values: torch.Tensor, index: BlockIndex, out_features: int) -> torch.Tensor:
    """The transpose of W, (K, N), in CSR."""
    return _csr(values, index.col_start, index.col_slots, index.block_row, out_features)


def _csr(
    values: torch.Tensor, start: torch.Tensor, slots: torch.Tensor, address: torch.Tensor, width: int
) -> torch.Tensor:
    _accept_beta_state()
    live = slots[: int(start[-1])]  # dead slots come last
    entries = values.reshape(-1).index_select(0, live)
    shape = (start.shape[0] - 1, width)
    return torch.sparse_csr_tensor(start, address.index_select(0, live), entries, shape, check_invariants=False)


@functools.cache
def _accept_beta_state() -> None:
    """torch says once per process that its CSR tensors are in beta state; the tests of this file hold what is used."""
    place, entry = torch.tensor([0], dtype=torch.int32), torch.tensor([0.0])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        torch.sparse_csr_tensor(torch.tensor([0, 1], dtype=torch.int32), place, entry, (1, 1), check_invariants=False)
