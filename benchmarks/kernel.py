"""Block-sparse linear against dense F.linear, through torch and autograd, in one process, interleaved.

    python benchmarks/kernel.py [--quick] [--json FILE]

A step is forward, input gradient and weight gradient; the sparse one packs its weights in every call. Dense is the
fastest of eager, compiled, and a forward with pre-packed weights followed by the faster of the two backwards. The limit
of a ratio is 1 / density: nothing but products of live blocks. Rows 1 to 16 are inference, both sides packed before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for tensors, on both sides

import torch
import torch._dynamo
import torch.nn.functional as F
from harness import parse, write

from sparsam.kernels.index import BlockIndex, build_index
from sparsam.kernels.ops import block_linear
from sparsam.kernels.packed import pack, packed_block_linear
from sparsam.measure.clock import Timing, geometric_mean, interleaved, ratio
from sparsam.measure.heap import keep_heap

SHAPES = [
    (512, 768, 3072),
    (2048, 1024, 1024),
    (2048, 1024, 4096),
    (2048, 4096, 1024),
    (4096, 512, 2048),
    (4096, 2048, 512),
]
FEW_ROWS = (1, 2, 4, 8, 16)
BURST = 10  # calls in one sample of the few-rows table: one call is too short for the clock
Call = Callable[[], object]


@dataclass(frozen=True)
class Cell:
    """One column of the table: a block size at a sparsity, in one number format."""

    name: str
    dtype: torch.dtype
    block: int
    density: float


BF16 = [
    Cell("bf16_b32_80", torch.bfloat16, 32, 0.2),
    Cell("bf16_b32_90", torch.bfloat16, 32, 0.1),
    Cell("bf16_b32_95", torch.bfloat16, 32, 0.05),
    Cell("bf16_b16_80", torch.bfloat16, 16, 0.2),
    Cell("bf16_b16_90", torch.bfloat16, 16, 0.1),
]
FP32 = [Cell("fp32_b32_80", torch.float32, 32, 0.2), Cell("fp32_b32_90", torch.float32, 32, 0.1)]


def main() -> None:
    arguments = parse(__doc__)
    quick = arguments.quick
    torch.manual_seed(0)
    kept = keep_heap()
    print(f"{torch.get_num_threads()} threads; freed memory is kept, on both sides: {'yes' if kept else 'no'}")
    rows: list[dict[str, Any]] = []
    for cells, repeats in ((BF16, 5 if quick else 21), (FP32, 3 if quick else 7)):
        for shape in SHAPES:
            rows += measure(shape, cells, repeats, compiled=not quick)
    few = few_rows(5 if quick else 15, compiled=not quick)
    summary = {}
    for cell in (*BF16, *FP32):
        summary[cell.name] = report(cell, [row for row in rows if row["name"] == cell.name])
    summary["rows1to16_90"] = geometric_mean([row["ratio"] for row in few])
    print("\nForward of few rows, 32x32 blocks, 90 % sparse, bf16, both packed beforehand")
    for row in few:
        print(
            f"  {row['rows']:>2} rows, {row['in']:>4} -> {row['out']:>4}: {row['sparse_ms'] * 1e3:7.1f} us, dense "
            f"{row['dense_ms'] * 1e3:7.1f} us ({row['dense_way']}): {row['ratio']:5.2f}x"
        )
    print()
    write(arguments, summary, rows + few)


def report(cell: Cell, rows: list[dict[str, Any]]) -> float:
    """Prints the table of one cell and returns the geometric mean of its ratios."""
    limit = 1 / cell.density
    print(f"\n{cell.name}: {cell.block}x{cell.block} blocks, {1 - cell.density:.0%} sparse, limit {limit:.0f}x")
    print("  tokens    in   out |  dense ms         way | sparse ms   ratio  of limit | forward     dx     dw")
    for row in rows:
        print(
            f"  {row['tokens']:>6} {row['in']:>5} {row['out']:>5} | {row['dense_ms']:9.2f} {row['dense_way']:>11} | "
            f"{row['sparse_ms']:9.2f} {row['ratio']:6.2f}x {row['ratio'] / limit:8.0%} | "
            + " ".join(f"{row[part + '_ratio']:6.2f}" for part in ("forward", "dx", "dw"))
        )
    return geometric_mean([row["ratio"] for row in rows])


def measure(shape: tuple[int, int, int], cells: list[Cell], repeats: int, compiled: bool) -> list[dict[str, Any]]:
    """All cells of one number format on one shape, timed round-robin with dense."""
    tokens, k, n = shape
    dtype = cells[0].dtype
    x = torch.randn(tokens, k, dtype=dtype, requires_grad=True)
    weight = (torch.randn(n, k, dtype=dtype) * k**-0.5).requires_grad_()
    grad = torch.randn(tokens, n, dtype=dtype)
    # every step follows its own parts, dense or sparse: each finds the caches as its own kind left them
    calls: dict[str, Call] = {
        "eager forward": inference(lambda: F.linear(x, weight)),
        "eager dx": inference(lambda: grad @ weight),
        "eager dw": inference(lambda: grad.mT @ x),
        "eager": lambda: torch.autograd.grad(F.linear(x, weight), (x, weight), grad),
    }
    if compiled:
        torch._dynamo.reset()  # its graphs of other shapes count against a limit
        linear = torch.compile(F.linear, dynamic=False, fullgraph=True)
        calls["compiled forward"] = inference(lambda: linear(x, weight))
        calls["compiled"] = lambda: torch.autograd.grad(linear(x, weight), (x, weight), grad)
        prepacked = packed_dense(weight, tokens)
        if prepacked is not None:
            calls["packed forward"] = inference(lambda: prepacked(x))
    for cell in cells:
        calls |= sparse_calls(cell, x, grad)
    timings = interleaved(calls, repeats=repeats)
    dense_ms, way = dense_step(timings)
    forwards = [name for name in ("eager forward", "compiled forward", "packed forward") if name in timings]
    best = {
        "forward": min((timings[name] for name in forwards), key=lambda timing: timing.median_ms),
        "dx": timings["eager dx"],
        "dw": timings["eager dw"],
    }
    result = []
    for cell in cells:
        step = timings[cell.name]
        row: dict[str, Any] = {"name": cell.name, "tokens": tokens, "in": k, "out": n, "dense_way": way}
        row |= {"dense_ms": dense_ms, "sparse_ms": step.median_ms, "spread": step.spread}
        row["ratio"] = dense_ms / step.median_ms if way == "packed" else ratio(timings[way], step).median
        for part, timing in best.items():
            row[part + "_ms"] = timings[f"{cell.name} {part}"].median_ms
            row[part + "_ratio"] = ratio(timing, timings[f"{cell.name} {part}"]).median
        result.append(row)
    return result


def dense_step(timings: Mapping[str, Timing]) -> tuple[float, str]:
    """Milliseconds of the fastest dense step and what it is."""
    eager = timings["eager"].median_ms
    ways = {"eager": eager}
    backward = eager - timings["eager forward"].median_ms
    if "compiled" in timings:
        ways["compiled"] = timings["compiled"].median_ms
        backward = min(backward, ways["compiled"] - timings["compiled forward"].median_ms)
    if "packed forward" in timings:
        ways["packed"] = timings["packed forward"].median_ms + backward
    way = min(ways, key=ways.__getitem__)
    return ways[way], way


def sparse_calls(cell: Cell, x: torch.Tensor, grad: torch.Tensor) -> dict[str, Call]:
    """The step of one cell through autograd, and its three parts."""
    n = grad.shape[1]
    values, index = random_blocks(cell.block, cell.density, x.shape[1], n, cell.dtype)
    values.requires_grad_()
    empty = grad.new_empty(0)

    def backward(*needs: bool) -> Call:
        return inference(
            lambda: torch.ops.sparsam.block_linear_backward(grad, x, values, empty, *index, "none", *needs)
        )

    return {
        f"{cell.name} forward": inference(lambda: block_linear(x, values, index, n)),
        f"{cell.name} dx": backward(True, False, False),
        f"{cell.name} dw": backward(False, True, False),
        cell.name: lambda: torch.autograd.grad(block_linear(x, values, index, n), (x, values), grad),
    }


def few_rows(repeats: int, compiled: bool) -> list[dict[str, Any]]:
    """Inference on 1 to 16 rows with packed weights, 32x32 blocks, 90 % sparse, bf16."""
    result = []
    for _, k, n in SHAPES:
        weight = torch.randn(n, k, dtype=torch.bfloat16)
        values, index = random_blocks(32, 0.1, k, n, torch.bfloat16)
        for rows in FEW_ROWS[:: 1 if compiled else 4]:
            calls = few_rows_calls(torch.randn(rows, k, dtype=torch.bfloat16), weight, values, index, compiled)
            timings = interleaved(calls, repeats=repeats)
            sparse = timings.pop("sparse")
            way = min(timings, key=lambda name: timings[name].median_ms)
            result.append(
                {"name": "rows1to16_90", "rows": rows, "in": k, "out": n, "dense_way": way}
                | {"dense_ms": timings[way].median_ms / BURST, "sparse_ms": sparse.median_ms / BURST}
                | {"ratio": ratio(timings[way], sparse).median}
            )
    return result


def few_rows_calls(
    x: torch.Tensor, weight: torch.Tensor, values: torch.Tensor, index: BlockIndex, compiled: bool
) -> dict[str, Call]:
    """Dense ways and the sparse one for one input, in bursts."""
    n, k = weight.shape
    calls: dict[str, Call] = {"eager": burst(lambda: F.linear(x, weight))}
    if compiled:
        torch._dynamo.reset()
        linear = torch.compile(F.linear, dynamic=False, fullgraph=True)
        calls["compiled"] = burst(lambda: linear(x, weight))
    prepacked = packed_dense(weight, x.shape[0])
    if prepacked is not None:
        calls["packed"] = burst(lambda: prepacked(x))
    packed = pack(values, index, k, n, x.dtype)
    if packed is None:
        calls["sparse"] = burst(lambda: block_linear(x, values, index, n))
    else:
        calls["sparse"] = burst(lambda: packed_block_linear(x, packed))
    return calls


def packed_dense(weight: torch.Tensor, rows: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """F.linear with the weight laid out beforehand by oneDNN, as frozen compiled models run it; None without oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return None
    with torch.no_grad():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)

    def linear(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")  # type: ignore[no-any-return]

    return linear


def random_blocks(
    block: int, density: float, in_features: int, out_features: int, dtype: torch.dtype
) -> tuple[torch.Tensor, BlockIndex]:
    """Values of a random topology and its index."""
    block_rows, block_cols = -(-out_features // block), -(-in_features // block)
    live = torch.randperm(block_rows * block_cols)[: round(block_rows * block_cols * density)]
    index = build_index((live // block_cols).int(), (live % block_cols).int(), block_rows, block_cols)
    return torch.randn(len(live), block, block, dtype=dtype) * in_features**-0.5, index


def inference(call: Call) -> Call:
    """The call without gradients."""

    def run() -> object:
        with torch.inference_mode():
            return call()

    return run


def burst(call: Call) -> Call:
    """`BURST` calls in inference mode."""

    def run() -> None:
        with torch.inference_mode():
            for _ in range(BURST):
                call()

    return run


if __name__ == "__main__":
    main()
