"""Attention against softmax(q k^T) v in float64: values, all gradients, and what torch asks of an operator."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from sparsam.kernels import attention, cpu, self_attention
from sparsam.kernels import reference as plain

LENGTHS = (1, 7, 16, 33, 64, 100, 256, 511)  # around the tiles of 16, the blocks of 32 and the chunks of 256
AMX = cpu.current_isa() == "amx"
needs_amx = pytest.mark.skipif(not AMX, reason="the fused kernel needs AMX")
# L2 error relative to the exact result. bf16 rounds at 2^-9 = 0.002: the fused kernel rounds P, dS and each result
# once; plain bf16 products round the scores too, which are of size 4 and sit in an exponent
BF16_ERROR = 0.004 if AMX else 0.03
# torch's products may add up in another order for other strides, lengths and threads; the fused kernel may not
SAME = {"rtol": 0, "atol": 0} if AMX else {"rtol": 0.03, "atol": 0.03}


def operands(tokens, size, batch=2, heads=3, dtype=torch.bfloat16, scale=1.0):
    """q, k, v as views of one (B, T, 3, H, D) tensor, and a gradient in (B, T, H, D) order."""
    qkv = torch.randn(batch, tokens, 3, heads, size) * scale
    grad = torch.randn(batch, tokens, heads, size).to(dtype).transpose(1, 2)
    return qkv.to(dtype).permute(2, 0, 3, 1, 4).unbind(0), grad


def run(function, tensors, grad, causal):
    """Output and gradients of q, k, v."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves, causal)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def exact(q, k, v, causal):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v


def check(function, tensors, grad, causal, bound):
    found = run(function, tensors, grad, causal)
    wanted = run(exact, [x.double() for x in tensors], grad.double(), causal)
    for name, x, y, like in zip(("out", "dq", "dk", "dv"), found, wanted, (grad, *tensors), strict=True):
        assert x.dtype == like.dtype
        # a softmax over one key has no gradient: what is compared with zero may be off by a rounding of its terms
        error = (x.double() - y).norm() / max(y.norm(), 1e-2 * like.double().norm())
        assert error <= bound, f"{name}: relative error {error:.1e} above {bound:.0e}"
    return found


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("size", [32, 64, 96, 128])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_bf16_against_the_exact_result(tokens, size, causal):
    tensors, grad = operands(tokens, size, *((1, 2) if tokens > 256 else (2, 3)))
    check(attention, tensors, grad, causal, BF16_ERROR)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_a_sequence_longer_than_all_that_is_held_at_once(causal):
    tensors, grad = operands(1070, 64, 1, 1)
    check(attention, tensors, grad, causal, BF16_ERROR)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shape", [(9, 64), (33, 20), (5, 160)], ids=str)
def test_the_plain_path(shape, causal):
    """What runs without AMX, and for other types and head sizes."""
    tensors, grad = operands(*shape)
    check(plain.attention, tensors, grad, causal, 0.03)
    for dtype, bound in ((torch.float32, 3e-6), (torch.float64, 1e-12)):
        check(attention, [x.to(dtype) for x in tensors], grad.to(dtype), causal, bound)
    if shape[1] != 64:
        check(attention, tensors, grad, causal, 0.03)


def test_float64_passes_gradcheck():
    leaves = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(attention, leaves)


def test_no_batch_no_tokens():
    for shape in ((0, 2, 5, 32), (2, 0, 5, 32), (2, 3, 0, 32)):
        q = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
        attention(q, q, q).sum().backward()
        assert q.grad.shape == shape


@pytest.mark.parametrize("tokens", [33, 256])
def test_one_tensor_of_q_k_v_gives_the_same_and_one_gradient(tokens):
    (q, k, v), grad = operands(tokens, 64)
    qkv = torch.stack((q, k, v)).permute(1, 3, 0, 2, 4).contiguous().requires_grad_()
    out = self_attention(qkv)
    (dqkv,) = torch.autograd.grad(out, qkv, grad.transpose(1, 2))
    assert dqkv.is_contiguous() or not AMX
    for x, y in zip(
        (out.transpose(1, 2), *dqkv.permute(2, 0, 3, 1, 4)), run(attention, (q, k, v), grad, True), strict=True
    ):
        torch.testing.assert_close(x, y, **SAME)


def test_every_memory_order_gives_the_same_bits():
    tensors, grad = operands(40, 64)
    wanted = run(attention, tensors, grad, True)
    spread = [torch.stack((x, x), -1)[..., 0] for x in (*tensors, grad)]  # stride 2 in D
    shifted = [F.pad(x, (3, 2))[..., 3:-2] for x in (*tensors, grad)]  # rows that start anywhere
    for *views, gradient in (spread, shifted, [x.contiguous() for x in (*tensors, grad)]):
        for x, y in zip(run(attention, views, gradient, True), wanted, strict=True):
            torch.testing.assert_close(x, y, **SAME)


def test_expanded_operands_and_an_expanded_gradient():
    """Keys shared by all heads (stride 0), and the gradient of a sum (stride 0 everywhere)."""
    tensors, _ = operands(20, 32)
    q, k, v = (tensors[0], *(x[:, :1].expand(-1, 3, -1, -1) for x in tensors[1:]))
    ones = torch.ones((), dtype=torch.bfloat16).expand(2, 3, 20, 32)
    check(attention, (q, k, v), ones, True, 0.02 if AMX else 0.05)  # dq cancels to little here


def test_the_output_lets_heads_be_joined_without_a_copy():
    tensors, _ = operands(10, 32)
    out = attention(*tensors)
    if AMX:
        assert out.transpose(1, 2).is_contiguous()


def test_what_comes_later_changes_nothing():
    tensors, _ = operands(100, 64)
    before = attention(*tensors)
    changed = [x.clone() for x in tensors]
    for x in changed:
        x[:, :, 70:] = torch.randn_like(x[:, :, 70:]) * 50
    torch.testing.assert_close(attention(*changed)[:, :, :70], before[:, :, :70], **SAME)


@pytest.mark.parametrize("scale", [1e-3, 8.0, 30.0])
def test_tiny_and_huge_scores(scale):
    """Huge ones make a one-hot softmax, whose other probabilities are subnormal or zero."""
    tensors, grad = operands(80, 64, scale=scale)
    found = run(attention, tensors, grad, True)
    wanted = run(exact, [x.double() for x in tensors], grad.double(), True)
    assert all(x.isfinite().all() for x in found)
    assert (found[0].double() - wanted[0]).norm() <= (0.004 if AMX else 0.3) * wanted[0].norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_bad_numbers_show_and_nothing_hangs(which, value):
    (q, k, v), grad = operands(100, 64, 1, 2)
    good = attention(q, k, v)
    tensors = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
    tensors[which][0, 0, 50, 3] = value
    out, *gradients = run(attention, list(tensors.values()), grad, True)
    seen = slice(50, None)
    wanted = exact(*(x.double() for x in tensors.values()), True)[:, :, seen]
    assert not (out[:, :, seen].isfinite() & ~wanted.isfinite()).any()
    assert not all(gradient[0, 0].isfinite().all() for gradient in gradients)
    torch.testing.assert_close(out[0, 1], good[0, 1], **SAME)  # the other head
    if which != "v":  # 0 * inf: values of the same block may spoil an earlier row, scores may not
        torch.testing.assert_close(out[0, 0, :50], good[0, 0, :50], **SAME)


def test_threads_change_no_bit():
    tensors, grad = operands(70, 64, 3, 3)
    torch.set_num_threads(1)
    wanted = run(attention, tensors, grad, True)
    for threads in (2, 5):
        torch.set_num_threads(threads)
        for x, y in zip(run(attention, tensors, grad, True), wanted, strict=True):
            torch.testing.assert_close(x, y, **SAME)


def test_from_several_python_threads_at_once_and_between_torch_products():
    """oneDNN configures the same tiles: neither may disturb the other."""
    work = [operands(tokens, size) for tokens, size in ((33, 64), (64, 32), (100, 128), (20, 96))]
    x, weight = torch.randn(64, 256).bfloat16(), torch.randn(128, 256).bfloat16()
    product = F.linear(x, weight)
    wanted = [run(attention, *item, True) for item in work]

    def repeat(item):
        results = []
        for _ in range(5):
            results.append(run(attention, *item, True))
            torch.testing.assert_close(F.linear(x, weight), product, rtol=0, atol=0)
        return results

    with ThreadPoolExecutor(4) as pool:
        for results, expected in zip(pool.map(repeat, work), wanted, strict=True):
            for found in results:
                for a, b in zip(found, expected, strict=True):
                    torch.testing.assert_close(a, b, **SAME)


def test_autocast_computes_in_bf16_and_leaves_fp32_gradients():
    tensors, grad = operands(40, 64)
    wide = [x.float().requires_grad_() for x in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*wide)
        one = self_attention(torch.stack(wide).permute(1, 3, 0, 2, 4))
    assert out.dtype == one.dtype == torch.bfloat16
    wanted, *gradients = run(attention, tensors, grad, True)
    torch.testing.assert_close(out.detach(), wanted)
    torch.testing.assert_close(one.detach().transpose(1, 2), wanted)
    for found, expected in zip(torch.autograd.grad(out, wide, grad), gradients, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected.float(), rtol=0.02, atol=0.02)


def test_autocast_leaves_float64_alone_as_torch_does():
    tensors, _ = operands(9, 32, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*tensors).dtype == torch.float64


@pytest.mark.parametrize("causal", [True, False])
def test_compiled_whole_is_the_same(causal):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    joint = torch.compile(self_attention, backend=counter, fullgraph=True)
    apart = torch.compile(attention, backend=counter, fullgraph=True)
    for _ in range(2):
        tensors, grad = operands(40, 64)
        qkv = torch.stack(tensors).permute(1, 3, 0, 2, 4)
        for f, compiled, leaves, gradient in (
            (self_attention, joint, [qkv], grad.transpose(1, 2)),
            (attention, apart, tensors, grad),
        ):
            wanted = run(f, leaves, gradient, causal)
            torch.testing.assert_close(run(compiled, leaves, gradient, causal), wanted, **SAME)
    assert counter.frame_count == 2


@needs_amx
@pytest.mark.parametrize("causal", [True, False])
def test_opcheck(causal):
    (q, k, v), grad = operands(20, 32)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    qkv = torch.randn(2, 20, 3, 3, 32).bfloat16().requires_grad_()
    torch.library.opcheck(torch.ops.sparsam.attention.default, (*leaves, causal))
    torch.library.opcheck(torch.ops.sparsam.self_attention.default, (qkv, causal))
    out, lse = torch.ops.sparsam.attention(q, k, v, causal)
    torch.library.opcheck(torch.ops.sparsam.attention_backward.default, (grad, q, k, v, out, lse, causal))
    out, lse = torch.ops.sparsam.self_attention(qkv.detach(), causal)
    arguments = (grad.transpose(1, 2), qkv.detach(), out, lse, causal)
    torch.library.opcheck(torch.ops.sparsam.self_attention_backward.default, arguments)


def test_fake_and_meta_tensors_have_the_shape_and_order_of_real_ones():
    tensors, _ = operands(20, 32)
    out = attention(*tensors)
    with FakeTensorMode() as mode:
        fake = attention(*(mode.from_tensor(x) for x in tensors))
    assert (fake.shape, fake.dtype, fake.stride()) == (out.shape, out.dtype, out.stride())
    meta = attention(*(x.to("meta") for x in tensors))
    assert (meta.shape, meta.dtype) == (out.shape, out.dtype)


ELSEWHERE = """
import os, torch
from sparsam.kernels import attention, backend
torch.manual_seed(0)
torch.set_num_threads(2)
q, k, v = (torch.randn(2, 3, 50, 64).bfloat16().requires_grad_() for _ in range(3))
out = attention(q, k, v)
out.float().square().mean().backward()
exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
assert (out - exact).norm() < 0.03 * exact.norm()
wanted = torch.autograd.grad(exact.square().mean(), (q, k, v))
assert all((x.grad - y).norm() < 0.05 * y.norm() for x, y in zip((q, k, v), wanted))
if backend() == "amx":  # an OpenMP pool does not survive a fork: torch itself hangs there, the kernel must not
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(attention(q, k, v), out) else 1)
    assert os.waitpid(child, 0)[1] == 0
print(backend())
"""


@pytest.mark.parametrize("isa", ["avx512", "reference", None])
def test_without_amx_in_another_process_and_after_fork(isa, monkeypatch):
    if isa not in (None, "reference", *cpu.available_isas()):
        pytest.skip(f"no {isa} here")
    if isa is not None:
        monkeypatch.setenv("SPARSAM_CPU_ISA", isa)
    result = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == (isa or cpu.current_isa())


@pytest.mark.parametrize(
    "change",
    [
        {"k": torch.zeros(2, 3, 9, 64, dtype=torch.bfloat16)},
        {"v": torch.zeros(2, 1, 8, 64, dtype=torch.bfloat16)},
        {"k": torch.zeros(2, 3, 8, 64)},
        {"q": torch.zeros(3, 8, 64, dtype=torch.bfloat16)},
        {"v": torch.zeros(2, 3, 8, 64, dtype=torch.bfloat16, device="meta")},
    ],
)
def test_operands_that_differ_are_refused_before_the_kernel_reads_memory(change):
    tensors = {name: torch.zeros(2, 3, 8, 64, dtype=torch.bfloat16) for name in "qkv"} | change
    with pytest.raises(ValueError, match=r"attention: expected q, k, v of one \(B, H, T, D\) shape, dtype and device"):
        attention(*tensors.values())


def test_a_joint_tensor_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"expected q, k and v as one \(B, T, 3, H, D\), got \(2, 8, 3, 64\)"):
        self_attention(torch.zeros(2, 8, 3, 64))
