"""The step, bytes, memory and price of a small workload, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan.small import COMPUTE, WORKLOAD, four_ranks, setting
from sparsam.comm.codecs import BF16, Identity, Int8Rows
from sparsam.comm.link import Cost
from sparsam.plan.cluster import Cluster
from sparsam.plan.memory import memory_of, units_of
from sparsam.plan.predict import efficiency, figures_of, predict
from sparsam.plan.times import CodecCost
from sparsam.plan.workload import Activations, Gradient, buckets_of


@pytest.mark.parametrize(
    ("seconds", "hidden"),
    [
        (0.0, 0.0),
        (1.0, 1.0),  # the first behind the second half of the backward pass, the second open
        (3.0, 5.0),  # the first from second 1 to 4, the second to 7, the backward pass ends at 2
    ],
)
def test_a_step(seconds, hidden):
    one = predict(setting(), four_ranks(seconds))
    assert one.exposed == pytest.approx(hidden)
    assert one.computing == pytest.approx(3.5)
    assert one.step == pytest.approx(3.5 + hidden)
    assert one.sent == 12e6  # 3/4 of twice 8 MB
    assert one.between == one.sent


def test_alone_nothing_waits():
    network = four_ranks(3.0)
    alone = predict(setting(codec=Int8Rows(), rewire_every=10), network.resized(1), slowest=2.0, jitter=0.1)
    assert alone.step == pytest.approx(3.5)
    assert efficiency(setting(), network) == pytest.approx(3.5 / 8.5)


def test_recomputing_takes_a_forward_pass_and_hides_more():
    one = predict(setting(recompute_every=2), four_ranks(1.0))
    assert one.computing == pytest.approx(4.5)
    assert one.exposed == pytest.approx(1.0)
    assert predict(setting(recompute_every=2), four_ranks(1.4)).exposed == pytest.approx(1.4)


def test_compression_is_computing_and_moves_the_buckets():
    """1 s a bucket: complete at 2 and 4, the backward pass ends at 4; a bucket of a quarter of the bytes."""
    cost = CodecCost(Cost(0.0, 1e-6), Cost(0.0, 0.0))
    compute = replace(COMPUTE, codec=cost)
    one = predict(setting(compute=compute, codec=BF16()), four_ranks(2.0))
    assert one.compression == pytest.approx(2.0)
    assert one.computing == pytest.approx(5.5)
    assert one.exposed == pytest.approx(1.0)
    assert one.sent == 6e6


def test_the_last_rank_counts():
    assert predict(setting(), four_ranks(0.0), slowest=2.0).step == pytest.approx(7.0)


def test_sending_is_work_on_a_cpu():
    compute = replace(COMPUTE, seconds_per_byte=1e-7)
    assert predict(setting(compute=compute), four_ranks(0.0)).compression == pytest.approx(1.2)


def test_a_rewire_is_shared_by_its_steps():
    """The dense gradient of `b`, 4 MB, takes 3 s and computing it 1 s, every 10 steps."""
    gradients = (replace(WORKLOAD.gradients[0], values=10, compact=True), WORKLOAD.gradients[1])
    workload = replace(WORKLOAD, gradients=gradients)
    one = predict(
        setting(workload=workload, compute=replace(COMPUTE, rewire=1.0), rewire_every=10, codec=BF16()), four_ranks(3.0)
    )
    assert one.rewiring == pytest.approx(0.4)
    assert one.sent == pytest.approx(3e6 + 30 + 6e6 / 10)


def test_shards():
    """Layers without numbers are one unit of 8 MB: gathered in each pass, 6 MB a rank; gradients: 6 MB more."""
    one = predict(setting(sharding="fsdp"), four_ranks(0.0))
    assert one.sent == 6 * 3e6
    assert one.exposed == pytest.approx(0.0)
    slow = predict(setting(sharding="fsdp"), four_ranks(1.0))  # a second each, and nothing to hide behind
    assert slow.exposed == pytest.approx(3.0)


def test_a_codec_that_does_not_add_up_is_refused_in_shards():
    with pytest.raises(ValueError, match=r"s: expected a codec whose payloads add up .* got Int8Rows"):
        setting(sharding="fsdp", codec=Int8Rows())
    with pytest.raises(ValueError, match="recompute: expected at least 1 block, got 0"):
        setting(recompute_every=0)


def test_memory():
    """8 MB of weights. The gradients, 8 MB, come as 4.1 kB of activations go."""
    alone = memory_of(WORKLOAD, 1, Identity())
    assert (alone.parameters, alone.gradients, alone.optimizer, alone.exchange) == (8e6, 8e6, 16e6, 0)
    assert alone.activations == 4100
    assert alone.total == 32e6
    assert memory_of(WORKLOAD, 4, Identity()).total == 40e6  # and DDP's buckets
    coded = memory_of(WORKLOAD, 4, Int8Rows())
    assert (coded.residuals, coded.exchange) == (8e6, 8e6 + 5 * 4e6)
    assert coded.total == 8e6 + 16e6 + 28e6 + 8e6 + 16e6
    shards = memory_of(WORKLOAD, 4, Identity(), "fsdp")
    assert (shards.parameters, shards.optimizer) == (2e6, 4e6)
    assert shards.exchange == 3 * 8e6  # neither layer has a number: both are one unit


def test_recomputing_keeps_the_inputs_of_segments():
    activations = Activations(blocks=4, inside=4000, outside=100, boundary=200)
    assert activations.kept(None) == 4100
    assert activations.kept(1) == 4 * 200 + 1000 + 100
    assert activations.kept(2) == 2 * 200 + 2000 + 100
    assert activations.kept(9) == 4100  # one segment saves nothing
    assert Activations(0, 0, 100, 0).kept(2) == 100


def test_units_are_blocks():
    names = ("head.weight", "blocks.1.up", "blocks.1.down", "blocks.0.up", "tokens.weight")
    units = units_of([Gradient(name, 1, 1, False) for name in names])
    assert [[gradient.name for gradient in unit] for unit in units] == [
        ["head.weight"],
        ["blocks.1.up", "blocks.1.down"],
        ["blocks.0.up"],
        ["tokens.weight"],
    ]


def test_buckets_close_when_they_reach_the_limit():
    gradients = [Gradient(str(size), size, size, False) for size in (1, 2, 3, 4, 5)]
    buckets = buckets_of(gradients, first_bytes=2, bytes_cap=7, bytes_per_value=1)
    assert [[gradient.values for gradient in bucket] for bucket in buckets] == [[1, 2], [3, 4], [5]]


def test_figures_are_modelled_and_priced():
    """4 ranks at 0.9 an hour each: 1 for 1000 s."""
    section = {"alpha_seconds": 0.0, "bits_per_second": 1e12}
    cluster = Cluster.model_validate(
        {
            "version": 1,
            "nodes": 4,
            "ranks_per_node": 1,
            "device": "measured here",
            "memory_gib": 1.0,
            "links": {"between": section},
            "price_per_hour": 0.9,
        }
    )
    figures = figures_of(setting(), cluster, steps=2000)
    assert {figure.kind for figure in figures.values()} == {"modelled"}
    assert figures["cost_1000_steps"].value == pytest.approx(3.5, rel=1e-3)
    assert figures["cost_run"].value == pytest.approx(7.0, rel=1e-3)
    assert figures["tokens_per_second"].value == pytest.approx(40 / 3.5, rel=1e-3)
    assert "cost_run" not in figures_of(setting(), cluster)


@given(
    st.floats(0.01, 10), st.floats(1.01, 5), st.sampled_from(["none", "fsdp"]), st.sampled_from([Identity(), BF16()])
)
def test_slower_links_never_make_a_step_shorter(seconds, times, sharding, codec):
    one = setting(sharding=sharding, codec=codec)
    now, slower = predict(one, four_ranks(seconds)), predict(one, four_ranks(times * seconds))
    assert slower.step >= now.step - 1e-9
    assert now.step >= now.computing
    assert efficiency(one, four_ranks(seconds)) <= 1 + 1e-9


@given(st.sampled_from([2, 4, 8, 64]), st.floats(0, 0.1))
def test_more_ranks_never_compute_sooner(ranks, jitter):
    network = replace(four_ranks(0.1), nodes=ranks)
    wider = replace(network, nodes=2 * ranks)
    assert predict(setting(), wider, jitter=jitter).step >= predict(setting(), network, jitter=jitter).step - 1e-9
