"""The learning rate as a part: what the optimiser was built with, times a factor, times a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsam.schedules import Schedule, constant
from sparsam.session import Part, Session

__all__ = ["LearningRate"]


class LearningRate(Part):
    """Sets each group's learning rate before every step: its own * factor * schedule(applied steps).

    Args:
        schedule: multiplies, for example `warm_up(cosine(1.0, 0.1, steps=10_000), 200)`.
        factor: what sparse training needs below the dense rate, often 0.7 to 0.8.
    """

    def __init__(self, schedule: Schedule | None = None, factor: float = 1.0) -> None:
        if schedule is not None and not callable(schedule):
            raise ValueError(
                f"schedule: expected a function of the step, got {schedule!r}. Write LearningRate(factor={schedule!r})."
            )
        if not factor > 0:
            raise ValueError(f"factor: expected a factor of the learning rate > 0, got {factor}.")
        self.schedule = schedule or constant(1.0)
        self.factor = factor

    def attach(self, session: Session) -> None:
        self.session = session
        self.base = [float(group["lr"]) for group in session.optimizer.param_groups]

    def before_step(self) -> None:
        scale = self.factor * self.schedule(self.session.applied_steps)
        for group, base in zip(self.session.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base * scale

    def metrics(self) -> dict[str, float]:
        return {"learning_rate": float(self.session.optimizer.param_groups[0]["lr"])}

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # the optimiser's own state holds the scaled rate, which must not become the base
        self.base = [float(base) for base in state["base"]]

    def detach(self) -> None:
        for group, base in zip(self.session.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base
