"""The methods of a recipe at constant density, and those of the literature that change it. `density.py` has the rest.

`begin` and `until` are shares of the training, `every` and the lengths of phases are steps.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from sparsam.recipe.allocations import SCORES, ScoreName
from sparsam.recipe.section import Typed
from sparsam.schedules import Schedule, constant, cosine
from sparsam.sparse import published
from sparsam.sparse.allocation import Allocation, uniform
from sparsam.sparse.methods import DropGrow, Method, Resize

__all__ = [
    "ACDC",
    "GMP",
    "DropAndGrow",
    "GraNet",
    "MethodSection",
    "Rewiring",
    "Static",
    "StraightThrough",
    "TaylorPruning",
    "check_span",
    "percent_sparse",
    "step_of",
]


def step_of(share: float, steps: int) -> int:
    """The step at a share of the training."""
    return int(share * steps + 1e-9)  # 0.29 of 100 steps are 29


def percent_sparse(density: float) -> str:
    """A density as people are shown it."""
    return f"{100 * (1 - density):.3g} %"


class MethodSection(Typed):
    """What decides topologies.

    Attributes:
        changes_density: whether the share of active units changes during the training.
    """

    changes_density: ClassVar[bool] = False
    type: str

    def text(self, steps: int, density: float = 1.0) -> str:
        """What it does in a training of so many steps, for a person."""
        raise NotImplementedError

    def build(self, steps: int, density: float = 1.0, allocation: Allocation | None = None) -> Method:
        """The method for a training of so many steps.

        Args:
            steps: of the whole training.
            density: what the recipe calls so; where a method changes density, mostly the one at its end.
            allocation: how it shares density out when that changes; None is the method's own way.
        """
        raise NotImplementedError

    def start(self, density: float) -> float:
        """Density of the first topology."""
        return density

    def end(self, density: float) -> float:
        """Density of the last topology."""
        return density

    def last(self, steps: int, density: float) -> int:
        """The last step that can change a topology; 0 where none does."""
        method = self.build(steps, density)
        assert isinstance(method, Resize)
        return method.until

    def grows(self, density: float) -> bool:
        """Whether density rises at some step."""
        return False

    def rate(self, steps: int) -> Schedule:
        """Share of the learning rate that it wants at each step."""
        return constant(1.0)

    def check(self, steps: int, density: float) -> None:
        """Refuses what cannot work in a training of so many steps.

        Raises:
            ValueError: one line with the keys that do not go together.
        """


class Static(MethodSection):
    """The first topology is kept."""

    type: Literal["static"] = "static"

    def text(self, steps: int, density: float = 1.0) -> str:
        return "the first topology stays"

    def build(self, steps: int, density: float = 1.0, allocation: Allocation | None = None) -> Method:
        return published.static()

    def last(self, steps: int, density: float) -> int:
        return 0


class _Moving(MethodSection):
    """Moves units at constant density."""

    every: int = Field(100, ge=1)
    until: float = Field(0.75, gt=0, le=1)

    def last(self, steps: int, density: float) -> int:
        return max(1, step_of(self.until, steps))

    def check(self, steps: int, density: float) -> None:
        if density == 1:
            raise ValueError(
                f"method {self.type} has nothing to move at density 1; use method static or a lower density"
            )


class Rewiring(_Moving):
    """SET (grows at random) or RigL (grows where the dense gradient is large)."""

    type: Literal["set", "rigl"] = "rigl"
    fraction: float = Field(0.3, gt=0, le=1)

    def text(self, steps: int, density: float = 1.0) -> str:
        name = "RigL" if self.type == "rigl" else "SET"
        return f"{name} every {self.every} steps until step {self.last(steps, density)}"

    def build(self, steps: int, density: float = 1.0, allocation: Allocation | None = None) -> Method:
        make = published.rigl if self.type == "rigl" else published.set_
        return make(self.every, self.fraction, self.last(steps, density))


class DropAndGrow(_Moving):
    """Drops and grows by scores of one's choice."""

    type: Literal["drop_grow"] = "drop_grow"
    drop: ScoreName = "magnitude"
    grow: ScoreName = "gradient"
    fraction: float = Field(0.3, gt=0, le=1)

    def text(self, steps: int, density: float = 1.0) -> str:
        last = self.last(steps, density)
        return f"drops by {self.drop}, grows by {self.grow}, every {self.every} steps until step {last}"

    def build(self, steps: int, density: float = 1.0, allocation: Allocation | None = None) -> Method:
        last = self.last(steps, density)
        fraction = cosine(self.fraction, 0.0, steps=last)
        return DropGrow(SCORES[self.drop], SCORES[self.grow], self.every, fraction, last)


class StraightThrough(_Moving):
    """SR-STE: the largest weights are active, the others train on behind their zeros. Masked storage only."""

    type: Literal["sr_ste"] = "sr_ste"
    every: int = Field(1, ge=1)
    until: float = Field(1.0, gt=0, le=1)
    decay: float = Field(2e-4, ge=0)

    def text(self, steps: int, density: float = 1.0) -> str:
        return f"SR-STE every {self.every} steps until step {self.last(steps, density)}"

    def build(self, steps: int, density: float = 1.0, allocation: Allocation | None = None) -> Method:
        return published.sr_ste(self.decay, self.every, self.last(steps, density))


class _Pruning(MethodSection):
    """Becomes sparser in the course of the training."""

    changes_density: ClassVar[bool] = True

    def start(self, density: float) -> float:
        return 1.0

    def check(self, steps: int, density: float) -> None:
        if density >= self.start(density):
            raise ValueError(
                f"method {self.type} begins at density {self.start(density):g}, sparsity.density {density:g} is no "
                "less; use a lower density or method static"
            )


class _Cubic(_Pruning):
    """Density falls along a cubic."""

    every: int = Field(100, ge=1)
    begin: float = Field(0.0, ge=0, lt=1)
    until: float = Field(0.75, gt=0, le=1)
    initial: float = Field(1.0, gt=0, le=1)

    def start(self, density: float) -> float:
        return self.initial

    def last(self, steps: int, density: float) -> int:
        return max(1, step_of(self.until, steps))

    def check(self, steps: int, density: float) -> None:
        super().check(steps, density)
        check_span(self.type, self.begin, self.until, steps)

    def text(self, steps: int, density: float = 1.0) -> str:
        name = {"gmp": "GMP", "granet": "GraNet"}[self.type]
        return (
            f"{name} every {self.every} steps until step {self.last(steps, density)}, "
            f"from {percent_sparse(self.initial)} to {percent_sparse(density)} sparse"
        )


class GMP(_Cubic):
    """Gradual magnitude pruning."""

    type: Literal["gmp"] = "gmp"

    def build(self, steps: int, density: float = 1.0, allocation: Allocation | None = None) -> Method:
        begin, until = step_of(self.begin, steps), self.last(steps, density)
        return published.gmp(density, self.every, until, begin, self.initial, allocation or uniform)


class GraNet(_Cubic):
    """GMP over all layers together, and after each pruning weak units give way to promising ones."""

    type: Literal["granet"] = "granet"
    fraction: float = Field(0.3, gt=0, le=1)

    def build(self, steps: int, density: float = 1.0, allocation: Allocation | None = None) -> Method:
        begin, until = step_of(self.begin, steps), self.last(steps, density)
        return published.granet(density, self.every, until, begin, self.initial, self.fraction, allocation)


class TaylorPruning(_Pruning):
    """Every so many steps the worst share of all units goes, until the density is reached."""

    type: Literal["taylor_pruning"] = "taylor_pruning"
    every: int = Field(1000, ge=1)
    worst: float = Field(0.2, gt=0, lt=1)
    begin: float = Field(0.0, ge=0, lt=1)
    order: Literal[1, 2] = 2

    def check(self, steps: int, density: float) -> None:
        super().check(steps, density)
        if (last := self.last(steps, density)) > steps:
            raise ValueError(
                f"method taylor_pruning, every {self.every} steps, reaches density {density:g} at step {last}, after "
                f"training.steps {steps}; use a smaller every or more steps"
            )

    def text(self, steps: int, density: float = 1.0) -> str:
        order = {1: "first", 2: "second"}[self.order]
        return (
            f"Taylor pruning of {order} order every {self.every} steps until step {self.last(steps, density)}, "
            f"to {percent_sparse(density)} sparse"
        )

    def build(self, steps: int, density: float = 1.0, allocation: Allocation | None = None) -> Method:
        return published.taylor_pruning(
            density, self.every, self.worst, step_of(self.begin, steps), self.order, allocation
        )


class ACDC(_Pruning):
    """Sparse and dense phases in turns; the last one is sparse."""

    type: Literal["ac_dc"] = "ac_dc"
    dense_steps: int = Field(100, ge=1)
    sparse_steps: int = Field(100, ge=1)
    warm_up: float = Field(0.0, ge=0, lt=1)
    until: float = Field(0.75, gt=0, le=1)

    def grows(self, density: float) -> bool:
        return True

    def check(self, steps: int, density: float) -> None:
        super().check(steps, density)
        if (last := self.last(steps, density)) >= steps:
            raise ValueError(
                f"method ac_dc begins its last sparse phase at step {last}, training.steps is {steps}: the model would "
                "end dense; use shorter phases or a smaller until"
            )

    def text(self, steps: int, density: float = 1.0) -> str:
        return (
            f"AC/DC, {self.dense_steps} steps dense and {self.sparse_steps} steps {percent_sparse(density)} sparse in "
            f"turns, sparse from step {self.last(steps, density)}"
        )

    def build(self, steps: int, density: float = 1.0, allocation: Allocation | None = None) -> Method:
        return published.ac_dc(
            density,
            self.dense_steps,
            self.sparse_steps,
            step_of(self.until, steps),
            step_of(self.warm_up, steps),
            allocation,
        )


def check_span(method: str, begin: float, until: float, steps: int) -> None:
    """Refuses a span of shares that holds no step of the training."""
    if step_of(begin, steps) >= max(1, step_of(until, steps)):
        raise ValueError(
            f"method {method} begins at {begin:g} of the training and ends at {until:g}: expected until later than "
            f"begin, by a step at least of training.steps {steps}"
        )
