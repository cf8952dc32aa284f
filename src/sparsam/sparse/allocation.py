"""How density is shared out between layers. An allocation is a function of all layers and the total density."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real

import torch

from sparsam.sparse.scores import (
    Score,
    accumulates,
    accumulators_of,
    check_functions,
    magnitude,
    needs_gradient,
    reads_gradient,
    scored,
    taylor,
)
from sparsam.sparse.views import LayerView

__all__ = ["Allocation", "by_sensitivity", "check_density", "erdos_renyi", "global_", "share_out", "uniform"]

Allocation = Callable[[Mapping[str, LayerView], float], dict[str, float]]


def uniform(views: Mapping[str, LayerView], density: float) -> dict[str, float]:
    """The same density everywhere."""
    return dict.fromkeys(views, check_density(density))


def erdos_renyi(views: Mapping[str, LayerView], density: float) -> dict[str, float]:
    """Erdos-Renyi-Kernel: a layer's density is proportional to (sum of its dims) / (product of its dims).

    Layers that come out above 1 are made dense and the rest is solved again, so the total is met exactly.

    Args:
        views: the layers; only their shapes count.
        density: active share of all weights of these layers, in (0, 1].

    Source: Evci et al. 2020, arXiv:1911.11134, section 3; Mocanu et al. 2018, arXiv:1707.04780.
    """
    raw = {name: sum(view.shape) / view.weights for name, view in views.items()}
    return _in_proportion(raw, views, check_density(density))


def by_sensitivity(score: Score = taylor, power: float = 0.5, floor: float = 0.1) -> Allocation:
    """Layers whose weights matter more keep more of them: density proportional to (mean score of the layer)^power.

    Args:
        score: of units; the Taylor score needs gradients, so run a backward before `sparsify`.
        power: 0 is uniform, 1 follows the score.
        floor: least density of a layer, as a share of the total density, in [0, 1].
    """
    check_functions(score=score)
    _checked_floor(floor)

    def allocation(views: Mapping[str, LayerView], density: float) -> dict[str, float]:
        check_density(density)
        raw = {}
        for name, view in views.items():
            mean = float(scored(score, view)[view.topology].mean())
            if not (math.isfinite(mean) and mean >= 0):
                raise ValueError(
                    f"{name}: expected a mean score >= 0 to share density out by, got {mean}. Use a score that "
                    "measures size, such as magnitude, taylor or fisher."
                )
            raw[name] = mean**power
        if not any(raw.values()):
            raise ValueError("by_sensitivity: expected a score above 0 in some layer, got 0 everywhere.")
        return _in_proportion(raw, views, density, floor * density)

    return _needs_what(score, allocation)


def global_(score: Score = magnitude, floor: float = 0.1) -> Allocation:
    """All units of all layers compete: a layer's density is its share of those with the highest scores.

    Args:
        score: of units. Scores of different layers are compared as they are.
        floor: least density of a layer, as a share of the total density, in [0, 1], and at least one unit: a layer of
            tiny weights is not cut off.

    Source: of the idea, Han et al. 2015, arXiv:1506.02626; of the trap that the floor closes, layer collapse, Tanaka
    et al. 2020, arXiv:2006.05467.
    """
    check_functions(score=score)
    _checked_floor(floor)

    def allocation(views: Mapping[str, LayerView], density: float) -> dict[str, float]:
        check_density(density)
        budget = density * sum(view.weights for view in views.values())
        kept: dict[str, int] = {}
        scores, sizes, owners = [], [], []
        for position, (name, view) in enumerate(views.items()):
            size = view.weights / view.units
            found = torch.nan_to_num(
                scored(score, view).masked_fill(~view.topology, -torch.inf), nan=-torch.inf
            ).flatten()
            kept[name] = min(max(1, round(floor * density * view.units)), view.active_units)
            budget -= kept[name] * size
            # the best of the layer are kept whatever others have: only the rest competes
            most = min(view.active_units, round(_most(view, density) * view.units))
            rest = found.sort(descending=True).values[kept[name] : most]
            scores.append(rest)
            sizes.append(torch.full_like(rest, size, dtype=torch.float64))
            owners.append(torch.full_like(rest, position, dtype=torch.int64))
        if budget < -0.5 * sum(view.weights / view.units for view in views.values()):  # more than rounding explains
            raise ValueError(
                f"global_: expected a density that leaves every one of {len(views)} layers one unit and its floor, got "
                f"{density:g}. Raise the density, or use a pattern of smaller units."
            )
        order = torch.cat(scores).argsort(descending=True, stable=True)
        spent = torch.cat(sizes)[order].cumsum(0)
        # a unit is in when more than half of it still fits: the total is met to the nearest unit
        winners = torch.cat(owners)[order][spent - torch.cat(sizes)[order] / 2 < budget]
        more = torch.bincount(winners, minlength=len(views)).tolist()
        return {name: (kept[name] + more[position]) / view.units for position, (name, view) in enumerate(views.items())}

    return _needs_what(score, allocation)


def check_density(density: object, what: str = "density") -> float:
    """The density, if it is one.

    Raises:
        ValueError: it is no share of active units in (0, 1].
    """
    if not (isinstance(density, Real) and 0.0 < float(density) <= 1.0):
        raise ValueError(
            f"{what}: expected a share of active units in (0, 1], got {density!r}. Sparsity is 1 - density."
        )
    return float(density)


def share_out(allocation: Allocation, views: Mapping[str, LayerView], density: float) -> dict[str, float]:
    """What an allocation says, for whoever is given one.

    Raises:
        ValueError: it is none, or says nothing about a layer.
    """
    makers: tuple[object, ...] = (by_sensitivity, global_)  # called with views they would take them for a score
    shares = allocation(views, density) if callable(allocation) and allocation not in makers else None
    if not isinstance(shares, Mapping) or views.keys() - shares.keys():
        came = f"the function {allocation.__name__}" if hasattr(allocation, "__name__") else repr(allocation)
        raise ValueError(
            f"allocation: expected one that gives every layer a density, got {came}. "
            "Write uniform, erdos_renyi, global_() or by_sensitivity()."
        )
    return dict(shares)


def _needs_what(score: Score, allocation: Allocation) -> Allocation:
    """Declares that an allocation reads what its score reads."""
    allocation = accumulates(*accumulators_of(score))(allocation)
    return needs_gradient(allocation) if reads_gradient(score) else allocation


def _in_proportion(
    raw: Mapping[str, float], views: Mapping[str, LayerView], density: float, floor: float = 0.0
) -> dict[str, float]:
    """Densities proportional to `raw`, at least `floor` and at most what a pattern allows, that meet the total; what
    hits a bound is fixed there."""
    sizes = {name: view.weights for name, view in views.items()}
    most = {name: _most(view, density) for name, view in views.items()}
    fixed: dict[str, float] = {}
    while True:
        free = [name for name in views if name not in fixed]
        if not free:
            return {name: fixed[name] for name in views}
        budget = density * sum(sizes.values()) - sum(share * sizes[name] for name, share in fixed.items())
        weight = sum(raw[name] * sizes[name] for name in free)
        even = budget / sum(sizes[name] for name in free)
        shares = {name: budget * raw[name] / weight if weight > 0 else even for name in free}
        over = {name: most[name] for name in free if shares[name] > most[name]}
        under = {name: floor for name in free if shares[name] < floor}
        if not over and not under:
            return {name: fixed[name] if name in fixed else shares[name] for name in views}
        # one side at a time, the one that is further off in weights, or a bound could be fixed that is not reached
        excess = sum((shares[name] - most[name]) * sizes[name] for name in over)
        lack = sum((floor - shares[name]) * sizes[name] for name in under)
        fixed |= over if excess >= lack else under


def _most(view: LayerView, density: float) -> float:
    """The largest density that a layer can have while all together have `density`."""
    rows, cols = view.topology.shape
    most = view.pattern.most((rows, cols)) / view.units
    # above it only all units are possible, which the pattern itself decides
    return most if density <= most else 1.0


def _checked_floor(floor: float) -> None:
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"floor: expected a share of the density in [0, 1], got {floor}.")
