"""Density per layer: the total is met exactly, whatever the shapes."""

from __future__ import annotations

import math

import hypothesis
import hypothesis.strategies as st
import pytest

from sparsam import erdos_renyi, uniform

SHAPES = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.lists(st.integers(1, 64), min_size=2, max_size=4), min_size=1, max_size=5
)


def total(shapes, densities):
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    return sum(densities[name] * size for name, size in sizes.items()) / sum(sizes.values())


def test_uniform():
    assert uniform({"a": (2, 3), "b": (4, 4)}, 0.25) == {"a": 0.25, "b": 0.25}


def test_erdos_renyi_by_hand():
    """(10 + 10) / 100 against (10 + 40) / 400: shares of 20 and 50 among a budget of 0.2 * 500 = 100."""
    found = erdos_renyi({"a": (10, 10), "b": (40, 10)}, 0.2)
    assert found == pytest.approx({"a": 100 * 20 / 70 / 100, "b": 100 * 50 / 70 / 400})


def test_a_layer_above_one_is_made_dense_and_the_rest_is_solved_again():
    found = erdos_renyi({"small": (2, 2), "large": (50, 50)}, 0.1)
    assert found["small"] == 1.0
    assert found["large"] == pytest.approx((0.1 * 2504 - 4) / 2500)


@hypothesis.given(SHAPES, st.floats(0.01, 1.0))
def test_the_total_is_met(shapes, density):
    shapes = {name: tuple(shape) for name, shape in shapes.items()}
    for allocation in (uniform, erdos_renyi):
        found = allocation(shapes, density)
        assert total(shapes, found) == pytest.approx(density)
        assert all(0 < value <= 1 for value in found.values())


@pytest.mark.parametrize("allocation", [uniform, erdos_renyi])
@pytest.mark.parametrize("density", [0.0, -0.1, 1.1, 90, math.nan])
def test_a_density_outside_its_range_is_refused(allocation, density):
    with pytest.raises(
        ValueError, match=r"expected a share of active units in \(0, 1\], got .*Sparsity is 1 - density"
    ):
        allocation({"a": (2, 2)}, density)
