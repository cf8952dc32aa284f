"""The patterns of a recipe: which weights live and die together."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, Tag, model_validator

from sparsam.recipe.section import Typed, typed
from sparsam.sparse.patterns import NM, Block, Neuron, Pattern, Unstructured

__all__ = ["AnyPattern", "BlockPattern", "NMPattern", "NeuronPattern", "UnstructuredPattern"]


class BlockPattern(Typed):
    """Whole blocks of weights live and die together."""

    type: Literal["block"] = "block"
    rows: int = Field(32, ge=1, le=256)
    cols: int = Field(32, ge=1, le=256)

    @property
    def text(self) -> str:
        return f"blocks of {self.rows} × {self.cols}"

    def build(self) -> Pattern:
        return Block(self.rows, self.cols)


class UnstructuredPattern(Typed):
    """Single weights live and die. Fewer FLOPs on paper, the same time."""

    type: Literal["unstructured"] = "unstructured"

    @property
    def text(self) -> str:
        return "single weights"

    def build(self) -> Pattern:
        return Unstructured()


class NMPattern(Typed):
    """At most n weights of m neighbours along the input. Fewer FLOPs on paper, the same time."""

    type: Literal["nm"] = "nm"
    n: int = Field(2, ge=1)
    m: int = Field(4, ge=2, le=256)

    @model_validator(mode="after")
    def _n_fits_into_m(self) -> Self:
        if self.n >= self.m:
            raise ValueError(f"expected n smaller than m, got {self.n}:{self.m}")
        return self

    @property
    def text(self) -> str:
        return f"{self.n} of {self.m} neighbours"

    @property
    def density(self) -> float:
        """The most that its groups can hold, short of all."""
        return self.n / self.m

    def build(self) -> Pattern:
        return NM(self.n, self.m)


class NeuronPattern(Typed):
    """Whole outputs live and die: rows of a linear layer. Fewer FLOPs on paper, the same time."""

    type: Literal["neuron"] = "neuron"

    @property
    def text(self) -> str:
        return "whole outputs"

    def build(self) -> Pattern:
        return Neuron()


AnyPattern = Annotated[
    Annotated[BlockPattern, Tag("block")]
    | Annotated[UnstructuredPattern, Tag("unstructured")]
    | Annotated[NMPattern, Tag("nm")]
    | Annotated[NeuronPattern, Tag("neuron")],
    typed("block"),
]
