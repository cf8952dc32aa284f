"""Schedules: values one can check by hand, exact ends, and the limit on neighbouring steps for any schedule."""

from __future__ import annotations

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import pytest

from sparsam.schedules import constant, cosine, cubic, limit_rate, linear, stages, warm_up


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (constant(0.3), {-1: 0.3, 0: 0.3, 10**9: 0.3}),
        (linear(1.0, 0.0, steps=4), {-1: 1.0, 0: 1.0, 1: 0.75, 2: 0.5, 4: 0.0, 9: 0.0}),
        (linear(0.0, 1.0, steps=2, begin=10), {9: 0.0, 10: 0.0, 11: 0.5, 12: 1.0, 13: 1.0}),
        (cosine(0.3, 0.0, steps=4), {0: 0.3, 1: 0.15 * (1 + math.sqrt(0.5)), 2: 0.15, 4: 0.0, 5: 0.0}),
        (cubic(1.0, 0.1, steps=2), {0: 1.0, 1: 0.1 + 0.9 / 8, 2: 0.1, 3: 0.1}),
        (stages([(0, 0.8), (1000, 0.6)]), {-5: 0.8, 0: 0.8, 999: 0.8, 1000: 0.6, 10**6: 0.6}),
        (warm_up(constant(2.0), 4), {0: 0.5, 1: 1.0, 3: 2.0, 4: 2.0}),
        (warm_up(constant(2.0), 0), {0: 2.0}),
        (limit_rate(stages([(0, 1.0), (1, 0.0)]), 0.25), {-1: 1.0, 0: 1.0, 1: 0.75, 2: 0.5, 4: 0.0, 5: 0.0}),
    ],
)
def test_values_by_hand(schedule, values):
    assert {step: schedule(step) for step in values} == pytest.approx(values)


@pytest.mark.parametrize("curve", [linear, cosine, cubic])
@hypothesis.given(start=st.floats(0, 1), end=st.floats(0, 1), steps=st.integers(1, 999), begin=st.integers(0, 9))
def test_both_ends_are_exact(curve, start, end, steps, begin):
    """A final density must be what was asked for: 0.1, not 0.10000000000000003."""
    schedule = curve(start, end, steps=steps, begin=begin)
    assert (schedule(begin), schedule(begin + steps), schedule(begin + steps + 7)) == (start, end, end)
    assert min(start, end) - 1e-12 <= schedule(begin + steps // 2) <= max(start, end) + 1e-12


def test_the_documented_sparsity_curve():
    """sparsity(t) = final * (1 - cos(pi t / T)) / 2."""
    schedule = cosine(0.0, 0.9, steps=10)
    for step in range(11):
        assert schedule(step) == pytest.approx(0.9 * (1 - math.cos(math.pi * step / 10)) / 2)


@hypothesis.given(st.lists(st.floats(-1, 1), min_size=1, max_size=20), st.floats(0.01, 1))
def test_limit_rate_bounds_every_step_and_depends_on_no_order_of_calls(values, per_step):
    def schedule(step):
        return values[min(step, len(values) - 1)]

    limited = limit_rate(schedule, per_step)
    path = [limited(step) for step in range(len(values))]
    assert path[0] == values[0]
    assert all(abs(after - before) <= per_step + 1e-12 for before, after in itertools.pairwise(path))
    fresh = limit_rate(schedule, per_step)
    assert [fresh(step) for step in reversed(range(len(values)))] == path[::-1]
    assert limit_rate(schedule, 2.0)(len(values)) == values[-1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: linear(0, 1, steps=0), "expected a schedule over at least 1 step, got steps = 0"),
        (lambda: stages([]), r"expected rising first steps that begin with 0, got \[\]"),
        (lambda: stages([(5, 0.1)]), r"begin with 0, got \[5\]"),
        (lambda: stages([(0, 0.1), (9, 0.2), (9, 0.3)]), r"begin with 0, got \[0, 9, 9\]"),
        (lambda: warm_up(constant(1.0), -1), "warm_up: expected steps >= 0, got -1"),
        (lambda: limit_rate(constant(1.0), 0.0), "limit_rate: expected per_step > 0, got 0.0"),
        (lambda: limit_rate(constant(1.0), math.nan), "limit_rate: expected per_step > 0, got nan"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
