"""drop_grow on tables one can check by hand, and its promises for any scores."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from sparsam import (
    NM,
    DropGrow,
    Unstructured,
    constant,
    gradient,
    magnitude,
    needs_gradient,
    random,
    rigl,
    set_,
    static,
)
from sparsam.sparse.methods import drop_grow

ZERO = torch.zeros(2, 3)


def move(active, drop, grow, fraction, drop_ties=ZERO, grow_ties=ZERO):
    table = [torch.tensor(part, dtype=torch.float32) for part in (active, drop, grow)]
    return drop_grow(table[0].bool(), *table[1:], fraction, drop_ties, grow_ties).int().tolist()


def test_the_weakest_goes_and_the_strongest_comes():
    active = [[1, 1, 0], [1, 1, 0]]
    drop = [[4, 1, 9], [3, 2, 9]]  # what inactive units score in dropping plays no part
    grow = [[9, 0, 5], [9, 0, 7]]  # what kept units score in growing plays no part
    assert move(active, drop, grow, 0.25) == [[1, 0, 0], [1, 1, 1]]
    assert move(active, drop, grow, 0.5) == [[1, 0, 1], [1, 0, 1]]


def test_a_unit_just_dropped_may_come_back():
    active = [[1, 1, 0], [1, 1, 0]]
    assert move(active, [[4, 1, 0], [3, 2, 0]], [[0, 8, 5], [0, 0, 7]], 0.25) == active


@pytest.mark.parametrize(
    ("fraction", "moved"), [(0.0, 0), (0.2, 0), (0.25, 1), (0.49, 1), (0.5, 2), (0.75, 2), (1.0, 2)]
)
def test_how_many_move_is_rounded_down(fraction, moved):
    after = move([[1, 1, 0], [1, 1, 0]], [[4, 1, 0], [3, 2, 0]], [[0, 0, 5], [0, 0, 7]], fraction)
    assert after[0][2] + after[1][2] == moved


def test_full_empty_and_single_topologies_stay_possible():
    full = [[1, 1, 1], [1, 1, 1]]
    assert move(full, [[1, 2, 3], [4, 5, 6]], [[0] * 3] * 2, 0.5) == full
    assert move([[0] * 3] * 2, [[0] * 3] * 2, [[1] * 3] * 2, 1.0) == [[0] * 3] * 2
    assert move([[1, 0, 0], [0, 0, 0]], [[0] * 3] * 2, [[0, 0, 0], [0, 0, 1]], 1.0) == [[0, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("pattern", [Unstructured(), NM(2, 4)], ids=str)
def test_where_everything_is_active_nothing_moves(pattern):
    """n:m at density 1 has no room for a move: a dense phase of AC/DC passes it by."""
    everything, scores = torch.ones(3, 8, dtype=torch.bool), torch.rand(3, 8)
    assert drop_grow(everything, scores, scores, 0.3, scores, scores, pattern).all()


def test_a_live_unit_of_score_zero_is_alive():
    """Liveness is the topology: a unit that has just grown weighs zero and must not count as absent."""
    active = [[1, 1, 1], [1, 0, 0]]
    assert move(active, [[0] * 3] * 2, [[0, 0, 0], [0, 1, 1]], 0.0) == active


SCORES = st.sampled_from([0.0, 1.0, -1.0, 0.5, float("inf"), float("-inf"), float("nan")])


@hypothesis.given(st.data(), st.integers(1, 6), st.integers(1, 6), st.floats(0, 1))
def test_the_count_is_kept_for_any_scores(data, rows, cols, fraction):
    """Ties, NaN and infinities must not let the density drift, nor drop more than was asked."""

    def grid(values):
        cells = st.lists(values, min_size=rows * cols, max_size=rows * cols)
        return torch.tensor(data.draw(cells)).view(rows, cols)

    active = grid(st.booleans())
    ties = torch.rand(2, rows, cols)
    after = drop_grow(active, grid(SCORES), grid(SCORES), fraction, *ties)
    assert after.dtype == torch.bool
    assert after.sum() == active.sum()
    assert (active & ~after).sum() <= int(fraction * int(active.sum()))


def test_ties_decide_by_their_numbers():
    active = torch.tensor([[True, True, False, False]])
    ties = torch.tensor([[0.2, 0.9, 0.3, 0.1]])
    assert drop_grow(active, ZERO[:1, :1].expand(1, 4), ZERO[:1, :1].expand(1, 4), 0.5, ties, ties).tolist() == [
        [False, True, True, False]
    ]


@pytest.mark.parametrize("until", [None, 300])
def test_when_topologies_change(until):
    method = set_(every=100, until=until)
    due = [step for step in range(0, 701, 50) if method.due(step)]
    assert due == ([100, 200, 300, 400, 500, 600, 700] if until is None else [100, 200, 300])


def test_the_share_is_annealed_as_in_the_paper():
    """a / 2 * (1 + cos(pi t / T_end))."""
    method = rigl(every=100, fraction=0.3, until=400)
    assert [method.fraction(step) for step in (0, 200, 400)] == pytest.approx([0.3, 0.15, 0.0])
    assert set_(fraction=0.2).fraction(10**6) == 0.2


def test_only_methods_that_read_gradients_ask_for_them():
    assert rigl().needs_gradient
    assert DropGrow(gradient, random, 1, constant(0.1)).needs_gradient
    assert not set_().needs_gradient
    assert DropGrow(magnitude, needs_gradient(lambda view: gradient(view)), 1, constant(0.1)).needs_gradient
    assert not static().needs_gradient
    assert not static().due(100)
    assert static().update({}, 100) == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DropGrow(magnitude, random, 0, constant(0.1)),
            "every: expected at least 1 step between updates, got 0",
        ),
        (lambda: rigl(fraction=1.5), r"fraction: expected a share of active units in \[0, 1\], got 1.5"),
        (lambda: set_(until=0), "until: expected a step after begin = 0 >= 0, got 0"),
        (lambda: move([[1, 0, 0]] * 2, [[0] * 3] * 2, [[0] * 3] * 2, 1.5), r"a fraction in \[0, 1\], got 1.5"),
        (lambda: move([[1, 0, 0]] * 2, [[0] * 2] * 2, [[0] * 3] * 2, 0.5), r"scores of shape \(2, 3\), got \(2, 2\)"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
