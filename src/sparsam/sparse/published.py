"""The methods of the literature, each a short composition of `methods.py` or a class of a few lines."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from sparsam.schedules import Schedule, constant, cosine, cubic, stages
from sparsam.sparse.allocation import Allocation, check_density, global_, uniform
from sparsam.sparse.methods import DropGrow, Method, Resize, Then
from sparsam.sparse.scores import fisher, gradient, magnitude, random, taylor
from sparsam.sparse.views import LayerView

__all__ = ["ac_dc", "gmp", "granet", "rigl", "set_", "sr_ste", "static", "taylor_pruning"]


def static() -> Method:
    """The first topology stays."""
    return _Static()


def set_(every: int = 100, fraction: float = 0.3, until: int | None = None) -> DropGrow:
    """SET: drop the smallest magnitudes, grow at random. `fraction` is annealed to 0 at step `until`, if given.

    Source: Mocanu et al. 2018, arXiv:1707.04780. Differs: by magnitude alone, where the paper takes its share of the
    positive and of the negative weights apart; what grows starts at zero, not at random.
    """
    return DropGrow(magnitude, random, every, _annealed(fraction, until), until)


def rigl(every: int = 100, fraction: float = 0.3, until: int | None = None) -> DropGrow:
    """RigL: drop the smallest magnitudes, grow where the dense gradient is largest.

    Args:
        every: applied steps between updates.
        fraction: share of active units moved at the first update; cosine to 0 at step `until`, constant without it.
        until: last step that changes topologies; three quarters of the training is usual.

    Source: Evci et al. 2020, arXiv:1911.11134, Alg. 1. Differs: the optimiser steps on update steps too, and topologies
    change after it, so that weights to drop are those after the step.
    """
    return DropGrow(magnitude, gradient, every, _annealed(fraction, until), until)


def gmp(
    density: float,
    every: int = 100,
    until: int = 1000,
    begin: int = 0,
    initial: float = 1.0,
    allocation: Allocation = uniform,
) -> Resize:
    """GMP, gradual magnitude pruning: density falls from `initial` along a cubic, the smallest magnitudes go.

    Sparsify at density `initial` before; units that went stay away.

    Args:
        density: at the end, in (0, 1].
        every: applied steps between updates.
        until: step at which the final density is reached.
        begin: step at which pruning begins.
        initial: density at the start.
        allocation: how density is shared out between layers.

    Source: Zhu and Gupta 2017, arXiv:1710.01878. Differs: updates fall on multiples of `every`, not on
    `begin` plus them.
    """
    check_density(density)
    check_density(initial, "initial")
    curve = cubic(initial, density, steps=max(1, until - begin), begin=begin)
    return Resize(magnitude, curve, every, until, begin, allocation)


def granet(
    density: float,
    every: int = 100,
    until: int = 1000,
    begin: int = 0,
    initial: float = 1.0,
    fraction: float = 0.3,
    allocation: Allocation | None = None,
) -> Then:
    """GraNet: GMP over all layers together, and after each pruning as RigL does, weak units give way to promising ones.

    Args:
        density: at the end, in (0, 1].
        every: applied steps between updates.
        until: step at which the final density is reached; the last update of either kind.
        begin: step at which pruning begins.
        initial: density at the start, that of `sparsify`.
        fraction: share of active units that give way at first; cosine to 0 at `until`.
        allocation: how density is shared out between layers; by default all units compete by magnitude.

    Source: Liu et al. 2021, arXiv:2106.10404, Alg. 1. Differs: units move while density falls; the authors' code
    moves them to the end of training, as Then(granet(...), rigl(...)) does. `global_` leaves each layer a floor.
    """
    prune = gmp(density, every, until, begin, initial, global_() if allocation is None else allocation)
    return Then(prune, DropGrow(magnitude, gradient, every, _annealed(fraction, until, begin), until, begin))


def taylor_pruning(
    density: float,
    every: int = 1000,
    worst: float = 0.2,
    begin: int = 0,
    order: int = 2,
    allocation: Allocation | None = None,
) -> Resize:
    """Gradual Taylor pruning: every so many steps the worst share of all units goes, until the density is reached.

    Args:
        density: at the end, in (0, 1].
        every: applied steps between updates.
        worst: share of the active units that goes at an update.
        begin: step after which the first period starts.
        order: 1 scores by |weight * gradient|, 2 by weight^2 * mean squared gradient.
        allocation: how density is shared out between layers; by default all units compete by the same score.

    Sparsify at density 1 before; a sparser model is left alone until its turn comes.

    Source: Molchanov et al. 2017, arXiv:1611.06440 (first order); LeCun et al. 1990, Optimal Brain Damage (second).
    Differs: first order scores weights by the gradient of one window, the paper feature maps by a mean over many.
    """
    check_density(density)
    if not 0.0 < worst < 1.0:
        raise ValueError(f"worst: expected a share in (0, 1), got {worst}.")
    if order not in (1, 2):
        raise ValueError(f"order: expected 1 (gradient) or 2 (Fisher), got {order}.")
    score = taylor if order == 1 else fisher
    updates = max(1, math.ceil(math.log(density) / math.log(1 - worst) - 1e-9))

    def left(step: int) -> float:
        return max(density, (1 - worst) ** max(0, (step - begin) // every))

    return Resize(
        score, left, every, begin + updates * every, begin, global_(score) if allocation is None else allocation
    )


def ac_dc(
    density: float,
    dense_steps: int,
    sparse_steps: int,
    until: int,
    warm_up: int = 0,
    allocation: Allocation | None = None,
) -> Resize:
    """AC/DC: sparse and dense phases in turns; every sparse one keeps the largest magnitudes, the last one stays.

    Sparsify at density 1 before. Weights that come back in a dense phase start at zero.

    Args:
        density: of sparse phases, in (0, 1].
        dense_steps: length of a dense phase.
        sparse_steps: length of a sparse phase.
        until: the sparse phase that holds this step, or the one after it, is the last and stays.
        warm_up: steps of the first dense phase; 0 is `dense_steps`.
        allocation: how density is shared out between layers; by default all units compete by magnitude.

    Source: Peste et al. 2021, arXiv:2106.12379, Alg. 1. Differs: the authors' runs set all momentum to zero when
    a dense phase begins, here that of the weights that come back; `global_` leaves each layer a floor.
    """
    check_density(density)
    for what, steps in (("dense_steps", dense_steps), ("sparse_steps", sparse_steps)):
        if steps < 1:
            raise ValueError(f"{what}: expected at least 1 step, got {steps}.")
    if warm_up < 0:
        raise ValueError(f"warm_up: expected a number of steps >= 0, got {warm_up}.")
    turns, step = [(0, 1.0)], warm_up or dense_steps
    while True:
        turns.append((step, density))
        if step + sparse_steps > until:
            break
        turns.append((step + sparse_steps, 1.0))
        step += sparse_steps + dense_steps
    allocation = global_() if allocation is None else allocation
    return Resize(magnitude, stages(turns), None, turns[-1][0], allocation=allocation)


def sr_ste(decay: float = 2e-4, every: int = 1, until: int | None = None) -> Method:
    """SR-STE, made for n:m: at every step each group's largest weights are active, the others train on behind zeros.

    Their gradient is that of a dense weight, and each step pulls them to zero by a share of themselves. Needs masked
    storage and 4 more bytes a weight. The share is tuned for SGD.

    Args:
        decay: that share, added to the gradient.
        every: applied steps between choices.
        until: last step that changes topologies.

    Source: Zhou et al. 2021, arXiv:2102.04010, eq. 9. Differs: what `sparsify` sets to zero starts behind its zero at
    zero, where the paper starts from the dense weights.
    """
    return _StraightThrough(decay, every, until)


def _annealed(fraction: float, until: int | None, begin: int = 0) -> Schedule:
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction: expected a share of active units in [0, 1], got {fraction}.")
    # a step that cannot be is refused by the method
    return constant(fraction) if until is None else cosine(fraction, 0.0, steps=max(1, until - begin), begin=begin)


class _Static(Method):
    per_layer = True

    def due(self, step: int) -> bool:
        return False

    def update(self, views: Mapping[str, LayerView], step: int) -> Mapping[str, torch.Tensor]:
        return {}


class _StraightThrough(Method):
    """Every so many steps the largest of all weights are active, those behind zeros included."""

    masked_only = "inactive weights go on training behind their zeros"
    per_layer = True

    def __init__(self, decay: float, every: int, until: int | None) -> None:
        if every < 1:
            raise ValueError(f"every: expected at least 1 step between updates, got {every}.")
        if not decay >= 0:
            raise ValueError(f"decay: expected a share >= 0, got {decay}.")
        self.hidden_decay, self.every, self.until = decay, every, until

    def due(self, step: int) -> bool:
        return step > 0 and step % self.every == 0 and (self.until is None or step <= self.until)

    def update(self, views: Mapping[str, LayerView], step: int) -> Mapping[str, torch.Tensor]:
        return {
            name: view.pattern.choose(magnitude(view), view.active_units, view.random("keep"))
            for name, view in views.items()
        }
