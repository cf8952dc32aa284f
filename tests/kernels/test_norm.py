"""Residual addition and LayerNorm against float64: values, all gradients, and what torch asks of an operator."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from sparsam.kernels import add_layer_norm, cpu

FUSED = cpu.current_isa() in ("avx512", "avx512_bf16", "amx")
needs_kernel = pytest.mark.skipif(not FUSED, reason="the fused kernel needs AVX-512")
SHAPES = [(1, 1), (3, 5), (2, 3, 16), (7, 17), (65, 48), (2, 70, 100), (33, 512), (130, 1000), (5, 4097)]
BRANCHES = [None, torch.float32, torch.bfloat16]
# L2 error relative to the exact result of the same inputs; bfloat16 rounds by at most 2^-8 = 0.004
ERROR = {torch.float32: 3e-6, torch.bfloat16: 0.004}


def operands(shape, branch, affine=(True, True)):
    """x, branch, weight and bias; the stream does not lie around zero, where the mean would not matter."""
    width = shape[-1]
    return [
        torch.randn(shape) + 3,
        None if branch is None else torch.randn(shape).to(branch),
        torch.randn(width) if affine[0] else None,
        torch.randn(width) if affine[1] else None,
    ]


def run(function, tensors, grads, **options):
    """The two results, and the gradients of all operands that are there."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    results = function(*leaves, **options)
    used = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
    wanted = [leaf for leaf in leaves if leaf is not None]
    outputs, their_grads = zip(*used, strict=True)
    found = torch.autograd.grad(outputs, wanted, their_grads, allow_unused=True)
    return [*(result.detach() for result in results), *found]


def exact(x, branch, weight, bias, eps=1e-5):
    added = x if branch is None else x + branch
    center = added - added.mean(-1, keepdim=True)
    out = center / (center.square().mean(-1, keepdim=True) + eps).sqrt()
    out = out if weight is None else out * weight
    return added, out if bias is None else out + bias


def gradients_of(shape, out):
    return [torch.randn(shape), torch.randn(shape).to(out)]


def check(tensors, grads, out=torch.float32, **options):
    with torch.autocast("cpu", torch.bfloat16, enabled=out == torch.bfloat16):
        found = run(add_layer_norm, tensors, grads, **options)
    doubles = [None if t is None else t.double() for t in tensors]
    wanted = run(exact, doubles, [None if g is None else g.double() for g in grads], **options)
    kinds = [torch.float32, out, *(t.dtype for t in tensors if t is not None)]
    for number, (result, expected, kind) in enumerate(zip(found, wanted, kinds, strict=True)):
        if expected is None:
            assert result is None
            continue
        assert result.dtype == kind
        # a row of one number is its own mean: what is compared with zero may be off by a rounding of its terms
        error = (result.double() - expected).norm() / expected.norm().clamp_min(1e-2 * expected.numel() ** 0.5)
        assert error <= ERROR[kind], f"result {number}: relative error {error:.1e}"
    return found


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("branch", BRANCHES, ids=["alone", "fp32 branch", "bf16 branch"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_exact_result(shape, branch, out):
    check(operands(shape, branch), gradients_of(shape, out), out)


@pytest.mark.parametrize("affine", list(itertools.product([True, False], repeat=2)), ids=str)
@pytest.mark.parametrize("branch", BRANCHES, ids=str)
def test_without_weight_or_bias_and_with_another_eps(branch, affine):
    shape = (9, 50)
    check(operands(shape, branch, affine), gradients_of(shape, torch.float32), eps=0.5)


@pytest.mark.parametrize("branch", BRANCHES, ids=str)
@pytest.mark.parametrize("used", [0, 1], ids=["the sum", "the normalised"])
def test_only_one_of_the_two_goes_on(used, branch):
    grads = gradients_of((9, 50), torch.float32)
    grads[1 - used] = None
    check(operands((9, 50), branch), grads)


def test_only_what_asks_for_a_gradient_gets_one():
    x, branch, weight, bias = operands((9, 50), torch.bfloat16)
    for asking in (x, branch, weight, bias):
        asking.requires_grad_()
        out = sum(result.sum() for result in add_layer_norm(x, branch, weight, bias))
        out.backward()
        assert asking.grad is not None
        assert sum(t.grad is not None for t in (x, branch, weight, bias)) == 1
        asking.requires_grad_(False).grad = None


def test_views_in_another_order():
    x, branch = torch.randn(4, 40, 3).mT, torch.randn(3, 4, 40, dtype=torch.bfloat16).transpose(0, 1)
    weight, bias = torch.randn(40, 2).unbind(1)
    grads = [torch.randn(4, 40, 3).mT, torch.randn(40).expand(4, 3, 40)]
    found = check([x, branch, weight, bias], grads)
    assert all(result.is_contiguous() for result in found[:2])


@pytest.mark.parametrize("branch", BRANCHES, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 40)], ids=str)
def test_no_rows(shape, branch):
    tensors = [None if t is None else t.requires_grad_() for t in operands(shape, branch)]
    added, out = add_layer_norm(*tensors)
    assert added.shape == out.shape == shape
    (added.sum() + out.sum()).backward()
    assert torch.equal(tensors[2].grad, torch.zeros(shape[-1]))
    assert torch.equal(tensors[3].grad, torch.zeros(shape[-1]))
    assert tensors[0].grad.shape == shape


def test_no_columns():
    added, out = add_layer_norm(torch.ones(3, 0), torch.ones(3, 0))
    assert added.shape == out.shape == (3, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_nan_and_inf_stay_in_their_row_and_are_seen(out, value):
    x, branch, weight, bias = operands((4, 37), torch.float32)
    x[2, 36] = value
    with torch.autocast("cpu", torch.bfloat16, enabled=out == torch.bfloat16):
        added, normalised = add_layer_norm(x, branch, weight, bias)
    torch.testing.assert_close(added[2, 36], torch.tensor(value), equal_nan=True)
    assert normalised.isnan().any(-1).tolist() == [False, False, True, False]
    assert normalised[2].isnan().all()


@needs_kernel
def test_rounding_to_bf16_is_torch_s():
    """Values of all sizes, ties, subnormals, infinities and NaN; the row of the norm is made to pass them through."""
    bits = torch.cat([torch.randint(-(2**31), 2**31, (4096,)), torch.arange(-(2**31), 2**31, 2**15)])
    wide = bits.to(torch.int32).view(torch.float32)
    branch = torch.zeros(len(wide), 1, dtype=torch.bfloat16, requires_grad=True)
    added, _ = add_layer_norm(torch.zeros(len(wide), 1), branch)
    # a row of one: the gradient of its norm is zero, that of the sum goes through
    (found,) = torch.autograd.grad([added, _], branch, [wide[:, None], torch.zeros(len(wide), 1)])
    expected = wide.bfloat16()
    assert torch.equal(found.view(-1).isnan(), expected.isnan())
    assert torch.equal(found.view(-1)[~expected.isnan()], expected[~expected.isnan()])


@needs_kernel
@pytest.mark.parametrize("shape", [(300, 520), (3, 17)], ids=str)
def test_bits_depend_neither_on_the_run_nor_on_the_threads(shape):
    tensors, grads = operands(shape, torch.bfloat16), gradients_of(shape, torch.float32)
    wanted = None
    for threads in (1, 2, 2, 5):
        torch.set_num_threads(threads)
        found = run(add_layer_norm, tensors, grads)
        for a, b in zip(found, wanted or found, strict=True):
            assert torch.equal(a, b)
        wanted = found


@pytest.mark.parametrize("branch", BRANCHES, ids=str)
def test_autocast_narrows_the_normalised_output_alone(branch):
    tensors = operands((6, 64), branch)
    with torch.autocast("cpu", torch.bfloat16):
        added, out = add_layer_norm(*tensors)
    plain_added, plain = add_layer_norm(*tensors)
    assert (added.dtype, out.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(added, plain_added, rtol=0, atol=0)
    torch.testing.assert_close(out, plain.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("x", "branch", "weight", "added", "out", "cast"),
    [
        (torch.float64, torch.bfloat16, torch.float32, torch.float64, torch.float64, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16, None),
        (torch.bfloat16, None, torch.float32, torch.bfloat16, torch.bfloat16, None),
        (torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float32, None),
        (torch.float32, torch.float32, torch.float32, torch.float32, torch.float16, torch.float16),
    ],
)
def test_types_the_kernel_does_not_do(x, branch, weight, added, out, cast):
    with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
        tensors = operands((6, 64), branch)
        affine = [t.to(weight).requires_grad_() for t in tensors[2:]]
        found = add_layer_norm(tensors[0].to(x), tensors[1], *affine)
    assert [t.dtype for t in found] == [added, out]
    stream, added_to = tensors[0].to(x).double(), None if branch is None else tensors[1].double()
    wanted = exact(stream, added_to, *(t.double() for t in affine))
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b).norm() <= 0.005 * b.norm()
    torch.autograd.grad(found[1].float().sum(), affine)


def test_float64_passes_gradcheck():
    tensors = [t.double().requires_grad_() for t in operands((3, 5), torch.float32)]
    assert torch.autograd.gradcheck(add_layer_norm, tensors)


@pytest.mark.parametrize("branch", BRANCHES, ids=str)
def test_compiled_whole_is_the_same(branch):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(add_layer_norm, backend=counter, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            tensors, grads = operands((5, 7, 40), branch), gradients_of((5, 7, 40), torch.bfloat16)
            wanted = run(add_layer_norm, tensors, grads)
            torch.testing.assert_close(run(compiled, tensors, grads), wanted, rtol=0, atol=0)
    assert counter.frame_count == 1


@needs_kernel
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("branch", BRANCHES, ids=str)
def test_opcheck(branch, affine):
    x, added, weight, bias = operands((5, 20), branch, (affine, affine))
    leaves = [None if t is None else t.requires_grad_() for t in (x, added, weight, bias)]
    operators = torch.ops.sparsam
    if branch is None:
        torch.library.opcheck(operators.layer_norm.default, (x, weight, bias, 1e-5, torch.bfloat16))
        out, mean, rstd = operators.layer_norm(x, weight, bias, 1e-5, torch.bfloat16)
        added = x
    else:
        torch.library.opcheck(operators.add_layer_norm.default, (*leaves, 1e-5, torch.bfloat16))
        added, out, mean, rstd = operators.add_layer_norm(*leaves, 1e-5, torch.bfloat16)
    saved = [t if t is None else t.detach() for t in (added, mean, rstd, weight)]
    for dadded, narrow in ((None, False), (torch.randn(5, 20), True)):
        arguments = (torch.ones_like(out), dadded, *saved, narrow, affine)
        torch.library.opcheck(operators.add_layer_norm_backward.default, arguments)


@pytest.mark.parametrize("branch", BRANCHES, ids=str)
def test_fake_and_meta_tensors_have_the_shape_and_order_of_real_ones(branch):
    tensors = operands((2, 3, 20), branch)
    real = add_layer_norm(*tensors)
    with FakeTensorMode() as mode:
        fake = add_layer_norm(*(t if t is None else mode.from_tensor(t) for t in tensors))
    meta = add_layer_norm(*(t if t is None else t.to("meta") for t in tensors))
    for a, b, c in zip(real, fake, meta, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()) == (c.shape, c.dtype, c.stride())


ELSEWHERE = """
import os, torch
from sparsam.kernels import add_layer_norm, backend
torch.manual_seed(0)
torch.set_num_threads(2)
x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in ((30, 1000), 1000, 1000))
branch = torch.randn(30, 1000).bfloat16().requires_grad_()
added, out = add_layer_norm(x, branch, weight, bias)
assert added.dtype == out.dtype == torch.float32
exact = torch.nn.functional.layer_norm(x.double() + branch, (1000,), weight.double(), bias.double())
assert (out - exact).norm() < 1e-5 * exact.norm()
grad = torch.randn(30, 1000)
found = torch.autograd.grad(out, (x, branch, weight, bias), grad)
wanted = torch.autograd.grad(exact, (x, branch, weight, bias), grad.double())
assert all((a - b).norm() < 0.005 * b.norm() for a, b in zip(found, wanted))
if backend().startswith(("avx512", "amx")):  # an OpenMP pool does not survive a fork; so small, torch starts none
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(add_layer_norm(x, branch, weight, bias)[1], out) else 1)
    assert os.waitpid(child, 0)[1] == 0
print(backend(), out.grad_fn.name())
"""


@pytest.mark.parametrize("isa", ["avx2", "avx512", "reference", None])
def test_other_machines_and_after_fork(isa, monkeypatch):
    if isa not in (None, "reference", *cpu.available_isas()):
        pytest.skip(f"no {isa} here")
    if isa is not None:
        monkeypatch.setenv("SPARSAM_CPU_ISA", isa)
    result = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    used, operator = result.stdout.split()
    assert used == (isa or cpu.current_isa())
    assert ("sparsam" in operator) == used.startswith(("avx512", "amx"))


def test_the_c_interface_refuses_below_avx512():
    if "avx2" not in cpu.available_isas():
        pytest.skip("no compiled avx2 here")
    x, out, row = torch.zeros(1, 4), torch.zeros(1, 4), torch.zeros(1)
    before = cpu.current_isa()
    try:
        cpu.set_isa("avx2")
        assert not cpu.library().norm_forward(x, None, None, None, 1e-5, None, out, row, row)
        assert not cpu.library().norm_backward(out, None, x, row, row, None, out, None, None, None)
    finally:
        cpu.set_isa(before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"branch": torch.zeros(3, 8)}, r"expected branch of shape \(2, 8\) on cpu to go with x, got \(3, 8\) on cpu"),
        ({"branch": torch.zeros(8)}, r"expected branch of shape \(2, 8\) on cpu to go with x, got \(8,\) on cpu"),
        ({"weight": torch.zeros(7)}, r"expected weight of shape \(8,\) on cpu to go with x, got \(7,\) on cpu"),
        ({"bias": torch.zeros(1)}, r"expected bias of shape \(8,\) on cpu to go with x, got \(1,\) on cpu"),
        ({"bias": torch.zeros(8, device="meta")}, r"expected bias of shape \(8,\) on cpu .* got \(8,\) on meta"),
        ({"x": torch.zeros(()), "branch": None}, "expected x of at least one dimension, got a single number"),
    ],
)
def test_operands_that_do_not_fit_are_refused_before_the_kernel_reads_memory(change, message):
    given = {"x": torch.zeros(2, 8), "branch": torch.zeros(2, 8), "weight": torch.ones(8), "bias": torch.ones(8)}
    with pytest.raises(ValueError, match="add_layer_norm: " + message):
        add_layer_norm(**(given | change))


def test_it_is_layer_norm():
    x, branch, weight, bias = operands((9, 64), torch.float32)
    _, out = add_layer_norm(x, branch, weight, bias)
    torch.testing.assert_close(out, F.layer_norm(x + branch, (64,), weight, bias))
