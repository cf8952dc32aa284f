"""block_linear against the masked dense product: values, all gradients, and what torch asks of an operator."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from sparsam.kernels import backend, block_linear, build_index, cpu, dense_from_blocks
from sparsam.kernels.reference import activate, activation_gradient, block_mean

BLOCKS = [(1, 1), (1, 4), (4, 1), (4, 8), (8, 8), (16, 16), (16, 32), (32, 16), (32, 32), (64, 64), (3, 5)]
ACTIVATIONS = cpu.ACTIVATIONS
# one rounding of a bfloat16 product is 2^-9 of its size; sums of a few hundred terms stay within a few of them
TOLERANCE = {torch.float64: (1e-10, 1e-10), torch.float32: (2e-5, 2e-5), torch.bfloat16: (3e-2, 3e-2)}


def layer(rows, cols, out_features, in_features, density=0.5, dead=1, dtype=torch.float32):
    """Random values at random addresses, in random slot order, with dead slots among them."""
    grid = -(-out_features // rows), -(-in_features // cols)
    active = torch.rand(grid) < density
    row, col = active.nonzero(as_tuple=True)
    order = torch.randperm(len(row) + dead)
    row, col = (torch.cat([part, part.new_full((dead,), -1)])[order].int() for part in (row, col))
    values = torch.randn(len(row), rows, cols, dtype=dtype) * (row >= 0)[:, None, None] / in_features**0.5
    # what lies in the padding takes no part in anything
    dense = dense_from_blocks(values, row, col, out_features, in_features)
    return values.requires_grad_(), build_index(row, col, *grid), dense.detach(), active


def masked_dense(x, weight, bias, activation, grad):
    """Output and gradients of x, weight and bias by the dense product, in float64."""
    x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    bias = None if bias is None else bias.detach().double().requires_grad_()
    y = activate(F.linear(x, weight, bias), activation)
    y.backward(grad.double())
    return y.detach(), x.grad, weight.grad, None if bias is None else bias.grad


def close(found, expected, dtype):
    relative, absolute = TOLERANCE[dtype]
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(found.double(), expected, rtol=relative, atol=absolute * scale)


def check(
    rows, cols, out_features, in_features, shape, dtype, *, values_dtype=None, bias=True, activation="none", **how
):
    """Forward and every gradient of block_linear against the dense product with the same zeros."""
    values, index, dense, active = layer(rows, cols, out_features, in_features, dtype=values_dtype or dtype, **how)
    x = torch.randn(*shape, in_features, dtype=dtype).requires_grad_()
    b = torch.randn(out_features, dtype=values_dtype or dtype).requires_grad_() if bias else None
    grad = torch.randn(*shape, out_features, dtype=dtype)
    scores = torch.zeros(active.shape).requires_grad_()
    whole = torch.zeros(out_features, in_features).requires_grad_()

    y = block_linear(x, values, index, out_features, b, activation, scores)
    y.backward(grad)
    block_linear(x.detach(), values.detach(), index, out_features, b, activation, whole).backward(grad)

    wanted, dx, dweight, dbias = masked_dense(x, dense.to(dtype), None if b is None else b.to(dtype), activation, grad)
    assert y.dtype == x.dtype
    assert y.shape == (*shape, out_features)
    close(y.detach(), wanted, dtype)
    close(x.grad, dx, dtype)
    inside = dense_from_blocks(torch.ones_like(values), *index[:2], out_features, in_features).bool()
    assert values.grad.dtype == values.dtype
    close(dense_from_blocks(values.grad, *index[:2], out_features, in_features), dweight * inside, dtype)
    assert not values.grad[index.block_row < 0].any()
    assert whole.grad.dtype == scores.grad.dtype == torch.float32
    narrow = torch.float32 if dtype == torch.float64 else dtype
    close(whole.grad, dweight, narrow)
    # blocks of one weight: the grid is the whole matrix, and the gradient keeps its sign
    close(scores.grad, block_mean(dweight if rows == cols == 1 else dweight.abs(), rows, cols), narrow)
    if b is not None:
        close(b.grad / 2, dbias, dtype)


@pytest.fixture(params=["kernel", "reference"])
def path(request, monkeypatch):
    """Both implementations: the library where there is one, and plain PyTorch."""
    if request.param == "reference":
        monkeypatch.setattr(cpu, "library", lambda: None)
    elif cpu.library() is None:
        pytest.skip("no compiled library")
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "cols"), BLOCKS, ids=lambda size: str(size))
class TestAgainstMaskedDense:
    @pytest.mark.parametrize("shape", [(0,), (1,), (7,), (2, 33)], ids=str)
    def test_every_block_size_and_number_of_rows(self, path, rows, cols, shape, dtype):
        check(rows, cols, 2 * rows, 3 * cols, shape, dtype)

    @pytest.mark.parametrize("density", [0.0, 1.0], ids=["empty", "full"])
    def test_empty_and_full_topologies(self, path, rows, cols, density, dtype):
        check(rows, cols, 2 * rows, 3 * cols, (7,), dtype, density=density, dead=0 if density else 1)

    def test_shapes_that_the_block_does_not_divide(self, path, rows, cols, dtype):
        check(rows, cols, 2 * rows + 1, 3 * cols + 1, (5,), dtype, activation="gelu")


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [5, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_activation(path, activation, bias, size, dtype):
    check(size, size, 2 * size, 3 * size, (9,), dtype, activation=activation, bias=bias)


@pytest.mark.parametrize("size", [4, 32])
def test_fp32_values_with_bf16_input_keep_gradients_of_their_own_type(path, size):
    check(size, size, 2 * size, 3 * size, (33,), torch.bfloat16, values_dtype=torch.float32, activation="gelu")


@pytest.mark.parametrize("size", [4, 32])
def test_no_rows_and_no_slots_at_all(path, size):
    check(size, size, 2 * size, 3 * size, (0,), torch.float32, density=0.0, dead=0)


def test_float64_warns_and_is_right():
    """float64 has no kernel: it must say so and still be exact, not run in float32 in silence."""
    expected = contextlib.nullcontext() if cpu.library() is None else pytest.warns(UserWarning, match="has no kernel")
    with expected:
        check(4, 4, 8, 12, (7,), torch.float64, activation="gelu")


def test_autocast_runs_fp32_values_in_bf16_and_leaves_their_gradient_fp32():
    values, index, dense, _ = layer(16, 16, 32, 48)
    x, bias = torch.randn(9, 48).requires_grad_(), torch.randn(32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = block_linear(x, values, index, 32, bias, "gelu")
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert values.grad.dtype == x.grad.dtype == bias.grad.dtype == torch.float32
    close(y.detach(), activate(F.linear(x, dense, bias), "gelu").detach().double(), torch.bfloat16)


def test_autocast_leaves_float64_alone_as_torch_does():
    values, index, dense, _ = layer(4, 4, 8, 12, dtype=torch.float64)
    x = torch.randn(3, 12, dtype=torch.float64)
    expected = contextlib.nullcontext() if cpu.library() is None else pytest.warns(UserWarning, match="has no kernel")
    with torch.autocast("cpu", torch.bfloat16), expected:
        y = block_linear(x, values, index, 8)
    close(y.detach(), x @ dense.mT, torch.float64)


def test_strided_input_and_gradient():
    """A transposed, a sliced and an expanded tensor are what real models hand over."""
    values, index, dense, _ = layer(4, 8, 8, 24)
    for x in (torch.randn(24, 6).mT, torch.randn(6, 40)[:, 3:27], torch.randn(1, 24).expand(6, 24)):
        x = x.detach().requires_grad_()
        y = block_linear(x, values, index, 8)
        (dx,) = torch.autograd.grad(y.sum(), x)  # a gradient of stride 0
        close(y.detach(), (x.double() @ dense.double().mT).detach(), torch.float32)
        close(dx, dense.double().sum(0).expand(6, 24), torch.float32)


def test_only_the_gradients_that_are_asked_for():
    values, index, _, _ = layer(4, 8, 8, 24)
    y = block_linear(torch.randn(5, 24), values, index, 8, torch.zeros(8))
    assert torch.autograd.grad(y.sum(), [values], retain_graph=True)[0].shape == values.shape
    assert not block_linear(torch.randn(5, 24), values.detach(), index, 8).requires_grad


def test_the_default_dtype_of_the_program_plays_no_part(path):
    values, index, _, _ = layer(4, 8, 8, 24)
    x, bias = torch.randn(5, 24), torch.zeros(8, requires_grad=True)
    torch.set_default_dtype(torch.float64)
    block_linear(x, values, index, 8, bias).sum().backward()
    assert bias.grad.tolist() == [5.0] * 8


def test_a_probe_adds_up_over_backwards():
    """One micro-batch: mean |gradient|. Over several, the block scores add up and the whole gradient keeps its sign."""
    values, index, _, active = layer(4, 4, 8, 8, density=0.3)
    scores, whole = torch.zeros(active.shape).requires_grad_(), torch.zeros(8, 8).requires_grad_()
    x, grad = torch.randn(5, 8), torch.randn(5, 8)
    for sign in (1, -1):
        block_linear(x, values, index, 8, probe=scores).backward(sign * grad)
        block_linear(x, values, index, 8, probe=whole).backward(sign * grad)
    close(whole.grad, torch.zeros(8, 8).double(), torch.float32)
    close(scores.grad, 2 * block_mean((grad.mT @ x).abs(), 4, 4).double(), torch.float32)


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_the_dense_gradient_of_narrow_operands_is_summed_in_float32(path, activation):
    """Rounded to bfloat16 after the sum, 2^-9 of every entry would be lost, and growth ranks by what is left."""
    values, index, _, active = layer(16, 16, 32, 48)
    x, grad = torch.randn(400, 48).bfloat16(), torch.randn(400, 32).bfloat16()
    whole, scores = torch.zeros(32, 48).requires_grad_(), torch.zeros(active.shape).requires_grad_()
    y, pre = torch.ops.sparsam.block_linear(x, values.detach(), None, whole, *index, 32, activation, True)
    y.backward(grad)
    block_linear(x, values.detach(), index, 32, activation=activation, probe=scores).backward(grad)
    exact = activation_gradient(grad, pre.detach(), activation).double().mT @ x.double()
    torch.testing.assert_close(whole.grad.double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))
    # the kernel may round grad * act' otherwise than PyTorch does, entry by entry; those errors are independent
    tolerance = 1e-5 if activation == "none" else 1e-3
    torch.testing.assert_close(scores.grad.double(), block_mean(exact.abs(), 16, 16), rtol=tolerance, atol=0)


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("probe", [None, "scores", "whole"])
def test_opcheck(activation, probe):
    values, index, _, active = layer(4, 8, 8, 24)
    x = torch.randn(2, 3, 24, requires_grad=True)
    bias = torch.randn(8, requires_grad=True)
    shape = {"scores": active.shape, "whole": (8, 24)}.get(probe)
    collects = None if shape is None else torch.zeros(shape, requires_grad=True)
    arguments = (x, values, bias, collects, *index, 8, activation, activation != "none")
    torch.library.opcheck(torch.ops.sparsam.block_linear.default, arguments)


def test_opcheck_of_the_operators_behind_it():
    values, index, _, _ = layer(32, 32, 64, 96)
    values = values.detach()
    grad, x, pre = torch.randn(3, 64), torch.randn(3, 96), torch.randn(3, 64)
    backward = torch.ops.sparsam.block_linear_backward.default
    torch.library.opcheck(backward, (grad, x, values, pre, *index, "gelu", True, True, True))
    torch.library.opcheck(torch.ops.sparsam.block_scores.default, (grad, x, values, pre, *index, "gelu"))


def test_a_plain_training_step_skips_the_operators(monkeypatch):
    """With an activation too, and not by accident: the backward runs without grad mode."""

    def refuse(*arguments):
        raise AssertionError("an operator was called")

    for name in ("block_linear", "block_linear_backward"):
        monkeypatch.setattr(torch.ops.sparsam, name, refuse)
    values, index, _, _ = layer(4, 8, 8, 24)
    for activation in ("none", "gelu"):
        block_linear(torch.randn(2, 3, 24), values, index, 8, None, activation).sum().backward()
    assert values.grad.any()


def test_meta_tensors_go_through():
    values, index, _, _ = layer(4, 8, 8, 24)
    meta = type(index)(*(tensor.to("meta") for tensor in index))
    assert block_linear(torch.empty(5, 24, device="meta"), values.to("meta"), meta, 8).shape == (5, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 33)}, "expected x with K and out_features that make 2 x 3 blocks"),
        ({"out_features": 9}, "expected x with K and out_features that make 2 x 3 blocks"),
        ({"activation": "tanh"}, "expected an activation of none, relu, relu2, gelu, gelu_tanh, silu, got 'tanh'"),
        ({"x": torch.zeros(3, 24, dtype=torch.int64)}, "expected a floating-point x, got torch.int64"),
        ({"bias": torch.zeros(7)}, r"expected a bias of \(8,\), got \(7,\)"),
        ({"probe": torch.zeros(2, 2)}, r"expected a probe of \(2, 3\) or \(8, 24\), got \(2, 2\)"),
        ({"values": torch.zeros(4, 8)}, r"expected values of \(slots, rows, cols\), got \(4, 8\)"),
        ({"values": torch.zeros(99, 4, 8)}, "expected an index of 99 slots, got one of"),
    ],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_what_does_not_fit_is_refused_before_the_kernel_reads_memory(change, message, autocast):
    values, index, _, _ = layer(4, 8, 8, 24)
    arguments = {"x": torch.zeros(3, 24), "values": values, "index": index, "out_features": 8} | change
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), pytest.raises(ValueError, match=message):
        block_linear(**arguments)


def test_backend_names_an_instruction_set():
    assert backend() in (*cpu.ISAS, "reference")


def test_compiled_whole_with_at_most_two_graphs_and_no_recompile_over_100_rewires():
    """A topology is data: changing it must not recompile; only update steps (with a probe) may have another graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def step(x, values, index, bias, probe):
        return block_linear(x, values, index, 32, bias, "gelu", probe).square().mean()

    x, bias = torch.randn(9, 48), torch.randn(32)
    values = torch.randn(6, 8, 8, requires_grad=True)
    index = build_index(torch.zeros(6, dtype=torch.int32), torch.arange(6, dtype=torch.int32), 4, 6)
    for update in range(100):
        places = torch.randperm(24)[:6]
        rewired = build_index((places // 6).int(), (places % 6).int(), 4, 6)
        for old, new in zip(index, rewired, strict=True):
            old.copy_(new)
        probe = torch.zeros(4, 6, requires_grad=True) if update % 10 == 5 else None
        step(x, values, index, bias, probe).backward()
        if update % 10 == 5:
            wanted = torch.zeros(4, 6, requires_grad=True)
            block_linear(x, values.detach(), index, 32, bias, "gelu", wanted).square().mean().backward()
            torch.testing.assert_close(probe.grad, wanted.grad)
    assert counter.frame_count <= 2
