"""Density per layer: the total is met exactly, whatever the shapes."""

from __future__ import annotations

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from sparsam import (
    NM,
    LayerView,
    Unstructured,
    by_sensitivity,
    erdos_renyi,
    global_,
    gradient,
    magnitude,
    movement,
    uniform,
)
from sparsam.sparse.scores import accumulators_of, reads_gradient

SHAPES = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.lists(st.integers(1, 64), min_size=2, max_size=4), min_size=1, max_size=5
)
EVERY = {
    "uniform": uniform,
    "erdos_renyi": erdos_renyi,
    "by_sensitivity": by_sensitivity(magnitude, floor=0.001),
    "global_": global_(floor=0.001),
}


def view(name, shape, weight=None, active=None):
    """A layer of single weights; of ones unless a weight is given."""
    weight = torch.ones(shape) if weight is None else weight
    flat = (shape[0], math.prod(shape[1:]))
    topology = torch.ones(flat, dtype=torch.bool) if active is None else active
    return LayerView(
        name=name,
        shape=tuple(shape),
        pattern=Unstructured(),
        topology=topology,
        weight=weight,
        gradient=None,
        moments={},
        reduce=lambda entries: entries.float().reshape(flat),
        seed=0,
        step=0,
        growth=None,
    )


def views(shapes, **weights):
    return {name: view(name, shape, weights.get(name)) for name, shape in shapes.items()}


def total(layers, densities):
    sizes = {name: one.weights for name, one in layers.items()}
    return sum(densities[name] * size for name, size in sizes.items()) / sum(sizes.values())


def test_uniform():
    assert uniform(views({"a": (2, 3), "b": (4, 4)}), 0.25) == {"a": 0.25, "b": 0.25}


def test_erdos_renyi_by_hand():
    """(10 + 10) / 100 against (10 + 40) / 400: shares of 20 and 50 among a budget of 0.2 * 500 = 100."""
    found = erdos_renyi(views({"a": (10, 10), "b": (40, 10)}), 0.2)
    assert found == pytest.approx({"a": 100 * 20 / 70 / 100, "b": 100 * 50 / 70 / 400})


def test_a_layer_above_one_is_made_dense_and_the_rest_is_solved_again():
    found = erdos_renyi(views({"small": (2, 2), "large": (50, 50)}), 0.1)
    assert found["small"] == 1.0
    assert found["large"] == pytest.approx((0.1 * 2504 - 4) / 2500)


def test_global_by_hand():
    """Half of 8 weights: the four largest are all of a and one of b."""
    a, b = torch.tensor([[5.0, 6.0, 7.0]]), torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.5]])
    layers = views({"a": (1, 3), "b": (1, 5)}, a=a, b=b)
    assert global_(floor=0.0)(layers, 0.5) == {"a": 1.0, "b": 0.2}
    assert global_(floor=0.8)(layers, 0.5) == {"a": 2 / 3, "b": 0.4}


def test_in_global_a_layer_of_tiny_weights_keeps_its_floor():
    large, tiny = torch.rand(100, 100) + 1, torch.rand(100, 10) * 1e-6
    layers = views({"large": (100, 100), "tiny": (100, 10)}, large=large, tiny=tiny)
    found = global_(floor=0.5)(layers, 0.01)
    assert found["tiny"] == 0.005
    assert total(layers, found) == pytest.approx(0.01, abs=1 / 11000)


def test_in_global_a_floor_that_rounding_exceeds_is_no_error():
    """0.3 of 5 units is 1.5: every layer keeps 2."""
    layers = views(dict.fromkeys("abcdef", (5, 1)))
    for floor, density in ((1.0, 0.3), (0.9, 0.35)):
        shares = global_(floor=floor)(layers, density)
        assert all(abs(share - density) <= 0.1 + 1e-9 for share in shares.values())


def test_in_global_what_is_inactive_does_not_come_back():
    active = torch.tensor([[True, False, True, False]])
    layers = {"a": view("a", (1, 4), torch.tensor([[1.0, 9.0, 2.0, 9.0]]), active), "b": view("b", (1, 4))}
    found = global_(floor=0.0)(layers, 0.5)
    assert found["a"] <= 0.5
    assert total(layers, found) == 0.5


def test_by_sensitivity_by_hand():
    """Mean magnitudes of 4 and 1: square roots 2 and 1 share out half of 8 weights as 8/3 and 4/3."""
    layers = views({"a": (1, 4), "b": (1, 4)}, a=torch.full((1, 4), 4.0))
    found = by_sensitivity(magnitude, floor=0.0)(layers, 0.5)
    assert found == pytest.approx({"a": 8 / 3 / 4, "b": 4 / 3 / 4})
    assert by_sensitivity(magnitude, power=0.0)(layers, 0.5) == {"a": 0.5, "b": 0.5}
    assert by_sensitivity(magnitude, power=1.0, floor=0.6)(layers, 0.5) == pytest.approx({"a": 0.7, "b": 0.3})


@hypothesis.given(st.data(), SHAPES, st.floats(0.01, 1.0), st.sampled_from(sorted(EVERY)))
def test_the_total_is_met(data, shapes, density, kind):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    scales = {name: data.draw(st.sampled_from([1e-6, 1.0, 100.0])) for name in shapes}
    layers = views(shapes, **{name: scales[name] * torch.rand(shape) for name, shape in shapes.items()})
    weights = sum(one.weights for one in layers.values())
    if kind == "global_" and density * weights < 2 * len(layers):
        return  # every layer keeps one unit, which so few cannot give
    found = EVERY[kind](layers, density)
    assert all(0 < value <= 1 for value in found.values())
    # to the nearest unit, where floors are rounded up to units
    slack = 0.5 + 0.001 * weights if kind == "global_" else 1e-6 * weights
    assert abs(total(layers, found) - density) * weights <= slack


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("density", [0.0, -0.1, 1.1, 90, math.nan])
def test_a_density_outside_its_range_is_refused(kind, density):
    with pytest.raises(
        ValueError, match=r"expected a share of active units in \(0, 1\], got .*Sparsity is 1 - density"
    ):
        EVERY[kind](views({"a": (2, 2)}), density)


def test_what_an_allocation_needs_is_what_its_score_needs():
    assert reads_gradient(global_(gradient))
    assert not reads_gradient(global_(magnitude))
    assert [one.name for one in accumulators_of(by_sensitivity(movement))] == ["movement"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda layers: global_(floor=1.5), r"floor: expected a share of the density in \[0, 1\], got 1.5"),
        (lambda layers: by_sensitivity(floor=-1.0), r"floor: expected a share of the density in \[0, 1\], got -1.0"),
        (lambda layers: global_("magnitude"), "score: expected a function, got 'magnitude'. Pass the function itself"),
        (lambda layers: by_sensitivity(0.5), "score: expected a function, got 0.5. Pass the function itself"),
        (
            lambda layers: global_(lambda view: magnitude(view).sum())(layers, 0.5),
            r"a: expected a score for each of \(2, 50\) units, got \(\). Bring entries to units with view.reduce",
        ),
        (lambda layers: global_()(layers, 0.001), r"leaves every one of 2 layers one unit and its floor, got 0.001"),
        (
            lambda layers: by_sensitivity(lambda view: -magnitude(view))(layers, 0.5),
            r"a: expected a mean score >= 0 to share density out by, got -1.0",
        ),
        (
            lambda layers: by_sensitivity(lambda view: 0 * magnitude(view))(layers, 0.5),
            "by_sensitivity: expected a score above 0 in some layer, got 0 everywhere",
        ),
        (lambda layers: by_sensitivity()(layers, 0.5), "a: expected a gradient for the Taylor score, got none"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(views({"a": (2, 50), "b": (10, 10)}))


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("density", [0.5, 0.3])
def test_no_layer_is_given_more_than_its_pattern_allows(kind, density):
    """Half of n:m is all that 2:4 can hold, however much better one layer's weights score."""
    layers = {
        name: dataclasses.replace(one, pattern=NM(2, 4))
        for name, one in views({"a": (8, 16), "b": (16, 8)}, a=torch.full((8, 16), 9.0)).items()
    }
    found = EVERY[kind](layers, density)
    assert total(layers, found) == pytest.approx(density, abs=1e-2)
    for name, one in layers.items():
        count = one.pattern.count(one.units, found[name])
        one.pattern.choose(torch.rand(one.topology.shape), count, torch.rand(one.topology.shape))
