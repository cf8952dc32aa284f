"""The section `distillation` of a recipe: which model teaches, and how much what it says counts."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field

from sparsam.recipe.section import Strict

__all__ = ["DistillationSection"]


class DistillationSection(Strict):
    """Adds `weight` times the soft targets of a teacher to the loss: a run folder, or a Hugging Face model folder."""

    teacher: str
    weight: float = Field(0.5, gt=0)
    temperature: float = Field(2.0, gt=0)

    @property
    def folder(self) -> Path:
        return Path(self.teacher).expanduser()

    def resolved(self) -> Self:
        """The same with an absolute path."""
        return self.model_copy(update={"teacher": str(self.folder.resolve())})
