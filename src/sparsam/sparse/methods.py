"""Methods: they decide the next topology of every layer. A method keeps no tensors; published ones are compositions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from sparsam.schedules import Schedule, constant, cosine
from sparsam.sparse.patterns import top_k
from sparsam.sparse.scores import Score, gradient, magnitude, random, reads_gradient
from sparsam.sparse.views import LayerView

__all__ = ["DropGrow", "Method", "drop_grow", "rigl", "set_", "static"]


class Method(ABC):
    """Decides topologies. A subclass says when it is due and what each layer's next topology is.

    Attributes:
        needs_gradient: whether updates read the dense gradient of units that do not exist.
    """

    needs_gradient: bool = False

    @abstractmethod
    def due(self, step: int) -> bool:
        """Whether topologies change after applied step `step` (the first one is 1)."""

    @abstractmethod
    def update(self, views: Mapping[str, LayerView], step: int) -> Mapping[str, torch.Tensor]:
        """Next topology (bool grid) of the layers that change."""


class _Static(Method):
    def due(self, step: int) -> bool:
        return False

    def update(self, views: Mapping[str, LayerView], step: int) -> Mapping[str, torch.Tensor]:
        return {}


class DropGrow(Method):
    """Every so many steps, moves a share of each layer's active units to better places; density never changes.

    Args:
        drop: active units with the lowest of these scores go.
        grow: of all units that are not kept, those with the highest of these scores come in.
        every: applied steps between updates.
        fraction: share of active units to move, a schedule of the applied step.
        until: last step at which topologies change, or None.
    """

    def __init__(self, drop: Score, grow: Score, every: int, fraction: Schedule, until: int | None = None) -> None:
        if every < 1:
            raise ValueError(f"every: expected at least 1 step between updates, got {every}.")
        self.drop, self.grow = drop, grow
        self.every, self.fraction, self.until = every, fraction, until
        self.needs_gradient = reads_gradient(grow) or reads_gradient(drop)

    def due(self, step: int) -> bool:
        return step > 0 and step % self.every == 0 and (self.until is None or step <= self.until)

    def update(self, views: Mapping[str, LayerView], step: int) -> Mapping[str, torch.Tensor]:
        fraction = self.fraction(step)
        return {
            name: drop_grow(
                view.topology, self.drop(view), self.grow(view), fraction, view.random("drop"), view.random("grow")
            )
            for name, view in views.items()
        }


def drop_grow(
    active: torch.Tensor,
    drop_scores: torch.Tensor,
    grow_scores: torch.Tensor,
    fraction: float,
    drop_ties: torch.Tensor,
    grow_ties: torch.Tensor,
) -> torch.Tensor:
    """Moves a fraction of the active units to better places (one SET or RigL update).

    Args:
        active: bool (rows, cols), True = active unit.
        drop_scores: float32 (rows, cols). The lowest active ones go.
        grow_scores: float32 (rows, cols). The highest of all that is not kept come in, just-dropped units included.
        fraction: share of active units to move, in [0, 1].
        drop_ties: float32 (rows, cols), orders equal drop scores.
        grow_ties: float32 (rows, cols), orders equal grow scores.

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
    moved = int(fraction * count)
    kept = top_k(drop_scores.masked_fill(~active, -torch.inf), count - moved, drop_ties + active)
    grown = top_k(grow_scores.masked_fill(kept, -torch.inf), moved, grow_ties - kept.float())
    return kept | grown


def static() -> Method:
    """The first topology stays."""
    return _Static()


def set_(every: int = 100, fraction: float = 0.3, until: int | None = None) -> DropGrow:
    """SET: drop the smallest magnitudes, grow at random. `fraction` is annealed to 0 at step `until`, if given.

    Source: Mocanu et al. 2018, arXiv:1707.04780.
    """
    return DropGrow(magnitude, random, every, _annealed(fraction, until), until)


def rigl(every: int = 100, fraction: float = 0.3, until: int | None = None) -> DropGrow:
    """RigL: drop the smallest magnitudes, grow where the dense gradient is largest.

    Args:
        every: applied steps between updates.
        fraction: share of active units moved at the first update; cosine to 0 at step `until`, constant without it.
        until: last step that changes topologies; three quarters of the training is usual.

    Source: Evci et al. 2020, arXiv:1911.11134.
    """
    return DropGrow(magnitude, gradient, every, _annealed(fraction, until), until)


def _annealed(fraction: float, until: int | None) -> Schedule:
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction: expected a share of active units in [0, 1], got {fraction}.")
    return constant(fraction) if until is None else cosine(fraction, 0.0, steps=until)
