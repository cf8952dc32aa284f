"""CPU nanoseconds per value of rounding to each number format, against torch's own casts, in turns in one process.

    python benchmarks/formats.py [--quick] [--json FILE]

A million float32 values, one thread, the fastest of 25 rounds. "casts" is the same rounding written down plainly: amax,
division, cast there and back, multiplication. Both sides keep freed memory, which helps the casts more: they make large
temporaries. CPU time, because calls this short are cut up by whatever else runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from harness import parse, write

from sparsam.formats import FORMATS, FP32, TF32, Format
from sparsam.measure.clock import geometric_mean
from sparsam.measure.heap import keep_heap

ROWS, COLS = 1024, 1024


def main() -> None:
    arguments = parse(__doc__)
    keep_heap()
    torch.set_num_threads(1)
    x = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0))
    columns = ("round", "casts", "given scale", "stochastic", "quantise", "dequantise", "to bf16")
    print(f"{'ns per value':12}" + "".join(f"{column:>13}" for column in columns))
    rows = [measure(format, x, 5 if arguments.quick else 25) for format in FORMATS]
    for row in rows:
        cells = (f"{row[column]:13.2f}" if column in row else f"{'':13}" for column in columns)
        print(f"{row['name']:12}" + "".join(cells))
    one_byte = [row["ratio"] for row in rows if row["one_byte"]]
    write(arguments, {"one_byte_against_casts": geometric_mean(one_byte)}, rows)


def measure(format: Format, x: torch.Tensor, repeats: int) -> dict[str, Any]:
    scale, q = format.scale_of(x), format.quantise(x)
    calls: dict[str, Callable[[], object]] = {
        "round": lambda: format.round(x),
        "given scale": lambda: format.round(x, scale=scale),
        "stochastic": lambda: format.round(x, rounding="stochastic", seed=1),
        "quantise": lambda: format.quantise(x),
        "dequantise": lambda: q.dequantise(),
        "to bf16": lambda: q.dequantise(torch.bfloat16),
    }
    if format not in (FP32, TF32):  # nothing to cast, no cast
        calls["casts"] = lambda: plain(format, x)
        assert torch.equal(plain(format, x), format.round(x))
    row: dict[str, Any] = {"name": format.name, "one_byte": format.dtype.itemsize == 1}
    row |= {name: seconds * 1e9 / x.numel() for name, seconds in fastest(calls, repeats).items()}
    if "casts" in row:
        row["ratio"] = row["casts"] / row["round"]
    return row


def fastest(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """CPU seconds of the fastest of some rounds."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            best[name] = min(best[name], time.thread_time() - start)
    return best


def plain(format: Format, x: torch.Tensor) -> torch.Tensor:
    """What one writes without this library."""
    if format.scale_covers == "nothing":
        return x.to(format.dtype).to(torch.float32)
    values = x.view(-1, 32) if format.scale_covers == "block" else x
    amax = values.abs().amax() if format.scale_covers == "tensor" else values.abs().amax(-1, keepdim=True)
    scale = amax.clamp(min=1e-12) / format.max
    if format.scale_covers == "block":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    scaled = values / scale
    codes = (scaled.round().clamp(-127, 127) if format.integer else scaled).to(format.dtype)
    return (codes.to(torch.float32) * scale).view(x.shape)


if __name__ == "__main__":
    main()
