"""What the operators refuse before a kernel reads memory, and gradients of gradients, which no kernel has."""

from __future__ import annotations

import pytest
import torch

from sparsam.kernels import add_layer_norm, attention, block_linear, build_index, cpu, self_attention
from sparsam.kernels.checks import check_linear


def operands(**change):
    """Arguments of block_linear for 8 x 24 in blocks of 4 x 8, three and a dead slot; `change` replaces some."""
    row, col = torch.tensor([0, 1, 1, -1]), torch.tensor([2, 0, 1, -1])
    index = build_index(row.int(), col.int(), 2, 3)
    parts = {name: change.pop(name)(getattr(index, name)) for name in index._fields if name in change}
    whole = {"x": torch.ones(3, 24), "values": torch.ones(4, 4, 8), "index": index._replace(**parts), "out_features": 8}
    return {**whole, "bias": torch.ones(8), "activation": "none", **change}


FIELDS = ("block_row", "block_col", "row_start", "row_slots", "col_start", "col_slots")
FAULTS = [
    *[({field: lambda t: t.long()}, f"expected {field} as one contiguous row of int32, got") for field in FIELDS],
    *[({field: lambda t: t.repeat_interleave(2)[::2]}, f"expected {field} as one contiguous row") for field in FIELDS],
    *[({field: lambda t: t[None]}, f"expected {field} as one contiguous row of int32") for field in FIELDS],
    *[({field: lambda t: t.to("meta")}, f"expected {field} on cpu like x, got meta. Move it") for field in FIELDS],
    *[
        ({field: lambda t: t[:-1].clone()}, rf"expected an index of 4 slots, got one of .*3 \({field}\).*See build")
        for field in ("block_row", "block_col", "row_slots", "col_slots")
    ],
    *[
        ({field: lambda t: t[:-1].clone()}, "expected x with K and out_features that make . x . blocks")
        for field in ("row_start", "col_start")
    ],
    ({"values": torch.ones(4, 4, 8, device="meta")}, "expected values on cpu like x, got meta"),
    ({"bias": torch.ones(8, device="meta")}, "expected bias on cpu like x, got meta"),
    ({"bias": torch.ones(7)}, r"expected a bias of \(8,\), got \(7,\). Give one number per output"),
    ({"values": torch.ones(4, 0, 8)}, r"expected values of \(slots, rows, cols\), got \(4, 0, 8\)"),
    ({"values": torch.ones(4, 32)}, r"expected values of \(slots, rows, cols\), got \(4, 32\)"),
    ({"x": torch.tensor(1.0)}, r"expected x of \(..., K\), got one number"),
    ({"x": torch.ones(3, 24, device="meta")}, "expected block_row on meta like x, got cpu"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), FAULTS)
def test_operands_that_do_not_fit(change, message):
    with pytest.raises(ValueError, match="block_linear: " + message):
        block_linear(**operands(**change))


def test_a_probe_elsewhere():
    with pytest.raises(ValueError, match="block_linear: expected probe on cpu like x, got meta"):
        block_linear(**operands(), probe=torch.zeros(2, 3, device="meta"))


def test_what_fits_passes():
    check_linear(**operands())
    assert block_linear(**operands()).tolist() == [[9.0] * 4 + [17.0] * 4] * 3


def test_an_index_of_any_integers_becomes_one_that_kernels_read():
    row, col = torch.tensor([[1, 0], [-1, 2]]).mT.contiguous().mT.unbind(1)
    assert not row.is_contiguous() or row.dtype != torch.int32
    index = build_index(row, col.short(), 2, 3)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in index)
    assert index.block_row.tolist() == [1, -1]
    assert build_index(index.block_row, index.block_col, 2, 3).block_row is index.block_row


def narrow(*shape):
    return torch.randn(*shape).bfloat16().requires_grad_()


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("wants", ["x", "values", "bias", "probe"])
def test_a_gradient_of_a_gradient_of_the_block_product(wants, activation):
    """It would be zero in silence. The ordinary backward stays."""
    arguments = operands(activation=activation, probe=torch.zeros(2, 3))
    arguments[wants].requires_grad_()
    y = block_linear(**arguments).square().sum()
    with pytest.raises(
        ValueError, match=r"block_linear: expected a first-order backward, got create_graph=True. Use the"
    ):
        torch.autograd.grad(y, arguments[wants], create_graph=True)
    (gradient,) = torch.autograd.grad(block_linear(**arguments).square().sum(), arguments[wants])
    assert not gradient.requires_grad


@pytest.mark.skipif(cpu.current_isa() != "amx", reason="no fused attention here")
def test_a_gradient_of_a_gradient_of_attention():
    q, k, v = (narrow(1, 2, 8, 32) for _ in range(3))
    with pytest.raises(
        ValueError, match=r"attention: expected a first-order backward, got create_graph=True. Use the ref"
    ):
        torch.autograd.grad(attention(q, k, v).float().sum(), q, create_graph=True)
    qkv = narrow(1, 8, 3, 2, 32)
    with pytest.raises(ValueError, match=r"self_attention: expected a first-order backward, got create_graph=True"):
        torch.autograd.grad(self_attention(qkv).float().sum(), qkv, create_graph=True)


@pytest.mark.skipif("avx512" not in cpu.available_isas(), reason="no fused norm here")
@pytest.mark.parametrize("alone", [True, False])
def test_a_gradient_of_a_gradient_of_the_norm(alone):
    x, weight = torch.randn(3, 40, requires_grad=True), torch.ones(40, requires_grad=True)
    _, y = add_layer_norm(x, None if alone else torch.randn(3, 40), weight)
    with pytest.raises(
        ValueError, match=r"add_layer_norm: expected a first-order backward, got create_graph=True. Use to"
    ):
        torch.autograd.grad(y.square().sum(), [x, weight], create_graph=True)


def test_the_reference_of_attention_has_gradients_of_gradients():
    """What the refusal advises does work."""
    q, k, v = (torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradgradcheck(lambda *tensors: attention(*tensors), (q, k, v))


def test_an_instruction_set_that_is_gone_by_the_backward():
    """The forward saved what only its own kernel reads."""
    usable, before = cpu.available_isas(), cpu.current_isa()
    if before != "amx":
        pytest.skip("no amx here")
    q = torch.randn(1, 2, 8, 32).bfloat16().requires_grad_()
    x = torch.randn(3, 40, requires_grad=True)
    out, (_, normalised) = attention(q, q, q), add_layer_norm(x, x)
    try:
        cpu.set_isa(usable[0])
        with pytest.raises(ValueError, match=r"attention: expected the instruction set amx, .* got portable. Choose"):
            out.float().sum().backward()
        with pytest.raises(
            ValueError, match=r"add_layer_norm: expected an instruction set from avx512 on, .* got portable"
        ):
            normalised.sum().backward()
    finally:
        cpu.set_isa(before)
