"""The methods of the literature on models so small that every step can be checked by hand."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import sparsam as sp


class Line:
    """One weight row (1, 8) in masked storage whose gradient is given, trained by plain SGD with lr 1."""

    def __init__(self, method, density, start, **options):
        self.model = nn.Sequential(nn.Linear(8, 1, bias=False))
        with torch.no_grad():
            self.model[0].weight.copy_(torch.tensor([start]))
        sp.sparsify(self.model, options.pop("pattern", sp.Unstructured()), density, storage="masked")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.session = sp.Session(self.model, self.optimizer, [sp.SparseTraining(method, **options)])

    def step(self, gradient=(0.0,) * 8):
        """Takes a step along a gradient, that of a dense weight; returns the active units."""
        with self.session.forward():
            loss = self.model(torch.tensor([list(gradient)])).sum()
        self.session.backward(loss)
        assert self.session.step()
        return self.active

    @property
    def active(self):
        return [int(one) for one in self.model[0].weight_topology[0]]

    @property
    def weight(self):
        return self.model[0].weight.detach()[0].tolist()


RISING = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def test_gmp_follows_the_cubic_and_drops_the_smallest():
    """density 0.25 + 0.75 (1 - t)^3 over 4 steps of 8 weights: 4.53 -> 5, 2.75 -> 3, 2.09 -> 2, 2."""
    line = Line(sp.gmp(0.25, every=1, until=4), 1.0, RISING)
    assert [sum(line.step()) for _ in range(6)] == [5, 3, 2, 2, 2, 2]
    assert line.weight == [0, 0, 0, 0, 0, 0, 7, 8]


def test_gmp_begins_where_it_is_told_and_from_the_density_it_is_told():
    line = Line(sp.gmp(0.25, every=2, until=6, begin=2, initial=0.5), 0.5, RISING)
    assert [sum(line.step()) for _ in range(8)] == [4, 4, 4, 2, 2, 2, 2, 2]


class Coarse:
    """Two layers of whole rows: 4 rows of 250 weights and 100 rows of 10, so that rounding leaves the first one far
    from a total density."""

    def __init__(self, method, densities=(1.0, 1.0)):
        torch.manual_seed(0)
        self.layers = [nn.Linear(250, 4), nn.Linear(10, 100)]
        for layer, density in zip(self.layers, densities, strict=True):
            sp.sparsify(nn.Sequential(layer), sp.Neuron(), density)
        model = nn.ModuleList(self.layers)
        self.session = sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.0), [sp.SparseTraining(method)])

    def step(self):
        sum(layer.weight.square().sum() for layer in self.layers).backward()
        self.session.before_step()
        self.session.optimizer.step()
        self.session.after_step()
        return [int(layer.weight_topology.sum()) for layer in self.layers]


def test_while_density_falls_rounding_brings_nothing_back():
    """0.62 of 4 rows is 2: the total lies below the next target, 0.6, and still nothing may grow."""
    coarse = Coarse(sp.Resize(sp.magnitude, sp.stages([(0, 1.0), (1, 0.62), (2, 0.6), (3, 0.5)]), None, 3))
    assert [coarse.step() for _ in range(4)] == [[2, 62], [2, 60], [2, 50], [2, 50]]


def test_at_one_density_rounding_does_not_drift():
    coarse = Coarse(sp.Resize(sp.magnitude, sp.stages([(0, 1.0), (1, 0.62)]), 1, 9))
    assert [coarse.step() for _ in range(4)] == [[2, 62]] * 4


def test_a_schedule_that_falls_from_above_the_models_density_brings_nothing_back():
    """The model has a third already: the first periods of 20 % off have nothing to take."""
    coarse = Coarse(sp.taylor_pruning(0.25, every=1, order=1), (0.5, 0.3))
    counts = [coarse.step() for _ in range(8)]
    assert counts[0] == counts[1] == [2, 30]
    assert all(one >= other for pair in itertools.pairwise(counts) for one, other in zip(*pair, strict=True))


def test_while_density_rises_rounding_drops_nothing():
    """0.64 of 4 rows is 3: the total lies above the next target, 0.52, and no layer gives anything back."""
    method = sp.Resize(sp.magnitude, sp.stages([(0, 0.3), (1, 0.5), (2, 0.52), (3, 1.0)]), None, 3)
    coarse = Coarse(method, (0.5, 0.1))
    assert [coarse.step() for _ in range(3)] == [[3, 36], [3, 36], [4, 100]]


def test_granet_prunes_and_then_moves():
    """Of 4 left after pruning, the weaker half gives way to where the gradient is largest."""
    line = Line(sp.granet(0.5, every=1, until=1, fraction=0.5), 1.0, RISING)
    line.session.parts[0].method.second.fraction = sp.constant(0.5)
    assert line.step([0.0, 0.9, 0.1, 0.8, 0, 0, 0, 0]) == [0, 1, 0, 1, 0, 0, 1, 1]
    # what went and came back in one update keeps its value
    assert line.weight == pytest.approx([0, 1.1, 0, 3.2, 0, 0, 7, 8])


def test_granet_leaves_everything_alone_before_it_begins():
    method = sp.granet(0.5, every=10, until=50, begin=25)
    assert [step for step in range(1, 70) if method.second.due(step)] == [30, 40, 50]
    assert [step for step in range(1, 70) if method.first.due(step)] == [30, 40, 50]
    assert method.second.fraction(25) == 0.3
    assert method.second.fraction(50) == 0.0


def test_granet_by_default_lets_all_layers_compete():
    layers = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False))
    with torch.no_grad():
        layers[0].weight.uniform_(0.5, 1.0)
        layers[1].weight.uniform_(0.0, 0.4)
    sp.sparsify(layers, sp.Unstructured(), 1.0, storage="masked")
    method = sp.granet(0.25, every=1, until=1)
    session = sp.Session(layers, torch.optim.SGD(layers.parameters(), lr=0.0), [sp.SparseTraining(method)])
    with session.forward():
        session.backward(layers(torch.ones(2, 8)).sum())
    session.step()
    assert [int(layer.weight_topology.sum()) for layer in layers] == [15, 1]


def test_taylor_pruning_takes_the_worst_share_every_period():
    """First order: |w g|. 8 -> 6 -> 5 -> 4 at a quarter of what is left each time, down to a half."""
    line = Line(sp.taylor_pruning(0.5, every=2, worst=0.25, order=1), 1.0, [8.0] * 8)
    gradient = [0.1, 0.2, 0.3, 0.4, 0.05, 0.6, 0.7, 0.8]
    counts = [sum(line.step(gradient)) for _ in range(8)]
    assert counts == [8, 6, 6, 4, 4, 4, 4, 4]  # 0.75, 0.5625 -> 4.5 -> 4, then the density that was asked for
    assert line.active == [0, 0, 0, 1, 0, 1, 1, 1]


def test_taylor_pruning_of_second_order_weighs_squares():
    """w^2 E[g^2]: the large weight with a small gradient stays before the small one with a larger gradient."""
    line = Line(sp.taylor_pruning(0.5, every=1, worst=0.5, order=2), 1.0, [9.0, 1.0] * 4)
    assert line.step([0.1, 0.2] * 4) == [1, 0] * 4


def test_ac_dc_alternates_and_ends_sparse():
    line = Line(sp.ac_dc(0.5, dense_steps=2, sparse_steps=3, until=9, warm_up=1), 1.0, RISING)
    counts = [sum(line.step()) for _ in range(14)]
    #         step 1: sparse, 4: dense, 6: sparse, 9: dense, 11: sparse for good
    assert counts == [4, 4, 4, 8, 8, 4, 4, 4, 8, 8, 4, 4, 4, 4]


def test_what_comes_back_in_a_dense_phase_starts_at_zero_and_competes_again():
    line = Line(sp.ac_dc(0.5, dense_steps=1, sparse_steps=1, until=3, warm_up=1), 1.0, RISING)
    assert line.step() == [0, 0, 0, 0, 1, 1, 1, 1]
    line.step()
    assert line.weight == [0, 0, 0, 0, 5, 6, 7, 8]
    # in the dense phase the first weight grows past all others
    assert line.step([-9.0, 0, 0, 0, 0, 0, 0, 0]) == [1, 0, 0, 0, 0, 1, 1, 1]


def test_sr_ste_by_hand():
    """Zhou et al., eq. 9: behind the zeros w - lr (g + decay w); in front w - lr g; then the best of each group."""
    line = Line(sp.sr_ste(decay=0.5), 0.5, [1.0, 2.0, 3.0, 4.0, 8.0, 7.0, 6.0, 5.0], pattern=sp.NM(2, 4))
    assert line.weight == [0, 0, 3, 4, 8, 7, 0, 0]
    hidden = line.session.parts[0]._hidden.weights["0"]
    assert hidden.tolist() == [[0, 0, 3, 4, 8, 7, 0, 0]]  # what sparsify dropped is gone
    assert line.step([-2.0, 0, 0, 1, 0, 0, 0, -4]) == [0, 0, 1, 1, 1, 1, 0, 0]
    assert hidden.tolist() == [[2, 0, 3, 3, 8, 7, 0, 4]]
    assert line.weight == [0, 0, 3, 3, 8, 7, 0, 0]
    # the first weight overtakes the third behind its zero: 2 + 2 - 0.5 * 2
    assert line.step([-2.0, 0, 1, 0, 0, 0, 0, 0]) == [1, 0, 0, 1, 1, 1, 0, 0]
    assert line.weight == [3, 0, 0, 3, 8, 7, 0, 0]
    assert hidden.tolist() == [[3, 0, 2, 3, 8, 7, 0, 2]]


def test_stages_of_density_grow_back():
    """80 % sparse, then 60 %: units come back where the gradient is largest, at zero."""
    method = sp.Resize(sp.magnitude, sp.stages([(0, 0.25), (2, 0.5)]), None, 2, grow=sp.gradient)
    line = Line(method, 0.25, RISING)
    assert line.step() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert line.step([0.1, 0.2, 0.3, -0.4, 0, 0.2, 0, 0]) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert line.weight == [0, 0, 0, 0, 0, 0, 7, 8]


def test_then_lets_the_second_see_what_the_first_decided():
    method = sp.Then(sp.gmp(0.5, every=2, until=4), sp.set_(every=3, fraction=0.5))
    assert [step for step in range(1, 10) if method.due(step)] == [2, 3, 4, 6, 9]
    assert not method.needs_gradient
    assert sp.granet(0.5).needs_gradient


MAKE = {
    "every": (lambda: sp.gmp(0.1, every=0), "every: expected at least 1 step between updates, got 0"),
    "until": (lambda: sp.gmp(0.1, until=5, begin=9), "until: expected a step after begin = 9 >= 0, got 5"),
    "rigl until": (lambda: sp.rigl(until=0), "until: expected a step after begin = 0 >= 0, got 0"),
    "initial": (lambda: sp.gmp(0.1, initial=90), r"initial: expected a share of active units in \(0, 1\], got 90"),
    "warm-up": (lambda: sp.ac_dc(0.1, 5, 5, 10, warm_up=-1), "warm_up: expected a number of steps >= 0, got -1"),
    "fraction as a number": (
        lambda: sp.DropGrow(sp.magnitude, sp.gradient, 100, 0.3),
        r"fraction: expected a function, got 0.3. Write constant\(...\)",
    ),
    "score by name": (
        lambda: sp.DropGrow("magnitude", sp.gradient, 100, sp.constant(0.3)),
        "drop: expected a function, got 'magnitude'. Pass the function itself",
    ),
    "density as a number": (
        lambda: sp.Resize(sp.magnitude, 0.5, 1, 9),
        r"density: expected a function, got 0.5. Write constant\(...\)",
    ),
    "method uncalled": (
        lambda: sp.Then(sp.gmp(0.5), sp.rigl),
        r"method: expected a Method such as rigl\(every=100\), got rigl, which makes one. Write rigl\(...\)",
    ),
    "resize until": (
        lambda: sp.Resize(sp.magnitude, sp.constant(0.5), 1, until=5, begin=5),
        "until: expected a step after begin = 5 >= 0, got 5",
    ),
    "density": (lambda: sp.gmp(0.0), r"density: expected a share of active units in \(0, 1\], got 0.0"),
    "granet": (lambda: sp.granet(1.5), r"density: expected a share of active units in \(0, 1\], got 1.5"),
    "worst": (lambda: sp.taylor_pruning(0.1, worst=1.0), r"worst: expected a share in \(0, 1\), got 1.0"),
    "order": (lambda: sp.taylor_pruning(0.1, order=3), r"order: expected 1 \(gradient\) or 2 \(Fisher\), got 3"),
    "dense steps": (lambda: sp.ac_dc(0.1, 0, 5, 10), "dense_steps: expected at least 1 step, got 0"),
    "sparse steps": (lambda: sp.ac_dc(0.1, 5, 0, 10), "sparse_steps: expected at least 1 step, got 0"),
    "ac/dc density": (
        lambda: sp.ac_dc(2.0, 5, 5, 10),
        r"density: expected a share of active units in \(0, 1\], got 2.0",
    ),
    "sr-ste every": (lambda: sp.sr_ste(every=0), "every: expected at least 1 step between updates, got 0"),
    "sr-ste decay": (lambda: sp.sr_ste(decay=-1.0), "decay: expected a share >= 0, got -1.0"),
    "then": (
        lambda: sp.Then(sp.rigl(), sp.sr_ste()),
        "Then: expected methods whose inactive weights are zero, got one",
    ),
    "recovery density": (lambda: sp.recovery(0.0, 1, 1, 2), r"density: expected the density of the pruned model"),
    "recovery until": (lambda: sp.recovery(0.5, 5, 1, 5), "until: expected a step after fine_tune = 5 >= 0, got 5"),
    "recovery regrow": (lambda: sp.recovery(0.5, 1, 1, 2, regrow=0.0), r"regrow: expected a share of all units"),
    "recovery every": (lambda: sp.recovery(0.5, 1, 0, 2), "every: expected at least 1 step in a period, got 0"),
    "rate until": (lambda: sp.recovery_rate(5, 5), "until: expected a step after fine_tune = 5 >= 0, got 5"),
    "rate low": (lambda: sp.recovery_rate(1, 5, low=0.0), r"low: expected a share of the rate in \(0, 1\], got 0.0"),
}


@pytest.mark.parametrize("case", MAKE)
def test_what_is_refused(case):
    make, message = MAKE[case]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "method",
    [
        sp.DropGrow(lambda view: view.weight.abs().mean(), sp.random, 1, sp.constant(0.5)),
        sp.Resize(lambda view: view.weight.abs().mean(), sp.constant(0.25), 1, 9),
    ],
    ids=["drop", "keep"],
)
def test_a_score_that_is_not_one_number_a_unit(method):
    with pytest.raises(ValueError, match=r"0: expected a score for each of \(1, 8\) units, got \(\). Bring entries"):
        Line(method, 0.5, RISING).step()


def test_recovery_in_three_stages():
    """3 steps as it is, then one unit of eight every 2 steps, all of them from step 8."""
    line = Line(sp.recovery(0.25, fine_tune=3, every=2, until=8, regrow=0.125), 0.25, RISING)
    gradient = [0.0, 0, 0.5, 0, 0.25, 0, 0, 0]
    assert [sum(line.step(gradient)) for _ in range(9)] == [2, 2, 2, 2, 3, 3, 4, 8, 8]


def test_recovery_grows_where_the_gradient_is_largest():
    line = Line(sp.recovery(0.25, fine_tune=1, every=1, until=4, regrow=0.125), 0.25, RISING)
    line.step([0.0, 0, 0.5, 0, 0.25, 0, 0, 0])
    assert line.step([0.0, 0, 0.5, 0, 0.25, 0, 0, 0]) == [0, 0, 1, 0, 0, 0, 1, 1]


def test_the_rate_of_a_recovery():
    rate = sp.recovery_rate(fine_tune=4, until=8, low=0.2, warm_up=2)
    assert [rate(step) for step in range(10)] == pytest.approx([0.1, 0.2, 0.2, 0.2, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert sp.recovery_rate(4, 8, low=0.2)(0) == 0.2
