"""Linear layers of int8 codes against sums in int64: exact before scaling, whatever codes and shapes."""

from __future__ import annotations

import pytest
import torch

from sparsam import formats
from sparsam.kernels.formats import INT32_TERMS
from sparsam.kernels.int8 import int8_block_linear, int8_linear, quantise_rows, quantise_tensor


def blocks(rows, cols, height, width, seed=0, share=0.5):
    """Random codes in blocks with a dead slot in between, and the dense weight that they stand for."""
    draw = torch.Generator().manual_seed(seed)
    down, across = -(-rows // height), -(-cols // width)
    row, col = (torch.rand(down, across, generator=draw) < share).nonzero(as_tuple=True)
    row, col = torch.cat([row[:1], torch.tensor([-1]), row[1:]]), torch.cat([col[:1], torch.tensor([-1]), col[1:]])
    values = torch.randint(-127, 128, (len(row), height, width), generator=draw, dtype=torch.int8)
    dense = torch.zeros(down * height, across * width, dtype=torch.int8)
    for value, r, c in zip(values, row.tolist(), col.tolist(), strict=True):
        if r >= 0:
            dense[r * height : (r + 1) * height, c * width : (c + 1) * width] = value
    return values, row.int(), col.int(), dense[:rows, :cols]


def saturating(x_q, weight):
    """What a machine without VNNI does: u8 x s8 products of neighbours are added in an int16, which saturates."""
    pairs = (x_q.int() + 128).view(len(x_q), 1, -1, 2) * weight.int().view(1, len(weight), -1, 2)
    return pairs.sum(-1).clamp(-(2**15), 2**15 - 1).sum(-1) - 128 * weight.int().sum(-1)


@pytest.mark.parametrize(
    ("tokens", "shape", "block"),
    [
        (3, (32, 48), (16, 16)),
        (1, (30, 50), (16, 16)),
        (7, (9, 2100), (4, 8)),
        (0, (16, 16), (8, 8)),
        (2, (5, 1), (2, 3)),
    ],
    ids=str,
)
def test_against_int64(tokens, shape, block):
    values, row, col, dense = blocks(*shape, *block)
    x_q = torch.randint(-127, 128, (tokens, shape[1]), dtype=torch.int8)
    x_scale, scale, bias = torch.rand(tokens, 1) + 0.1, torch.rand(shape[0]) + 0.1, torch.randn(shape[0])
    total = x_q.long() @ dense.long().mT
    y = int8_block_linear(x_q, x_scale, values, scale, row, col, bias, shape[0])
    assert torch.equal(y, total.float() * x_scale * scale + bias)
    plain = int8_block_linear(x_q, torch.ones(tokens, 1), values, torch.ones(shape[0]), row, col, None, shape[0])
    assert torch.equal(plain, total.float())
    assert torch.equal(int8_linear(x_q, x_scale, dense, scale, bias), y)


def test_the_largest_codes_never_saturate():
    """Q4: activations of 255 (127 as a signed code) times weights of 127."""
    x_q, weight = torch.full((2, 64), 127, dtype=torch.int8), torch.full((3, 64), 127, dtype=torch.int8)
    weight[1] = -127
    exact = x_q.long() @ weight.long().mT
    assert not torch.equal(saturating(x_q, weight).long(), exact)  # what is to be avoided
    assert torch.equal(int8_linear(x_q, torch.ones(2, 1), weight, torch.ones(3), None), exact.float())


def test_under_autocast_sums_stay_exact():
    x_q, weight = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((4, 96), (5, 96)))
    expected = (x_q.long() @ weight.long().mT).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(int8_linear(x_q, torch.ones(4, 1), weight, torch.ones(5), None), expected)


def test_rows_are_the_codes_of_the_format():
    x = torch.randn(6, 40) * torch.tensor([1.0, 1e-6, 1e4, 0.0, 1e-20, 3.0])[:, None]
    codes, scale = quantise_rows(x)
    expected = formats.INT8_ROWS.quantise(x)
    assert torch.equal(codes, expected.codes)
    assert torch.equal(codes * scale, expected.dequantise())
    assert bool((scale > 0).all())
    assert torch.equal(quantise_rows(x[:1])[0], codes[:1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_what_is_not_finite_makes_its_row_nan_and_no_other(bad):
    x = torch.randn(3, 8)
    x[1, 2] = bad
    for codes, scale in (quantise_rows(x), quantise_tensor(x, torch.tensor(0.1))):
        y = int8_linear(codes, scale, torch.ones(4, 8, dtype=torch.int8), torch.ones(4), None)
        assert y.isfinite().all(1).tolist() == [True, False, True]


def test_a_calibrated_scale_saturates_and_measures_nothing():
    x = torch.tensor([[0.5, -30.0, 12.7]])
    codes, scale = quantise_tensor(x, torch.tensor(0.1))
    assert codes.tolist() == [[5, -127, 127]]
    assert scale.item() == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("x_q", "values", "message"),
    [
        (torch.zeros(2, 8), torch.zeros(1, 4, 8, dtype=torch.int8), "expected int8 codes of"),
        (torch.zeros(2, 8, dtype=torch.int8), torch.zeros(1, 4, 8), "int8_block_linear: expected x_q of"),
        (torch.zeros(1, INT32_TERMS + 1, dtype=torch.int8), torch.zeros(1, 4, INT32_TERMS + 1, dtype=torch.int8),
         "an int32 may overflow"),
    ],
    ids=["float x", "float weight", "too many inputs"],
)  # fmt: skip
def test_what_does_not_fit_is_refused(x_q, values, message):
    zero = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        int8_block_linear(x_q, torch.ones(len(x_q), 1), values, torch.ones(4), zero, zero, None, 4)
