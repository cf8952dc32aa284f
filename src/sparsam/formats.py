"""Number formats as values: what a format can hold, and how a tensor is rounded to it. No products, no gradients.

A format names a grid (exponent and mantissa bits, or integers), what happens above its largest value, and how many
values share a scale. `scale` is what a code is multiplied by to dequantise: value = code * scale.

    q = E4M3.quantise(x)     # q.codes, one byte per value; q.scale; q.nbytes
    x_ = q.dequantise()      # float32, on the grid of E4M3
    x_ = E4M3.round(x)       # the same values in one go: what simulated arithmetic uses

Results are detached: whoever needs a gradient says what it shall be. Costs, and why not torchao: docs/precision.md.
"""

from __future__ import annotations

import difflib
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "BF16",
    "E4M3",
    "E4M3_ROWS",
    "E5M2",
    "FORMATS",
    "FP16",
    "FP32",
    "INT8_ROWS",
    "INT8_TENSOR",
    "MX_E4M3",
    "MX_E5M2",
    "TF32",
    "Format",
    "Quantised",
    "Rounding",
    "named",
    "non_finite",
]

Rounding = Literal["nearest", "stochastic"]

BLOCK = 32  # neighbours of the last dimension under one MX scale
SMALLEST_AMAX = 1e-12  # far below, scales would be subnormal numbers, which some machines flush to zero
LARGEST_AMAX = 3.4028232e38  # a step below float32's largest: 127 * scale must not come back as infinity
PIECE = 1 << 16  # values at a time: temporaries stay in cache, where a large one costs a page fault per 4 KiB
FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Format:
    """A number format: its grid, its limits, and what a scale covers.

    Attributes:
        name: as recipes and reports write it.
        dtype: of the stored codes.
        exponent_bits: 0 for integers.
        mantissa_bits: stored ones, without the leading 1; for integers all bits but the sign.
        max: largest finite code.
        overflow: what a finite value too large for `max`, and infinity, become: "saturate" (max) or "infinity".
        scale_covers: "nothing" (there is no scale), "tensor", "row" (all of the last dimension) or "block" (32
            neighbours of the last dimension; such a scale is a power of two).
        error_floor: median relative error of Gaussian numbers (rows of 1024) rounded to nearest under current scaling.
            A tensor that shows much more does not suit the format. Measured by the tests, like the next.
        l2_floor: the same as a relative error in the L2 norm.

    Source: Micikevicius et al. 2022, arXiv:2209.05433 (E4M3, E5M2); Rouhani et al. 2023, arXiv:2310.10537 (MX).
        Differs: MX scales are rounded up so that nothing saturates (Mishra et al. 2025, arXiv:2506.08027), where the
        paper may cut an eighth off the largest value; integers are symmetric, -128 is never made.
    """

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    max: float
    overflow: Literal["saturate", "infinity"]
    scale_covers: Literal["nothing", "tensor", "row", "block"]
    error_floor: float
    l2_floor: float

    @property
    def integer(self) -> bool:
        return self.exponent_bits == 0

    @property
    def bits(self) -> int:
        """Bits that say something: TF32 has 19 and is stored in 32."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        """Smallest positive code of full precision."""
        return 1.0 if self.integer else 2.0 ** (2 - 2 ** (self.exponent_bits - 1))

    @property
    def smallest(self) -> float:
        """Smallest positive code (subnormal). Half of it, and less, rounds to zero."""
        return 1.0 if self.integer else self.smallest_normal * 2.0**-self.mantissa_bits

    @property
    def bytes_per_value(self) -> float:
        """Stored bytes with the scales of blocks; one scale per row or tensor is left to `bytes_of`."""
        return self.dtype.itemsize + (1 / BLOCK if self.scale_covers == "block" else 0.0)

    def bytes_of(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of this shape and its scales: 4 per tensor or row, 1 per block (an exponent)."""
        scales = self._scale_shape(shape)
        scale_bytes = 0 if scales is None else math.prod(scales) * (1 if self.scale_covers == "block" else 4)
        return math.prod(shape) * self.dtype.itemsize + scale_bytes

    def scale_of(self, x: Tensor, old: Tensor | float | None = None) -> Tensor | None:
        """Current scaling: amax / max, always finite and above zero.

        Where amax is 0, infinite or NaN nothing is measured: the old scale stays, or 1 without one.

        Args:
            x: any shape, floating point.
            old: scale of an earlier tensor, of the shape returned here, or one number.

        Returns:
            float32: () for a tensor, (..., 1) for rows, (..., blocks) for blocks; None for a format without a scale.

        Raises:
            ValueError: x is not floating point, or `old` is no scale of this format.
        """
        x = _working(x)
        shape = self._scale_shape(x.shape)
        if shape is None:
            return None
        rows = self._rows(x)
        if rows.dim() == 1 or x.numel() == 0:
            amax = _amax(rows).expand(shape)
        else:
            amax = torch.maximum(rows.amax(-1), -rows.amin(-1)).view(shape)
        scale = (amax.clamp(SMALLEST_AMAX, LARGEST_AMAX) / self.max).to(torch.float32)
        if self.scale_covers == "block":
            scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)  # up to a power of two
        kept = scale.new_ones(()) if old is None else self._checked(old, x)
        return torch.where((amax > 0) & (amax <= FLOAT32_MAX), scale, kept)

    def quantise(
        self, x: Tensor, *, rounding: Rounding = "nearest", seed: int | None = None, scale: Tensor | float | None = None
    ) -> Quantised:
        """Codes of a tensor: x / scale, rounded to the grid. Zeros stay zero in every format and rounding.

        The quotient is taken in float32 (float64 for float64) and rounded once more: to nearest, ties to the even
        code; or at random to one of its two neighbours so that the mean is the quotient, in steps of 2^-13 of a
        quantum or finer. What the grid holds stays. Stochastic rounding overflows only where rounding to nearest does.
        NaN stays NaN; infinity may vanish (E4M3 makes it 448), so ask `non_finite` first.

        Args:
            x: any shape, floating point.
            rounding: "nearest" or "stochastic".
            seed: of stochastic rounding: the result is a function of (x, scale, seed) on one kind of device. Give each
                tensor and step its own.
            scale: float32 as `scale_of` returns it, or one number; None measures it now.

        Returns:
            Codes, scale and this format.

        Raises:
            ValueError: x is not floating point, or holds NaN and codes are integers; stochastic without a seed or
                subnormals; a scale that is not finite and above zero, of another shape or, for blocks, no power of two.
        """
        x, noise = _working(x), _noise(rounding, seed, x.device)
        scale = self.scale_of(x) if scale is None else self._checked(scale, x)
        rows = self._rows(x)
        codes = torch.empty(rows.shape, dtype=self.dtype, device=x.device)
        for part, part_scale, out in self._parts(rows, scale, codes):
            out.copy_(self._codes(part, part_scale, noise))
        return Quantised(_unrowed(codes, x.shape), scale, self)

    def round(
        self,
        x: Tensor,
        *,
        rounding: Rounding = "nearest",
        seed: int | None = None,
        scale: Tensor | float | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """What `quantise(x, ...).dequantise(dtype)` gives, in less time and memory."""
        x, noise = _working(x), _noise(rounding, seed, x.device)
        scale = self.scale_of(x) if scale is None else self._checked(scale, x)
        rows, table = self._rows(x), self._table(scale, x.device)
        values = torch.empty(rows.shape, dtype=dtype, device=x.device)
        for part, part_scale, out in self._parts(rows, scale, values):
            codes = self._codes(part, part_scale, noise)
            # integers need not be stored on the way; they have one zero, and -0 + 0 = 0
            codes = codes.to(torch.float32).add_(0.0) if self.integer else codes.to(self.dtype)
            _decode(codes, part_scale, table, out)
        return _unrowed(values, x.shape)

    def fits(self, x: Tensor, scale: Tensor | float | None = None) -> bool:
        """True if all values are finite and none is above max * scale. Without a scale 1 is meant, in every format."""
        x = _working(x)
        rows = self._rows(x)
        if scale is not None:
            rows = rows / self._checked(scale, x).reshape(-1, *[1] * (rows.dim() - 1))
        return bool((_amax(rows) <= self.max).item())

    def _scale_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        if self.scale_covers == "nothing":
            return None
        if self.scale_covers == "tensor":
            return ()
        width = shape[-1] if shape else 1
        return (*shape[:-1], 1 if self.scale_covers == "row" else -(-width // BLOCK))

    def _checked(self, scale: Tensor | float, x: Tensor) -> Tensor:
        """A scale from outside as float32, in the shape that x asks for."""
        shape = self._scale_shape(x.shape)
        if shape is None:
            raise ValueError(f"{self.name}: expected no scale, got one. This format has none: leave it out.")
        given = torch.as_tensor(scale, dtype=torch.float32, device=x.device).detach()
        if given.numel() == 1:
            given = given.reshape(()).expand(shape).contiguous()
        if given.shape != shape:
            got = f"got {tuple(given.shape)}. scale_of gives the right one."
            raise ValueError(f"{self.name}: expected one number or a scale of shape {shape}, {got}")
        good = (given > 0) & (given <= FLOAT32_MAX)
        if self.scale_covers == "block":
            good &= (given.view(torch.int32) & 0x7FFFFF) == 0
        if not bool(good.all()):
            wanted = "powers of two" if self.scale_covers == "block" else "finite scales above zero"
            got = f"got {given[~good][0].item():g}. scale_of gives no others."
            raise ValueError(f"{self.name}: expected {wanted}, {got}")
        return given

    def _rows(self, x: Tensor) -> Tensor:
        """x as a matrix with a scale per row, blocks filled up with zeros; without such scales as one long vector."""
        if self.scale_covers not in ("row", "block"):
            return x.reshape(-1)
        x = x if x.dim() else x.reshape(1)
        width = x.shape[-1]
        if self.scale_covers == "block":
            missing, width = -width % BLOCK, BLOCK
            x = torch.nn.functional.pad(x, (0, missing)) if missing else x  # pad copies, also for nothing
        return x.reshape(x.numel() // width if width else math.prod(x.shape[:-1]), width)

    def _parts(self, rows: Tensor, scale: Tensor | None, out: Tensor) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Rows with their scales and places in `out`, a piece at a time; on a GPU all at once."""
        count = max(1, PIECE // max(1, rows[:1].numel()) if rows.is_cpu else len(rows))
        if scale is None or scale.dim() == 0:
            scales: Iterable[Tensor | None] = itertools.repeat(scale)
        else:
            scales = scale.reshape(-1, 1).split(count)
        return zip(rows.split(count), scales, out.split(count), strict=False)

    def _codes(self, x: Tensor, scale: Tensor | None, noise: torch.Generator | None) -> Tensor:
        """x / scale as numbers that a cast to `dtype` turns into the right codes. May be x itself."""
        y = x if scale is None else x / scale
        if self.integer:
            y = y.clamp(-self.max, self.max)
            if bool(y.sum().isnan()):  # such numbers never sum to NaN by themselves, and a sum is cheaper than a search
                raise ValueError(f"{self.name}: expected numbers, got NaN, which integers lack. See non_finite.")
            return y.round_() if noise is None else _whole(y, noise)
        if noise is None and (self.mantissa_bits == 23 or (y.dtype == torch.float32 and self.dtype != torch.float32)):
            return y  # torch's cast rounds it; from float64 to less than float32 it rounds twice, and may make a tie
        if bool((_amax(y) <= self.max).item()):
            return _on_grid(y, self, noise)
        # half a quantum above max is where rounding to nearest overflows
        half = 2.0 ** (math.floor(math.log2(self.max)) - self.mantissa_bits - 1)
        limit = math.inf if self.overflow == "saturate" else self.max + half
        return torch.where(y.abs() < limit, _on_grid(y.clamp(-self.max, self.max), self, noise), y * math.inf)

    def _table(self, scale: Tensor | None, device: torch.device) -> Tensor | None:
        """All 256 values of a one-byte float, times a tensor's scale: on CPU faster than torch's cast."""
        if self.integer or self.dtype.itemsize > 1 or device.type != "cpu":
            return None
        table = torch.arange(256, dtype=torch.uint8).view(self.dtype).to(torch.float32)
        return table * scale if self.scale_covers == "tensor" and scale is not None else table


@dataclass(frozen=True, eq=False)
class Quantised:
    """A tensor in a format: codes, and the scale that turns them back.

    Attributes:
        codes: in `format.dtype`, of the shape of what was quantised.
        scale: float32 as `Format.scale_of` shapes it, or None.
        format: what it is in.
    """

    codes: Tensor
    scale: Tensor | None
    format: Format

    @property
    def nbytes(self) -> int:
        """Bytes on a wire or disk, codes and scales; a block's scale is one byte there."""
        return self.format.bytes_of(self.codes.shape)

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """code * scale in float32, then in `dtype`."""
        codes, scale, format = self.codes, self.scale, self.format
        bits = codes.view(torch.uint8) if codes.dtype.itemsize == 1 else codes  # float8 cannot be padded
        rows, table = format._rows(bits).view(codes.dtype), format._table(scale, codes.device)
        values = torch.empty(rows.shape, dtype=dtype, device=codes.device)
        for part, part_scale, out in format._parts(rows, scale, values):
            _decode(part, part_scale, table, out)
        return _unrowed(values, codes.shape)


FP32 = Format("fp32", torch.float32, 8, 23, FLOAT32_MAX, "infinity", "nothing", 0.0, 0.0)
TF32 = Format("tf32", torch.float32, 8, 10, 2.0**127 * (2 - 2.0**-10), "infinity", "nothing", 0.000169, 0.000207)
BF16 = Format("bf16", torch.bfloat16, 8, 7, 2.0**127 * (2 - 2.0**-7), "infinity", "nothing", 0.00135, 0.00166)
FP16 = Format("fp16", torch.float16, 5, 10, 65504.0, "infinity", "nothing", 0.000169, 0.000207)
E4M3 = Format("e4m3", torch.float8_e4m3fn, 4, 3, 448.0, "saturate", "tensor", 0.0216, 0.0264)
E4M3_ROWS = Format("e4m3_rows", torch.float8_e4m3fn, 4, 3, 448.0, "saturate", "row", 0.0216, 0.0264)
E5M2 = Format("e5m2", torch.float8_e5m2, 5, 2, 57344.0, "infinity", "tensor", 0.0433, 0.0527)
INT8_TENSOR = Format("int8_tensor", torch.int8, 0, 7, 127.0, "saturate", "tensor", 0.013, 0.0112)
INT8_ROWS = Format("int8_rows", torch.int8, 0, 7, 127.0, "saturate", "row", 0.0092, 0.0079)
MX_E4M3 = Format("mx_e4m3", torch.float8_e4m3fn, 4, 3, 448.0, "saturate", "block", 0.0217, 0.0264)
MX_E5M2 = Format("mx_e5m2", torch.float8_e5m2, 5, 2, 57344.0, "infinity", "block", 0.0433, 0.0527)
FORMATS = (FP32, TF32, BF16, FP16, E4M3, E4M3_ROWS, E5M2, INT8_TENSOR, INT8_ROWS, MX_E4M3, MX_E5M2)


def named(name: str) -> Format:
    """The format that a recipe calls by this name. Code passes the constants themselves.

    Raises:
        ValueError: no format has this name.
    """
    for known in FORMATS:
        if known.name == name:
            return known
    names = [known.name for known in FORMATS]
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    advice = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"format: expected one of {', '.join(names)}, got {name!r}.{advice}")


def non_finite(x: Tensor) -> int:
    """How many values are infinite or NaN. Ask before a cast: E4M3 and integers turn infinity into `max`."""
    x = _working(x)
    return 0 if math.isfinite(_amax(x).item()) else int((~torch.isfinite(x)).sum())


def _working(x: Tensor) -> Tensor:
    """x as it is computed with: float64 as it is, all else in float32; out of autograd's sight."""
    if not x.is_floating_point():
        raise ValueError(f"x: expected a floating-point tensor, got {x.dtype}. Convert it with .float() first.")
    return x.detach() if x.dtype == torch.float64 else x.detach().to(torch.float32)


def _amax(x: Tensor) -> Tensor:
    """Largest magnitude, 0 of nothing, NaN where there is one."""
    if x.numel() == 0:
        return x.new_zeros(())
    low, high = torch.aminmax(x)  # half the time of abs().amax(), and no copy
    return torch.maximum(-low, high)


def _unrowed(rows: Tensor, shape: torch.Size) -> Tensor:
    if rows.numel() == shape.numel():
        return rows.view(shape)
    return rows.view(*shape[:-1], -1)[..., : shape[-1] if shape else 1].reshape(shape)


def _decode(codes: Tensor, scale: Tensor | None, table: Tensor | None, out: Tensor) -> None:
    """Writes code * scale to a contiguous `out`."""
    if table is None:
        values = codes.to(torch.float32)
    else:
        values = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32)
        which = codes.view(torch.uint8).reshape(-1).to(torch.int32)
        torch.index_select(table, 0, which, out=values.view(-1))
    if scale is not None and (table is None or scale.dim()):
        values.mul_(scale)
    if values is not out:
        out.copy_(values)


def _noise(rounding: Rounding, seed: int | None, device: torch.device) -> torch.Generator | None:
    if rounding == "nearest":
        return None
    if rounding != "stochastic":
        raise ValueError(f"rounding: expected 'nearest' or 'stochastic', got {rounding!r}. Name one of the two.")
    if seed is None:
        raise ValueError("seed: expected a number for stochastic rounding, got None. Make it from run, step and name.")
    if sys.float_info.min / 2 == 0:  # `_on_grid` goes by way of them
        raise ValueError("rounding: expected subnormal numbers, got zeros. Call torch.set_flush_denormal(False).")
    return torch.Generator(device).manual_seed(seed)


def _whole(y: Tensor, noise: torch.Generator) -> Tensor:
    """Numbers up to 127 as whole ones whose mean they are (to 2^-23), by way of fixed point."""
    fixed = (y * 2.0**23).to(torch.int32)
    added = torch.empty_like(fixed).random_(generator=noise).bitwise_and_((1 << 23) - 1)
    return added.add_(fixed).bitwise_right_shift_(23).to(y.dtype)


def _on_grid(y: Tensor, grid: Format, noise: torch.Generator | None) -> Tensor:
    """y, none above `grid.max`, rounded to a float grid in its own dtype. NaN may become anything."""
    wide = y.dtype == torch.float64
    if wide and noise is None:
        power = (y.view(torch.int64) & 0x7FF0000000000000).view(y.dtype)  # 2^floor(log2|y|)
        quantum = power.clamp_(min=grid.smallest_normal).mul_(2.0**-grid.mantissa_bits)
        return (y / quantum).round_().mul_(quantum)
    cut = (52 if wide else 23) - grid.mantissa_bits
    if cut == 0:
        return y
    # What is subnormal in the grid is made so in y's own dtype: then the same bits are cut off everywhere, and a carry
    # into the exponent is just what rounding up means. What little this loses lies below the bits of the noise.
    shift = 2.0 ** (-1022 if wide else -126) / grid.smallest_normal
    codes = (y if shift == 1.0 else y * shift).view(torch.int64 if wide else torch.int32)
    if noise is None:
        added = (codes >> cut).bitwise_and_(1).add_((1 << (cut - 1)) - 1)  # ties go to the even code
    else:
        added = torch.empty_like(codes).random_(generator=noise).bitwise_and_((1 << cut) - 1)
    out = added.add_(codes).bitwise_and_(-1 << cut).view(y.dtype)
    return out if shift == 1.0 else out.mul_(1.0 / shift)
