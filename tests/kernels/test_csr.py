"""Blocks of one weight: when they become CSR products, and that these say and give the same. Values: see test_ops."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sparsam.kernels import block_linear, build_index, cpu, csr, reference
from sparsam.kernels.ops import _backward_cpu

pytestmark = pytest.mark.skipif(
    cpu.library() is None or not torch.backends.mkl.is_available(), reason="needs the compiled library and MKL"
)


def single_weights(rows, cols, density=0.1, dead=3):
    row, col = (torch.rand(rows, cols) < density).nonzero(as_tuple=True)
    order = torch.randperm(len(row) + dead)
    row, col = (torch.cat([part, part.new_full((dead,), -1)])[order] for part in (row, col))
    values = torch.randn(len(row), 1, 1) * (row >= 0)[:, None, None]
    return values, build_index(row, col, rows, cols)


@pytest.mark.parametrize("activation", cpu.ACTIVATIONS)
def test_products_are_those_of_the_scattered_weight(activation):
    values, index = single_weights(70, 45)
    x, grad = torch.randn(9, 45), torch.randn(9, 70)
    bias = torch.randn(70)
    y, pre = csr.forward(x, values, index, 70, bias, activation)
    wanted, wanted_pre = reference.forward(x, values, index, 70, bias, activation)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(pre, wanted_pre)
    found = csr.backward(grad, x, values, index, pre, activation)
    expected = reference.backward(grad, x, values, index, pre, activation)
    for one, other in zip(found, expected, strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one, other)
    assert not found[1][index.block_row < 0].any()


def test_the_same_bits_every_time():
    values, index = single_weights(300, 200)
    x, grad = torch.randn(32, 200), torch.randn(32, 300)
    torch.set_num_threads(2)
    first = csr.forward(x, values, index, 300, None, "none")[0], *csr.backward(grad, x, values, index, None, "none")
    for _ in range(5):
        again = csr.forward(x, values, index, 300, None, "none")[0], *csr.backward(grad, x, values, index, None, "none")
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_everything_else_goes_to_the_kernels(monkeypatch):
    values, _ = single_weights(8, 8)
    x = torch.randn(4, 8)
    assert csr.fits(x, values)
    assert not csr.fits(x.bfloat16(), values)
    assert not csr.fits(x, values.bfloat16())
    assert not csr.fits(x, torch.randn(3, 1, 2))
    assert not csr.fits(x, torch.randn(3, 2, 1))
    assert not csr.fits(x[:0], values)
    assert not csr.fits(x, values[:0])
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not csr.fits(x, values)


def test_block_linear_takes_this_way(monkeypatch):
    values, index = single_weights(40, 30)
    x = torch.randn(5, 30)
    calls = []
    monkeypatch.setattr(csr, "fits", lambda *operands: calls.append(operands) or False)
    kernel = block_linear(x, values, index, 40)
    gradients = _backward_cpu(torch.ones(5, 40), x, values, x.new_empty(0), *index, "none", True, True, True)
    assert len(calls) == 2
    monkeypatch.undo()
    torch.testing.assert_close(block_linear(x, values, index, 40), kernel)
    for one, other in zip(
        _backward_cpu(torch.ones(5, 40), x, values, x.new_empty(0), *index, "none", True, True, True),
        gradients,
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_a_first_use_warns_of_nothing():
    """torch tells of its beta state once per process, which must not reach users (nor stop those who forbid it)."""
    program = (
        "import torch, sparsam\n"
        "from sparsam.kernels import block_linear, build_index\n"
        "index = build_index(torch.tensor([0, 1]), torch.tensor([1, 0]), 2, 2)\n"
        "values = torch.ones(2, 1, 1, requires_grad=True)\n"
        "block_linear(torch.ones(3, 2), values, index, 2).sum().backward()\n"
        "print(values.grad.flatten().tolist())\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "[3.0, 3.0]\n", done.stderr
    assert "UserWarning" not in done.stderr
