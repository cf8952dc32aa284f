"""Splits against all others, and decisions against tables that one can check by hand."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsam.comm.balance import Balance, Load, batch_shares, owners, partition, stage_seconds

positive = st.floats(0.01, 100.0)
EVEN = (1.0, 1.0)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(work=st.lists(positive | st.just(0.0), min_size=1, max_size=8), data=st.data())
def test_no_other_split_is_faster(work, data):
    speeds = data.draw(st.lists(positive, min_size=1, max_size=min(4, len(work))))
    found = partition(work, speeds)
    every = [(0, *inner, len(work)) for inner in combinations(range(1, len(work)), len(speeds) - 1)]
    assert found in every
    best = min(max(stage_seconds(work, speeds, bounds)) for bounds in every)
    assert max(stage_seconds(work, speeds, found)) == pytest.approx(best, rel=1e-9)
    assert partition(work, speeds) == found


@pytest.mark.parametrize(
    ("work", "speeds", "bounds"),
    [
        ([1, 1, 1, 1], EVEN, (0, 2, 4)),
        ([8, 1, 1, 1], EVEN, (0, 1, 4)),
        ([1, 1, 1, 8], EVEN, (0, 3, 4)),
        ([1, 1, 1, 1, 1, 1], (1.0, 0.5), (0, 4, 6)),
        ([1, 1, 1, 1, 1, 1], (0.5, 1.0), (0, 2, 6)),
        ([8, 8, 8, 1, 1, 1], (1.0, 1.0, 1.0), (0, 1, 2, 6)),
        ([5], (2.0,), (0, 1)),
        ([5, 5], EVEN, (0, 1, 2)),
    ],
    ids=str,
)
def test_splits_that_one_can_see(work, speeds, bounds):
    assert partition(work, speeds) == bounds
    assert owners(bounds) == [rank for rank in range(len(speeds)) for _ in range(bounds[rank + 1] - bounds[rank])]


LOAD = Load(work=(4.0, 4.0, 2.0, 1.0, 1.0, 1.0), speeds=EVEN, nbytes=(10, 20, 30, 40, 50, 60), bandwidth=10.0)


def test_layers_move_where_that_pays():
    # 10 and 3 seconds become 8 and 5: 2 seconds a step for 30 bytes at 10 bytes a second
    decision = Balance(every=2).decide((0, 3, 6), LOAD)
    assert decision.bounds == (0, 2, 6)
    assert decision.text == (
        "layers move: the slowest stage takes 1e+04 ms of a step and 8e+03 ms in the best split; the move takes 3e+03 "
        "ms for 30 bytes (predicted from measured work and speeds)."
    )


@pytest.mark.parametrize(
    ("balance", "bounds", "why"),
    [
        (Balance(every=2, hysteresis=0.2), (0, 3, 6), "too little to gain"),
        (Balance(every=1), (0, 3, 6), "1 steps do not pay for a move"),
        (Balance(), (0, 2, 6), "too little to gain"),
    ],
    ids=["hysteresis", "cost of the move", "best already"],
)
def test_layers_stay_where_it_does_not(balance, bounds, why):
    decision = balance.decide(bounds, LOAD)
    assert decision.bounds == bounds
    assert decision.text.startswith(f"layers stay, {why}: ")


def test_what_moved_does_not_move_back():
    """The same numbers again, in the new split: nothing to gain, whatever the numbers are."""
    for work in product((1.0, 3.0, 7.0), repeat=5):
        load = Load(work, (1.0, 0.5, 1.0), (1,) * 5, 1e9)
        first = Balance().decide((0, 1, 2, 5), load)
        assert Balance().decide(first.bounds, load).bounds == first.bounds


@settings(deadline=None, max_examples=60, derandomize=True)
@given(speeds=st.lists(positive, min_size=1, max_size=3), extra=st.integers(0, 8))
def test_no_other_shares_of_a_batch_are_faster(speeds, extra):
    batch = len(speeds) + extra
    shares = batch_shares(speeds, batch)
    assert sum(shares) == batch
    assert min(shares) >= 1
    others = [one for one in product(range(1, batch + 1), repeat=len(speeds)) if sum(one) == batch]

    def slowest(shares):
        return max(share / speed for share, speed in zip(shares, speeds, strict=True))

    assert slowest(shares) == pytest.approx(min(map(slowest, others)), rel=1e-9)


def test_shares_that_one_can_see():
    assert batch_shares((2.0, 1.0, 1.0), 8) == (4, 2, 2)
    assert batch_shares((0.001, 1.0), 4) == (1, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition([1.0], EVEN), "expected at least one layer a rank, got 1 layers for 2 ranks"),
        (lambda: partition([1.0], ()), "expected at least one layer a rank, got 1 layers for 0 ranks"),
        (lambda: partition([1.0, 1.0], (1.0, 0.0)), "speeds: expected each above zero, got 0.0"),
        (lambda: batch_shares(EVEN, 1), "expected at least one sample a rank, got 1 for 2 ranks"),
        (lambda: batch_shares((-1.0,), 1), "speeds: expected each above zero, got -1.0"),
        (lambda: Balance(every=0), "every: expected at least 1 step between decisions, got 0"),
        (lambda: Balance(hysteresis=1.0), r"hysteresis: expected a share in \[0, 1\), got 1.0"),
    ],
    ids=["layers", "ranks", "speed", "batch", "speed of samples", "every", "hysteresis"],
)
def test_what_does_not_fit_is_said(call, message):
    with pytest.raises(ValueError, match=message):
        call()
