"""Methods: they decide the next topology of every layer. A method keeps no tensors.

`DropGrow` moves units at constant density, `Resize` follows a density schedule, `Then` does one after the other; the
methods of the literature are short compositions of these, in `published.py`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from sparsam.schedules import Schedule
from sparsam.sparse.allocation import Allocation, share_out, uniform
from sparsam.sparse.patterns import Pattern, Unstructured
from sparsam.sparse.scores import Accumulator, Score, accumulators_of, check_functions, random, reads_gradient, scored
from sparsam.sparse.views import LayerView

__all__ = ["DropGrow", "Method", "Resize", "Then", "check_method", "drop_grow", "resize"]

_ANY = Unstructured()


class Method(ABC):
    """Decides topologies. A subclass says when it is due and what each layer's next topology is.

    Attributes:
        needs_gradient: whether updates read the dense gradient of units that do not exist.
        accumulators: what its scores gather over steps.
        masked_only: why it needs masked storage, or nothing.
        per_layer: whether each layer's next topology depends on that layer alone, so that layers may be on several
            ranks.
        hidden_decay: None: an inactive weight is zero and nothing else. A number: behind its zero an inactive weight
            goes on training with the gradient of a dense one, pulled to zero by this share of itself at every step.
    """

    needs_gradient: bool = False
    accumulators: tuple[Accumulator, ...] = ()
    masked_only: str = ""
    per_layer: bool = False
    hidden_decay: float | None = None

    @abstractmethod
    def due(self, step: int) -> bool:
        """Whether topologies change after applied step `step` (the first one is 1)."""

    @abstractmethod
    def update(self, views: Mapping[str, LayerView], step: int) -> Mapping[str, torch.Tensor]:
        """Next topology (bool grid) of the layers that change."""


class DropGrow(Method):
    """Every so many steps, moves a share of each layer's active units to better places; density never changes.

    Args:
        drop: active units with the lowest of these scores go.
        grow: of all units that are not kept, those with the highest of these scores come in.
        every: applied steps between updates.
        fraction: share of active units to move, a schedule of the applied step.
        until: last step at which topologies change, or None.
        begin: updates come after this step.
    """

    per_layer = True

    def __init__(
        self, drop: Score, grow: Score, every: int, fraction: Schedule, until: int | None = None, begin: int = 0
    ) -> None:
        check_functions(drop=drop, grow=grow, fraction=fraction)
        if every < 1:
            raise ValueError(f"every: expected at least 1 step between updates, got {every}.")
        if not 0 <= begin < (math.inf if until is None else until):
            raise ValueError(f"until: expected a step after begin = {begin} >= 0, got {until}.")
        self.drop, self.grow = drop, grow
        self.every, self.fraction, self.until, self.begin = every, fraction, until, begin
        self.needs_gradient = reads_gradient(grow) or reads_gradient(drop)
        self.accumulators = accumulators_of(drop) + accumulators_of(grow)
        self.masked_only = _grows_by_accumulator(grow)

    def due(self, step: int) -> bool:
        return step > self.begin and step % self.every == 0 and (self.until is None or step <= self.until)

    def update(self, views: Mapping[str, LayerView], step: int) -> Mapping[str, torch.Tensor]:
        fraction = self.fraction(step)
        return {
            name: drop_grow(
                view.topology,
                scored(self.drop, view),
                scored(self.grow, view),
                fraction,
                view.random("drop"),
                view.random("grow"),
                view.pattern,
            )
            for name, view in views.items()
        }


class Resize(Method):
    """Makes layers sparser, or denser, as a schedule of the total density says.

    While the schedule falls the total never grows, and while it rises no layer loses units: where units are coarse, or
    the model is not at the density where the schedule begins, it waits until the schedule comes by.

    Args:
        keep: when density falls, active units with the lowest of these scores go.
        density: active share of all units of all layers, a schedule of the applied step.
        every: updates come at its multiples. None: whenever the schedule's value changes, for one made of stages.
        until: last step that changes topologies; it is always an update, so the final density is met exactly.
        begin: updates come after this step.
        allocation: how the total is shared out between layers when density falls.
        grow: when density rises, inactive units with the highest of these scores come in, in all layers the same share
            of what they lack.
    """

    def __init__(
        self,
        keep: Score,
        density: Schedule,
        every: int | None,
        until: int,
        begin: int = 0,
        allocation: Allocation = uniform,
        grow: Score = random,
    ) -> None:
        check_functions(keep=keep, density=density, allocation=allocation, grow=grow)
        if every is not None and every < 1:
            raise ValueError(f"every: expected at least 1 step between updates, got {every}.")
        if not 0 <= begin < until:
            raise ValueError(f"until: expected a step after begin = {begin} >= 0, got {until}.")
        self.keep, self.grow, self.density, self.allocation = keep, grow, density, allocation
        self.every, self.until, self.begin = every, until, begin
        self.needs_gradient = any(map(reads_gradient, (keep, grow, allocation)))
        self.accumulators = accumulators_of(keep) + accumulators_of(grow) + accumulators_of(allocation)
        self.masked_only = _grows_by_accumulator(grow)

    def due(self, step: int) -> bool:
        if not self.begin < step <= self.until:
            return False
        if self.every is None:
            return self.density(step) != self.density(step - 1)
        return step % self.every == 0 or step == self.until

    def update(self, views: Mapping[str, LayerView], step: int) -> Mapping[str, torch.Tensor]:
        target, before = self.density(step), self.density(max(0, step - (self.every or 1)))
        total = sum(view.weights for view in views.values())
        now = sum(view.density * view.weights for view in views.values()) / total
        # rounding to whole units leaves the total this far from a target: no reason to turn round
        rounding = sum(view.weights / view.units for view in views.values()) / 2 / total
        if target > before or (target == before and target > now + rounding):
            # every layer gets the same share of what it lacks: none can be asked for more than it has
            share = max(0.0, target - now) / max(1 - now, 1e-12)
            shares = {name: view.density + share * (1 - view.density) for name, view in views.items()}
        else:
            shares = share_out(self.allocation, views, target)
        counts = {name: view.pattern.count(view.units, shares[name]) for name, view in views.items()}
        if target < before and target >= now:
            counts = {name: min(count, views[name].active_units) for name, count in counts.items()}
        return {name: resize(view, counts[name], self.keep, self.grow) for name, view in views.items()}


class Then(Method):
    """One method after the other: the second sees the topologies that the first has decided.

    Args:
        first: updates when it is due.
        second: updates when it is due.
    """

    def __init__(self, first: Method, second: Method) -> None:
        for method in (first, second):
            check_method(method)
        if first.hidden_decay is not None or second.hidden_decay is not None:
            raise ValueError("Then: expected methods whose inactive weights are zero, got one that trains them on.")
        self.first, self.second = first, second
        self.accumulators = first.accumulators + second.accumulators
        self.masked_only = first.masked_only or second.masked_only
        self.per_layer = first.per_layer and second.per_layer
        self.needs_gradient = first.needs_gradient or second.needs_gradient

    def due(self, step: int) -> bool:
        return self.first.due(step) or self.second.due(step)

    def update(self, views: Mapping[str, LayerView], step: int) -> Mapping[str, torch.Tensor]:
        decided: dict[str, torch.Tensor] = {}
        for method in (self.first, self.second):
            if method.due(step):
                seen = {
                    name: dataclasses.replace(view, topology=decided[name]) if name in decided else view
                    for name, view in views.items()
                }
                decided |= method.update(seen, step)
        return decided


def check_method(method: object) -> None:
    """Refuses what is no method.

    Raises:
        ValueError: says what came.
    """
    if not isinstance(method, Method):
        name = getattr(method, "__name__", "")
        came = f"{name}, which makes one. Write {name}(...)" if name else repr(method)
        raise ValueError(f"method: expected a Method such as rigl(every=100), got {came}.")


def drop_grow(
    active: torch.Tensor,
    drop_scores: torch.Tensor,
    grow_scores: torch.Tensor,
    fraction: float,
    drop_ties: torch.Tensor,
    grow_ties: torch.Tensor,
    pattern: Pattern = _ANY,
) -> torch.Tensor:
    """Moves a fraction of the active units to better places (one SET or RigL update).

    Args:
        active: bool (rows, cols), True = active unit.
        drop_scores: float32 (rows, cols). The lowest active ones go.
        grow_scores: float32 (rows, cols). The highest of all that is not kept come in, just-dropped units included.
        fraction: share of active units to move, in [0, 1].
        drop_ties: float32 (rows, cols), orders equal drop scores.
        grow_ties: float32 (rows, cols), orders equal grow scores.
        pattern: says which units may be active together; any may, when it is not given.

    Returns:
        bool (rows, cols) with as many active units as before.

    Raises:
        ValueError: shapes differ, or fraction is outside [0, 1].

    Source: Evci et al. 2020, arXiv:1911.11134, Alg. 1. Differs: ties are broken by (seed, step, layer).
    """
    if not active.shape == drop_scores.shape == grow_scores.shape:
        raise ValueError(
            f"drop_grow: expected scores of shape {tuple(active.shape)}, "
            f"got {tuple(drop_scores.shape)} and {tuple(grow_scores.shape)}."
        )
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"drop_grow: expected a fraction in [0, 1], got {fraction}.")
    count = int(active.sum())
    if count == active.numel():
        return active.clone()  # what would go comes back; and n:m has nothing between n / m and all
    moved = int(fraction * count)
    kept = pattern.choose(drop_scores.masked_fill(~active, -torch.inf), count - moved, drop_ties + active)
    return _filled(pattern, kept, grow_scores, count, grow_ties)


def resize(view: LayerView, count: int, keep: Score, grow: Score) -> torch.Tensor:
    """Drops active units of the lowest scores, or grows inactive ones of the highest, until there are `count`.

    Args:
        view: the layer.
        count: active units afterwards.
        keep: scores what to keep when units go.
        grow: scores what to grow when units come.

    Returns:
        bool (rows, cols) with `count` active units.
    """
    active = view.topology
    if count > view.active_units:
        return _filled(view.pattern, active, scored(grow, view), count, view.random("grow"))
    return view.pattern.choose(scored(keep, view).masked_fill(~active, -torch.inf), count, view.random("drop") + active)


def _filled(pattern: Pattern, kept: torch.Tensor, scores: torch.Tensor, count: int, ties: torch.Tensor) -> torch.Tensor:
    """`kept` and the units of the highest scores beside it, `count` in all."""
    # a score of +inf of somebody's own must not outrank what is kept
    scores = torch.nan_to_num(scores, nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
    return pattern.choose(scores.masked_fill(kept, torch.inf), count, ties)


def _grows_by_accumulator(grow: Score) -> str:
    """Why this growth score needs masked storage, or nothing."""
    names = ", ".join(one.name for one in accumulators_of(grow))
    return f"it grows by {names}, which inactive weights have in masked storage only" if names else ""
