"""YAML becomes a `Recipe`, or one line that says what is wrong with it, where, and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from sparsam.recipe.sections import TAGS, VERSION, Recipe

__all__ = ["RecipeError", "default_recipe", "parse_recipe", "read_recipe"]


class RecipeError(ValueError):
    """What is wrong with a recipe, in one line."""


def default_recipe(small: bool = False) -> Path:
    """The recipe of the demo, which `sparsam train` runs when it is given none.

    Args:
        small: the one for machines that multiply slowly.
    """
    return Path(str(resources.files("sparsam.recipe") / ("default_small.yaml" if small else "default.yaml")))


def read_recipe(path: Path, settings: Iterable[str] = ()) -> Recipe:
    """Reads and checks a recipe.

    Args:
        path: YAML file.
        settings: changes on top, each `section.key=value` with a YAML value, e.g. `sparsity.density=0.2`.

    Raises:
        RecipeError: it cannot be read or something in it is refused; one line with the file, the key, and what to do.
    """
    if path.is_dir():
        raise RecipeError(
            f"{path}: expected a recipe (a YAML file), got a folder. A run folder is taken up with --resume."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"{path}: expected a recipe (a YAML file), found nothing there. Check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"{path}: expected a recipe (a YAML file), it cannot be read ({_one_line(error)})."
        ) from error
    return parse_recipe(text, settings, name=path.name)


def parse_recipe(text: str, settings: Iterable[str] = (), name: str = "recipe") -> Recipe:
    """`read_recipe` for text that is already there; `name` is what messages call it."""
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{name}: expected YAML, it does not parse: {_one_line(error)}.") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{name}: expected sections like `training:` with keys below, got {_kind(values)}.")
    version = values.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        got = "none" if version is None else repr(version)
        raise RecipeError(f"{name}: expected `version: {VERSION}` in it, got {got}. Add the line.")
    if version > VERSION:
        raise RecipeError(
            f"{name}: version {version} is newer than {VERSION}, the newest that this Sparsam reads. Upgrade Sparsam."
        )
    for setting in settings:
        _set(values, setting)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        problems = [_explain(problem) for problem in error.errors()]
        raise RecipeError(f"{name}: {'; '.join(dict.fromkeys(problems))}.".replace("?.", "?")) from error


class _Loader(yaml.SafeLoader):
    """YAML without two of its traps: a key given twice is refused, and 1e-3 is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"the key '{key}' is given twice (line {node.start_mark.line + 1})")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _set(values: dict[str, Any], setting: str) -> None:
    path, equals, text = setting.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(f"--set {setting}: expected section.key=value, e.g. --set sparsity.density=0.2.")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(
            f"--set {setting}: expected a YAML value after '=', it does not parse: {_one_line(error)}."
        ) from error
    place = values
    for key in keys[:-1]:
        inner = place.setdefault(key, {})
        if not isinstance(inner, dict):
            raise RecipeError(
                f"--set {setting}: expected '{key}' to be a section, it is {inner!r}. Set '{key}' itself."
            )
        place = inner
    place[keys[-1]] = value


def _explain(problem: Mapping[str, Any]) -> str:
    """One of pydantic's errors in our words: where, what came, what to do."""
    path, section = _place([str(part) for part in problem["loc"]])
    where = ".".join(path)
    kind, given, context = problem["type"], problem.get("input"), problem.get("ctx", {})
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(path[-1], section, n=1, cutoff=0.5)
        return f"{where}: there is no such key; " + (
            f"did you mean '{near[0]}'?" if near else f"known are {', '.join(section)}"
        )
    if kind == "value_error":
        return f"{where}: {_one_line(context['error'])}".removeprefix(": ")
    if kind in ("literal_error", "union_tag_invalid"):
        known = re.findall(r"'([^']+)'", context.get("expected") or context["expected_tags"])
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
    message = (
        problem["msg"].removeprefix("Input should be ").replace("a valid ", "a ").replace("a integer", "a whole number")
    )
    message = message.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return f"{where}: expected {message}, got {given!r}"


def _place(location: list[str]) -> tuple[list[str], list[str]]:
    """Follows pydantic's error location: the path as a reader knows it (no union tags), and the keys known there."""
    models = [Recipe]
    path: list[str] = []
    for part in location:
        if part in TAGS:
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


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


def _one_line(error: object) -> str:
    return " ".join(str(error).split()).rstrip(".")
