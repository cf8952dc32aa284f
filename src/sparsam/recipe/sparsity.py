"""The section `sparsity` of a recipe: what is made sparse, how much, how it changes, and what does not go together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from torch import nn

from sparsam.measure.device_profile import DeviceProfile
from sparsam.recipe.allocations import AnyAllocation, BySensitivity, Global, Shared
from sparsam.recipe.density import AnyMethod, Resizing, Stages
from sparsam.recipe.methods import ACDC, MethodSection, Rewiring, step_of
from sparsam.recipe.patterns import AnyPattern, BlockPattern, NMPattern
from sparsam.recipe.section import Strict
from sparsam.schedules import stages
from sparsam.sparse.allocation import Allocation, uniform
from sparsam.sparse.methods import Method
from sparsam.sparse.patterns import Pattern
from sparsam.sparse.penalty import L1
from sparsam.sparse.sparsify import inspect, sparsify
from sparsam.sparse.table import SparsityTable

if TYPE_CHECKING:
    from sparsam.recipe.sections import Recipe

__all__ = ["ALL_SLOW", "Sparsity", "all_slow"]

ALL_SLOW = (
    "no layer is faster in blocks on this machine: all left dense; sparsity.if_slow: compact trains sparse all the same"
)
# scores that an untrained model without gradients has already
_FROM_WEIGHTS = ("magnitude", "random")


class Penalty(Strict):
    """L1, or group lasso over the pattern's units: what pulls weights to zero before they are pruned."""

    strength: float = Field(1e-4, gt=0)
    until: float = Field(1.0, gt=0, le=1)
    groups: bool = False
    dense: list[str] = Field([])

    def build(self, steps: int, pattern: Pattern) -> L1:
        """The part, for a training of so many steps; from `until` on it does nothing."""
        last = max(1, step_of(self.until, steps))
        strength = stages([(0, self.strength), (last, 0.0)])
        return L1(strength, groups=pattern if self.groups else False, dense=self.dense)


class Sparsity(Strict):
    """What is made sparse, how much, and how it changes."""

    pattern: AnyPattern = BlockPattern()
    density: float = Field(0.1, gt=0, le=1)
    method: AnyMethod = Rewiring()
    allocation: AnyAllocation | None = None  # None: the method's own way, which is uniform for most
    storage: Literal["auto", "compact", "masked"] = "auto"
    if_slow: Literal["dense", "scatter", "compact"] = "dense"
    include: list[str] = Field(["*"])
    exclude: list[str] = Field([])
    sparse_fan_in: bool | None = None  # None: for models that are not trained yet
    keep_moments: bool = False
    l1: Penalty | None = None
    lr_factor: float = Field(1.0, gt=0, le=2)

    @field_validator("allocation", mode="before")
    @classmethod
    def _by_name(cls, given: object) -> object:
        return {"type": given} if isinstance(given, str) else given

    @model_validator(mode="before")
    @classmethod
    def _groups_are_full(cls, given: Any) -> Any:
        """Without a density, n:m keeps n of m."""
        pattern = given.get("pattern") if isinstance(given, dict) else None
        if isinstance(pattern, Mapping) and str(pattern.get("type")).lower() == "nm" and "density" not in given:
            n, m = pattern.get("n", 2), pattern.get("m", 4)
            if isinstance(n, int) and isinstance(m, int) and 0 < n < m:
                return {**given, "density": n / m}
        return given

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if isinstance(self.pattern, NMPattern):
            self._fits_into_groups(self.pattern)
        if self.storage == "compact":
            self._fits_into_compact()
        if self.keep_moments and self._stored_compact:
            raise ValueError(
                "keep_moments needs masked storage, where a unit has a place of its own; use storage masked, or "
                "keep_moments false"
            )
        if isinstance(self.allocation, Global | BySensitivity):
            self._can_be_shared_out(self.allocation)
        return self

    def check(self, steps: int) -> None:
        """Refuses what cannot work in a training of so many steps.

        Raises:
            ValueError: one line with the keys that do not go together.
        """
        self.method.check(steps, self.density)

    @property
    def starts_masked(self) -> bool:
        """Whether layers begin in masked storage, for another reason than that they cannot be compact."""
        return self.storage == "masked" or (
            self.storage == "auto" and (self.method.changes_density or bool(self._why_masked))
        )

    def compact_at(self, steps: int) -> int | None:
        """The step after which blocks become compact once, or lose their dead slots; None: they never do."""
        method: MethodSection = self.method
        fixed = self.storage == "masked" or not method.changes_density or method.end(self.density) == 1
        if fixed or not isinstance(self.pattern, BlockPattern):
            return None
        last = method.last(steps, self.density)
        return last if last < steps else None

    def build_method(self, steps: int) -> Method:
        """The method for a training of so many steps."""
        return self.method.build(steps, self.density, self._shares)

    def apply(self, model: nn.Module, profile: DeviceProfile, recipe: Recipe) -> SparsityTable:
        """Makes the model sparse as this section of `recipe` says; the table of what was done.

        A table of dense layers alone is the answer where every eligible layer measures slower in blocks.

        Raises:
            ValueError: no layer is eligible, for another reason than its speed.
        """
        found = self.inspect(model, profile, recipe)
        if all_slow(found):
            return found
        fan_in = not recipe.starts_trained if self.sparse_fan_in is None else self.sparse_fan_in
        start = self.method.start(self.density)
        # where density moves between layers, each has room for all of its units
        headroom = 1 / start if self.method.changes_density else 0.0
        pattern, options = self.pattern.build(), self._options(profile, recipe)
        return self._explained(
            sparsify(model, pattern, start, sparse_fan_in=fan_in, headroom=headroom, **options), recipe
        )

    def inspect(self, model: nn.Module, profile: DeviceProfile, recipe: Recipe) -> SparsityTable:
        """The table that `apply` would give; the model stays as it is."""
        start, options = self.method.start(self.density), self._options(profile, recipe)
        return self._explained(inspect(model, self.pattern.build(), start, **options), recipe)

    @property
    def _why_masked(self) -> str:
        """Why the method needs masked storage, or nothing; the length of the training does not matter for it."""
        return self.method.build(1000, self.density).masked_only

    @property
    def _shares(self) -> Allocation | None:
        if self.allocation is not None:
            return self.allocation.build()
        return uniform if isinstance(self.pattern, NMPattern) else None

    @property
    def _stored_compact(self) -> bool:
        """Whether blocks are compact while the method changes the topology."""
        return isinstance(self.pattern, BlockPattern) and not self.starts_masked

    def _options(self, profile: DeviceProfile, recipe: Recipe) -> dict[str, Any]:
        training = recipe.training
        # a method that changes density shares it out by itself, from the first update on
        first = uniform if self.method.changes_density else self._shares or uniform
        asked = self.method.changes_density and self.storage == "compact"
        return {
            "include": self.include,
            "exclude": self.exclude,
            "allocation": first,
            "storage": "masked" if self.starts_masked else self.storage,
            "profile": profile,
            "tokens": training.batch * training.context,
            "format": recipe.format,
            "if_slow": "compact" if asked else self.if_slow,  # there is no density yet to time it at
            "seed": training.seed,
        }

    def _explained(self, table: SparsityTable, recipe: Recipe) -> SparsityTable:
        """Says of masked blocks what will become of them."""
        step = self.compact_at(recipe.training.steps)
        if step is None:
            return table
        where = " where that is faster" if self.if_slow == "dense" else ""
        reason = f"masked until step {step}, then compact{where}"
        return dataclasses.replace(
            table,
            rows=tuple(
                dataclasses.replace(row, reason=reason)
                if row.storage == "masked" and row.reason == "asked for" and row.kind in ("Linear", "ActivatedLinear")
                else row
                for row in table.rows
            ),
        )

    def _can_be_shared_out(self, allocation: Global | BySensitivity) -> None:
        if allocation.score not in _FROM_WEIGHTS and not self.method.changes_density:
            raise ValueError(
                f"allocation.score {allocation.score} needs gradients, and method {self.method.type} shares density "
                f"out before the first step; use score {_FROM_WEIGHTS[0]}, or a method that changes density"
            )

    def _fits_into_compact(self) -> None:
        method: MethodSection = self.method
        if not isinstance(self.pattern, BlockPattern):
            raise ValueError(
                f"storage compact needs pattern block, got {self.pattern.type}; use storage masked or pattern block"
            )
        if method.grows(self.density):
            raise ValueError(
                f"storage compact has no place for what method {method.type} grows; use storage auto or masked"
            )
        if self._why_masked:
            raise ValueError(
                f"storage compact does not go with method {method.type}: {self._why_masked}; use storage masked"
            )

    def _fits_into_groups(self, pattern: NMPattern) -> None:
        method: MethodSection = self.method
        if self.density > pattern.density:
            raise ValueError(
                f"pattern nm holds {pattern.n} of {pattern.m}, density {self.density:g} is more; "
                f"use density {pattern.density:g}"
            )
        if self.allocation is not None and self.allocation != Shared(type="uniform"):
            raise ValueError(
                f"pattern nm has the same density in every layer, got allocation {self.allocation.type}; "
                "use allocation uniform"
            )
        levels = method.schedule.levels(self.density) if isinstance(method, Resizing) else [1.0]
        steps_only = (
            isinstance(method, Resizing) and isinstance(method.schedule, Stages) and not method.schedule.limit_rate
        )
        held = all(level == 1 or level <= pattern.density for level in levels)
        if method.changes_density and not isinstance(method, ACDC) and not (steps_only and held):
            raise ValueError(
                f"pattern nm holds {pattern.n} of {pattern.m} or all, and method {method.type} passes through what is "
                "between; use method sr_ste, ac_dc, rigl, set or static"
            )


def all_slow(table: SparsityTable) -> bool:
    """Whether no layer is sparse, and some are dense only because their blocks measured slower."""
    timed = any(row.compact_ms is not None and row.dense_ms is not None for row in table.rows)
    return timed and all(row.storage == "dense" for row in table.rows)
