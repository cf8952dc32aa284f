"""Patterns: the grid over a weight, means that leave padding out, and exact top-k whatever the scores."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from sparsam import Block, Unstructured
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
    ],
)
def test_grid(pattern, shape, grid):
    assert pattern.grid(shape) == grid


def test_means_by_hand():
    """The unit at the edge is averaged over what lies inside, not over its padding."""
    weight = torch.tensor([[1.0, 3.0, 5.0], [5.0, 7.0, 7.0], [2.0, 4.0, 9.0]])
    assert Block(2, 2).reduce(weight).tolist() == [[4.0, 6.0], [3.0, 9.0]]
    assert torch.equal(Unstructured().reduce(weight), weight)


@hypothesis.given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
def test_reduce_takes_back_what_expand_spread(rows, cols, down, across):
    for pattern in (Block(rows, cols), Unstructured()):
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


def test_equal_scores_are_ordered_by_ties():
    chosen = top_k(torch.zeros(2, 2), 2, torch.tensor([[0.1, 0.4], [0.3, 0.2]]))
    assert chosen.tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize("size", [(0, 4), (4, 0), (-1, 1)])
def test_an_empty_block_is_refused(size):
    with pytest.raises(ValueError, match="Block: expected rows and cols >= 1, got Block"):
        Block(*size)


@pytest.mark.parametrize("count", [-1, 5])
def test_more_than_there_is_is_refused(count):
    with pytest.raises(ValueError, match=f"top_k: expected a count from 0 to 4, got {count}"):
        top_k(torch.zeros(2, 2), count, torch.zeros(2, 2))
