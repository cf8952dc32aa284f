"""Bytes and seconds of collectives, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsam.comm.codecs import BF16, Identity, Int8Rows, TopK
from sparsam.plan.network import Link, Network, collective, gather_shards, scatter_shards

A, B = 1e-3, 1e-6  # a millisecond a message, a microsecond a byte
NODE = Network(1, 4, Link(A, B), Link(A, B))
CLUSTER = Network(2, 4, Link(0.0, 1e-9), Link(A, B))  # inside: 1000 times as fast


def test_a_ring():
    """4000 bytes, 4 ranks: 6 steps of 1000 bytes."""
    moved = collective(Identity(), 1000, NODE)
    assert moved.nbytes == 6000
    assert moved.between == 0
    assert moved.seconds == pytest.approx(6 * (A + 1000 * B))
    assert collective(BF16(), 1000, NODE).nbytes == 3000


def test_two_steps():
    """1024 values, 4 ranks: shards of 256 are 256 bytes and a scale, sent to 3 others, twice."""
    moved = collective(Int8Rows(512), 1024, NODE)
    assert moved.nbytes == 6 * 260
    assert moved.seconds == pytest.approx(6 * (A + 260 * B))


def test_gathered_values():
    """1 % of 1000 values are 10: 4 bytes each and 4 for its place, passed on 3 times."""
    moved = collective(TopK(0.01), 1000, NODE)
    assert moved.nbytes == 3 * 80
    assert moved.seconds == pytest.approx(3 * (A + 80 * B))


def test_values_chosen_together():
    """Of 4 runs of 256 values the scores go around, 4 bytes each; then one run, as 4 shards of 64 + 4 bytes, twice."""
    moved = collective(TopK(0.25, block=256, values=Int8Rows(), agreed=True), 1024, NODE)
    assert moved.nbytes == 6 * 4 + 6 * 68
    assert moved.seconds == pytest.approx(6 * (A + 4 * B) + 6 * (A + 68 * B))


def test_a_ring_over_nodes_leaves_each_node_once():
    """8 ranks: 14 steps of 500 bytes, held up by the link between nodes."""
    moved = collective(Identity(), 1000, CLUSTER)
    assert moved.nbytes == moved.between == 7000
    assert moved.seconds == pytest.approx(14 * (A + 500 * B))


def test_all_to_all_over_nodes_shares_the_link():
    """8 ranks, shards of 128 + 4 bytes. To 4 ranks elsewhere at a quarter of the rate, then 7 steps around."""
    moved = collective(Int8Rows(512), 1024, CLUSTER)
    assert moved.nbytes == 14 * 132
    assert moved.between == (16 + 7) * 132
    assert moved.seconds == pytest.approx(4 * (A + 4 * 132 * B) + 7 * (A + 132 * B))


def test_two_levels():
    """Each of 4 ranks has 256 of 1024 values: 3 + 3 steps of 1 KiB inside, and 2 of 132 bytes for all 4 between."""
    moved = collective(Int8Rows(512), 1024, CLUSTER, two_level=True)
    assert moved.between == 4 * 2 * 132
    assert moved.nbytes == 6 * 1024 + 2 * 132
    assert moved.seconds == pytest.approx(2 * (A + 4 * 132 * B) + 6 * 1024e-9)


def test_trees_have_fewer_latencies_and_as_many_bytes():
    """4 ranks: 2 hops instead of 3, there and back; 4000 bytes as before. An all-to-all sends at once."""
    tree = replace(NODE, trees=True)
    moved = collective(Identity(), 1000, tree)
    assert moved.nbytes == 6000
    assert moved.seconds == pytest.approx(4 * A + 6000 * B)
    assert collective(Int8Rows(512), 1024, tree).seconds == pytest.approx((1 + 2) * A + 6 * 260 * B)


def test_shards():
    """4000 bytes, 4 ranks: three quarters leave each rank, whichever way."""
    assert gather_shards(4000, NODE).nbytes == 3000
    assert scatter_shards(Identity(), 1000, NODE).nbytes == 3000
    assert scatter_shards(BF16(), 1000, NODE).seconds == pytest.approx(3 * (A + 500 * B))


def test_alone_nothing_moves():
    alone = NODE.resized(1)
    assert alone.ranks == 1
    assert collective(Identity(), 1000, alone).seconds == 0.0
    assert gather_shards(1000, alone).nbytes == 0.0


def test_nodes_are_filled():
    assert CLUSTER.resized(64).nodes == 16
    assert CLUSTER.resized(2).ranks_per_node == 2
    with pytest.raises(ValueError, match="expected full nodes of 4 ranks, got 6 ranks"):
        CLUSTER.resized(6)


def test_a_fit_needs_four_sizes():
    with pytest.raises(ValueError, match="expected times of at least 4 sizes from at least 2 ranks, got 3 sizes and 3"):
        Link.fitted(2, [1, 2, 3], [1.0, 2.0, 3.0])


CODECS = st.sampled_from([Identity(), BF16(), Int8Rows(), TopK(0.01), TopK(0.4, block=128, agreed=True)])


@given(CODECS, st.integers(1, 10**7), st.sampled_from([1, 2, 4, 8]), st.sampled_from([2, 4, 32]), st.booleans())
def test_more_values_and_slower_links_never_take_less(codec, n, inner, nodes, two_level):
    network = Network(nodes, inner, Link(1e-6, 1e-10), Link(1e-5, 1e-9))
    slower = Network(nodes, inner, Link(1e-6, 1e-10), Link(1e-5, 2e-9))
    now = collective(codec, n, network, two_level)
    assert collective(codec, n, slower, two_level).seconds >= now.seconds
    assert collective(codec, 2 * n, network, two_level).seconds >= now.seconds
    assert collective(codec, 2 * n, network, two_level).nbytes >= now.nbytes


@given(st.integers(10**4, 10**7), st.sampled_from([2, 4, 8]), st.sampled_from([2, 4, 32]))
def test_two_levels_send_less_between_nodes(n, inner, nodes):
    network = Network(nodes, inner, Link(1e-6, 1e-10), Link(1e-5, 1e-9))
    flat, deep = (collective(Int8Rows(), n, network, level) for level in (False, True))
    assert deep.between <= 1.01 * flat.between
