"""The section `memory` of a recipe: what is recomputed in the backward instead of being kept."""

from __future__ import annotations

from pydantic import Field

from sparsam.memory.recompute import Recompute
from sparsam.recipe.section import Strict
from sparsam.session import Part

__all__ = ["Memory"]


class Memory(Strict):
    """Recomputes layers in segments of `recompute`, all of it or (`selective`) all but products and top-k."""

    recompute: int = Field(5, ge=1)
    selective: bool = False
    layers: list[str] | None = Field(None, min_length=1)

    def parts(self) -> list[Part]:
        return [Recompute(self.recompute, self.selective, self.layers)]
