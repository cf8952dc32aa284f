"""Times compact against dense once per shape on this device, and remembers: what decides a layer's storage.

Kept as JSON on disk, one section per machine and library version, and carried by checkpoints. Not for reports of a
whole step: a product that is faster alone is what this file knows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from sparsam.kernels import cpu, ops
from sparsam.kernels.index import BlockIndex, build_index
from sparsam.measure.clock import interleaved, on_threads
from sparsam.measure.machine import fingerprint
from sparsam.measure.product_profile import ProductProfile, ProductTimer, read_pair
from sparsam.measure.timings import VERSION, Timings, default_path, read_file

__all__ = ["DeviceProfile", "LinearShape", "LinearTiming", "default_path", "time_linear"]

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class LinearShape(NamedTuple):
    """What decides the time of one linear layer: T tokens, K in, N out, blocks of R x C, density, format, threads."""

    tokens: int
    in_features: int
    out_features: int
    rows: int
    cols: int
    density: float
    format: str
    threads: int

    @property
    def key(self) -> str:
        """One line, the same for densities that give the same number of blocks."""
        return (
            f"{self.tokens}x{self.in_features}x{self.out_features} blocks {self.rows}x{self.cols}"
            f" {self.blocks} of {self.grid[0] * self.grid[1]} {self.format} {self.threads} threads"
        )

    @property
    def grid(self) -> tuple[int, int]:
        """(RB, CB): blocks per column and per row, edge blocks included."""
        return math.ceil(self.out_features / self.rows), math.ceil(self.in_features / self.cols)

    @property
    def blocks(self) -> int:
        """Active blocks."""
        return round(self.density * self.grid[0] * self.grid[1])


class LinearTiming(NamedTuple):
    """Median time of forward and backward of one layer, block-sparse and dense, timed against each other."""

    compact_ms: float
    dense_ms: float


class DeviceProfile:
    """Timings of linear layers on this device, each taken once; `products` has those of single products per format.

    Args:
        path: JSON file to remember them in; None = ``sparsam/device_profile.json`` in the user's cache folder. A file
            that is damaged is reported and written anew; one that cannot be written is reported and done without.
        timer: takes the timing of one shape; another one is for tests.
        product_timer: the same for single products.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        timer: Callable[[LinearShape], LinearTiming] | None = None,
        product_timer: ProductTimer | None = None,
    ) -> None:
        self.path = Path(path) if path is not None else default_path()
        self._timer = timer or time_linear
        self._machine = f"{fingerprint()}; kernels {_library_hash()}"
        content = read_file(self.path)
        self._linear = Timings(self.path, self._machine, _read_timing, content)
        # A section of its own: versions that know of no products keep it and read past it.
        products = Timings(self.path, f"{self._machine}; products", read_pair, content)
        self.products = ProductProfile(products, product_timer)

    def linear(
        self,
        tokens: int,
        in_features: int,
        out_features: int,
        rows: int,
        cols: int,
        density: float,
        format: str = "bf16",
        threads: int | None = None,
    ) -> LinearTiming:
        """Forward and backward of one layer, from memory or timed now (well under a second for most shapes).

        Args:
            tokens: T, rows of the input per call.
            in_features, out_features: K, N.
            rows, cols: block size.
            density: active share of blocks, 0..1.
            format: "bf16" (float32 weights, bfloat16 products, as under autocast) or "fp32".
            threads: None = torch's current number.

        Returns:
            `LinearTiming` in ms.

        Raises:
            ValueError: a size below 1, a density outside [0, 1], an unknown format.
        """
        shape = LinearShape(
            tokens, in_features, out_features, rows, cols, density, format, threads or torch.get_num_threads()
        )
        _check(shape)
        return self._linear.get(shape.key, lambda: LinearTiming(*self._timer(shape)))

    def to_json(self) -> dict[str, Any]:
        """What was asked of this profile so far, for a checkpoint: machine and key -> [compact_ms, dense_ms], and
        under "products" what `ProductPair` holds."""
        return {
            "version": VERSION,
            "machine": self._machine,
            "linear": self._linear.to_json(),
            "products": self.products.timings.to_json(),
        }

    @classmethod
    def from_json(
        cls,
        data: Mapping[str, Any],
        path: str | Path | None = None,
        timer: Callable[[LinearShape], LinearTiming] | None = None,
        product_timer: ProductTimer | None = None,
    ) -> DeviceProfile:
        """A profile that answers with the timings of a checkpoint, whatever this machine would say.

        Raises:
            ValueError: not a profile, or one of a newer version.
        """
        profile = cls(path, timer, product_timer)
        profile.carry(data)
        return profile

    def carry(self, data: Mapping[str, Any]) -> None:
        """Answers from now on with the timings of another profile: what its `to_json` gave.

        Raises:
            ValueError: see `from_json`.
        """
        products = data.get("products", {}) if isinstance(data, Mapping) else None  # none in older checkpoints
        if not isinstance(products, Mapping) or not isinstance(data.get("linear"), Mapping):
            raise ValueError("device profile: expected the content of DeviceProfile.to_json(), got something else.")
        if data.get("version") != VERSION:
            raise ValueError(
                f"device profile: expected version {VERSION}, got {data.get('version')!r}. Update sparsam."
            )
        self._linear.carry(data["linear"])
        self.products.timings.carry(products)


def time_linear(shape: LinearShape, seconds: float = 0.4) -> LinearTiming:
    """Times forward and backward of one layer, block-sparse and dense in turns, on random numbers of its own.

    Both get float32 weights; in bf16 both run under autocast, as training does, so that rounding and packing the
    weights is counted on both sides.

    Args:
        shape: the layer.
        seconds: about how long the counted rounds may take.
    """
    dtype = _FORMATS[shape.format]
    random = torch.Generator().manual_seed(0)
    x = torch.randn(shape.tokens, shape.in_features, generator=random).to(dtype).requires_grad_()
    gradient = torch.randn(shape.tokens, shape.out_features, generator=random).to(dtype)
    dense = torch.randn(shape.out_features, shape.in_features, generator=random).div_(math.sqrt(shape.in_features))
    dense.requires_grad_()
    index = _random_index(shape, random)
    values = torch.randn(shape.blocks, shape.rows, shape.cols, generator=random).mul_(0.05).requires_grad_()

    def run(product: Callable[[], torch.Tensor]) -> None:
        with torch.enable_grad(), _format(dtype):
            y = product()
        y.backward(gradient)
        x.grad = dense.grad = values.grad = None

    with on_threads(shape.threads):
        times = interleaved(
            {
                "compact": lambda: run(lambda: ops.block_linear(x, values, index, shape.out_features)),
                "dense": lambda: run(lambda: F.linear(x, dense)),
            },
            repeats=31,
            warmup=2,
            seconds=seconds,
        )
    return LinearTiming(times["compact"].median_ms, times["dense"].median_ms)


def _random_index(shape: LinearShape, random: torch.Generator) -> BlockIndex:
    block_rows, block_cols = shape.grid
    chosen = torch.randperm(block_rows * block_cols, generator=random)[: shape.blocks].sort().values
    row, col = (chosen // block_cols).int(), (chosen % block_cols).int()
    return build_index(row, col, block_rows, block_cols)


def _format(dtype: torch.dtype) -> Any:
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast("cpu", dtype)


def _check(shape: LinearShape) -> None:
    sizes = (shape.tokens, shape.in_features, shape.out_features, shape.rows, shape.cols, shape.threads)
    if min(sizes) < 1:
        raise ValueError(f"device profile: expected sizes of at least 1, got {shape}. Leave out empty layers.")
    if not 0 <= shape.density <= 1:
        raise ValueError(
            f"device profile: expected a density in [0, 1], got {shape.density}. Density is the active share."
        )
    if shape.format not in _FORMATS:
        raise ValueError(
            f"device profile: expected a format of {', '.join(_FORMATS)}, got {shape.format!r}. Use one of them."
        )


def _read_timing(pair: Any) -> LinearTiming:
    return LinearTiming(float(pair[0]), float(pair[1]))


def _library_hash() -> str:
    """Changes when the compiled kernels do, so that a rebuild is timed anew."""
    library = cpu.library()
    if library is None:
        return "reference"
    return hashlib.sha256(library.path.read_bytes()).hexdigest()[:12]
