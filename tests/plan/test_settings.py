"""Where promises hold, on a workload whose answer is plain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plan.small import COMPUTE, WORKLOAD
from sparsam.comm.link import Cost
from sparsam.plan.network import Link, Network
from sparsam.plan.settings import PROMISES, compared, plain_and_compressed, scan
from sparsam.plan.times import CodecCost

FREE = CodecCost(Cost(0.0, 0.0), Cost(0.0, 0.0))
NETWORK = Network(2, 8, Link(0.0, 1e-12), Link(0.0, 1e-9))
SPARSE = replace(
    WORKLOAD,
    gradients=tuple(replace(one, values=10**5, compact=True) for one in WORKLOAD.gradients),
    compact={"a", "b"},
)


def settings(workload, name):
    return plain_and_compressed(name, workload, COMPUTE, lambda codec: FREE)


def test_a_tenth_of_the_values_is_a_tenth_of_the_bytes():
    (dense, _), (sparse, _) = settings(WORKLOAD, "dense"), settings(SPARSE, "sparse")
    sent, between, speedup, efficiency = compared(sparse, dense, NETWORK, 1.0, 0.0)
    assert (sent, between) == (pytest.approx(0.9), pytest.approx(0.9))
    assert speedup >= 1.0
    assert efficiency <= 1.0


def test_promises_hold_where_the_link_is_the_limit_and_not_where_it_is_not():
    dense, sparse = settings(WORKLOAD, "dense"), settings(SPARSE, "sparse")
    cases = scan([*dense, *sparse], dense[0], NETWORK, rates=(1e7, 1e12))
    assert len(cases) == len(PROMISES) * 4 * 2
    holds = {(one.promise.workers, one.setting, one.bits_per_second): one.holds for one in cases}
    assert holds[256, "sparse", 1e7]
    assert not holds[256, "sparse", 1e12]  # nothing waits for the wire, so there is nothing to win
    assert not holds[256, "dense", 1e7]
    assert holds[1024, "sparse, compressed", 1e12]
    assert not holds[1024, "sparse, compressed", 1e7]
    assert all(one.saved < 1e-9 for one in cases if one.setting == "dense")


def test_a_slower_link_never_helps_efficiency():
    dense = settings(WORKLOAD, "dense")
    cases = [one for one in scan(dense, dense[0], NETWORK) if one.setting == "dense, compressed"]
    for promise in PROMISES:
        reached = [one.efficiency for one in cases if one.promise is promise]
        assert reached == sorted(reached)


def test_promises_read_as_they_were_made():
    assert [promise.text for promise in PROMISES] == [
        "256 workers: 62 % fewer bytes sent, 1.83x the speed",
        "1024 workers: 78 % fewer bytes between nodes, 92 % efficiency",
    ]


def test_shards_are_sent_in_what_adds_up():
    names = [
        type(one.codec).__name__
        for one in plain_and_compressed("d", WORKLOAD, COMPUTE, lambda _: FREE, sharding="fsdp")
    ]
    assert names == ["Identity", "BF16"]
