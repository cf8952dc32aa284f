"""Patterns: the grid over a weight, means that leave padding out, and exact top-k whatever the scores."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from sparsam import NM, Block, Neuron, Unstructured
from sparsam.sparse.patterns import top_k

SCORES = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")]), st.floats(-2, 2, width=32)
)


@pytest.mark.parametrize(
    ("pattern", "shape", "grid"),
    [
        (Block(2, 3), (4, 6), (2, 2)),
        (Block(2, 3), (5, 7), (3, 3)),
        (Block(16, 16), (1000, 768), (63, 48)),
        (Block(64, 64), (3, 3), (1, 1)),
        (Unstructured(), (4, 6), (4, 6)),
        (NM(2, 4), (3, 10), (3, 10)),
        (Neuron(), (4, 6), (4, 1)),
    ],
)
def test_grid(pattern, shape, grid):
    assert pattern.grid(shape) == grid


def test_means_by_hand():
    """The unit at the edge is averaged over what lies inside, not over its padding."""
    weight = torch.tensor([[1.0, 3.0, 5.0], [5.0, 7.0, 7.0], [2.0, 4.0, 9.0]])
    assert Block(2, 2).reduce(weight).tolist() == [[4.0, 6.0], [3.0, 9.0]]
    assert torch.equal(Unstructured().reduce(weight), weight)
    assert torch.equal(NM(1, 2).reduce(weight), weight)
    assert Neuron().reduce(weight).tolist() == [[3.0], [pytest.approx(19 / 3)], [5.0]]


@hypothesis.given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
def test_reduce_takes_back_what_expand_spread(rows, cols, down, across):
    for pattern in (Block(rows, cols), Unstructured(), NM(1, cols), Neuron()):
        units = torch.randn(pattern.grid((down, across)))
        spread = pattern.expand(units, (down, across))
        assert spread.shape == (down, across)
        torch.testing.assert_close(pattern.reduce(spread), units)


def test_narrow_types_are_averaged_in_float32():
    weight = torch.full((64, 64), 1.0, dtype=torch.bfloat16)
    weight[0, 0] = 1.5
    assert Block(64, 64).reduce(weight).item() == pytest.approx(1 + 0.5 / 4096)


def test_patterns_are_values():
    assert Block(16, 16) == Block(16, 16) != Block(16, 32)
    assert len({Block(16, 16), Block(16, 16), Unstructured(), Unstructured()}) == 2


@hypothesis.given(st.data(), st.lists(SCORES, max_size=30))
def test_top_k_is_exact_for_any_scores(data, scores):
    """Ties, infinities and NaN: exactly `count` places, none beaten by one that was left out."""
    scores = torch.tensor(scores)
    count = data.draw(st.integers(0, len(scores)))
    ties = torch.rand(len(scores))
    chosen = top_k(scores, count, ties)
    assert int(chosen.sum()) == count
    keys = [(-torch.inf if s != s else s, t) for s, t in zip(scores.tolist(), ties.tolist(), strict=True)]
    inside = [key for key, took in zip(keys, chosen.tolist(), strict=True) if took]
    outside = [key for key, took in zip(keys, chosen.tolist(), strict=True) if not took]
    assert not inside or not outside or min(inside) >= max(outside)


@hypothesis.given(st.data(), st.lists(SCORES, max_size=30))
def test_top_k_chooses_what_stable_sorts_choose(data, scores):
    """Also where ties are equal: then the first place wins, so that every rank and every resume agrees."""
    scores = torch.tensor(scores)
    count = data.draw(st.integers(0, len(scores)))
    ties = torch.randint(3, (len(scores),)).float()
    by_tie = ties.argsort(descending=True, stable=True)
    order = by_tie[scores.nan_to_num(-torch.inf, torch.inf, -torch.inf)[by_tie].argsort(descending=True, stable=True)]
    assert top_k(scores, count, ties).nonzero().flatten().tolist() == sorted(order[:count].tolist())


def test_equal_scores_are_ordered_by_ties():
    chosen = top_k(torch.zeros(2, 2), 2, torch.tensor([[0.1, 0.4], [0.3, 0.2]]))
    assert chosen.tolist() == [[False, True], [True, False]]


def chosen(pattern, scores, count):
    scores = torch.tensor(scores, dtype=torch.float32)
    return pattern.choose(scores, count, torch.rand(scores.shape)).int().tolist()


def test_n_of_m_by_hand():
    """The two best of each four; the last group is short; of what is allowed the best so many."""
    scores = [[9, 8, 7, 6, 1, 2, 3, 4, 5, 6]]
    assert chosen(NM(2, 4), scores, 6) == [[1, 1, 0, 0, 0, 0, 1, 1, 1, 1]]
    assert chosen(NM(2, 4), scores, 4) == [[1, 1, 0, 0, 0, 0, 0, 0, 1, 1]]
    assert chosen(NM(2, 4), scores, 10) == [[1] * 10]
    assert chosen(NM(2, 4), [[float("-inf")] * 4], 2)[0].count(1) == 2


@hypothesis.given(st.data(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(1, 11))
def test_no_group_holds_more_than_n(data, n, more, rows, size):
    pattern = NM(n, n + more)
    scores = torch.tensor(data.draw(st.lists(SCORES, min_size=rows * size, max_size=rows * size))).view(rows, size)
    most = rows * sum(min(n, size - start) for start in range(0, size, n + more))
    count = data.draw(st.integers(0, most))
    topology = pattern.choose(scores, count, torch.rand(rows, size))
    assert int(topology.sum()) == count
    if count < rows * size:
        groups = torch.nn.functional.pad(topology, (0, -size % (n + more))).view(-1, n + more)
        assert int(groups.sum(1).max()) <= n


def test_units_of_infinite_score_are_always_chosen():
    """How growing keeps what is there: no score of another unit outranks it, nor its place in a group."""
    scores = [[float("inf"), 0, 9, 8, 7, 0, float("inf"), 1]]
    assert chosen(NM(2, 4), scores, 4) == [[1, 0, 1, 0, 1, 0, 1, 0]]


def test_how_many_may_be_active_together():
    assert NM(2, 4).most((3, 8)) == 12
    assert NM(2, 4).most((3, 9)) == 15  # a short group of one
    assert NM(2, 4).most((3, 11)) == 18
    assert Unstructured().most((3, 9)) == 27


def test_counts_are_the_nearest_and_never_none():
    assert [Unstructured().count(10, density) for density in (0.0, 0.01, 0.24, 0.26, 1.0)] == [1, 1, 2, 3, 10]


@pytest.mark.parametrize("size", [(0, 4), (5, 4), (-1, -1)])
def test_n_outside_m_is_refused(size):
    with pytest.raises(ValueError, match=r"NM: expected 1 <= n <= m, got NM\("):
        NM(*size)


def test_more_units_than_groups_hold_are_refused():
    with pytest.raises(
        ValueError, match=r"NM.*expected at most 4 active units of 8 \(density 0.5\) or all of them, got 5. Lower"
    ):
        NM(2, 4).choose(torch.zeros(1, 8), 5, torch.zeros(1, 8))


@pytest.mark.parametrize("size", [(0, 4), (4, 0), (-1, 1)])
def test_an_empty_block_is_refused(size):
    with pytest.raises(ValueError, match="Block: expected rows and cols >= 1, got Block"):
        Block(*size)


@pytest.mark.parametrize("count", [-1, 5])
def test_more_than_there_is_is_refused(count):
    with pytest.raises(ValueError, match=f"top_k: expected a count from 0 to 4, got {count}"):
        top_k(torch.zeros(2, 2), count, torch.zeros(2, 2))
