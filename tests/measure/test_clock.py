"""The clock: order of calls, rounds shared by all, ratios pair by pair. No test here asserts a time."""

from __future__ import annotations

import gc

import pytest

from sparsam.measure.clock import Timing, geometric_mean, interleaved, ratio


def test_every_call_once_per_round_and_the_order_turns():
    seen: list[str] = []
    timings = interleaved({name: lambda name=name: seen.append(name) for name in "abc"}, repeats=3, warmup=1)
    assert "".join(seen) == "abc" + "abc" + "bca" + "cab"
    assert list(timings) == ["a", "b", "c"]
    assert all(len(timing.samples_ms) == 3 for timing in timings.values())


def test_stops_early_but_not_before_three_rounds():
    timings = interleaved({"a": lambda: None}, repeats=50, warmup=0, seconds=0.0)
    assert len(timings["a"].samples_ms) == 3


def test_waits_for_the_device_inside_the_time():
    seen: list[str] = []
    interleaved({"a": lambda: seen.append("call")}, repeats=2, warmup=0, synchronize=lambda: seen.append("wait"))
    assert seen == ["wait", "call", "wait", "call", "wait"]


def test_garbage_collection_is_back_on_even_after_an_error():
    def fails():
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        interleaved({"a": fails})
    assert gc.isenabled()


def test_timing_by_hand():
    timing = Timing((4.0, 2.0, 3.0, 10.0, 1.0))
    assert timing.median_ms == 3.0
    assert timing.min_ms == 1.0
    assert timing.spread == pytest.approx((4.0 - 2.0) / 3.0)
    assert timing.to_json() == {"median_ms": 3.0, "min_ms": 1.0, "spread": pytest.approx(2 / 3), "rounds": 5}
    assert Timing((2.0,)).spread == 0.0


def test_ratio_is_taken_round_by_round():
    # The machine was three times slower in the last round, for both alike: the ratio does not move.
    found = ratio(Timing((4.0, 4.0, 12.0)), Timing((2.0, 2.0, 6.0)))
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)


def test_geometric_mean():
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: interleaved({}), "interleaved: expected at least one call"),
        (lambda: interleaved({"a": int}, repeats=0), "interleaved: expected at least 1 repeat, got 0"),
        (lambda: ratio(Timing((1.0,)), Timing((1.0, 2.0))), "ratio: expected timings of the same rounds, got 1 and 2"),
        (lambda: geometric_mean([]), "geometric_mean: expected positive numbers"),
        (lambda: geometric_mean([1.0, 0.0]), "geometric_mean: expected positive numbers"),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()
