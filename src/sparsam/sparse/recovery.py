"""Staged recovery of a pruned model: fine-tune it sparse at a low rate, grow it back little by little, finish dense."""

from __future__ import annotations

from sparsam.schedules import Schedule
from sparsam.sparse.methods import Resize
from sparsam.sparse.scores import Score, gradient, magnitude

__all__ = ["recovery", "recovery_rate"]


def recovery(
    density: float, fine_tune: int, every: int, until: int, regrow: float = 0.005, grow: Score = gradient
) -> Resize:
    """The method of a staged recovery, for a model in masked storage at `density`.

    Stage 1, up to step `fine_tune`: the topology stays. Stage 2: every `every` steps a share `regrow` of all units
    comes back, at zero, where the dense gradient is largest. Stage 3, from step `until`: all units are active.

    Args:
        density: of the model at the start, in (0, 1].
        fine_tune: steps of stage 1.
        every: steps of a period of stage 2.
        until: the first step of the dense finish.
        regrow: share of all units that comes back in a period.
        grow: scores where units come back.
    """
    if not 0.0 < density <= 1.0:
        raise ValueError(f"density: expected the density of the pruned model in (0, 1], got {density}.")
    if not 0 <= fine_tune < until:
        raise ValueError(f"until: expected a step after fine_tune = {fine_tune} >= 0, got {until}.")
    if not 0.0 < regrow <= 1.0:
        raise ValueError(f"regrow: expected a share of all units in (0, 1], got {regrow}.")
    if every < 1:
        raise ValueError(f"every: expected at least 1 step in a period, got {every}.")

    def regrown(step: int) -> float:
        if step >= until:
            return 1.0
        return min(1.0, density + regrow * max(0, (step - fine_tune) // every))

    return Resize(magnitude, regrown, None, until, grow=grow)


def recovery_rate(fine_tune: int, until: int, low: float = 0.1, warm_up: int = 0) -> Schedule:
    """Share of the learning rate over a staged recovery: low while sparse, then rising, whole in the dense finish.

    Args:
        fine_tune: steps of stage 1, which runs at `low`.
        until: step at which the rate is whole again; it rises in a line over stage 2.
        low: share of the rate in stage 1.
        warm_up: steps over which the rate rises to `low` at the very start.
    """
    if not 0 <= fine_tune < until:
        raise ValueError(f"until: expected a step after fine_tune = {fine_tune} >= 0, got {until}.")
    if not 0.0 < low <= 1.0:
        raise ValueError(f"low: expected a share of the rate in (0, 1], got {low}.")

    def share(step: int) -> float:
        if step < fine_tune:
            return low * min(1.0, (step + 1) / warm_up) if warm_up else low
        return min(1.0, low + (1 - low) * (step - fine_tune) / (until - fine_tune))

    return share
