"""Samples of products: what Gaussian data show, what must not be overlooked, and the trend of a loss."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsam.formats import E4M3
from sparsam.kernels.formats import BF16, FP8, FP8_ROWS, FP16, INT8, MX_FP8, PRODUCT_FORMATS
from sparsam.precision.stats import LossTrend, ProductSample, _spread, sample_product

PERFECT = ProductSample(True, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0)
WORST = ProductSample(False, 1.0, 1.0, math.inf, -1.0, math.inf, math.inf)

by_format = pytest.mark.parametrize("format", PRODUCT_FORMATS, ids=str)


def gaussian(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@by_format
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_floors_on_gaussian_data(format, gradient):
    sample = sample_product(gaussian(64, 1024), gaussian(64, 1024, seed=2), format, gradient, rows=64, depth=1024)
    kinds = (format.gradient if gradient else format.operand, format.operand)
    assert sample.median_error == pytest.approx(max(kind.error_floor for kind in kinds), rel=0.08, abs=1e-9)
    assert sample.noise == pytest.approx(math.hypot(*(kind.l2_floor for kind in kinds)), rel=0.05, abs=1e-7)
    assert sample.cosine == pytest.approx(1 - sample.noise**2 / 2, abs=2e-4)
    assert sample.norm_ratio == pytest.approx(1, abs=0.002)
    assert sample.finite
    assert sample.saturation == 0
    # integers lose what lies below half a code of the largest
    assert sample.underflow < (0.02 if format is INT8 else 0.001)


@by_format
def test_a_small_sample_tells_what_the_whole_does(format):
    left, right = gaussian(2048, 2048), gaussian(1024, 2048, seed=2)
    part = sample_product(left, right, format, False)
    whole = sample_product(left[:256], right[:256], format, False, rows=256, depth=2048)
    for name in ("median_error", "noise", "norm_ratio"):
        assert getattr(part, name) == pytest.approx(getattr(whole, name), rel=0.1, abs=1e-7), name
    assert part.underflow == pytest.approx(whole.underflow, abs=0.003)


def test_what_an_l2_error_does_not_show():
    heavy = torch.exp(3.9 * gaussian(64, 1024)) * gaussian(64, 1024, seed=2).sign()
    l2 = (E4M3.round(heavy) - heavy).norm() / heavy.norm()
    assert l2 < 0.03  # as if it were Gaussian
    for format in (FP8, INT8):
        sample = sample_product(heavy, gaussian(64, 1024, seed=3), format, False, rows=64, depth=1024)
        assert sample.underflow > 0.5
        assert sample.median_error == 1.0
        assert sample.noise < 0.05


def test_by_hand():
    # int8 rows: the scale of (127, 1, 0.4, 0) is 1, so 0.4 of three nonzero values is lost; 127 is not cut
    left, right = torch.tensor([[127.0, 1.0, 0.4, 0.0]]), torch.tensor([[0.0, 0.0, 127.0, 1.0]])
    sample = sample_product(left, right, INT8, False)
    assert sample.underflow == pytest.approx(1 / 3)
    assert (sample.saturation, sample.median_error) == (0.0, 0.0)
    assert (sample.cosine, sample.noise, sample.norm_ratio) == (0.0, 1.0, 0.0)  # 0.4 * 127 became 0


@by_format
def test_scales_are_those_of_the_real_product(format):
    # the largest value stands where the sample does not look: scales of a tensor and of rows know it all the same
    left = torch.ones(4096, 4096)
    left[:, 4090] = 1e6
    covers = format.operand.scale_covers
    sample = sample_product(left, torch.ones(64, 4096), format, False)
    assert sample.finite
    assert (sample.underflow == 1.0) == (covers in ("tensor", "row"))


@pytest.mark.parametrize("format", [FP8, FP8_ROWS, MX_FP8, INT8], ids=str)
def test_current_scaling_cuts_nothing_and_an_old_amax_does(format):
    left, right = gaussian(64, 512) * 1e3, gaussian(64, 512, seed=2)
    assert sample_product(left, right, format, True).saturation == 0
    old = sample_product(left, right, format, False, amax=(1000.0, None))
    if format is FP8:
        assert old.saturation == pytest.approx(0.30, abs=0.02)  # beyond 1.03 standard deviations
        assert old.cosine < 0.99
    else:
        assert old == sample_product(left, right, format, False)


def test_a_format_without_the_range_is_no_fault_of_the_operands():
    sample = sample_product(torch.full((8, 32), 1e5), torch.ones(8, 32), FP16, False)
    assert sample.finite
    assert (sample.saturation, sample.cosine, sample.noise) == (1.0, -1.0, math.inf)


@by_format
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_operands_that_are_not_finite(format, bad):
    left, right = gaussian(32, 64), gaussian(16, 64)
    left[3, 5] = bad
    assert sample_product(left, right, format, True) == WORST
    assert sample_product(right, left, format, False) == WORST
    assert sample_product(right, right, format, False, amax=(bad, None)) == WORST


@by_format
@pytest.mark.parametrize("shape", [(4, 32), (0, 32), (4, 0)], ids=str)
def test_nothing_to_lose(format, shape):
    nothing = torch.zeros(shape)
    assert sample_product(nothing, nothing, format, True) == PERFECT


def test_gradients_near_zero_are_not_taken_for_zeros():
    small = gaussian(32, 64) * 1e-10  # squares of the products vanish in float32
    sample = sample_product(small, gaussian(32, 64, seed=2) * 1e-11, INT8, True)
    assert sample.noise == pytest.approx(0.009, abs=0.004)


def test_autocast_transposes_and_dtypes_change_nothing():
    left, right = gaussian(96, 2000), gaussian(80, 2000, seed=2)
    plain = sample_product(left, right, INT8, False)
    with torch.autocast("cpu", torch.bfloat16):
        assert sample_product(left, right, INT8, False) == plain
    assert sample_product(left.T.contiguous().T, right.T.contiguous().T, INT8, False) == plain
    assert sample_product(left.double().requires_grad_(), right, INT8, False) == plain
    assert sample_product(left.bfloat16(), right, BF16, False).median_error < BF16.operand.error_floor * 1.1


@given(size=st.integers(1, 5000), count=st.sampled_from([8, 32, 64]))
def test_the_sample_is_spread_evenly(size, count):
    chosen = _spread(torch.arange(size)[:, None], 0, count, 8)[:, 0]
    assert len(chosen) == min(size, count)
    groups = chosen if size <= count else chosen[::8]
    assert (groups.diff() >= 0).all()
    if size > count:
        part = size / (count // 8)
        assert groups[0] < part
        assert groups[-1] > size - part - 16
        assert (groups.diff() <= 2 * part + 8).all()


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"expected operands \(M, R\) and \(N, R\), got \(2, 3\) and \(3, 2\)"):
        sample_product(torch.ones(2, 3), torch.ones(3, 2), BF16, False)
    with pytest.raises(ValueError, match=r"at least 8 rows and a depth of 32, got 4 and 512"):
        sample_product(torch.ones(2, 3), torch.ones(2, 3), BF16, False, rows=4)


def trend_of(losses):
    trend = LossTrend()
    for loss in losses:
        trend = trend.seen(loss)
    return trend


def test_the_trend_of_few_losses_is_their_mean_and_variance():
    trend = trend_of([1.0, 3.0])
    assert trend.mean == pytest.approx(2.0, abs=0.01)
    assert trend.variance == pytest.approx(1.0, abs=0.01)
    assert trend.count == 2


def test_the_trend_has_exponential_weights_that_add_up_to_one():
    losses = gaussian(300).tolist()
    keep = 1 - 1 / LossTrend.WINDOW
    weights = torch.tensor([keep**age for age in range(299, -1, -1)], dtype=torch.float64)
    x = torch.tensor(losses, dtype=torch.float64)
    mean = (weights * x).sum() / weights.sum()
    variance = (weights * (x - mean) ** 2).sum() / weights.sum()
    trend = trend_of(losses)
    assert trend.mean == pytest.approx(mean.item())
    assert trend.variance == pytest.approx(variance.item())


def test_a_spike_scores_high_and_a_new_loss_low():
    trend = trend_of((2 + 0.1 * gaussian(200)).tolist())
    assert trend.score(3.0) > 6
    assert abs(trend.score(2.1)) < 3
    assert trend.score(1.0) < -6
    assert trend_of([1.0] * (LossTrend.ENOUGH - 1)).score(100.0) == 0
    assert trend_of([1.0] * LossTrend.ENOUGH).score(100.0) > 6
    assert trend_of([1.0] * 50).score(1.001) == pytest.approx(1.0)  # no deviation: a thousandth of the mean
    assert trend_of([0.0] * 50).score(1.0) == 0


def test_a_burst_does_not_hide_the_next_and_a_new_level_is_soon_the_mean():
    calm = (2 + 0.1 * gaussian(50)).tolist()
    assert trend_of([*calm, *[1e8] * 4, *calm[:20]]).score(4.0) > 6
    risen = trend_of([*calm, *[20.0] * 100])
    assert risen.score(20.0) < 1
    assert risen.mean < 20


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_not_finite_never_enters(loss):
    trend = trend_of([1.0, 2.0])
    assert trend.seen(loss) is trend
    assert trend.score(loss) == math.inf
