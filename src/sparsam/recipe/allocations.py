"""The allocations of a recipe, and the scores that it calls by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, Tag

from sparsam.recipe.section import Typed, typed
from sparsam.sparse import allocation, scores
from sparsam.sparse.allocation import Allocation
from sparsam.sparse.scores import Score

__all__ = ["SCORES", "AnyAllocation", "BySensitivity", "Global", "ScoreName", "Shared"]

ScoreName = Literal["magnitude", "mest", "gradient", "taylor", "fisher", "movement", "momentum", "random"]
SizeName = Literal["magnitude", "mest", "gradient", "taylor", "fisher", "momentum"]
SCORES: Mapping[str, Score] = {
    "magnitude": scores.magnitude,
    "gradient": scores.gradient,
    "mest": scores.mest,
    "taylor": scores.taylor,
    "fisher": scores.fisher,
    "movement": scores.movement,
    "momentum": scores.momentum,
    "random": scores.random,
}


class Shared(Typed):
    """Shared out by shapes alone: the same density everywhere, or more of it where a layer is small."""

    type: Literal["uniform", "erdos_renyi"] = "uniform"

    def build(self) -> Allocation:
        return allocation.uniform if self.type == "uniform" else allocation.erdos_renyi


class Global(Typed):
    """All units of all layers compete by one score."""

    type: Literal["global"] = "global"
    score: ScoreName = "magnitude"
    floor: float = Field(0.1, ge=0, le=1)

    def build(self) -> Allocation:
        return allocation.global_(SCORES[self.score], self.floor)


class BySensitivity(Typed):
    """Layers whose weights matter more keep more of them; the score is one that measures size."""

    type: Literal["by_sensitivity"] = "by_sensitivity"
    score: SizeName = "taylor"
    power: float = Field(0.5, ge=0)
    floor: float = Field(0.1, ge=0, le=1)

    def build(self) -> Allocation:
        return allocation.by_sensitivity(SCORES[self.score], self.power, self.floor)


AnyAllocation = Annotated[
    Annotated[Shared, Tag("uniform")]
    | Annotated[Shared, Tag("erdos_renyi")]
    | Annotated[Global, Tag("global")]
    | Annotated[BySensitivity, Tag("by_sensitivity")],
    typed("uniform"),
]
