"""What low formats would do to the operands of a product, measured on a sample of it; and how unusual a loss is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparsam.formats import Format
from sparsam.kernels.formats import ProductFormat

__all__ = ["LossTrend", "ProductSample", "sample_product"]

ROW_GROUP = 8  # sampled rows come in groups of neighbours: of a transposed operand they share cache lines
DEPTH_GROUP = 32  # and the reduced dimension in whole MX blocks
GOLDEN = 0.6180339887
MEDIAN_OF = 4096  # values are enough for a median to 3 %, and to find it among all would cost more than all the rest


@dataclass(frozen=True)
class ProductSample:
    """One product, sampled once, as it comes out in one format against float32.

    Attributes:
        finite: whether all values of both operands were finite.
        underflow: share of nonzero operand values that become zero; the worse operand of the two.
        saturation: share of operand values cut to the largest code; the worse operand.
        median_error: median relative error of nonzero operand values; the worse operand.
        cosine: between the product in this format and in float32.
        noise: L2 norm of their difference over the norm in float32.
        norm_ratio: norm in this format over the norm in float32.
    """

    finite: bool
    underflow: float
    saturation: float
    median_error: float
    cosine: float
    noise: float
    norm_ratio: float


@torch.no_grad()
def sample_product(
    left: Tensor,
    right: Tensor,
    format: ProductFormat,
    left_is_gradient: bool,
    *,
    rows: int = 32,
    depth: int = 512,
    amax: tuple[Tensor | float | None, Tensor | float | None] = (None, None),
) -> ProductSample:
    """What a format does to left @ right.T, judged by a few rows of both and a part of the reduced dimension.

    Rows are spread evenly and the same every time, each group a little off its place so that no period of the data (the
    length of a sequence, the width of a head) meets the spacing. Scales are those of the real product: of the whole
    tensor, of whole rows, or of whole blocks. Only what is looked at can be found not finite: the sampled rows, and
    the whole tensor where its amax is given or the format has one scale for all.

    Args:
        left: (M, R), floating point, any strides.
        right: (N, R).
        format: of the product.
        left_is_gradient: whether left is rounded to `format.gradient`.
        rows: at most so many of each operand; at least 8.
        depth: at most so much of R; at least 32.
        amax: largest magnitudes of left and right where they are known. A format with one scale per tensor reads
            the whole operand to find it otherwise.

    Returns:
        The sample. Where an operand is not finite all its numbers are the worst ones there are; where there is nothing
        to lose (no values, or zeros) the best.

    Raises:
        ValueError: shapes do not fit, or the sample is too small to be one.
    """
    if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[1]:
        got = f"got {tuple(left.shape)} and {tuple(right.shape)}"
        raise ValueError(f"sample_product: expected operands (M, R) and (N, R), {got}. Transpose what is (R, N).")
    if rows < ROW_GROUP or depth < DEPTH_GROUP:
        least = f"at least {ROW_GROUP} rows and a depth of {DEPTH_GROUP}"
        raise ValueError(f"sample_product: expected {least}, got {rows} and {depth}. Leave them out for 32 and 512.")
    if left.numel() == 0 or right.numel() == 0:
        return ProductSample(True, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0)
    one = _rounded(left, format.gradient if left_is_gradient else format.operand, rows, depth, amax[0])
    other = _rounded(right, format.operand, rows, depth, amax[1])
    if one is None or other is None:
        return ProductSample(False, 1.0, 1.0, math.inf, -1.0, math.inf, math.inf)
    with torch.autocast(left.device.type, enabled=False):  # or both products would be those of autocast
        exact = (one.exact @ other.exact.T).double()  # squares of small gradients are zero in float32
        low = (one.low @ other.low.T).double()
    exact_norm, low_norm, error, dot = torch.stack(
        [exact.norm(), low.norm(), (low - exact).norm(), (low * exact).sum()]
    ).tolist()
    return ProductSample(
        True,
        max(one.underflow, other.underflow),
        max(one.saturation, other.saturation),
        max(one.median_error, other.median_error),
        *_likeness(exact_norm, low_norm, error, dot),
    )


@dataclass(frozen=True)
class LossTrend:
    """Running mean and variance of a loss, with exponential weights that add up to one from the first step on.

    A loss that leaps enters as one `LEAP` deviations above the mean, so that a burst does not hide those that come
    after it; a loss that stays high is soon the mean, for every leap widens the deviation.

    Attributes:
        mean: of the losses seen.
        variance: around it.
        count: losses seen.
    """

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0

    WINDOW = 100  # losses that the weights reach back over
    ENOUGH = 20  # losses before a score says anything
    LEAST_DEVIATION = 1e-3  # of the mean: a loss that hardly moves has no spikes
    LEAP = 6.0  # deviations above the mean

    def seen(self, loss: float) -> LossTrend:
        """The trend with one more loss; a loss that is not finite changes nothing."""
        if not math.isfinite(loss):
            return self
        keep = 1 - 1 / self.WINDOW
        weight = (1 - keep) / (1 - keep ** (self.count + 1))
        off = loss - self.mean
        if self.score(loss) > self.LEAP:
            off = self.LEAP * self._deviation
        return LossTrend(self.mean + weight * off, (1 - weight) * (self.variance + weight * off**2), self.count + 1)

    def score(self, loss: float) -> float:
        """Standard deviations by which a loss, not yet seen, lies above the mean; 0 before enough were seen.

        Infinite for a loss that is not finite.
        """
        if not math.isfinite(loss):
            return math.inf
        deviation = self._deviation
        return (loss - self.mean) / deviation if self.count >= self.ENOUGH and deviation > 0 else 0.0

    @property
    def _deviation(self) -> float:
        return max(math.sqrt(self.variance), self.LEAST_DEVIATION * abs(self.mean))


class _Rounded(NamedTuple):
    """The sampled part of an operand, before and after, and what was lost."""

    exact: Tensor
    low: Tensor
    underflow: float
    saturation: float
    median_error: float


def _rounded(x: Tensor, format: Format, rows: int, depth: int, amax: Tensor | float | None) -> _Rounded | None:
    """None where values are not finite."""
    whole = _spread(x, 0, rows, ROW_GROUP).to(torch.float32)
    covers = format.scale_covers
    given = None if amax is None else torch.as_tensor(amax, dtype=torch.float32, device=x.device)
    largest = _amax(x if covers == "tensor" else whole) if given is None else given
    if not math.isfinite(largest.item()) or (given is not None and not math.isfinite(_amax(whole).item())):
        return None
    exact = _spread(whole, 1, depth, DEPTH_GROUP)
    scale = format.scale_of(largest) if covers == "tensor" else format.scale_of(whole) if covers == "row" else None
    low = format.round(exact, scale=scale)

    # what lies within a quarter of a code above the largest one is rounded to it, not cut
    limit = format.max * (1 + 2.0 ** -(format.mantissa_bits + 2)) * (1.0 if scale is None else scale)
    cut = 0 if covers == "block" else int((exact.abs() > limit).sum())  # blocks are scaled so that nothing is cut
    nonzero = int(exact.count_nonzero())
    stride = max(1, exact.numel() // MEDIAN_OF) | 1  # odd: it walks through all columns
    some, some_low = exact.reshape(-1)[::stride], low.reshape(-1)[::stride]
    median = ((some_low - some) / some).abs().nanmedian().item()  # zeros are 0 / 0 and do not count
    return _Rounded(
        exact,
        low,
        underflow=1 - int(low.count_nonzero()) / nonzero if nonzero else 0.0,  # zeros stay zero in every format
        saturation=cut / exact.numel(),
        median_error=0.0 if math.isnan(median) else median,
    )


def _spread(x: Tensor, dim: int, count: int, group: int) -> Tensor:
    """About `count` entries along a dimension, in groups of neighbours, one group in each of as many equal parts."""
    if x.shape[dim] <= count:
        return x
    if dim == 0 and x.stride(0) == 1 < x.stride(1):  # torch would gather a transposed matrix a value at a time
        return _spread(x.T, 1, count, group).T.contiguous()
    places, groups = x.shape[dim] // group, count // group
    part = torch.arange(groups, dtype=torch.float32, device=x.device)
    chosen = ((part + part * GOLDEN % 1) * (places / groups)).long().clamp_(max=places - 1)
    grouped: Tensor = x.narrow(dim, 0, places * group).unflatten(dim, (places, group))
    return grouped.index_select(dim, chosen).flatten(dim, dim + 1)


def _amax(x: Tensor) -> Tensor:
    low, high = torch.aminmax(x.T if x.stride(0) == 1 else x)  # transposed it takes five times as long
    return torch.maximum(-low, high).to(torch.float32)


def _likeness(exact_norm: float, low_norm: float, error: float, dot: float) -> tuple[float, float, float]:
    """Cosine, noise and ratio of norms of two products."""
    if not math.isfinite(low_norm) or not math.isfinite(error):  # a format without the range
        return -1.0, math.inf, math.inf
    if exact_norm == 0:
        return (1.0, 0.0, 1.0) if low_norm == 0 else (0.0, math.inf, math.inf)
    cosine = dot / (exact_norm * low_norm) if low_norm else 0.0
    return max(-1.0, min(1.0, cosine)), error / exact_norm, low_norm / exact_norm
