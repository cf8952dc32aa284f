"""Products in given formats against float64 products of rounded operands: values, gradients, what must not vanish."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from sparsam import ActivatedLinear, Block, SparseLinear
from sparsam.kernels import block_linear, build_index, dense_from_blocks, formats
from sparsam.kernels.format_linear import format_block_linear, format_linear
from sparsam.kernels.formats import (
    BF16,
    FP8,
    FP8_ROWS,
    FP16,
    FP32,
    INT8,
    MX_FP8,
    PRODUCT_FORMATS,
    TF32,
    ProductFormat,
    Products,
    arithmetic,
    product,
    product_format,
)
from sparsam.kernels.reference import activate, block_mean

CPU = torch.device("cpu")
MIXED = [Products(FP8, FP8, BF16), Products(BF16, BF16, FP32), Products(INT8, MX_FP8, FP8_ROWS)]
MIXED += [Products(FP32, FP8, INT8), Products(TF32, FP16, BF16), Products(BF16, FP32, FP8)]
ALL = [Products(*[one] * 3) for one in PRODUCT_FORMATS] + MIXED
LOW = [one for one in ALL if one not in (Products(*[BF16] * 3), Products(*[FP32] * 3))]
# float32 sums; where codes are multiplied as bfloat16 the product is rounded to 8 bits
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}


def name_of(products):
    return "-".join(one.name for one in products)


def rounded_product(a, b, left, right):
    return left.round(a).double() @ right.round(b).double().mT


def close(found, expected, tolerance, absolute=1e-5):
    scale = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=absolute * scale)


def coarsest(products):
    """The tolerance of what was multiplied as bfloat16, if anything was."""
    narrow = any(one not in (FP32, TF32, FP16) for one in products)
    return TOLERANCE[torch.bfloat16 if narrow else torch.float32]


@pytest.mark.parametrize("shape", [(5, 33, 9), (1, 712, 10), (0, 8, 4), (3, 0, 4), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("format", PRODUCT_FORMATS, ids=str)
def test_a_product_is_that_of_the_rounded_operands(format, shape):
    rows, reduced, columns = shape
    # other strides than a matrix's: a transpose, and every second column
    a, b = torch.randn(reduced, rows).mT, torch.randn(columns, 2 * reduced)[:, ::2] * 0.1
    bias = torch.randn(columns)
    for left in {format.operand, format.gradient}:
        y = product(a, b, left, format.operand)
        assert y.dtype == torch.float32
        close(y, rounded_product(a, b, left, format.operand), coarsest([format]))
        assert torch.equal(product(a, b, left, format.operand, bias), y + bias)
    assert product(a, b.bfloat16(), left, format.operand, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_narrow_inputs_are_scaled_in_float32():
    a, b = torch.randn(4, 40).bfloat16(), torch.randn(3, 40).half()
    for format in PRODUCT_FORMATS:
        expected = rounded_product(a, b, format.operand, format.operand)
        close(product(a, b, format.operand, format.operand), expected, coarsest([format]))


def test_int8_products_are_exact_however_long(monkeypatch):
    a, b = (torch.randint(-127, 128, (rows, 3001)).float() for rows in (3, 5))
    a[:, 0] = b[:, 0] = 127.0  # then the scale is 1
    exact = (a.long() @ b.long().mT).float()
    assert torch.equal(product(a, b, INT8.operand, INT8.operand), exact)
    monkeypatch.setattr(formats, "INT32_TERMS", 1000)
    assert torch.equal(product(a, b, INT8.operand, INT8.operand), exact)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("format", PRODUCT_FORMATS, ids=str)
def test_what_is_not_finite_is_never_cut_to_the_largest_code(format, bad):
    a, b = torch.randn(4, 40), torch.randn(3, 40)
    spoilt = a.clone()
    spoilt[1, 35] = bad
    for one in {format.operand, format.gradient}:
        whole = one.scale_covers == "tensor"
        for y, good in (
            (product(spoilt, b, one, format.operand), product(a, b, one, format.operand)),
            (product(b, spoilt, format.operand, one).mT, product(b, a, format.operand, one).mT),
        ):
            assert not y[1].isfinite().any()
            assert not y.isfinite().any() if whole else torch.equal(y[[0, 2, 3]], good[[0, 2, 3]])


def test_values_far_from_one_keep_their_scales():
    """MX codes go into bfloat16 with their scales, the others without."""
    a, b = torch.randn(4, 64), torch.randn(3, 64)
    for format in (FP8, FP8_ROWS, MX_FP8, INT8):
        for power in (2.0**-30, 2.0**30):
            y = product(a * power, b / power, format.operand, format.operand)
            torch.testing.assert_close(y, product(a, b, format.operand, format.operand))


def test_arithmetic_is_said_truthfully():
    real = {
        "cpu": {FP32, BF16, INT8},
        "cuda": {FP32, BF16, FP16},
    }
    for device, formats_there in real.items():
        for format in PRODUCT_FORMATS:
            expected = "real" if format in formats_there else "simulated"
            assert arithmetic(format, torch.device(device)) == expected
            expected = "real" if format in (FP32, BF16) else "simulated"
            assert arithmetic(format, torch.device(device), blocks=True) == expected


def test_names_and_what_is_not_one():
    assert [product_format(one.name) for one in PRODUCT_FORMATS] == list(PRODUCT_FORMATS)
    with pytest.raises(ValueError, match=r"expected one of fp32, .*got 'fp9'\. Did you mean"):
        product_format("fp9")
    with pytest.raises(ValueError, match=r"got 'wide'\. Use one of them"):
        product_format("wide")


@pytest.mark.parametrize("shapes", [((2, 3), (2, 4)), ((3,), (2, 3))], ids=str)
def test_operands_that_do_not_fit_are_refused(shapes):
    a, b = (torch.ones(shape) for shape in shapes)
    with pytest.raises(ValueError, match=r"product: expected operands of \(M, R\) and \(N, R\), got .* Transpose"):
        product(a, b, FP8.operand, FP8.operand)


# The dense layer


def expected_of(x, weight, bias, products, grad):
    """y, dx, dweight, dbias in float64 from rounded operands."""
    tokens, dy = x.detach().reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    forward, back, update = products
    weight = weight.detach()
    y = rounded_product(tokens, weight, forward.operand, forward.operand) + bias.detach().double()
    dx = rounded_product(dy, weight.mT, back.gradient, back.operand)
    dweight = rounded_product(dy.mT, tokens.mT, update.gradient, update.operand)
    return y.view(grad.shape), dx.view(x.shape), dweight, dy.double().sum(0)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("products", ALL, ids=name_of)
def test_a_layer_and_its_gradients(products, autocast):
    x = torch.randn(40, 3, 2).mT.transpose(0, 2).detach().requires_grad_()  # (3, 2, 40)
    weight, bias = torch.randn(24, 40).requires_grad_(), torch.randn(24).requires_grad_()
    assert not x.is_contiguous()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = format_linear(x, weight, bias, products)
    assert y.dtype == (torch.bfloat16 if autocast and products.forward != FP32 else torch.float32)
    grad = torch.randn(3, 2, 24).to(y.dtype)
    y.backward(grad)
    tolerance = [coarsest([one]) for one in products]
    wanted, dx, dweight, dbias = expected_of(x, weight, bias, products, grad)
    # the bias and its gradient are rounded to bfloat16 by torch's own layer; the result once more under autocast
    close(
        y.detach(),
        wanted,
        tolerance[0] + (2.0**-8 if autocast else 0),
        1e-2 if products[0] == BF16 else tolerance[0] / 4,
    )
    close(x.grad, dx, tolerance[1])
    close(weight.grad, dweight, tolerance[2])
    close(bias.grad, dbias, 1e-5, 1e-2 if set(products) == {BF16} else 1e-5)
    assert {x.grad.dtype, weight.grad.dtype, bias.grad.dtype} == {torch.float32}


@pytest.mark.parametrize("shape", [(40,), (0, 40), (1, 40), (2, 0, 40)], ids=str)
@pytest.mark.parametrize("products", [*LOW[:2], LOW[-1], Products(INT8, FP8, MX_FP8)], ids=name_of)
def test_few_rows_or_none(products, shape):
    x, weight = torch.randn(shape).requires_grad_(), torch.randn(24, 40).requires_grad_()
    y = format_linear(x, weight, None, products)
    y.backward(torch.ones_like(y))
    assert y.shape == (*shape[:-1], 24)
    assert x.grad.shape == shape
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    assert bool(weight.grad.any()) == bool(x.numel())


def both(x, weight, bias, run, grad=None):
    for tensor in (x, weight, bias):
        tensor.grad = None
    y = run()
    y.backward(torch.ones_like(y) if grad is None else grad)
    return [y.detach(), x.grad, weight.grad, bias.grad]


def operands():
    return (
        torch.randn(6, 40, requires_grad=True),
        torch.randn(24, 40, requires_grad=True),
        torch.randn(24).requires_grad_(),
    )


def same(one, other):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_bf16_throughout_is_autocast_and_fp32_throughout_is_none():
    x, weight, bias = operands()
    bf16, fp32 = Products(BF16, BF16, BF16), Products(FP32, FP32, FP32)
    with torch.autocast("cpu", torch.bfloat16):
        theirs = both(x, weight, bias, lambda: F.linear(x, weight, bias))
        assert same(theirs, both(x, weight, bias, lambda: format_linear(x, weight, bias, bf16)))

    def wide():
        with torch.autocast("cpu", torch.bfloat16):
            return format_linear(x, weight, bias, fp32)

    assert same(both(x, weight, bias, wide), both(x, weight, bias, lambda: F.linear(x, weight, bias)))
    # without autocast the same numbers in x's type
    y = format_linear(x, weight, bias, bf16)
    assert y.dtype == torch.float32
    assert torch.equal(y, theirs[0].float())


def test_the_type_of_the_result():
    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    for products in (Products(FP8, FP8, FP8), Products(BF16, BF16, BF16), Products(FP32, FP32, FP32)):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            assert format_linear(x.to(dtype), weight, None, products).dtype == dtype
            with torch.autocast("cpu", torch.bfloat16):
                narrow = torch.float32 if products.forward == FP32 else torch.bfloat16
                expected = dtype if dtype == torch.float64 else narrow
                assert format_linear(x.to(dtype), weight, None, products).dtype == expected


def test_nothing_is_kept_but_x_and_the_weight_and_a_recompute_gives_the_same_bits():
    x, weight, bias = operands()
    for products in LOW:
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.data_ptr()) or one, lambda one: one):  # noqa: B023
            format_linear(x, weight, bias, products)
        assert kept == [x.data_ptr(), weight.data_ptr()]

        def layer(products=products):
            return format_linear(x, weight, bias, products)

        once = both(x, weight, bias, layer)
        assert same(once, both(x, weight, bias, lambda: checkpoint(layer, use_reentrant=False)))
        with torch.autocast("cpu", torch.bfloat16):  # does not reach into a backward
            y = layer()
        assert y.dtype == (torch.float32 if products.forward == FP32 else torch.bfloat16)
        y = layer()
        x.grad = weight.grad = bias.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            y.backward(torch.ones_like(y))
        assert same(once[1:], [x.grad, weight.grad, bias.grad])


@pytest.mark.parametrize("products", LOW, ids=name_of)
def test_a_gradient_that_is_not_finite_reaches_weights_and_inputs(products):
    x, weight, bias = operands()
    grad = torch.ones(6, 24)
    grad[2, 3] = math.inf
    _, dx, dweight, dbias = both(x, weight, bias, lambda: format_linear(x, weight, bias, products), grad)
    assert not dx[2].isfinite().any()
    assert not dweight[3].isfinite().any()
    assert not dbias[3].isfinite()


def test_frozen_operands_get_no_gradients():
    x, weight, bias = operands()
    format_linear(x, weight.detach(), bias.detach(), LOW[0]).sum().backward()
    assert weight.grad is bias.grad is None
    assert x.grad is not None


def test_the_layer_refuses_what_does_not_fit():
    x, weight, bias = operands()
    with pytest.raises(ValueError, match=r"format_linear: expected floating-point x of \(..., K\).*got torch.int64"):
        format_linear(torch.ones(2, 40, dtype=torch.long), weight, bias, LOW[0])
    with pytest.raises(ValueError, match=r"got torch.float32 of \(2, 39\) and \(24, 40\). Cast or reshape"):
        format_linear(torch.ones(2, 39), weight, bias, LOW[0])
    with pytest.raises(ValueError, match=r"format_linear: expected a first-order backward.*Leave formats unset"):
        torch.autograd.grad(format_linear(x, weight, bias, LOW[0]).sum(), x, create_graph=True)


# Blocks


def blocks(shape, block, density=0.5):
    """Values, index, dense weight and its mask, with dead slots among the live ones."""
    grid = tuple(-(-size // step) for size, step in zip(shape, block, strict=True))
    row, col = (torch.rand(grid) < density).nonzero(as_tuple=True)
    order = torch.randperm(len(row) + 2)
    row, col = (torch.cat([part, part.new_full((2,), -1)])[order].int() for part in (row, col))
    values = torch.randn(len(row), *block) * (row >= 0)[:, None, None]
    mask = dense_from_blocks(torch.ones_like(values), row, col, *shape).bool()
    return (
        values.requires_grad_(),
        build_index(row, col, *grid),
        dense_from_blocks(values.detach(), row, col, *shape),
        mask,
    )


@pytest.mark.parametrize("block", [(16, 16), (4, 8), (3, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("products", ALL, ids=name_of)
def test_blocks_and_their_gradients(products, block):
    shape, wide = (36, 44), torch.zeros(36, 44).requires_grad_()
    values, index, dense, mask = blocks(shape, block)
    x, bias = torch.randn(2, 3, 44).requires_grad_(), torch.randn(36).requires_grad_()
    scores = torch.zeros(-(-36 // block[0]), -(-44 // block[1])).requires_grad_()
    grad = torch.randn(2, 3, 36)
    y = format_block_linear(x, values, index, 36, bias, "none", products, scores)
    y.backward(grad)
    format_block_linear(x.detach(), values.detach(), index, 36, None, "none", products, wide).backward(grad)

    tolerance = [2 * coarsest([one]) for one in products]
    wanted, dx, dweight, dbias = expected_of(x, dense, bias, products, grad)
    close(y.detach(), wanted, tolerance[0], 1e-2 if products[0] == BF16 else tolerance[0] / 4)
    close(x.grad, dx, tolerance[1])
    close(bias.grad, dbias, 1e-5, 1e-2 if set(products) == {BF16} else 1e-5)
    close(dense_from_blocks(values.grad, *index[:2], *shape), dweight * mask, tolerance[2])
    outside = dense_from_blocks(values.grad, *index[:2], *shape).abs().sum()
    torch.testing.assert_close(values.grad.abs().sum(), outside)  # nothing in padding
    assert not values.grad[index.block_row < 0].any()
    # probes see what is not rounded, or as bf16 throughout what block_linear gives them
    exact = (grad.view(-1, 36).mT @ x.detach().view(-1, 44)).double()
    rounding = 2e-2 if set(products) == {BF16} else 1e-5
    torch.testing.assert_close(wide.grad.double(), exact, rtol=rounding, atol=rounding)
    mean = block_mean(exact.float() if block == (1, 1) else exact.float().abs(), *block)
    torch.testing.assert_close(scores.grad, mean, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks_in_one_plain_format_are_block_linear(dtype):
    values, index, _, _ = blocks((32, 48), (16, 16))
    x, bias = torch.randn(5, 48).requires_grad_(), torch.randn(32).requires_grad_()
    products = Products(*[BF16 if dtype == torch.bfloat16 else FP32] * 3)

    def theirs():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            return block_linear(x, values, index, 32, bias, "gelu")

    def ours():
        with torch.autocast("cpu", torch.bfloat16):
            return format_block_linear(x, values, index, 32, bias, "gelu", products)

    assert same(both(x, values, bias, theirs), both(x, values, bias, ours))


@pytest.mark.parametrize("activation", ["relu2", "gelu"])
def test_activations_come_after_scaling(activation):
    values, index, dense, _ = blocks((24, 40), (8, 8))
    x, _, bias = operands()
    for products in LOW:
        plain = format_linear(x, dense, bias, products)
        assert torch.equal(format_linear(x, dense, bias, products, activation), activate(plain, activation))
        plain = format_block_linear(x, values, index, 24, bias, "none", products)
        y = format_block_linear(x, values, index, 24, bias, activation, products)
        assert torch.equal(y, activate(plain, activation))


@pytest.mark.parametrize("products", LOW, ids=name_of)
def test_what_is_not_finite_stays_in_active_blocks(products):
    values, index, _, mask = blocks((20, 30), (8, 8))
    x = torch.randn(4, 30)
    x[1] = math.inf
    y = format_block_linear(x, values, index, 20, None, "none", products)
    assert not y[1, mask.any(1)].isfinite().any()
    grad = torch.full((4, 20), math.nan)
    format_block_linear(torch.randn(4, 30), values, index, 20, None, "none", products).backward(grad)
    assert not dense_from_blocks(values.grad, *index[:2], 20, 30)[mask].isfinite().any()
    assert torch.equal(values.grad[index.block_row < 0], torch.zeros(2, 8, 8))


def test_blocks_refuse_what_does_not_fit():
    values, index, _, _ = blocks((24, 40), (8, 8))
    with pytest.raises(ValueError, match=r"format_block_linear: expected a floating-point x, got torch.int64"):
        format_block_linear(torch.ones(2, 40, dtype=torch.long), values, index, 24, None, "none", LOW[0])
    with pytest.raises(ValueError, match=r"format_block_linear: expected a bias of \(24,\)"):
        format_block_linear(torch.ones(2, 40), values, index, 24, torch.ones(3), "none", LOW[0])
    x = torch.ones(2, 40, requires_grad=True)
    y = format_block_linear(x, values, index, 24, None, "none", LOW[0])
    with pytest.raises(ValueError, match=r"format_block_linear: expected a first-order backward.*Leave formats unset"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


# Layers that carry formats


def layers():
    dense = ActivatedLinear(40, 24, activation="gelu")
    topology = torch.rand(3, 5) < 0.6
    sparse = [SparseLinear.from_dense(dense, topology, Block(8, 8), product=how) for how in ("kernel", "dense")]
    return [dense, *sparse]


def test_layers_compute_in_their_formats_and_copies_keep_them():
    x = torch.randn(6, 40)
    for layer in layers():
        names = list(layer.state_dict())
        before = layer(x)
        for products in (*LOW, Products(FP32, FP32, FP32)):
            layer.formats = products
            y = layer(x)
            torch.testing.assert_close(
                y, format_linear(x, layer.weight, layer.bias, products, "gelu"), rtol=2e-2, atol=2e-2
            )
            assert torch.equal(copy.deepcopy(layer)(x), y)
        assert list(layer.state_dict()) == names
        layer.formats = None
        assert torch.equal(layer(x), before)


def test_both_products_of_a_sparse_layer_agree_on_gradients_and_probes():
    x, (_, *sparse) = torch.randn(6, 40), layers()
    for products in LOW:
        seen = []
        for layer in sparse:
            layer.formats, layer.probe = products, torch.zeros(24, 40).requires_grad_()
            layer.zero_grad()
            layer(x).square().sum().backward()
            seen.append([layer.values.grad, layer.bias.grad, layer.probe.grad])
        for one, other in zip(*seen, strict=True):
            assert (one - other).norm() < 0.15 * one.norm()  # the probe of a dense product sees rounded operands


def test_a_frozen_sparse_layer_ignores_formats():
    x = torch.randn(6, 40)
    for layer in layers()[1:]:
        layer.eval().freeze()
        with torch.no_grad():
            plain = layer(x)
            layer.formats = LOW[1]
            assert torch.equal(layer(x), plain)


# torch.compile itself asks for .grad of what comes out of the break, and takes back the warning that is an error here
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_break_the_graph_or_need_not():
    x = torch.randn(6, 40)
    for layer in layers()[:2]:
        for products in (None, Products(BF16, BF16, BF16), Products(FP32, FP32, FP32), Products(FP8, FP8, BF16)):
            torch._dynamo.reset()
            layer.formats = products
            compiled = torch.compile(layer, backend="eager", fullgraph=products is None or FP8 not in products)
            for autocast in (False, True):
                seen = []
                for call in (layer, compiled):
                    layer.zero_grad()
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        y = call(x)
                    y.sum().backward()
                    seen.append([y.detach(), *(parameter.grad for parameter in layer.parameters())])
                assert same(*seen)


def test_formats_are_ordered_by_bits_and_print_as_their_names():
    assert [one.bits for one in PRODUCT_FORMATS] == [32, 19, 16, 16, 8, 8, 8, 8]
    assert str(FP8) == "fp8"
    assert isinstance(FP8, ProductFormat)
