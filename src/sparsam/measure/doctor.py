"""Measures what this machine is fast at, in under half a minute: the rows that `sparsam doctor` prints.

Not for decisions about a layer (device_profile.py) and not for evidence: one shape stands for many here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sparsam.kernels import cpu, ops
from sparsam.kernels.formats import BF16, FP8, FP16, FP32, INT8, arithmetic
from sparsam.measure.clock import interleaved
from sparsam.measure.device_profile import LinearShape, time_linear
from sparsam.measure.figure import Figure, measured, modelled
from sparsam.measure.machine import describe
from sparsam.measure.product_profile import ProductPath, ProductShape, time_paths
from sparsam.measure.torch_products import TORCH_PATHS

__all__ = ["REFERENCE", "Row", "measure"]

REFERENCE = "no compiled kernels in use: products run on the PyTorch reference, correct but not fast"

# T, K, N of the products; small enough for a laptop, large enough for the matrix units.
_SHAPE = (2048, 1024, 4096)
_QUICK_SHAPE = (256, 256, 512)
_BLOCKS = (32, 16)
_SPARSITIES = (0.80, 0.90, 0.95)
# One product is enough to compare formats; the slowest of them are timed on less and scaled.
_PRODUCT = ProductShape("forward", 1024, 1024, 1024, 1)
_QUICK_PRODUCT = ProductShape("forward", 32, 32, 32, 1)
_PRODUCT_FORMATS = (FP32, BF16, FP16, INT8, FP8)
_COPY_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        section: the heading it stands under.
        name: what it is.
        figure: the number, or None for a line of text.
        note: text beside it; for a line without number, the content.
    """

    section: str
    name: str
    figure: Figure | None = None
    note: str = ""

    @property
    def text(self) -> str:
        """Number and note in one string, with how the number came to be."""
        number = "" if self.figure is None else f"{self.figure.text} ({self.figure.kind})"
        return "  ".join(part for part in (number, self.note) if part)


def measure(progress: Callable[[str], object] | None = None, quick: bool = False) -> list[Row]:
    """Describes the machine, times products and memory, and says where block-sparse is faster than dense.

    Args:
        progress: called with the name of what is measured next.
        quick: tiny shapes, a second or two in all: for tests, never as evidence.

    Returns:
        rows in the order to print.
    """
    tell = progress or (lambda name: None)
    machine = describe()
    rows = _machine_rows(machine)
    tell("dense products")
    rows += _dense_rows(_QUICK_SHAPE if quick else _SHAPE, quick)
    tell("formats")
    rows += _format_rows(_QUICK_PRODUCT if quick else _PRODUCT, quick)
    for block in _BLOCKS:
        tell(f"blocks of {block}x{block}")
        rows += _sparse_rows(_QUICK_SHAPE if quick else _SHAPE, block, quick)
    tell("memory")
    rows += _memory_rows(2**20 if quick else _COPY_BYTES)
    return rows


def _machine_rows(machine: dict[str, Any]) -> list[Row]:
    available = cpu.available_isas()
    paths = ", ".join(available) if available else "none: no compiled kernels, products run on the PyTorch reference"
    section = "Machine"
    rows = [
        Row(section, "processor", None, str(machine["cpu"])),
        Row(section, "cores allowed", None, f"{machine['allowed_cpus']:g} of {machine['cores']}"),
        Row(section, "threads", None, f"{machine['threads']}"),
        Row(section, "memory", None, measured(machine["memory_bytes"], "B").text),
        Row(section, "kernel paths", None, paths),
        Row(section, "kernel path in use", None, ops.backend()),
        Row(section, "large pages for tensors", None, _pages(bool(machine["transparent_huge_pages"]))),
        Row(section, "torch", None, f"{machine['torch']}, Python {machine['python']}, sparsam {machine['sparsam']}"),
    ]
    if ops.backend() == "reference":
        rows.append(Row(section, "note", None, REFERENCE))
    if machine["accelerators"]:
        names = ", ".join(str(name) for name in machine["accelerators"])
        rows.append(
            Row(section, "accelerators", None, f"{names}: no block-sparse kernels yet, the reference runs there")
        )
    if machine["warning"]:
        rows.append(Row(section, "warning", None, str(machine["warning"])))
    return rows


def _pages(on: bool) -> str:
    return "on" if on else "off: set THP_MEM_ALLOC_ENABLE=1, training steps often get faster by 10 % and more"


def _dense_rows(shape: tuple[int, int, int], quick: bool) -> list[Row]:
    tokens, in_features, out_features = shape
    random = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, in_features, generator=random)
    weight = torch.randn(out_features, in_features, generator=random)
    low_x, low_weight = x.bfloat16(), weight.bfloat16()
    with torch.no_grad():
        times = interleaved(
            {"bf16": lambda: F.linear(low_x, low_weight), "fp32": lambda: F.linear(x, weight)},
            repeats=3 if quick else 15,
            seconds=2.0,
        )
    flops = 2.0 * tokens * in_features * out_features
    where = f"forward of {tokens} x {in_features} -> {out_features}"
    speeds = {name: flops / (timing.median_ms / 1e3) for name, timing in times.items()}
    section = "Dense products"
    return [
        Row(section, "bf16", measured(speeds["bf16"], "FLOP/s"), where),
        Row(section, "fp32", measured(speeds["fp32"], "FLOP/s"), where),
        Row(section, "bf16 over fp32", measured(speeds["bf16"] / speeds["fp32"], "x")),
    ]


def _format_rows(shape: ProductShape, quick: bool) -> list[Row]:
    shape = shape._replace(threads=torch.get_num_threads())
    section = "Formats, one product with casts"
    device = torch.device("cpu")
    paths = {one.name: ProductPath(one) for one in _PRODUCT_FORMATS}
    missing = [name for name, path in TORCH_PATHS.items() if not _known(path)]
    paths |= {name: path for name, path in TORCH_PATHS.items() if name not in missing}
    times = time_paths(shape, paths, seconds=0.01 if quick else 4.0)
    rows = []
    bf16_ms, fp32_ms = times[BF16.name].ms, times[FP32.name].ms
    for name, path in paths.items():
        ms = times[name].ms
        notes = [f"{bf16_ms / ms:.3g}x the speed of bf16"]
        if path.format == BF16:
            notes = [f"forward of {shape.tokens} x {shape.in_features} -> {shape.out_features}"]
        elif path.format != FP32:
            notes.append("slower than bf16: never chosen" if ms >= bf16_ms else "faster than bf16")
        if fp32_ms < ms <= bf16_ms:  # such machines exist: fewer bits are no gain by themselves
            notes.append("slower than fp32")
        if path.multiply is None and arithmetic(path.format, device) == "simulated":
            notes.insert(1, "simulated")
        rows.append(Row(section, name, times[name].figure, ", ".join(notes)))
    return rows + [Row(section, name, None, "torch does not know it on this machine") for name in missing]


def _known(path: ProductPath) -> bool:
    try:
        time_paths(_QUICK_PRODUCT, {"tried": path}, seconds=0.0)
    except (RuntimeError, AttributeError):  # an operator that is missing altogether is the latter
        return False
    return True


def _sparse_rows(shape: tuple[int, int, int], block: int, quick: bool) -> list[Row]:
    rows = []
    for sparsity in _SPARSITIES:
        density = 1 - sparsity
        linear = LinearShape(*shape, block, block, density, "bf16", torch.get_num_threads())
        timing = time_linear(linear, seconds=0.01 if quick else 0.7)
        gain = timing.dense_ms / timing.compact_ms
        bound = modelled(1 / density, "x").text
        verdict = "faster than dense" if gain > 1 else "not faster: layers like this stay dense"
        rows.append(
            Row(
                f"Block-sparse {block}x{block}, forward and backward, bf16",
                f"{100 * sparsity:.0f} % sparse",
                measured(gain, "x"),
                f"{verdict}: {timing.compact_ms:.2f} ms against {timing.dense_ms:.2f} ms, bound {bound}",
            )
        )
    return rows


def _memory_rows(size: int) -> list[Row]:
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.empty_like(source)
    time = interleaved({"copy": lambda: target.copy_(source)}, repeats=9, seconds=2.0)["copy"]
    speed = 2.0 * size / (time.median_ms / 1e3)
    return [
        Row(
            "Memory",
            "copy",
            measured(speed, "B/s"),
            f"read and write, {size // 2**20} MiB, {torch.get_num_threads()} threads",
        )
    ]
