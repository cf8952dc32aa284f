"""When compression pays, from times by hand."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from sparsam.comm.codecs import Int8Rows, TopK
from sparsam.comm.link import Cost, bucket_sizes, decide, measured


def test_a_line_through_measured_times():
    cost = Cost.fitted([10, 100, 1000], [0.5 + 0.01 * n for n in (10, 100, 1000)])
    assert (cost.alpha, cost.beta) == (pytest.approx(0.5), pytest.approx(0.01))
    assert cost.of([10, 30]) == pytest.approx(1.4)


def test_no_cost_is_negative():
    assert Cost.fitted([10, 100, 1000], [1.0, 12.0, 130.0]).alpha == 0.0


@pytest.mark.parametrize(
    ("plain", "coded", "on"),
    [
        (Cost(0.001, 1e-6), Cost(0.002, 1e-7), True),  # a slow link
        (Cost(0.001, 1e-9), Cost(0.002, 1e-8), False),  # a fast one: the codec costs more than it saves
    ],
)
def test_the_decision_says_what_it_compared(plain, coded, on):
    decision = decide(plain, coded, [1_000_000, 500_000])
    assert decision.on is on
    assert f"compression is {'on' if on else 'off'}: 2 buckets of 1500000 gradients take" in decision.text


def test_buckets_of_a_model():
    assert bucket_sizes(25, 10) == [10, 10, 5]
    assert bucket_sizes(20, 10) == [10, 10]


@pytest.mark.parametrize("codec", [Int8Rows(), TopK(0.4, "taylor", block=128, agreed=True)], ids=["int8", "agreed"])
def test_a_link_is_measured(codec, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        decision = measured(codec, [1000], dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert decision.text.startswith(f"compression is {'on' if decision.on else 'off'}: 1 buckets of 1000")
