"""Schedules: a value for every applied optimiser step. Pure functions; nothing here knows of models or optimisers."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

__all__ = ["Schedule", "constant", "cosine", "cubic", "limit_rate", "linear", "stages", "warm_up"]

Schedule = Callable[[int], float]


def constant(value: float) -> Schedule:
    """The same value at every step."""
    return lambda step: value


def linear(start: float, end: float, *, steps: int, begin: int = 0) -> Schedule:
    """From start to end in equal increments over `steps` steps after `begin`; flat on both sides."""
    return _ramp(start, end, steps, begin, lambda t: t)


def cosine(start: float, end: float, *, steps: int, begin: int = 0) -> Schedule:
    """end + (start - end) * (1 + cos(pi t / steps)) / 2, flat before `begin` and after `begin + steps`.

    `cosine(0.0, final, steps=T)` is the sparsity curve final * (1 - cos(pi t / T)) / 2, and
    `cosine(0.3, 0.0, steps=T)` RigL's share of moved units [Evci et al. 2020, arXiv:1911.11134].
    """
    return _ramp(start, end, steps, begin, lambda t: (1 - math.cos(math.pi * t)) / 2)


def cubic(start: float, end: float, *, steps: int, begin: int = 0) -> Schedule:
    """Fast first, slow last: end + (start - end) * (1 - t)^3.

    Source: Zhu and Gupta 2017, arXiv:1710.01878 (gradual magnitude pruning).
    """
    return _ramp(start, end, steps, begin, lambda t: 1 - (1 - t) ** 3)


def stages(values: Sequence[tuple[int, float]]) -> Schedule:
    """Piecewise constant: [(0, 0.8), (1000, 0.6)] is 0.8 up to step 999 and 0.6 from step 1000.

    Raises:
        ValueError: empty, not starting at step 0, or steps out of order.
    """
    begins = [begin for begin, _ in values]
    if not begins or begins[0] != 0 or begins != sorted(set(begins)):
        raise ValueError(f"stages: expected rising first steps that begin with 0, got {begins}.")
    return lambda step: values[bisect.bisect_right(begins, max(step, 0)) - 1][1]


def warm_up(schedule: Schedule, steps: int) -> Schedule:
    """Scales the first `steps` steps of a schedule from 1 / steps up to 1."""
    if steps < 0:
        raise ValueError(f"warm_up: expected steps >= 0, got {steps}.")
    return lambda step: schedule(step) * (min(1.0, (step + 1) / steps) if steps else 1.0)


def limit_rate(schedule: Schedule, per_step: float) -> Schedule:
    """Follows a schedule, but never moves by more than `per_step` between neighbouring steps, from its value at 0.

    Args:
        schedule: what to follow.
        per_step: largest change from one step to the next, > 0.
    """
    if not per_step > 0:
        raise ValueError(f"limit_rate: expected per_step > 0, got {per_step}.")
    # the value at a step depends on all steps before it; each is computed once, in order
    known: list[float] = []

    def limited(step: int) -> float:
        step = max(step, 0)
        while len(known) <= step:
            wanted = schedule(len(known))
            last = known[-1] if known else wanted
            known.append(min(max(wanted, last - per_step), last + per_step))
        return known[step]

    return limited


def _ramp(start: float, end: float, steps: int, begin: int, shape: Callable[[float], float]) -> Schedule:
    if steps < 1:
        raise ValueError(f"expected a schedule over at least 1 step, got steps = {steps}.")

    def value(step: int) -> float:
        progress = (step - begin) / steps
        # both ends are exact: a final density must be what was asked for, not almost
        if progress <= 0:
            return start
        return end if progress >= 1 else start + (end - start) * shape(progress)

    return value
