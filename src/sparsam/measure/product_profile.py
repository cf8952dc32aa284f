"""What one product of a linear layer costs in each number format on this device, casts and quantisation included.

Not for block-sparse against dense (device_profile.py). `DeviceProfile` remembers what is timed here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sparsam.kernels.formats import BF16, FP32, PRODUCT_FORMATS, PRODUCTS, ProductFormat, product
from sparsam.measure.clock import interleaved, on_threads
from sparsam.measure.figure import Figure, Kind
from sparsam.measure.timings import Timings

__all__ = [
    "ProductPair",
    "ProductPath",
    "ProductProfile",
    "ProductShape",
    "ProductTime",
    "ProductTimer",
    "read_pair",
    "time_paths",
    "time_products",
]

_SMALLEST = 64
_KINDS = ("measured", "estimated")


class ProductShape(NamedTuple):
    """One product of a linear layer: T tokens, K in, N out.

    Attributes:
        kind: "forward" (x W^T), "input_gradient" (dy W) or "weight_gradient" (dy^T x).
    """

    kind: str
    tokens: int
    in_features: int
    out_features: int
    threads: int

    @property
    def multiplications(self) -> int:
        """T * K * N, the same for all three products."""
        return self.tokens * self.in_features * self.out_features

    def at_most(self, size: int) -> ProductShape:
        """The same product with no size above this one."""
        return self._replace(
            tokens=min(self.tokens, size),
            in_features=min(self.in_features, size),
            out_features=min(self.out_features, size),
        )

    def key(self, first: ProductFormat, second: ProductFormat) -> str:
        """One line for this product in two formats."""
        return (
            f"{self.kind} {self.tokens}x{self.in_features}x{self.out_features}"
            f" {first.name} and {second.name} {self.threads} threads"
        )


class ProductTime(NamedTuple):
    """Median time of one product in one format.

    Attributes:
        kind: "measured", or "estimated": one product takes so long that a smaller one was timed and its time scaled by
            the number of multiplications.
    """

    ms: float
    kind: Kind

    @property
    def figure(self) -> Figure:
        return Figure(self.ms, "ms", self.kind)


class ProductPath(NamedTuple):
    """A way to multiply: (a, b, dtype of the result) -> a b^T, casts included; None is the one that training takes."""

    format: ProductFormat
    multiply: Callable[[Tensor, Tensor, torch.dtype], Tensor] | None = None


class ProductPair(NamedTuple):
    """Two formats timed against each other."""

    first: ProductTime
    second: ProductTime


ProductTimer = Callable[[ProductShape, Sequence[ProductFormat]], Mapping[str, ProductTime]]


class ProductProfile:
    """Timings of products in pairs of formats, each taken once.

    Args:
        timings: where they are remembered.
        timer: takes the timings of one shape in some formats; None = `time_products`.
    """

    def __init__(self, timings: Timings[ProductPair], timer: ProductTimer | None = None) -> None:
        self.timings = timings
        self._timer = timer or time_products

    def pair(
        self,
        kind: str,
        tokens: int,
        in_features: int,
        out_features: int,
        first: ProductFormat,
        second: ProductFormat,
        threads: int | None = None,
    ) -> ProductPair:
        """Times of one product in two formats, timed in turns in one process; from memory or timed now.

        A time holds for the power of two nearest to T.

        Args:
            kind: "forward", "input_gradient" or "weight_gradient".
            tokens: T, rows of the layer's input per call.
            in_features, out_features: K, N.
            first, second: the formats, in the order of the answer.
            threads: None = torch's current number.

        Raises:
            ValueError: an unknown product, or a size below 1.
        """
        threads = torch.get_num_threads() if threads is None else threads
        if kind not in PRODUCTS:
            raise ValueError(
                f"device profile: expected a product of {', '.join(PRODUCTS)}, got {kind!r}. Use one of them."
            )
        if min(tokens, in_features, out_features, threads) < 1:
            raise ValueError(
                f"device profile: expected sizes of at least 1, got {tokens} tokens, {in_features} in,"
                f" {out_features} out, {threads} threads. Leave out empty layers."
            )
        shape = ProductShape(kind, 2 ** round(math.log2(tokens)), in_features, out_features, threads)
        if PRODUCT_FORMATS.index(first) > PRODUCT_FORMATS.index(second):
            return ProductPair(*reversed(self._ordered(shape, second, first)))
        return self._ordered(shape, first, second)

    def product(
        self,
        kind: str,
        tokens: int,
        in_features: int,
        out_features: int,
        format: ProductFormat,
        threads: int | None = None,
    ) -> float:
        """Time in ms of one product in a format, beside bf16 (bf16 itself beside fp32). See `pair`."""
        beside = FP32 if format == BF16 else BF16
        return self.pair(kind, tokens, in_features, out_features, format, beside, threads).first.ms

    def gain(
        self,
        kind: str,
        tokens: int,
        in_features: int,
        out_features: int,
        now: ProductFormat,
        candidate: ProductFormat,
        threads: int | None = None,
    ) -> float:
        """Time of one product now over its time in another format; above 1 the other one is faster. See `pair`."""
        if now == candidate:
            return 1.0
        pair = self.pair(kind, tokens, in_features, out_features, now, candidate, threads)
        return pair.first.ms / pair.second.ms

    def _ordered(self, shape: ProductShape, first: ProductFormat, second: ProductFormat) -> ProductPair:
        def take() -> ProductPair:
            times = self._timer(shape, (first, second))
            return ProductPair(times[first.name], times[second.name])

        return self.timings.get(shape.key(first, second), take)


def time_products(
    shape: ProductShape, formats: Sequence[ProductFormat], seconds: float = 0.4, patience_ms: float = 300.0
) -> dict[str, ProductTime]:
    """Times one product in several formats in turns, as training computes it (`kernels.formats.product`). See
    `time_paths`.

    Returns:
        name of the format -> time, in the order of `formats`.
    """
    return time_paths(shape, {one.name: ProductPath(one) for one in formats}, seconds, patience_ms)


def time_paths(
    shape: ProductShape, paths: Mapping[str, ProductPath], seconds: float = 0.4, patience_ms: float = 300.0
) -> dict[str, ProductTime]:
    """Times one product by several paths in turns, on random numbers of its own.

    The weight is float32; activations and gradients are what they are in a step: bf16, as under autocast, or float32
    for more bits. All is counted: rounding or quantising both operands, scaling the result, and its cast to what the
    step goes on with (float32 for the weight gradient).

    Some paths are references that take minutes for what others do in milliseconds. So a small product comes first, and
    none is run that would take longer than `patience_ms`: the largest that does not is timed, and its time scaled.

    Args:
        shape: the product; its tokens are taken as they are.
        paths: name -> path, at least one.
        seconds: about how long the counted rounds may take.
        patience_ms: what one product may take.

    Returns:
        name -> time, in the order of `paths`.

    Raises:
        ValueError: no paths.
        RuntimeError: torch does not know a path on this machine.
    """
    with on_threads(shape.threads), torch.no_grad():
        tried = {name: _affordable(shape, path, patience_ms) for name, path in paths.items()}
        calls = {name: _call(tried[name], path) for name, path in paths.items()}
        times = interleaved(calls, repeats=31, warmup=1, seconds=seconds)
    return {
        name: ProductTime(
            times[name].median_ms * (shape.multiplications / small.multiplications),
            "measured" if small == shape else "estimated",
        )
        for name, small in tried.items()
    }


def _affordable(shape: ProductShape, path: ProductPath, patience_ms: float) -> ProductShape:
    """The shape, or as much of it as fits into the patience; sizes double from a small one."""
    size = _SMALLEST
    small = shape.at_most(size)
    _once(_call(small, path))  # the first call of a kernel may compile it
    while small != shape:
        larger = shape.at_most(2 * size)
        ms = _once(_call(small, path))
        if ms * (shape.multiplications / small.multiplications) <= patience_ms:
            return shape
        if ms * (larger.multiplications / small.multiplications) > patience_ms:
            return small
        size, small = 2 * size, larger
    return shape


def _once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _call(shape: ProductShape, path: ProductPath) -> Callable[[], Tensor]:
    """One product as a step computes it, from the operands that the step has."""
    format = path.format
    kept = torch.float32 if format.bits > 16 else torch.bfloat16
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(shape.out_features, shape.in_features, generator=random).div_(math.sqrt(shape.in_features))
    x = torch.randn(shape.tokens, shape.in_features, generator=random).to(kept)
    gradient = torch.randn(shape.tokens, shape.out_features, generator=random).to(kept)
    a, b, left, result = {
        "forward": (x, weight, format.operand, kept),
        "input_gradient": (gradient, weight.t(), format.gradient, kept),
        "weight_gradient": (gradient.t(), x.t(), format.gradient, torch.float32),
    }[shape.kind]
    if path.multiply is not None:
        multiply = path.multiply
        return lambda: multiply(a, b, result)
    return lambda: product(a, b, left, format.operand, dtype=result)


def read_pair(data: Any) -> ProductPair:
    """A pair as JSON gives it back.

    Raises:
        ValueError, TypeError: it is none.
    """
    first, second = (ProductTime(float(ms), cast(Kind, kind)) for ms, kind in data)
    if not all(math.isfinite(one.ms) and one.ms > 0 and one.kind in _KINDS for one in (first, second)):
        raise ValueError("not a pair of times")
    return ProductPair(first, second)
