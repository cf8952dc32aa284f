"""The tensors in what a layer takes or gives: in tuples, lists, dicts and dataclasses, as deep as they go."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["mapped", "tensors_in"]


def mapped(value: Any, change: Callable[[Any], Any], leaf: type = Tensor) -> Any:
    """The same value with every leaf changed, in one order; of a kind that is not known it is given back as it is.

    Args:
        value: anything; named tuples, dataclasses and dicts of a class of their own stay what they are.
        change: what becomes of a leaf.
        leaf: the type of leaves.
    """
    if isinstance(value, leaf):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change, leaf) for item in value))
    if type(value) in (tuple, list):
        return type(value)(mapped(item, change, leaf) for item in value)
    same: Any
    if isinstance(value, dict):
        same = copy.copy(value)
        for key, item in value.items():
            same[key] = mapped(item, change, leaf)
        return same
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        same = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(same, field.name, mapped(getattr(value, field.name), change, leaf))
        return same
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """All of them, in the order of `mapped`."""
    found: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, add)
    return found
