"""Rounding to number formats, exactly: against a list of all codes of each format, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsam import formats
from sparsam.formats import (
    BF16,
    E4M3,
    E4M3_ROWS,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    INT8_ROWS,
    INT8_TENSOR,
    MX_E4M3,
    MX_E5M2,
    TF32,
    Format,
    named,
    non_finite,
)

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ROUNDINGS = ({}, {"rounding": "stochastic", "seed": 1})
FLOATS = [format for format in FORMATS if not format.integer]
SCALED = [format for format in FORMATS if format.scale_covers != "nothing"]
LISTED = [format for format in FORMATS if format is not FP32]  # few enough codes to list them

by_name = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
by_float = pytest.mark.parametrize("format", FLOATS, ids=lambda format: format.name)
by_scaled = pytest.mark.parametrize("format", SCALED, ids=lambda format: format.name)
by_listed = pytest.mark.parametrize("format", LISTED, ids=lambda format: format.name)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
by_rounding = pytest.mark.parametrize("how", ROUNDINGS, ids=("nearest", "stochastic"))


def unscaled(format: Format) -> dict:
    return {} if format.scale_covers == "nothing" else {"scale": 1.0}


def all_codes(format: Format) -> torch.Tensor:
    """Every value of the format as float64, in the order of its bits: positive ones rise, then negative ones fall."""
    if format.integer:
        return torch.cat([torch.arange(128), -torch.arange(128)]).double()
    if format is TF32:
        return (torch.arange(2**19, dtype=torch.int64) << 13).to(torch.int32).view(torch.float32).double()
    bits = {1: torch.uint8, 2: torch.int16}[format.dtype.itemsize]
    return torch.arange(256**format.dtype.itemsize, dtype=torch.int32).to(bits).view(format.dtype).double()


def positive(format: Format) -> torch.Tensor:
    """Finite codes from 0 up: their place in the list is their bit pattern, so even places are even codes."""
    codes = all_codes(format)
    codes = codes[: len(codes) // 2]
    return codes[codes.isfinite()]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, the signs of zeros included."""
    return torch.equal(a, b) and torch.equal(torch.signbit(a), torch.signbit(b))


def nearest(format: Format, x: torch.Tensor) -> torch.Tensor:
    """The oracle: looks x up among all codes, float64 to float64."""
    codes = positive(format).numpy()
    if format.overflow == "infinity":
        codes = np.append(codes, 2 * codes[-1] - codes[-2])  # the place where the next code would be: infinity
    size = np.minimum(x.abs().double().numpy(), codes[-1])
    up = np.clip(np.searchsorted(codes, size, side="right"), 1, len(codes) - 1)
    below, above = size - codes[up - 1], codes[up] - size
    place = np.where((above < below) | ((above == below) & (up % 2 == 0)), up, up - 1)
    if format.overflow == "infinity":
        codes[-1] = np.inf
    return torch.from_numpy(np.copysign(codes[place], x.double().numpy()))


# -- the formats themselves


def test_constants_are_what_the_lists_of_codes_say():
    for format in LISTED:
        codes = positive(format)
        assert codes.max() == format.max, format.name
        assert codes[1] == format.smallest, format.name
        assert all_codes(format).numel() == 2**format.bits, format.name
        if not format.integer:
            spacing = codes.diff() / codes[:-1]
            normal = codes[:-1] >= format.smallest_normal
            assert spacing[normal].max() == 2.0**-format.mantissa_bits, format.name
            assert (spacing[~normal][1:] > 2.0**-format.mantissa_bits).all(), format.name


@pytest.mark.parametrize("format", [FP32, BF16, FP16, E4M3, E5M2], ids=lambda format: format.name)
def test_constants_are_those_of_torch(format):
    info = torch.finfo(format.dtype)
    assert (format.max, format.smallest_normal, format.bits) == (info.max, info.smallest_normal, info.bits)
    assert format.smallest == info.smallest_normal * info.eps
    assert format.mantissa_bits == -math.log2(info.eps)


@by_name
def test_floors_are_what_gaussian_data_show(format):
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1))
    error = format.round(x) - x
    # one scale of integers hangs on the largest of a million numbers: that wanders from sample to sample
    near = 0.08 if format is INT8_TENSOR else 0.02
    assert (error.abs() / x.abs()).median().item() == pytest.approx(format.error_floor, rel=near)
    assert (error.norm() / x.norm()).item() == pytest.approx(format.l2_floor, rel=near)


def test_bytes_count_codes_and_scales():
    shape = (6, 70)
    assert {format.name: format.bytes_of(shape) for format in FORMATS} == {
        "fp32": 1680,
        "tf32": 1680,
        "bf16": 840,
        "fp16": 840,
        "e4m3": 424,
        "e4m3_rows": 444,
        "e5m2": 424,
        "int8_tensor": 424,
        "int8_rows": 444,
        "mx_e4m3": 438,
        "mx_e5m2": 438,
    }
    for format in FORMATS:
        assert format.quantise(torch.randn(shape)).nbytes == format.bytes_of(shape)
        assert format.bytes_of((32, 3200)) / 102400 == pytest.approx(format.bytes_per_value, abs=0.002)


def test_formats_are_values():
    assert len({*FORMATS, *FORMATS}) == len(FORMATS)
    with pytest.raises(AttributeError):
        E4M3.max = 1.0


# -- rounding to nearest


@by_listed
@by_rounding
def test_every_code_comes_back(format, how):
    codes = all_codes(format)
    codes = codes[~codes.isnan()]
    if format.overflow == "saturate":
        codes = codes[codes.isfinite()]
    for dtype in (torch.float32, torch.float64):
        back = format.round(codes.to(dtype), **unscaled(format), **how)
        if format.integer:
            assert torch.equal(back.double(), codes)
        else:
            assert same_bits(back.double(), codes)
        assert torch.equal(format.quantise(codes.to(dtype), **unscaled(format), **how).codes.double(), codes)


@by_listed
def test_midpoints_go_to_the_even_code_and_their_neighbours_to_the_nearer_one(format):
    codes = positive(format)
    middle = (codes[:-1] + codes[1:]) / 2
    even = torch.where(torch.arange(len(middle)) % 2 == 0, codes[:-1], codes[1:])
    for dtype in DTYPES:
        exact = middle.to(dtype).double() == middle
        m, low, high = middle[exact].to(dtype), codes[:-1][exact], codes[1:][exact]
        assert dtype not in (torch.float32, torch.float64) or bool(exact.all())
        for sign in (1, -1):
            rounded = format.round(sign * m, **unscaled(format)).double()
            assert torch.equal(rounded, sign * even[exact])
            for towards, wanted in ((low, low), (high, high)):
                beside = torch.nextafter(m, towards.to(dtype))
                beside = torch.where(beside == m, towards.to(dtype), beside)
                assert torch.equal(format.round(sign * beside, **unscaled(format)).double(), sign * wanted)


@by_listed
@by_dtype
def test_random_bit_patterns_round_like_the_list(format, dtype):
    generator = torch.Generator().manual_seed(3)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    bits = torch.randint(
        -(2 ** (8 * dtype.itemsize - 1)), 2 ** (8 * dtype.itemsize - 1) - 1, (20000,), generator=generator
    )
    wide = bits.to(integers).view(dtype)
    close = (torch.randn(20000, generator=generator).double() * format.max / 3).to(dtype)
    for x in (wide[~wide.isnan()], close, close * 2.0**-12):
        assert torch.equal(format.round(x, **unscaled(format)).double(), nearest(format, x))


@by_listed
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_above_the_largest_code(format, dtype):
    *_, before, largest = positive(format).tolist()
    threshold = largest + (largest - before) / 2
    tall = torch.tensor([largest, threshold, threshold, math.inf, torch.finfo(dtype).max], dtype=dtype)
    tall[1] = torch.nextafter(tall[1], tall[0])
    over = format.max if format.overflow == "saturate" else math.inf
    for how in ROUNDINGS:
        wanted = torch.tensor([largest, largest, over, over, over], dtype=torch.float64)
        assert torch.equal(format.round(tall, **unscaled(format), **how).double(), wanted)
        assert torch.equal(format.round(-tall, **unscaled(format), **how).double(), -wanted)


def test_fp32_rounds_float64_once():
    x = torch.tensor([1 + 2.0**-24, 1 + 2.0**-24 + 2.0**-50, 1e39, -1e-60, 2.0**-150 * 1.5], dtype=torch.float64)
    assert FP32.round(x).tolist() == [1.0, 1 + 2.0**-23, math.inf, 0.0, 2.0**-149]


@by_float
@by_rounding
@pytest.mark.parametrize("count", [1, 7, 16, 100])  # vectors and what is left over take different code in torch
def test_nan_stays_nan(format, how, count):
    for bits in (0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF):
        x = torch.full((count,), bits, dtype=torch.int32).view(torch.float32)
        assert format.round(x, **how).isnan().all()
        assert format.round(x.double(), **how).isnan().all()
    mixed = torch.ones(count, 32)
    mixed[0, 5] = math.nan
    assert torch.equal(format.round(mixed, **how).isnan(), mixed.isnan())
    assert torch.equal(format.round(mixed, **how)[~mixed.isnan()], mixed[~mixed.isnan()])


@pytest.mark.parametrize("format", [INT8_TENSOR, INT8_ROWS], ids=lambda format: format.name)
@by_rounding
def test_integers_refuse_nan(format, how):
    x = torch.ones(3, 4)
    x[1, 2] = math.nan
    for scale in (None, 0.1):
        with pytest.raises(ValueError, match=rf"{format.name}: expected numbers, got NaN, .* See non_finite\."):
            format.quantise(x, scale=scale, **how)
        with pytest.raises(ValueError, match="got NaN"):
            format.round(x.double(), scale=scale, **how)


@by_name
@by_rounding
@by_dtype
def test_zeros_stay_zero_and_keep_their_sign(format, how, dtype):
    x = torch.randn(8, 40).to(dtype)
    masked = torch.rand(8, 40) < 0.8
    x[masked] = 0.0
    x[2], x[:, ::3] = -0.0, -0.0
    out = format.round(x, **how)
    assert torch.equal(out == 0, (x == 0) | (out == 0))
    sign = torch.signbit(out[x == 0])
    assert torch.equal(sign, torch.signbit(x[x == 0]) & (not format.integer))
    assert (format.quantise(x, **how).codes.float()[masked] == 0).all()


numbers = st.floats(min_value=-(2.0**127), max_value=2.0**127, width=32)


@by_name
@given(x=st.lists(numbers, min_size=1, max_size=70), scale=st.integers(-20, 20))
def test_nothing_is_further_than_half_a_quantum(format, x, scale):
    x = torch.tensor(x)
    scale = None if format.scale_covers == "nothing" else 2.0**scale
    size = x.abs().double() / (scale or 1.0)
    exponent = torch.frexp(size).exponent - 1
    spacing = 2.0 ** (exponent.double() - format.mantissa_bits).clamp(min=math.log2(format.smallest))
    spacing = torch.ones_like(spacing) if format.integer else spacing
    error = (format.round(x, scale=scale).double() - x.double()).abs() / (scale or 1.0)
    inside = size <= format.max
    assert (error <= spacing / 2)[inside].all()


@by_name
@given(x=st.lists(numbers, min_size=2, max_size=70))
def test_order_and_sign_are_kept(format, x):
    x = torch.tensor(x).sort().values
    scale = None if format.scale_covers == "nothing" else 2.0 ** torch.frexp(x.abs().max()).exponent.clamp(-20, 120)
    out = format.round(x, scale=scale)
    assert (out[1:] >= out[:-1]).all()
    assert torch.equal(format.round(-x, scale=scale), -out)
    assert torch.equal(format.round(out, scale=scale), out)


# -- stochastic rounding


@by_listed
@by_dtype
def test_stochastic_rounding_takes_one_of_the_two_neighbours(format, dtype):
    codes = positive(format)
    generator = torch.Generator().manual_seed(5)
    x = (torch.rand(5000, generator=generator).double() ** 8 * min(format.max, torch.finfo(dtype).max) * 0.99).to(dtype)
    x = torch.cat([x, (torch.rand(1000, generator=generator) * 4 * format.smallest).to(dtype)])
    place = torch.searchsorted(codes, x.double(), right=True)
    low, high = codes[place - 1], codes[place]
    for seed in range(3):
        out = format.round(x, rounding="stochastic", seed=seed, **unscaled(format)).double()
        assert ((out == low) | (out == high)).all()
        assert torch.equal(format.round(-x, rounding="stochastic", seed=seed, **unscaled(format)).double() <= 0, x >= 0)


@by_listed
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("sign", [1, -1])
def test_stochastic_rounding_is_unbiased(format, dtype, sign):
    draws = 200_000
    top = 3.0 if format.integer else 1.0
    for quanta, unit in ((0.3, format.smallest), (1.9, format.smallest), (5 + 1 / 64, format.smallest), (None, None)):
        if quanta is None:  # a third of the way from 1 (or 3) to the next code
            value, quantum = top + 2.0**-format.mantissa_bits / 3, 2.0**-format.mantissa_bits
            if format.integer:
                value, quantum = top + 1 / 3, 1.0
        else:
            value, quantum = quanta * unit, unit
        x = torch.full((draws,), sign * value, dtype=dtype)
        value = x[0].double().item()  # float32 cannot hold all of them when they are subnormal
        out = format.round(x, rounding="stochastic", seed=11, **unscaled(format)).double()
        share = abs(value) / quantum % 1.0
        sigma = quantum * math.sqrt(share * (1 - share) / draws)
        assert abs(out.mean().item() - value) < 3 * sigma + quantum * 2.0**-13


@by_name
def test_stochastic_rounding_is_a_function_of_the_seed_and_leaves_the_global_one_alone(format):
    x = torch.randn(64, 33)
    before = torch.get_rng_state()
    first = format.round(x, rounding="stochastic", seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(format.round(x, rounding="stochastic", seed=7), first)
    assert torch.equal(format.quantise(x, rounding="stochastic", seed=7).dequantise(), first)
    assert format is FP32 or not torch.equal(format.round(x, rounding="stochastic", seed=8), first)


def test_stochastic_rounding_keeps_small_updates_of_bf16_weights():
    """Case P4: 1000 updates of -1e-4 on 1.0, where rounding to nearest stays at 1."""
    near = random = torch.ones(4000)
    mask = torch.arange(4000) % 4 == 0
    random = random.masked_fill(mask, 0.0)
    for step in range(1000):
        near = BF16.round(near - 1e-4)
        random = BF16.round(random - 1e-4 * ~mask, rounding="stochastic", seed=step)
    assert (near == 1.0).all()
    assert (random[mask] == 0).all()
    assert random[~mask].mean().item() == pytest.approx(0.9, abs=0.002)


def test_stochastic_rounding_refuses_flushed_subnormals():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush")
    try:
        with pytest.raises(ValueError, match=r"^rounding: expected subnormal numbers, got zeros\. Call torch\.set_"):
            E4M3.round(torch.ones(3), rounding="stochastic", seed=1)
        assert E4M3.round(torch.tensor([448.0, 2.0**-9, 0.0]), scale=1.0).tolist() == [448.0, 2.0**-9, 0.0]
    finally:
        torch.set_flush_denormal(False)


# -- scales


@by_scaled
@by_dtype
def test_the_largest_value_gets_the_largest_code(format, dtype):
    x = torch.randn(5, 64).to(dtype)
    q = format.quantise(x)
    largest = q.codes.float().abs().amax().item()
    if format.scale_covers == "block":
        assert format.max / 2 <= largest <= format.max
        assert torch.equal(torch.frexp(q.scale).mantissa, torch.full_like(q.scale, 0.5))
    else:
        assert largest == format.max
        amax = x.float().abs().amax() if format.scale_covers == "tensor" else x.float().abs().amax(-1, keepdim=True)
        assert torch.equal(q.scale, amax / format.max)
    assert q.scale.dtype == torch.float32
    assert torch.equal(q.scale, format.scale_of(x))


@by_scaled
@pytest.mark.parametrize("value", [1e-45, 1e-40, 1e-13, 1e-12, 1e-3, 65504.0, 1e30, torch.finfo(torch.float32).max])
def test_tensors_of_any_size_have_a_finite_scale_and_come_back_finite(format, value):
    x = torch.tensor([[value, 0.0, -value, value / 3]])
    scale = format.scale_of(x)
    assert ((scale > 0) & scale.isfinite()).all()
    out = format.round(x)
    assert out[0, 1] == 0
    if value < 1e-14:
        assert (out == 0).all()
    elif format.scale_covers != "block" or value < 3.3e38:
        assert out[0, 0].item() == pytest.approx(value, rel=0.07 if format.scale_covers == "block" else 1e-6)


@by_scaled
def test_where_nothing_can_be_measured_the_old_scale_stays(format):
    usual = torch.full((2, 40), 3.0)
    for bad in (0.0, math.inf, -math.inf, math.nan):
        x = usual.clone()
        if bad == 0:
            x[0] = 0.0
        else:
            x[0, 3] = bad
        for old, kept in ((None, 1.0), (0.25, 0.25), (format.scale_of(usual) * 8, None)):
            scale = format.scale_of(x, old)
            assert ((scale > 0) & scale.isfinite()).all()
            if format.scale_covers == "tensor" and bad == 0:
                continue  # another row is there to be measured
            first = scale if format.scale_covers == "tensor" else scale[0, 0]
            before = old if isinstance(old, torch.Tensor) else torch.tensor(kept)
            assert first == before.flatten()[0]
            if format.scale_covers != "tensor":
                assert scale[1, 0] == format.scale_of(usual)[1, 0]
    assert torch.equal(format.scale_of(torch.zeros(2, 40), 0.5), torch.full_like(format.scale_of(usual), 0.5))


def test_case_p6_all_zero_tiny_and_one_infinity():
    for format in SCALED:
        zeros, tiny = torch.zeros(4, 64), torch.full((4, 64), 1e-40)
        one = torch.ones(4, 64)
        one[1, 2], one[3] = math.inf, 0.0
        for x in (zeros, tiny, one):
            q = format.quantise(x)
            assert q.scale.isfinite().all()
            assert (q.scale > 0).all()
            assert (q.dequantise()[x == 0] == 0).all()
            assert not q.dequantise().isnan().any()
        assert [non_finite(x) for x in (zeros, tiny, one)] == [0, 0, 1]
        assert format.quantise(one).dequantise()[1, 2] == (format.max if format.overflow == "saturate" else math.inf)
        assert not format.fits(one)


def test_case_q3_a_zero_channel_and_a_tiny_one_in_fp16():
    weight = torch.randn(4, 32).half()
    weight[1], weight[2] = 0.0, 1e-6
    for format in (INT8_ROWS, INT8_TENSOR, E4M3_ROWS, MX_E4M3):
        q = format.quantise(weight)
        assert (q.scale > 0).all()
        back = q.dequantise(torch.float16)
        assert back.isfinite().all()
        assert (back[1] == 0).all()
        if format.scale_covers == "row":
            assert torch.equal(back[2], weight[2])


def test_blocks_by_hand():
    x = torch.zeros(2, 70)
    x[0, :32] = torch.arange(32.0)  # amax 31: 31/448 = 0.069, up to 2^-3; 31 * 8 = 248 -> 248 is between 240 and 256
    x[0, 32:64] = 448.0  # fits as it stands
    x[0, 64:] = 448.5  # a little more: twice the scale
    x[1, 0] = -1e-4  # amax / 448 = 2.2e-7, up to 2^-22
    q = MX_E4M3.quantise(x)
    assert q.scale.tolist() == [[2.0**-3, 1.0, 2.0], [2.0**-22, 1.0, 1.0]]
    assert q.codes.shape == x.shape
    assert q.codes[0, :4].float().tolist() == [0.0, 8.0, 16.0, 24.0]
    back = q.dequantise()
    assert back[0, 28:32].tolist() == [28.0, 28.0, 30.0, 32.0]  # 29 and 31 lie in the middle: to the even code
    assert back[0, 32:64].tolist() == [448.0] * 32
    assert back[0, 64:].tolist() == [448.0] * 6  # 224.25 -> 224, times 2
    assert back[1, 0].item() == -416 * 2.0**-22  # 1e-4 * 2^22 = 419.4 -> 416
    wide = MX_E5M2.quantise(x)
    assert wide.scale[0].tolist() == [2.0**-10, 2.0**-7, 2.0**-6]
    assert wide.dequantise()[0, 28:32].tolist() == [28.0, 28.0, 32.0, 32.0]


def test_rows_by_hand():
    x = torch.tensor([[127.0, 1.0, 2.5, -0.4], [0.5, -1.0, 0.0, 0.25]])
    q = INT8_ROWS.quantise(x)
    assert torch.equal(q.scale, torch.tensor([[1.0], [1 / 127]]))
    assert q.codes.tolist() == [[127, 1, 2, 0], [64, -127, 0, 32]]
    assert INT8_TENSOR.quantise(x).codes.tolist() == [[127, 1, 2, 0], [0, -1, 0, 0]]
    assert INT8_TENSOR.quantise(x, scale=0.5).codes.tolist() == [[127, 2, 5, -1], [1, -2, 0, 0]]


def test_a_given_scale_saturates_or_overflows():
    x = torch.tensor([1000.0, -1e9, math.inf])
    assert E4M3.round(x, scale=1.0).tolist() == [448.0, -448.0, 448.0]
    assert E4M3.round(x, scale=2.0).tolist() == [896.0, -896.0, 896.0]
    assert E5M2.round(x, scale=1.0).tolist() == [1024.0, -math.inf, math.inf]
    assert INT8_TENSOR.round(x, scale=1.0).tolist() == [127.0, -127.0, 127.0]


def test_fits_and_non_finite():
    x = torch.tensor([1.0, -448.0, 0.0])
    assert E4M3.fits(x)
    assert not E4M3.fits(x * 1.001)
    assert E4M3.fits(x * 1.001, scale=2.0)
    assert not E4M3.fits(x, scale=0.5)
    assert INT8_ROWS.fits(x[None] / 4)
    assert not INT8_ROWS.fits(torch.stack([x, x]) / 4, scale=torch.tensor([[1.0], [0.5]]))
    assert not FP16.fits(torch.tensor(65505.0))
    assert not FP32.fits(torch.tensor([math.nan]))
    assert not FP32.fits(torch.tensor([1e300], dtype=torch.float64))
    for format in FORMATS:
        assert format.fits(torch.zeros(0, 3))
    bad = torch.tensor([[1.0, math.inf, -math.inf], [math.nan, 1.0, 3e38]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert non_finite(bad.to(dtype)) == 3
    assert non_finite(torch.tensor([6e4, math.inf]).half()) == 1
    assert non_finite(bad.t()[1:]) == 3 - 1
    assert non_finite(torch.zeros(0)) == 0
    assert non_finite(torch.ones(()).to(torch.float8_e5m2)) == 0


# -- any tensor


SHAPES = [(), (1,), (0,), (3, 0), (0, 5), (5,), (32,), (33,), (2, 31), (3, 64), (2, 3, 40), (1, 1, 1, 1)]


@by_name
@by_dtype
@by_rounding
def test_any_shape_and_dtype(format, dtype, how):
    for shape in SHAPES:
        x = torch.randn(shape).to(dtype)
        q = format.quantise(x, **how)
        out = format.round(x, **how)
        assert q.codes.shape == out.shape == x.shape
        assert (q.codes.dtype, out.dtype, q.format) == (format.dtype, torch.float32, format)
        assert torch.equal(q.dequantise(), out)
        assert q.nbytes == format.bytes_of(shape)
        assert torch.equal(out, format.round(x.to(torch.float64 if dtype == torch.float64 else torch.float32), **how))
        for wanted in DTYPES:
            back = q.dequantise(wanted)
            assert back.dtype == wanted
            assert torch.equal(back, out.to(wanted))
            assert torch.equal(format.round(x, **how, dtype=wanted), back)
        assert torch.equal(format.round(x, **how, scale=q.scale), out)
        # far less than a wrong scale would make of it, in any format
        assert ((out - x.float()).abs() <= 0.25 * x.float().abs() + 0.05).all()


@by_name
@by_rounding
def test_pieces_do_not_show(format, how, monkeypatch):
    """Large tensors are rounded a piece at a time."""
    x = torch.randn(30, 70)
    whole = format.round(x, **how), format.quantise(x, **how)
    for piece in (50, 100, 1000):
        monkeypatch.setattr(formats, "PIECE", piece)
        q = format.quantise(x, **how)
        assert torch.equal(format.round(x, **how), whole[0])
        assert torch.equal(q.dequantise(), whole[0])
        assert torch.equal(q.codes.float(), whole[1].codes.float())


def test_the_default_dtype_changes_nothing():
    x = torch.randn(3, 40)
    wanted = [(format.round(x), format.round(x, rounding="stochastic", seed=1)) for format in FORMATS]
    torch.set_default_dtype(torch.float64)
    for format, (near, random) in zip(FORMATS, wanted, strict=True):
        for dtype in (torch.float32, torch.float16):
            assert torch.equal(format.round(x, dtype=dtype), near.to(dtype))
        assert torch.equal(format.round(x, rounding="stochastic", seed=1), random)
        assert format.round(x).dtype == torch.float32
        assert format.scale_of(x) is None or format.scale_of(x).dtype == torch.float32


@by_name
def test_strides_do_not_matter(format):
    x = torch.randn(6, 80, 2)
    for view in (x.permute(2, 1, 0), x[::2, 5:70, 1], x.transpose(0, 1), x[:, :1].expand(6, 9, 2)):
        plain = format.round(view.contiguous())
        assert torch.equal(format.round(view), plain)
        assert torch.equal(format.quantise(view).dequantise(), plain)


@by_name
@by_rounding
def test_the_input_is_not_written_to_and_no_gradient_passes(format, how):
    x = torch.randn(4, 40, requires_grad=True)
    before = x.detach().clone()
    for out in (format.round(x, **how), format.quantise(x, **how).dequantise()):
        assert not out.requires_grad
    assert torch.equal(x, before)
    q = format.quantise(x, **how)
    codes, scale = q.codes.clone(), q.scale
    q.dequantise(torch.bfloat16)
    assert torch.equal(q.codes.float(), codes.float())
    assert scale is None or torch.equal(q.scale, scale)


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda format: format.name)
def test_the_table_is_the_cast(format):
    codes = torch.arange(256, dtype=torch.uint8).view(format.dtype)
    for dtype in DTYPES:
        back = formats.Quantised(codes, torch.tensor(1.0), format).dequantise(dtype)
        assert torch.equal(back.nan_to_num(777.0), codes.to(dtype).nan_to_num(777.0))
        assert torch.equal(back.isnan(), codes.to(torch.float32).isnan())


# -- errors and names


def test_names():
    for format in FORMATS:
        assert named(format.name) is format
        assert getattr(formats, format.name.upper()) is format
    with pytest.raises(ValueError, match=r"^format: expected one of fp32, .*, got 'e4m4'\. Did you mean 'e4m3'\?$"):
        named("e4m4")
    with pytest.raises(ValueError, match=r"got 'int8'\. Did you mean 'int8_"):
        named("int8")
    with pytest.raises(ValueError, match=r"mx_e5m2, got 'posit'\.$"):
        named("posit")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: E4M3.round(torch.arange(3)), r"x: expected a floating-point tensor, got torch.int64\. Convert it"),
        (lambda: non_finite(torch.ones(2, dtype=torch.complex64)), r"got torch.complex64"),
        (lambda: E4M3.round(torch.ones(3), rounding="up"), r"rounding: expected 'nearest' or 'stochastic', got 'up'\."),
        (lambda: E4M3.round(torch.ones(3), rounding="stochastic"), r"seed: expected a number .*, got None\. Make it"),
        (
            lambda: BF16.round(torch.ones(3), scale=2.0),
            r"bf16: expected no scale, got one\. This format has none: leave it out\.",
        ),
        (lambda: E4M3.round(torch.ones(3), scale=0.0), r"e4m3: expected finite scales above zero, got 0\. scale_of"),
        (lambda: E4M3.scale_of(torch.ones(3), math.nan), r"e4m3: expected finite scales above zero, got nan\."),
        (
            lambda: E5M2.fits(torch.ones(3), torch.tensor(math.inf)),
            r"e5m2: expected finite scales above zero, got inf",
        ),
        (
            lambda: INT8_ROWS.quantise(torch.ones(2, 3), scale=torch.tensor([[1.0], [-1.0]])),
            r"int8_rows: expected finite scales above zero, got -1\. scale_of gives no others\.",
        ),
        (
            lambda: INT8_ROWS.quantise(torch.ones(2, 3), scale=torch.ones(2)),
            r"int8_rows: expected one number or a scale of shape \(2, 1\), got \(2,\)\. scale_of gives the right one\.",
        ),
        (
            lambda: MX_E4M3.round(torch.ones(2, 40), scale=3.0),
            r"mx_e4m3: expected powers of two, got 3\. scale_of gives no others\.",
        ),
    ],
)
def test_errors_say_what_was_expected_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
