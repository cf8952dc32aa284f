"""Packed int8 layers: every path of this machine against sums in int64, what goes in and out, what is refused."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
import torch.nn.functional as F

from sparsam.kernels import cpu, dense_from_blocks, int8_packed
from sparsam.kernels.int8 import int8_block_linear, quantise_rows, quantise_tensor
from sparsam.kernels.int8_packed import int8_backend, pack_int8, packed_int8_linear
from sparsam.kernels.reference import activate

FP32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
OK, BAD_ARGUMENT = 0, 1
KERNELS = int8_backend() != "reference"
needs_library = pytest.mark.skipif(not KERNELS, reason="no compiled library")

# (rows, cols), (out, in): whole grids, ragged edges, layers smaller than a block, depths that no word divides
SHAPES = [
    *[(block, shape) for block in ((32, 32), (16, 16)) for shape in ((96, 128), (100, 130), (5, 3))],
    *[(block, (100, 130)) for block in ((64, 64), (32, 64), (48, 16), (8, 4), (7, 3), (1, 1), (20, 30))],
]
ROWS = (0, 1, 3, 7, 13, 33, 129)


@pytest.fixture(params=cpu.available_isas() if KERNELS else [])
def isa(request):
    before = cpu.current_isa()
    cpu.set_isa(request.param)
    yield request.param
    cpu.set_isa(before)


def made(block=(32, 32), shape=(100, 130), density=0.5, extreme=False):
    """values, scale, block_row, block_col, in and out features: blocks in a random order, two dead slots among them."""
    (rows, cols), (out_features, in_features) = block, shape
    grid = -(-out_features // rows), -(-in_features // cols)
    row, col = (torch.rand(grid) < density).nonzero(as_tuple=True)
    order = torch.randperm(len(row) + 2)
    row, col = (torch.cat([part, part.new_full((2,), -1)])[order].int() for part in (row, col))
    values = torch.randint(-127, 128, (len(row), rows, cols), dtype=INT8)
    if extreme:
        values = torch.where(values < 0, -127, 127).to(INT8)
    return values, torch.rand(out_features) + 0.1, row, col, in_features, out_features


def exact(codes, x_scale, layer, bias):
    """The same with int64 sums."""
    values, scale, row, col, in_features, out_features = layer
    weight = dense_from_blocks(values, row, col, out_features, in_features).long()
    y = (codes.long() @ weight.T).float() * x_scale * scale
    return y if bias is None else y + bias


@pytest.mark.skipif(cpu.library() is None, reason="no compiled library")
def test_a_library_of_this_version_has_int8():
    assert KERNELS, "libsparsam_cpu.so is older than its sources: run `make setup`"


@needs_library
def test_the_path_follows_the_instruction_set():
    before, found = cpu.current_isa(), {}
    for name in cpu.available_isas():
        cpu.set_isa(name)
        found[name] = int8_backend(32, 32), int8_backend(7, 3)
    cpu.set_isa(before)
    assert found["portable"] == ("portable", "portable")
    assert found.get("avx2", ("avx2", "avx2")) == ("avx2", "avx2")
    assert {path for name in ("avx512", "avx512_bf16") for path in found.get(name, ())} <= {"vnni", "avx2"}
    assert found.get("amx", ("amx", "vnni"))[0] in {"amx", "vnni", "avx2"}
    assert found.get("amx", ("amx", "vnni"))[1] in {"vnni", "avx2"}


@needs_library
@pytest.mark.parametrize(("block", "shape"), SHAPES, ids=lambda pair: "x".join(map(str, pair)))
def test_every_bit_of_exact_sums(isa, block, shape):
    for at, density in enumerate((0.5, 0.1, 0.0, 1.0)):
        layer = made(block, shape, density)
        packed = pack_int8(*layer)
        for rows in ROWS if at == 0 else (7,):
            x = torch.randn(rows, shape[1])
            bias = torch.randn(shape[0]) if rows != 7 else None
            codes, x_scale = quantise_rows(x)
            expected = exact(codes, x_scale, layer, bias)
            for found in (
                packed_int8_linear(packed, codes, bias, x_scale=x_scale),
                packed_int8_linear(packed, x, bias),
            ):
                assert torch.equal(found, expected), (density, rows)
            *operands, _, out_features = layer
            assert torch.equal(int8_block_linear(codes, x_scale, *operands, bias, out_features), expected)


@needs_library
@pytest.mark.parametrize("block", [(32, 32), (16, 16), (8, 4), (7, 3)])
@pytest.mark.parametrize("code", [-127, 127])
def test_sums_never_saturate(isa, block, code):
    """The largest codes of one sign: pairs of their products do not fit 16 bits."""
    layer = made(block, (40, 1000), 1.0, extreme=True)
    codes = torch.full((5, 1000), code, dtype=INT8)
    ones = torch.ones(5, 1)
    for values in (layer[0], torch.full_like(layer[0], code)):
        one = (values, *layer[1:])
        assert torch.equal(packed_int8_linear(pack_int8(*one), codes, x_scale=ones), exact(codes, ones, one, None))


@needs_library
def test_the_widest_sum_that_an_int32_holds(isa):
    width = int8_packed.INT32_TERMS
    values = torch.full((1, 16, width), 127, dtype=INT8)
    zero = torch.zeros(1, dtype=torch.int32)
    packed = pack_int8(values, torch.ones(16), zero, zero, width, 16)
    codes = torch.full((2, width), -127, dtype=INT8)
    found = packed_int8_linear(packed, codes, x_scale=torch.ones(2))
    assert torch.equal(found, torch.full((2, 16), float(-127 * 127 * width)))


@needs_library
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rows_are_quantised_as_by_the_reference(isa, dtype):
    """Weights of one: the codes come out. Ties, tiny rows, rows of zeros, rows of any size, tails of a vector."""
    width = 67
    eye = torch.eye(width, dtype=INT8)[None]
    zero = torch.zeros(1, dtype=torch.int32)
    packed = pack_int8(eye, torch.ones(width), zero, zero, width, width)
    x = torch.randn(40, width) * torch.logspace(-44, 37, 40)[:, None]
    ties = torch.cat([torch.tensor([127.0]), torch.arange(width - 1) - 32.5])
    edges = torch.stack([torch.zeros(width), ties, ties * 2.0**-60, ties * 0.3, torch.full((width,), 1e-20), -ties])
    x = torch.cat([x, edges, torch.zeros(2, width)]).to(dtype)
    codes, x_scale = quantise_rows(x)
    found = packed_int8_linear(packed, x, dtype=FP32)
    assert torch.equal(found, codes.float() * x_scale)
    for scale in (torch.tensor(0.013), torch.tensor(1.0), torch.tensor(3e-9)):
        codes, x_scale = quantise_tensor(x, scale)
        assert torch.equal(packed_int8_linear(packed, x, x_scale=scale, dtype=FP32), codes.float() * x_scale)


@needs_library
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("x_scale", [None, torch.tensor(0.1)])
def test_a_row_that_is_not_finite_comes_out_as_nan_and_alone(isa, bad, x_scale):
    layer = made(shape=(96, 128), density=1.0)
    packed = pack_int8(*layer)
    x = torch.randn(5, 128)
    clean = packed_int8_linear(packed, x, x_scale=x_scale)
    x[3, 77] = bad
    found = packed_int8_linear(packed, x, x_scale=x_scale)
    assert found[3].isnan().all()
    assert torch.equal(found[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])


@needs_library
@pytest.mark.parametrize("activation", cpu.ACTIVATIONS)
def test_activation_and_type_of_the_result(isa, activation):
    for block, shape, rows in (((32, 32), (100, 130), 33), ((16, 16), (96, 128), 5)):
        layer = made(block, shape)
        packed, bias = pack_int8(*layer), torch.randn(shape[0])
        for dtype in (FP32, BF16):
            x = torch.randn(rows, shape[1]).to(dtype)
            codes, x_scale = quantise_rows(x)
            # the values are of the size of sums of codes: made of that of activations
            scaled = x_scale / 1000
            expected = activate(exact(codes, scaled, layer, bias).double(), activation)
            for out in (FP32, BF16):
                found = packed_int8_linear(packed, codes, bias, activation, x_scale=scaled, dtype=out)
                assert found.dtype == out
                tolerance = 2e-6 if out == FP32 else 5e-3
                torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
                same = packed_int8_linear(packed, x, bias, activation, dtype=out)
                again = packed_int8_linear(packed, codes, bias, activation, x_scale=x_scale, dtype=out)
                assert torch.equal(same, again)
            assert packed_int8_linear(packed, x, bias, activation).dtype == dtype


@needs_library
@pytest.mark.parametrize("rows", [3, 700])
def test_results_do_not_depend_on_threads(isa, rows):
    """With enough rows threads share them, otherwise the lines of the weight; 700 rows of 3000 take several turns."""
    layer = made((32, 32), (256, 3000), 0.4)
    packed, x, before = pack_int8(*layer), torch.randn(rows, 3000), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(packed_int8_linear(packed, x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], exact(*quantise_rows(x), layer, None))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@needs_library
def test_python_threads_share_one_pack():
    layer = made()
    packed, x = pack_int8(*layer), torch.randn(65, 130)
    expected, failures = packed_int8_linear(packed, x), []

    def work():
        failures.extend(1 for _ in range(20) if not torch.equal(packed_int8_linear(packed, x), expected))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


@needs_library
def test_views_leading_dimensions_and_scales_of_any_shape():
    layer = made(shape=(64, 96))
    packed, bias = pack_int8(*layer), torch.randn(64)
    x = torch.randn(6, 96)
    expected = packed_int8_linear(packed, x, bias)
    assert torch.equal(packed_int8_linear(packed, x.view(2, 3, 96), bias), expected.view(2, 3, 64))
    assert torch.equal(packed_int8_linear(packed, x[0], bias), expected[0])
    for same in (
        torch.cat([x, x], 1)[:, :96],
        x.mT.contiguous().mT,
        torch.stack([x, x], -1)[..., 0],
        torch._neg_view(-x),
    ):
        assert torch.equal(packed_int8_linear(packed, same, bias), expected)
    assert torch.equal(packed_int8_linear(packed, x, torch.stack([bias, bias], -1)[:, 0]), expected)
    codes, x_scale = quantise_rows(x)
    for scale in (x_scale, x_scale.view(-1), x_scale.view(2, 3, 1)):
        assert torch.equal(
            packed_int8_linear(packed, codes.view(2, 3, 96), bias, x_scale=scale), expected.view(2, 3, 64)
        )
    assert packed_int8_linear(packed, x.view(6, 96)[:0].view(2, 0, 96)).shape == (2, 0, 64)


@needs_library
def test_a_pack_may_be_copied_and_the_layer_may_go():
    layer = made()
    packed, x = pack_int8(*layer), torch.randn(5, 130)
    expected = packed_int8_linear(packed, x)
    for weights in (packed.weights.clone(), torch.cat([torch.zeros(8, dtype=torch.uint8), packed.weights])[8:]):
        assert torch.equal(packed_int8_linear(packed._replace(weights=weights), x), expected)


class Layer(torch.nn.Module):
    def __init__(self, packed):
        super().__init__()
        self.packed, self.bias = packed, torch.nn.Buffer(torch.randn(packed.out_features))

    def forward(self, x):
        return packed_int8_linear(self.packed, x, self.bias, "gelu")


def test_compiled_as_one_graph_and_exported():
    layer = Layer(pack_int8(*made(shape=(64, 96)))).eval()
    x = torch.randn(4, 96)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), expected)
        exported = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert "sparsam.packed_int8_linear.default" in str(exported.graph)
    for rows in (0, 1, 3, 7):
        x = torch.randn(rows, 96)
        assert torch.equal(exported.module()(x), layer(x))


def test_without_the_library_and_on_other_devices(monkeypatch):
    layer = made(shape=(64, 96))
    x, bias = torch.randn(2, 5, 96), torch.randn(64)
    expected = packed_int8_linear(pack_int8(*layer), x, bias, "relu")
    monkeypatch.setattr(cpu, "library", lambda: None)
    assert int8_backend() == "reference"
    packed = pack_int8(*layer)
    assert packed.weights.numel() == 0
    assert torch.equal(packed_int8_linear(packed, x, bias, "relu"), expected)
    for scale in (torch.tensor(0.02), torch.rand(10)):
        codes, row_scale = quantise_tensor(x.view(10, 96), scale.view(-1, 1))
        found = packed_int8_linear(packed, x, x_scale=scale)
        assert torch.equal(found.view(10, 64), exact(codes, row_scale, layer, None))
    elsewhere = pack_int8(*(part.to("meta") if isinstance(part, torch.Tensor) else part for part in layer))
    assert packed_int8_linear(elsewhere, torch.empty(3, 96, device="meta", dtype=BF16)).shape == (3, 64)


def test_opcheck():
    packed = pack_int8(*made(shape=(64, 96)))
    for x, x_scale in ((torch.randn(3, 96), None), (torch.ones(3, 96, dtype=INT8), torch.rand(3))):
        arguments = (x, x_scale, *packed[:5], torch.randn(64), 64, "gelu", FP32)
        torch.library.opcheck(torch.ops.sparsam.packed_int8_linear.default, arguments)


def test_close_to_the_layer_that_it_stands_for():
    values, _, row, col, _, _ = made(shape=(64, 96), density=0.7)
    scale = torch.rand(64) / 1000
    x = torch.randn(50, 96)
    weight = dense_from_blocks(values.float(), row, col, 64, 96) * scale[:, None]
    found = packed_int8_linear(pack_int8(values, scale, row, col, 96, 64), x)
    assert float((found - F.linear(x, weight)).norm() / F.linear(x, weight).norm()) < 0.02


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.ones(6, 32, 32)}, r"expected int8 values of \(S, R, C\), got torch.float32 of"),
        ({"values": torch.ones(6, 32, dtype=INT8)}, r"expected int8 values of \(S, R, C\), got torch.int8 of \(6, 32"),
        ({"values": torch.ones(6, 0, 32, dtype=INT8)}, r"expected int8 values of \(S, R, C\), got torch.int8 of \(6,"),
        ({"scale": torch.ones(63)}, r"expected a float32 scale of \(64,\), got torch.float32 of \(63,\). Give one"),
        ({"scale": torch.ones(64).double()}, r"expected a float32 scale of \(64,\), got torch.float64 of \(64,\)"),
        ({"in_features": 0}, "expected 1 to 133144 input features, got 0: an int32 may overflow"),
        ({"in_features": 133145}, "expected 1 to 133144 input features, got 133145: an int32 may overflow"),
        ({"block_row": torch.zeros(5, dtype=torch.int32)}, r"expected block_row as int32 of \(6,\), got torch.int32"),
        ({"block_col": torch.zeros(6).long()}, r"expected block_col as int32 of \(6,\), got torch.int64 of \(6,\)"),
        ({"in_features": 64}, "expected block_col below 2 for 64 x 64 in blocks of 32 x 32, got 2. Give the addr"),
    ],
)  # fmt: skip
def test_layers_that_do_not_fit(change, message):
    place = torch.arange(6, dtype=torch.int32)
    layer = {
        "values": torch.ones(6, 32, 32, dtype=INT8), "scale": torch.ones(64), "block_row": place // 3,
        "block_col": place % 3, "in_features": 96, "out_features": 64,
    }  # fmt: skip
    pack_int8(**layer)
    with pytest.raises(ValueError, match="pack_int8: " + message):
        pack_int8(**layer | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3, 96).double()}, "x of float32 or bfloat16, or int8 with x_scale, got torch.float64"),
        ({"x": torch.ones(3, 96, dtype=INT8)}, "x of float32 or bfloat16, or int8 with x_scale, got torch.int8"),
        ({"x": torch.ones(3, 95)}, r"expected x of \(..., 96\), got \(3, 95\). Its last dimension"),
        ({"x": torch.tensor(1.0)}, r"expected x of \(..., 96\), got \(\)"),
        ({"dtype": torch.float16}, "expected a result of float32 or bfloat16, got torch.float16. Cast it after"),
        ({"activation": "tanh"}, "expected an activation of none, relu, relu2, gelu, gelu_tanh, silu, got 'tanh'"),
        ({"bias": torch.ones(63)}, r"expected a bias of \(64,\), got \(63,\). Give one number per output"),
        ({"x_scale": torch.ones(2)}, r"expected x_scale of one number or one for each row of \(3, 96\), got \(2,\)"),
        ({"x": torch.ones(3, 96, device="meta")}, "expected the pack on meta like x, got cpu. Move it"),
        ({"bias": torch.ones(64, device="meta")}, "expected bias on cpu like x, got meta. Move it"),
        ({"x_scale": torch.ones(3, device="meta")}, "expected x_scale on cpu like x, got meta. Move it"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit(change, message):
    packed = pack_int8(*made(shape=(64, 96)))
    with pytest.raises(ValueError, match="packed_int8_linear: .*" + message):
        packed_int8_linear(**{"pack": packed, "x": torch.ones(3, 96)} | change)


@needs_library
def test_packs_of_another_layer_or_instruction_set_and_parts_of_one():
    packed, other = pack_int8(*made(shape=(64, 96))), pack_int8(*made(shape=(64, 128)))
    x = torch.randn(3, 96)
    for weights in (other.weights, packed.weights[:-8], packed.weights[:40], torch.zeros_like(packed.weights)):
        with pytest.raises(ValueError, match=r"expected a pack of this layer made on .*, got another. Pack again"):
            packed_int8_linear(packed._replace(weights=weights.clone()), x)
    before, path = cpu.current_isa(), int8_backend()
    try:
        for name in cpu.available_isas():
            cpu.set_isa(name)
            if int8_backend() == path:
                packed_int8_linear(packed, x)  # avx512 and avx512_bf16 have the same
            else:
                with pytest.raises(ValueError, match=f"expected a pack of this layer made on {name}, got another"):
                    packed_int8_linear(packed, x)
    finally:
        cpu.set_isa(before)


@needs_library
def test_the_interface_refuses_bad_arguments():
    c = int8_packed._functions()
    values, scale, row, col, in_features, out_features = made(shape=(64, 96), density=1.0)
    packed, x, y = pack_int8(values, scale, row, col, in_features, out_features), torch.ones(3, 96), torch.empty(3, 64)
    good = {
        "packed": packed.weights.data_ptr(), "bytes": packed.weights.numel(), "in": 96, "out": 64, "tokens": 3,
        "x_dtype": 0, "x": x.data_ptr(), "ldx": 96, "x_scale": None, "bias": None, "activation": 0, "y_dtype": 0,
        "y": y.data_ptr(), "threads": 1,
    }  # fmt: skip
    assert c.sparsam_int8_forward(*good.values()) == OK
    faults = [
        {"packed": None}, {"packed": good["packed"] + 4}, {"bytes": 63}, {"in": 95}, {"out": 63}, {"tokens": -1},
        {"x_dtype": 3}, {"x_dtype": 2}, {"x": None}, {"ldx": 95}, {"activation": 6}, {"activation": -1}, {"y_dtype": 2},
        {"y": None}, {"threads": 0},
    ]  # fmt: skip
    for fault in faults:
        assert c.sparsam_int8_forward(*(good | fault).values()) == BAD_ARGUMENT, fault
    index = int8_packed.build_index(row, col, 2, 3)
    fields = {
        "in_features": 96, "out_features": 64, "rows": 32, "cols": 32, "slots": len(row), "values": values.data_ptr(),
        "scale": scale.data_ptr(), "block_row": row.data_ptr(), "block_col": col.data_ptr(),
        "row_start": index.row_start.data_ptr(), "row_slots": index.row_slots.data_ptr(),
    }  # fmt: skip
    out = torch.empty_like(packed.weights)
    assert c.sparsam_int8_pack(ctypes.byref(int8_packed._Layer(**fields)), ctypes.c_void_p(out.data_ptr())) == OK
    assert torch.equal(out, packed.weights)
    broken = index.row_slots.clone()
    broken[0] = 99
    faults = [{name: 0} for name in fields] + [
        {"in_features": 64}, {"out_features": 32, "slots": 1}, {"in_features": 133145},
        {"row_slots": broken.data_ptr()},
    ]  # fmt: skip
    for fault in faults:
        layer = int8_packed._Layer(**fields | fault)
        assert c.sparsam_int8_pack_bytes(ctypes.byref(layer)) == 0, fault
        assert c.sparsam_int8_pack(ctypes.byref(layer), ctypes.c_void_p(out.data_ptr())) == BAD_ARGUMENT, fault
    assert c.sparsam_int8_path(0, 32) == -1


def test_python_refuses_features_that_the_library_would():
    assert int8_packed.INT32_TERMS * 127 * 127 < 2**31 <= (int8_packed.INT32_TERMS + 1) * 127 * 127
