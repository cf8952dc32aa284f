"""The oracle itself: its derivatives against autograd in float64, its means by hand."""

from __future__ import annotations

import pytest
import torch

from sparsam.kernels import cpu, reference


@pytest.mark.parametrize("activation", cpu.ACTIVATIONS)
def test_derivatives_of_activations_equal_autograd(activation):
    x = torch.linspace(-6, 6, 121, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(121, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(reference.activate(x, activation), x, grad)
    torch.testing.assert_close(reference.activation_gradient(grad, x.detach(), activation), wanted)


@pytest.mark.parametrize("activation", cpu.ACTIVATIONS)
def test_a_narrow_derivative_is_computed_in_float32(activation):
    x, grad = torch.linspace(-4, 4, 65).bfloat16(), torch.ones(65, dtype=torch.bfloat16)
    found = reference.activation_gradient(grad, x, activation)
    assert found.dtype == torch.bfloat16
    wanted = reference.activation_gradient(grad.double(), x.double(), activation)
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=2**-8)


def test_block_means_leave_padding_out():
    dense = torch.tensor([[1.0, 3.0, 5.0], [5.0, 7.0, 7.0], [2.0, 4.0, 9.0]])
    assert reference.block_mean(dense, 2, 2).tolist() == [[4.0, 6.0], [3.0, 9.0]]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_equals_torchs(causal):
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind(0)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    torch.testing.assert_close(reference.attention(q, k, v, causal), wanted)


def test_unknown_activations():
    with pytest.raises(ValueError, match=r"expected an activation of none, .*, silu, got 'tanh'"):
        reference.activate(torch.zeros(1), "tanh")
    with pytest.raises(ValueError, match=r"expected an activation of relu, .*, silu, got 'tanh'"):
        reference.activation_gradient(torch.zeros(1), torch.zeros(1), "tanh")
