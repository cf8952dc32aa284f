"""Times several things against each other on a machine that is never quite quiet.

Round-robin, medians, and ratios taken pair by pair: what disturbs the machine disturbs all contenders alike. Not for
timing one thing in isolation; a time alone says little here, a ratio taken in one process says much.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Ratio", "Timing", "geometric_mean", "interleaved", "least_seconds", "on_threads", "ratio"]

_LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Timing:
    """What `interleaved` saw of one contender.

    Args:
        samples_ms: one time per round, in the order of the rounds; rounds are shared with the other contenders.
    """

    samples_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        """Median of all rounds, the figure to quote."""
        return statistics.median(self.samples_ms)

    @property
    def min_ms(self) -> float:
        """Fastest round: the machine at its quietest."""
        return min(self.samples_ms)

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median; above about 0.1 the machine was not quiet."""
        return _spread(self.samples_ms)

    def to_json(self) -> dict[str, Any]:
        """Plain data: median, minimum, spread and number of rounds."""
        return {
            "median_ms": self.median_ms,
            "min_ms": self.min_ms,
            "spread": self.spread,
            "rounds": len(self.samples_ms),
        }


@dataclass(frozen=True)
class Ratio:
    """How many times faster one contender was than another, over the rounds they shared.

    Args:
        median: median of the per-round ratios.
        low, high: their quartiles.
    """

    median: float
    low: float
    high: float


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    repeats: int = 11,
    warmup: int = 2,
    seconds: float | None = None,
    synchronize: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Times every call once per round, for a number of rounds.

    The order turns by one place each round, so that no contender always runs in the warm cache of the same neighbour.
    Garbage collection is off while the clock runs. What a call returns is freed inside its own time.

    Args:
        calls: name -> function without arguments.
        repeats: rounds counted.
        warmup: rounds run first and thrown away.
        seconds: when given, stop early once this much time has gone into counted rounds, but never before 3 rounds.
        synchronize: called before the clock is read, for devices that run asynchronously.

    Returns:
        name -> `Timing`, in the order of ``calls``.

    Raises:
        ValueError: no calls, or fewer than one round.
    """
    if not calls:
        raise ValueError("interleaved: expected at least one call to time, got none. Pass {name: function}.")
    if repeats < 1:
        raise ValueError(f"interleaved: expected at least 1 repeat, got {repeats}. Use 5 or more for a median.")
    wait = synchronize or (lambda: None)
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    with _without_gc():
        for _ in range(warmup):
            for name in names:
                calls[name]()
        wait()
        began = time.perf_counter()
        for turn in range(repeats):
            if seconds is not None and turn >= _LEAST_ROUNDS and time.perf_counter() - began >= seconds:
                break
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                call = calls[name]
                start = time.perf_counter()
                call()
                wait()
                samples[name].append((time.perf_counter() - start) * 1e3)
    return {name: Timing(tuple(times)) for name, times in samples.items()}


def ratio(slow: Timing, fast: Timing) -> Ratio:
    """How many times faster ``fast`` is than ``slow``, taken round by round.

    Args:
        slow, fast: two timings of one `interleaved` run.

    Returns:
        Median and quartiles of ``slow / fast`` over the rounds.

    Raises:
        ValueError: the two do not come from the same rounds.
    """
    if len(slow.samples_ms) != len(fast.samples_ms):
        raise ValueError(
            f"ratio: expected timings of the same rounds, got {len(slow.samples_ms)} and {len(fast.samples_ms)} rounds."
            " Time both in one call of interleaved()."
        )
    quotients = [above / max(below, 1e-9) for above, below in zip(slow.samples_ms, fast.samples_ms, strict=True)]
    low, high = _quartiles(quotients)
    return Ratio(statistics.median(quotients), low, high)


def geometric_mean(values: list[float]) -> float:
    """Geometric mean of positive ratios.

    Raises:
        ValueError: no values, or one that is not positive.
    """
    if not values or min(values) <= 0:
        raise ValueError(f"geometric_mean: expected positive numbers, got {values!r}. Pass the ratios of all shapes.")
    return statistics.geometric_mean(values)


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Runs what it surrounds on this many of torch's threads."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    cuts = statistics.quantiles(values, n=4, method="inclusive")
    return cuts[0], cuts[2]


def _spread(samples: tuple[float, ...]) -> float:
    low, high = _quartiles(list(samples))
    return (high - low) / max(statistics.median(samples), 1e-12)


@contextmanager
def _without_gc() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def least_seconds(once: Callable[[], object], repeats: int = 3) -> float:
    """The shortest of a few calls, for a cost that is fitted over sizes: what disturbs a call only adds to it."""
    once()  # the first call finds connections and memory
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        once()
        times.append(time.perf_counter() - begin)
    return min(times)
