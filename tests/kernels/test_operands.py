"""Operands as the kernels take them: rows with unit stride, biases, autocast, and what counts as a plain tensor."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from sparsam.kernels.operands import as_autocast, as_bias, as_rows, is_plain

X = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    ("x", "copies"),
    [
        (X, False),
        (X.view(3, 1, 4), False),
        (X[0], False),
        (X[::2], False),
        (X[:, :2], False),
        (X[:0], False),
        (X.new_empty(5, 0), False),
        (X.new_empty(2, 5, 0), True),
        (X.mT, True),
        (X[:, ::2], True),
        (X[:1].expand(5, 4), True),
    ],
    ids=["rows", "3-d", "one", "every other", "narrow", "none", "no columns", "nor in 3-d", "turned", "spread", "same"],
)  # fmt: skip
def test_rows_are_views_where_they_can_be(x, copies):
    rows = as_rows(x)
    assert rows.dim() == 2
    assert rows.stride(1) == 1 or rows.shape[1] < 2
    assert rows.shape[0] < 2 or rows.stride(0) >= rows.shape[1]
    assert torch.equal(rows, x.reshape(x.shape[:-1].numel(), x.shape[-1]))
    assert copies or rows.data_ptr() == x.data_ptr()


def test_a_bias_comes_contiguous_and_in_a_type_that_kernels_read():
    bias = torch.arange(6.0)
    assert as_bias(None, X) is None
    assert as_bias(bias, X.bfloat16()) is bias
    assert as_bias(bias.double(), X.bfloat16()).dtype == torch.bfloat16
    assert as_bias(bias[::2], X).is_contiguous()


def test_autocast_leaves_double_and_meta_alone():
    assert as_autocast(X) is X
    with torch.autocast("cpu", torch.bfloat16):
        assert as_autocast(X).dtype == torch.bfloat16
        assert as_autocast(X.double()).dtype == torch.float64
        assert as_autocast(X.to("meta")).dtype == torch.float32


def test_what_is_plain():
    assert is_plain()
    assert is_plain(X, torch.nn.Parameter(X), X.mT, X[:0])
    for other in (
        X.to("meta"),
        X.to_sparse(),
        torch._neg_view(X),
        X.as_subclass(torch.nn.Buffer),
        FakeTensorMode().from_tensor(X),
    ):
        assert not is_plain(X, other)
    with FakeTensorMode():
        assert not is_plain(X)
    with torch.device("cpu"):
        assert not is_plain(X)
    assert not torch.vmap(lambda row: row * float(is_plain(row)))(X).any()
