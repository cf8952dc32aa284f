"""The packed forward: the plain call against the operator, what takes the operator's way, and what is refused."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from sparsam.kernels import block_linear, build_index, cpu
from sparsam.kernels.packed import PackedWeights, pack, packed_block_linear

needs_library = pytest.mark.skipif(cpu.library() is None, reason="no compiled library")
FP32, BF16 = torch.float32, torch.bfloat16


def made(dtype=FP32, rows=32, cols=32, grid=(2, 3)):
    """A pack, and the values and index that it is of: 70 % of the blocks, at least one, in a random order."""
    places = torch.randperm(grid[0] * grid[1])[: max(1, round(0.7 * grid[0] * grid[1]))]
    index = build_index(places // grid[1], places % grid[1], *grid)
    values = torch.randn(len(places), rows, cols) / (grid[1] * cols) ** 0.5
    packed = pack(values, index, grid[1] * cols, grid[0] * rows, dtype)
    if packed is None:
        pytest.skip("nothing is packed here")
    return packed, values, index


def through_operator(x, packed, bias=None, activation="none"):
    return torch.ops.sparsam.packed_block_linear(
        x, packed.weights, packed.values, bias, *packed.index, packed.out_features, activation
    )


class Seen(TorchDispatchMode):
    """Counts what comes through the dispatcher; keeps plain calls off the short way, as any mode does."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def without_operator(monkeypatch):
    """From here on a call that takes the operator's way fails."""

    def refuse(*arguments):
        raise AssertionError("the operator was called")

    monkeypatch.setattr(torch.ops.sparsam, "packed_block_linear", refuse)


@needs_library
@pytest.mark.parametrize("size", [4, 16, 32])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_packed_weights_give_the_same_rows(size, dtype):
    packed, values, index = made(dtype, size, size)
    bias = torch.randn(2 * size)
    for rows in (0, 1, 3, 16):
        x = torch.randn(rows, 3 * size, dtype=dtype)
        found = packed_block_linear(x, packed, bias, "gelu")
        wanted = block_linear(x, values, index, 2 * size, bias, "gelu")
        tolerance = 2e-5 if dtype == FP32 else 3e-2
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@needs_library
@pytest.mark.parametrize("activation", cpu.ACTIVATIONS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_plain_call_gives_every_bit_of_the_operator(dtype, activation, monkeypatch):
    packed, _, _ = made(dtype)
    cases = []
    for shape in ((), (0,), (1,), (2,), (16,), (300,), (2, 0), (2, 3), (2, 1, 5)):
        for bias in (None, torch.randn(64), torch.randn(64, dtype=BF16), torch.nn.Parameter(torch.randn(64))):
            x = torch.randn(*shape, 96, dtype=dtype)
            cases.append((x, bias, through_operator(x, packed, bias, activation).detach()))
    without_operator(monkeypatch)
    for x, bias, wanted in cases:
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                found = packed_block_linear(x, packed, bias, activation)
            assert found.shape == wanted.shape
            assert not found.requires_grad
            assert torch.equal(found, wanted)
            assert found.is_inference() == isinstance(mode, torch.inference_mode)


@needs_library
def test_what_is_not_plain_goes_through_the_operator():
    """Strided and negated rows, other types of bias, modes, transforms, gradients: the same numbers."""
    packed, _, _ = made()
    x, bias = torch.randn(5, 96), torch.randn(64)
    wanted = through_operator(x, packed, bias)
    spread = torch.stack([x, x], -1)[..., 0]
    wider = torch.cat([x, x], 1)[:, :96]
    negated = torch._neg_view(-x)
    assert negated.is_neg()
    assert negated.is_contiguous()
    for same in (spread, wider, x.mT.contiguous().mT, negated, torch.nn.Parameter(x)):
        torch.testing.assert_close(packed_block_linear(same, packed, bias).detach(), wanted)
    for same in (bias.double(), bias.repeat_interleave(2)[::2], torch._neg_view(-bias)):
        torch.testing.assert_close(packed_block_linear(x, packed, same), wanted)
    with Seen() as seen:
        torch.testing.assert_close(packed_block_linear(x, packed, bias), wanted)
    assert "sparsam.packed_block_linear.default" in seen.names
    with torch.device("meta"):  # a mode; what it makes is elsewhere, what comes of tensors is not
        torch.testing.assert_close(packed_block_linear(x, packed, bias), wanted)
    torch.testing.assert_close(torch.vmap(lambda row: packed_block_linear(row, packed, bias))(x), wanted)
    with torch.no_grad():
        assert torch.equal(packed_block_linear(x, packed, bias.requires_grad_()), wanted)


@needs_library
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_a_trace_holds_the_operator_and_no_dead_result():
    packed, _, _ = made()
    traced = torch.jit.trace(lambda x: packed_block_linear(x, packed), torch.randn(2, 96))
    x = torch.randn(2, 96)
    assert torch.equal(traced(x), packed_block_linear(x, packed))


@needs_library
def test_a_compiled_call_is_one_graph_with_the_operator_in_it():
    torch._dynamo.reset()
    packed, _, _ = made(BF16)
    x = torch.randn(4, 96, dtype=BF16)
    compiled = torch.compile(
        lambda x: packed_block_linear(x, packed, None, "gelu"), backend="aot_eager", fullgraph=True
    )
    with torch.no_grad():
        assert torch.equal(compiled(x), packed_block_linear(x, packed, None, "gelu"))


@needs_library
def test_the_profiler_sees_it():
    packed, _, _ = made()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        packed_block_linear(torch.randn(2, 96), packed)
    assert "sparsam::packed_block_linear" in {event.name for event in seen.events()}


@needs_library
def test_many_python_threads_share_one_pack(monkeypatch):
    packed, _, _ = made()
    inputs = [torch.randn(rows, 96) for rows in (1, 3, 8, 16) * 4]
    wanted = [through_operator(x, packed, None, "relu") for x in inputs]
    without_operator(monkeypatch)

    def work(at):
        with torch.inference_mode():
            return [packed_block_linear(inputs[at], packed, None, "relu") for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        for at, found in enumerate(pool.map(work, range(len(inputs)))):
            assert all(torch.equal(y, wanted[at]) for y in found)


@needs_library
def test_threads_are_those_of_torch_and_little_work_has_one(monkeypatch):
    packed, _, _ = made(grid=(8, 8))
    few, many = torch.randn(1, 256), torch.randn(64, 256)
    asked, forward = [], packed._forward

    def listen(*arguments):
        asked.append(arguments[-1])
        return forward(*arguments)

    monkeypatch.setattr(packed, "_forward", listen)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append([packed_block_linear(x, packed) for x in (few, many)])
    finally:
        torch.set_num_threads(before)
    assert asked == [1, 1, 1, 2]
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@needs_library
def test_a_pack_keeps_what_its_kernel_reads():
    """Memory of a parameter may be swapped (p.data = ...): the pack is stale then, and still safe to call."""
    values = torch.nn.Parameter(torch.ones(1, 32, 32))
    index = build_index(torch.zeros(1), torch.zeros(1), 1, 1)
    packed = pack(values, index, 32, 32, FP32)
    if packed is None:
        pytest.skip("nothing is packed here")
    at = values.data_ptr()
    values.data = torch.zeros(1, 32, 32)
    del index
    gc.collect()
    assert packed.values.data_ptr() == at
    assert packed_block_linear(torch.ones(1, 32), packed).tolist() == [[32.0] * 32]


@needs_library
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_values_of_any_order(dtype):
    _, values, index = made(dtype)
    strided = torch.stack([values, values], -1)[..., 0]
    x = torch.randn(2, 96, dtype=dtype)
    found = packed_block_linear(x, pack(strided, index, 96, 64, dtype))
    assert torch.equal(found, packed_block_linear(x, pack(values, index, 96, 64, dtype)))


@needs_library
@pytest.mark.parametrize("field", ["block_row", "block_col", "row_start", "row_slots", "col_start", "col_slots"])
def test_pack_refuses_an_index_that_does_not_fit(field):
    _, values, index = made()
    part = getattr(index, field)
    for changed, message in (
        (part.long(), f"pack: expected {field} as one contiguous row of int32, got"),
        (part.repeat_interleave(2)[::2], f"pack: expected {field} as one contiguous row of int32, got"),
        (part.to("meta"), f"pack: expected {field} on cpu like x, got meta. Move it"),
        (part[:-1].clone(), "pack: expected (an index of 4 slots|x with K and out_features that make . x . blocks)"),
    ):
        with pytest.raises(ValueError, match=message):
            pack(values, index._replace(**{field: changed}), 96, 64, FP32)
    with pytest.raises(ValueError, match="pack: expected x with K and out_features that make 2 x 3 blocks of 32 x 32"):
        pack(values, index, 97, 64, FP32)


@needs_library
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3, 96, device="meta")}, "expected block_row on meta like x, got cpu"),
        ({"x": torch.ones(3, 97)}, "expected x with K and out_features that make 2 x 3 blocks of 32 x 32, got K = 97"),
        ({"x": torch.tensor(1.0)}, r"expected x of \(..., K\), got one number"),
        ({"x": torch.ones(3, 96).double()}, "expected x of float32 or bfloat16 on a CPU, got torch.float64"),
        ({"bias": torch.ones(64, device="meta")}, "expected bias on cpu like x, got meta"),
        ({"bias": torch.ones(63)}, r"expected a bias of \(64,\), got \(63,\). Give one number per output"),
        ({"activation": "tanh"}, "expected an activation of none, relu, relu2, gelu, gelu_tanh, silu, got 'tanh'"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit(change, message):
    packed, _, _ = made()
    with pytest.raises(ValueError, match="packed_block_linear: " + message):
        packed_block_linear(**{"x": torch.ones(3, 96), "packed": packed, "bias": torch.ones(64)} | change)


@needs_library
def test_packs_that_do_not_belong_to_the_call():
    packed, values, index = made()
    x = torch.randn(2, 96)
    with pytest.raises(
        ValueError, match=r"packed weights: expected ones of this layer for torch.bfloat16 on .*, got oth"
    ):
        packed_block_linear(x.bfloat16(), packed)
    with pytest.raises(
        ValueError, match=r"packed weights: expected ones of this layer for torch.float32 on .*, got oth"
    ):
        packed_block_linear(x[:, :95].contiguous(), packed)
    for part in (packed.weights[:60], packed.weights[4:]):
        with pytest.raises(ValueError, match="packed weights: expected what `pack` returned, got a copy or a part"):
            torch.ops.sparsam.packed_block_linear(x, part, values, None, *index, 64, "none")
    before = cpu.current_isa()
    try:
        for other in (name for name in cpu.available_isas() if name != before):
            cpu.set_isa(other)
            with pytest.raises(ValueError, match=f"for torch.float32 on {other}, got others. Pack again"):
                packed_block_linear(x, packed)
    finally:
        cpu.set_isa(before)


def test_without_the_library(monkeypatch):
    monkeypatch.setattr(cpu, "library", lambda: None)
    index = build_index(torch.zeros(1), torch.zeros(1), 1, 1)
    x, values, nothing = torch.ones(1, 32), torch.ones(1, 32, 32), torch.empty(0, dtype=torch.uint8)
    assert pack(values, index, 32, 32, FP32) is None
    with pytest.raises(ValueError, match="packed_block_linear: expected the compiled library, got none"):
        torch.ops.sparsam.packed_block_linear(x, nothing, values, None, *index, 32, "none")


def test_nothing_is_packed_of_other_types():
    index = build_index(torch.zeros(1), torch.zeros(1), 1, 1)
    assert pack(torch.ones(1, 32, 32), index, 32, 32, torch.float16) is None
    assert pack(torch.ones(1, 32, 32).double(), index, 32, 32, FP32) is None
    assert pack(torch.ones(1, 32, 32, device="meta"), index, 32, 32, FP32) is None


@needs_library
def test_opcheck():
    packed, _, _ = made()
    assert isinstance(packed, PackedWeights)
    arguments = (torch.randn(3, 96), packed.weights, packed.values, None, *packed.index, 64, "none")
    torch.library.opcheck(torch.ops.sparsam.packed_block_linear.default, arguments)
