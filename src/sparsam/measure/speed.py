"""How fast a machine multiplies, in one number and half a second: for choices that need no more than that."""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F

__all__ = ["dense_flops_per_second"]


def dense_flops_per_second(dtype: torch.dtype = torch.bfloat16, seconds: float = 0.5) -> float:
    """Median speed of a dense linear layer of 1024 rows and 1024 x 1024 weights with torch's threads, in FLOP/s.

    Args:
        dtype: of rows and weights.
        seconds: about how long to measure.
    """
    size = 1024
    x, weight = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    times: list[float] = []
    with torch.inference_mode():
        F.linear(x, weight)
        end = time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            began = time.perf_counter()
            F.linear(x, weight)
            times.append(time.perf_counter() - began)
    return 2 * size**3 / statistics.median(times)
