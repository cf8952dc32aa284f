"""What shows of an exchange, and what codecs and stragglers cost, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan.small import WORKLOAD
from sparsam.comm.codecs import BF16, Identity, Int8Rows, TopK
from sparsam.comm.link import Cost
from sparsam.plan.cluster import Device
from sparsam.plan.times import (
    CodecCost,
    exposed,
    exposed_sharded,
    measured_codec,
    ready_shares,
    stated_codec,
    stated_compute,
    straggler,
)


@pytest.mark.parametrize(
    ("ready", "seconds", "hidden"),
    [
        ([1.0, 2.0], [1.0, 0.0], 0.0),  # all of it behind the backward pass
        ([1.0, 2.0], [1.0, 0.5], 0.5),  # the last bucket has nothing to hide behind
        ([1.0, 2.0], [3.0, 0.5], 2.5),  # the second waits for the first
        ([2.0, 2.0], [3.0, 0.5], 3.5),  # none of it
        ([], [], 0.0),
    ],
)
def test_exposed_traffic(ready, seconds, hidden):
    assert exposed(ready, seconds, 2.0) == pytest.approx(hidden)


def test_exposed_traffic_in_shards():
    # gathers of 1 s behind computing of 2 s: only the first shows
    assert exposed_sharded([1, 1, 1], [2, 2, 2], [0, 0, 0]) == pytest.approx(1.0)
    # gathers of 3 s: the first, and 1 s before each of the others
    assert exposed_sharded([3, 3, 3], [2, 2, 2], [0, 0, 0]) == pytest.approx(5.0)
    # gradients of the last unit go out when all is done; the one before went behind it
    assert exposed_sharded([0, 0], [2, 2], [1, 1]) == pytest.approx(1.0)
    assert exposed_sharded([], [], []) == 0.0


TIMES = st.lists(st.floats(0, 10), min_size=1, max_size=6)


@given(TIMES, st.floats(0, 10), st.floats(0, 3))
def test_exposed_traffic_is_between_none_and_all(ready, end, one):
    seconds = [one] * len(ready)
    ready = sorted(min(time, end) for time in ready)
    hidden = exposed(ready, seconds, end)
    assert 0 <= hidden <= sum(seconds) + 1e-9
    assert exposed(ready, [2 * one] * len(ready), end) >= hidden - 1e-9  # slower links never show less
    assert hidden >= ready[-1] + one - end - 1e-9


@given(TIMES, st.floats(0, 5), st.floats(0, 5))
def test_in_shards_at_least_the_first_gather_shows(computes, gather, scatter):
    waits = exposed_sharded([gather] * len(computes), computes, [scatter] * len(computes))
    assert waits >= gather - 1e-9
    assert waits <= len(computes) * (gather + scatter) + 1e-9


def test_the_last_of_several_ranks():
    assert straggler(1, slowest=2.0, jitter=0.5) == 1.0
    assert straggler(4, slowest=1.5) == 1.5
    # the larger of two normal values is 0.56 above the mean in expectation, Blom has 0.59
    assert straggler(2, jitter=0.1) == pytest.approx(1.056, abs=0.004)
    assert straggler(1024, jitter=0.1) > straggler(256, jitter=0.1) > 1.2


def test_what_codecs_compute():
    cost = CodecCost(Cost(0.0, 1.0), Cost(0.0, 10.0))  # a second to encode a value, ten to decode it
    assert cost.seconds(Identity(), 100, 4) == 0.0
    assert cost.seconds(BF16(), 100, 4) == 100 + 2000
    assert cost.seconds(Int8Rows(), 100, 4) == 125 + 3000
    assert cost.seconds(TopK(0.1), 100, 4) == 100 + 5000
    assert cost.seconds(TopK(0.1, agreed=True), 100, 4) == 125 + 3000
    assert cost.seconds(Int8Rows(), 100, 1) == cost.seconds(Int8Rows(), 0, 4) == 0.0


def test_stated_throughputs():
    """6 GFLOP at 3 GFLOP/s: 2 s, a third of them forward. 2,000,000 values are 56 MB for the optimiser."""
    compute = stated_compute(WORKLOAD, Device(flops_per_second=3e9, memory_bytes_per_second=56e6))
    assert compute.forward == pytest.approx(2 / 3)
    assert compute.backward == pytest.approx(4 / 3)
    assert compute.optimizer == pytest.approx(1.0)
    assert compute.ready == (0.5, 1.0)
    assert compute.scaled(2.0).forward == pytest.approx(4 / 3)
    codec = stated_codec(Device(flops_per_second=3e9, memory_bytes_per_second=12e6))
    assert codec.encode.of([10**6]) == pytest.approx(1.0)


def test_work_without_parameters_is_spread():
    """What `x` does by itself belongs to neither layer; nor does what no module below it owns."""
    assert ready_shares(WORKLOAD, {"a": 1.0, "b": 3.0}) == (0.75, 1.0)
    assert ready_shares(WORKLOAD, {"a": 1.0, "b": 1.0, "": 2.0}) == (0.5, 1.0)
    assert ready_shares(WORKLOAD, {}) == (0.0, 0.0)


def test_codecs_are_measured():
    cost = measured_codec(Int8Rows(), repeats=1)
    assert cost.encode.beta > 0
    assert cost.decode.beta > 0
    assert measured_codec(Identity()).encode == Cost(0.0, 0.0)
