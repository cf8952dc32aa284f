"""What every section of a recipe is: strict, unchangeable, and where there are several types, chosen by `type:`."""

from __future__ import annotations

from typing import Any

from pydantic import Discriminator, field_validator

from sparsam.strict_yaml import Strict

__all__ = ["Strict", "Typed", "typed"]


class Typed(Strict):
    """A section that says of which type it is, in upper or lower case as its name is usually written."""

    @field_validator("type", mode="before", check_fields=False)
    @classmethod
    def _in_any_case(cls, given: object) -> object:
        return _lower(given)


def typed(default: str) -> Discriminator:
    """Chooses between sections by their `type:`, or by the default where none is given."""
    return Discriminator(
        lambda value: _lower(value.get("type", default)) if isinstance(value, dict) else getattr(value, "type", default)
    )


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value
