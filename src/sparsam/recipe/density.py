"""The methods of a recipe that follow a density schedule of one's own: resize and recovery."""

from __future__ import annotations

import itertools
from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag, field_validator

from sparsam.recipe.allocations import SCORES, ScoreName
from sparsam.recipe.methods import (
    ACDC,
    GMP,
    DropAndGrow,
    GraNet,
    MethodSection,
    Rewiring,
    Static,
    StraightThrough,
    TaylorPruning,
    check_span,
    percent_sparse,
    step_of,
)
from sparsam.recipe.section import Typed, typed
from sparsam.schedules import Schedule, cosine, cubic, limit_rate, linear, stages
from sparsam.sparse.allocation import Allocation, uniform
from sparsam.sparse.methods import DropGrow, Method, Resize, Then
from sparsam.sparse.recovery import recovery, recovery_rate

__all__ = ["AnyMethod", "AnySchedule", "Ramp", "Recovery", "Resizing", "Stages"]


class Ramp(Typed):
    """Density moves from `initial` to that of the recipe along a curve."""

    type: Literal["cosine", "cubic", "linear"] = "cosine"
    initial: float = Field(1.0, gt=0, le=1)
    begin: float = Field(0.0, ge=0, lt=1)
    until: float = Field(0.75, gt=0, le=1)
    limit_rate: float | None = Field(None, gt=0)

    def start(self) -> float:
        return self.initial

    def last(self, steps: int) -> int:
        return max(1, step_of(self.until, steps))

    def levels(self, density: float) -> list[float]:
        return [self.initial, density]

    def build(self, steps: int, density: float) -> Schedule:
        begin, last = step_of(self.begin, steps), self.last(steps)
        make = {"cosine": cosine, "cubic": cubic, "linear": linear}[self.type]
        return _limited(make(self.initial, density, steps=last - begin, begin=begin), self.limit_rate)

    def check(self, steps: int, density: float) -> None:
        check_span("resize", self.begin, self.until, steps)


class Stages(Typed):
    """Density stays for a while at each of some values: pairs of a share of the training and the density from there."""

    type: Literal["stages"] = "stages"
    values: list[list[float]] = Field([[0.0, 1.0], [0.5, 0.1]], min_length=2)
    limit_rate: float | None = Field(None, gt=0)

    @field_validator("values")
    @classmethod
    def _rising_pairs(cls, values: list[list[float]]) -> list[list[float]]:
        for pair in values:
            if len(pair) != 2 or not 0 <= pair[0] <= 1 or not 0 < pair[1] <= 1:
                raise ValueError(f"expected pairs of a share of the training and a density, both up to 1, got {pair}")
        shares = [share for share, _ in values]
        if shares[0] != 0 or any(later <= earlier for earlier, later in itertools.pairwise(shares)):
            raise ValueError(f"expected rising shares of the training that begin with 0, got {shares}")
        return values

    def start(self) -> float:
        return self.values[0][1]

    def last(self, steps: int) -> int:
        reached = step_of(self.values[-1][0], steps)
        if self.limit_rate is None:
            return reached
        schedule, end = self.build(steps, self.values[-1][1]), self.values[-1][1]
        return next((step for step in range(reached, steps + 1) if schedule(step) == end), steps)

    def levels(self, density: float) -> list[float]:
        return [level for _, level in self.values]

    def build(self, steps: int, density: float) -> Schedule:
        return _limited(stages([(step_of(share, steps), level) for share, level in self.values]), self.limit_rate)

    def check(self, steps: int, density: float) -> None:
        if density != self.values[-1][1]:
            raise ValueError(
                f"method.schedule ends at density {self.values[-1][1]:g}, sparsity.density is {density:g}; "
                "make them equal"
            )
        begins = [step_of(share, steps) for share, _ in self.values]
        if len(set(begins)) < len(begins):
            raise ValueError(
                f"method.schedule has stages of less than one step of training.steps {steps}; "
                "leave some out or train longer"
            )


AnySchedule = Annotated[
    Annotated[Ramp, Tag("cosine")]
    | Annotated[Ramp, Tag("cubic")]
    | Annotated[Ramp, Tag("linear")]
    | Annotated[Stages, Tag("stages")],
    typed("cosine"),
]


class Resizing(MethodSection):
    """Follows a density schedule; beside it, units may move as RigL's do."""

    changes_density: ClassVar[bool] = True
    type: Literal["resize"] = "resize"
    schedule: AnySchedule = Ramp()
    keep: ScoreName = "magnitude"
    grow: ScoreName = "gradient"
    every: int | None = Field(None, ge=1)  # None: 100, and with stages whenever the schedule's value changes
    fraction: float = Field(0.0, ge=0, le=1)

    def start(self, density: float) -> float:
        return self.schedule.start()

    def last(self, steps: int, density: float) -> int:
        return self.schedule.last(steps)

    def grows(self, density: float) -> bool:
        levels = self.schedule.levels(density)
        return any(later > earlier for earlier, later in itertools.pairwise(levels))

    def check(self, steps: int, density: float) -> None:
        self.schedule.check(steps, density)
        if self.fraction and self.every is None and isinstance(self.schedule, Stages):
            raise ValueError("method.fraction moves units every so many steps; set method.every, or fraction 0")
        last = self.last(steps, density)
        if (reached := self.schedule.build(steps, density)(last)) != density:
            raise ValueError(
                f"method.schedule with limit_rate {self.schedule.limit_rate} comes to density {reached:.3g} by step "
                f"{last}, short of sparsity.density {density:g}; use a larger limit_rate or a later until"
            )

    def text(self, steps: int, density: float = 1.0) -> str:
        levels = " to ".join(percent_sparse(level) for level in self.schedule.levels(density))
        moves = f", moves units by {self.grow}" if self.fraction else ""
        last = self.last(steps, density)
        return f"{levels} sparse ({self.schedule.type}) until step {last}, keeps by {self.keep}{moves}"

    def build(self, steps: int, density: float = 1.0, allocation: Allocation | None = None) -> Method:
        last, schedule = self.last(steps, density), self.schedule.build(steps, density)
        every = self.every if self.every or isinstance(self.schedule, Stages) else 100
        begin = step_of(self.schedule.begin, steps) if isinstance(self.schedule, Ramp) else 0
        keep, grow = SCORES[self.keep], SCORES[self.grow]
        resize = Resize(keep, schedule, every, last, begin, allocation or uniform, grow)
        if not self.fraction:
            return resize
        assert every is not None
        moved = cosine(self.fraction, 0.0, steps=last)
        return Then(resize, DropGrow(keep, grow, every, moved, last))


class Recovery(MethodSection):
    """Staged recovery of a pruned model: sparse at a low rate, growing back little by little, dense at the end."""

    changes_density: ClassVar[bool] = True
    type: Literal["recovery"] = "recovery"
    prune: float = Field(0.0, ge=0, lt=1)
    fine_tune: float = Field(0.3, ge=0, lt=1)
    every: int = Field(100, ge=1)
    regrow: float = Field(0.005, gt=0, le=1)
    until: float = Field(0.8, gt=0, lt=1)
    grow: ScoreName = "gradient"
    low_rate: float = Field(0.1, gt=0, le=1)

    def start(self, density: float) -> float:
        return 1.0 if self.prune else density

    def end(self, density: float) -> float:
        return 1.0

    def last(self, steps: int, density: float) -> int:
        return step_of(self.until, steps)

    def grows(self, density: float) -> bool:
        return True

    def check(self, steps: int, density: float) -> None:
        if density == 1:
            raise ValueError("method recovery has nothing to grow back at density 1; use a lower density")
        stages = [step_of(share, steps) for share in (self.prune, self.fine_tune, self.until)]
        if not stages[0] <= stages[1] < stages[2] or (self.prune and not 0 < stages[0] < stages[1]):
            raise ValueError(
                f"method recovery prunes at {self.prune:g} of the training, fine-tunes until {self.fine_tune:g} and "
                f"grows until {self.until:g}: expected rising shares, a step of training.steps {steps} apart at least"
            )

    def rate(self, steps: int) -> Schedule:
        pruned = step_of(self.prune, steps)
        low = recovery_rate(step_of(self.fine_tune, steps), step_of(self.until, steps), self.low_rate)
        return lambda step: low(step) if step >= pruned else 1.0

    def text(self, steps: int, density: float = 1.0) -> str:
        prune, fine_tune, until = (step_of(share, steps) for share in (self.prune, self.fine_tune, self.until))
        return (
            f"recovery: {percent_sparse(density)} sparse from step {prune}, grows from step {fine_tune} by "
            f"{100 * self.regrow:.3g} % every {self.every} steps, dense from step {until}"
        )

    def build(self, steps: int, density: float = 1.0, allocation: Allocation | None = None) -> Method:
        pruned, until = step_of(self.prune, steps), step_of(self.until, steps)
        staged = recovery(
            density, step_of(self.fine_tune, steps), self.every, until, self.regrow, grow=SCORES[self.grow]
        )

        def levels(step: int) -> float:
            return staged.density(step) if step >= pruned else 1.0

        return Resize(staged.keep, levels, None, until, allocation=allocation or uniform, grow=staged.grow)


def _limited(schedule: Schedule, per_step: float | None) -> Schedule:
    return schedule if per_step is None else limit_rate(schedule, per_step)


AnyMethod = Annotated[
    Annotated[Static, Tag("static")]
    | Annotated[Rewiring, Tag("set")]
    | Annotated[Rewiring, Tag("rigl")]
    | Annotated[DropAndGrow, Tag("drop_grow")]
    | Annotated[GMP, Tag("gmp")]
    | Annotated[GraNet, Tag("granet")]
    | Annotated[TaylorPruning, Tag("taylor_pruning")]
    | Annotated[ACDC, Tag("ac_dc")]
    | Annotated[StraightThrough, Tag("sr_ste")]
    | Annotated[Recovery, Tag("recovery")]
    | Annotated[Resizing, Tag("resize")],
    typed("rigl"),
]
