"""How files that people write are read: strict YAML, strict sections, and one line for whatever is wrong with them.

Recipes and clusters are read so. Not for files that Sparsam writes for itself, which are JSON.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

__all__ = ["Loader", "Strict", "explained", "kind_of", "one_line"]


_MERGE = "tag:yaml.org,2002:merge"


class Strict(BaseModel):
    """A section: no unknown keys, no silent conversions, no infinite numbers, no changes after reading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Loader(yaml.SafeLoader):
    """YAML without two of its traps: a key given twice is refused, and 1e-3 is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # what is merged (<<) is no key, and may be given anew
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != _MERGE]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key '{key}' is given twice (line {node.start_mark.line + 1})")
        return super().construct_mapping(node, deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def explained(error: ValidationError, root: type[BaseModel], tags: Collection[str] = ()) -> str:
    """All of pydantic's errors in our words: where, what came, what to do; without a full stop.

    Args:
        error: what the model said.
        root: the model.
        tags: names that pydantic puts into the place of an error, and that no reader has written.
    """
    problems = (_explain(dict(problem), root, tags) for problem in error.errors())
    return "; ".join(dict.fromkeys(problems))


def kind_of(value: object) -> str:
    """What came instead of sections."""
    return "nothing" if value is None else type(value).__name__


def one_line(error: object) -> str:
    """A message without line breaks and without its full stop."""
    return " ".join(str(error).split()).rstrip(".")


def _explain(problem: Mapping[str, Any], root: type[BaseModel], tags: Collection[str]) -> str:
    path, section = _place([str(part) for part in problem["loc"]], root, tags)
    where = ".".join(path)
    kind, given, context = problem["type"], problem.get("input"), problem.get("ctx", {})
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], section, n=1, cutoff=0.5)
        return f"{where}: there is no such key; " + (
            f"did you mean '{near[0]}'?" if near else f"known are {', '.join(section)}"
        )
    if kind == "value_error":
        return f"{where}: {one_line(context['error'])}".removeprefix(": ")
    if kind in ("literal_error", "union_tag_invalid"):
        expected = context.get("expected") or context["expected_tags"]
        known = re.findall(r"'([^']+)'", expected) or [expected]
        known = [name for name in known if name != "format"]  # what a bare name is called inside
        value = given.get("type") if isinstance(given, dict) else given
        near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.5)
        return f"{where}: expected {' or '.join(known)}, got {value!r}" + (
            f"; did you mean '{near[0]}'?" if near else ""
        )
    if kind == "model_type":
        return f"{where}: expected a section with keys {', '.join(section)}, got {given!r}"
    if kind == "too_short":
        return f"{where}: expected at least {context['min_length']} in the list, got {context['actual_length']}"
    if kind == "missing":
        return f"{where}: expected this key, it is missing"
    message = (
        problem["msg"].removeprefix("Input should be ").replace("a valid ", "a ").replace("a integer", "a whole number")
    )
    message = message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return f"{where}: expected {message}, got {given!r}"


def _place(location: list[str], root: type[BaseModel], tags: Collection[str]) -> tuple[list[str], list[str]]:
    """Follows pydantic's error location: the path as a reader knows it (no union tags), and the keys known there."""
    models: list[type[Any]] = [root]
    path: list[str] = []
    for part in location:
        if part in tags:
            models = [model for model in models if part in _types(model)] or models
            continue
        path.append(part)
        inner = [
            found
            for model in models
            if part in model.model_fields
            for found in _models(model.model_fields[part].annotation)
        ]
        models = inner or models
    return path, list(dict.fromkeys(field for model in models for field in model.model_fields))


def _models(annotation: Any) -> list[type[Any]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _types(model: type[BaseModel]) -> tuple[Any, ...]:
    field = model.model_fields.get("type")
    return get_args(field.annotation) if field is not None else ()
