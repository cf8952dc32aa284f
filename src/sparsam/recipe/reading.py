"""YAML becomes a `Recipe`, or one line that says what is wrong with it, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from sparsam.recipe.sections import TAGS, VERSION, Recipe
from sparsam.strict_yaml import Loader, explained, kind_of, one_line

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
        raise RecipeError(f"{path}: expected a recipe (a YAML file), it cannot be read ({one_line(error)}).") from error
    return parse_recipe(text, settings, name=path.name)


def parse_recipe(text: str, settings: Iterable[str] = (), name: str = "recipe") -> Recipe:
    """`read_recipe` for text that is already there; `name` is what messages call it."""
    try:
        values = yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{name}: expected YAML, it does not parse: {one_line(error)}.") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{name}: expected sections like `training:` with keys below, got {kind_of(values)}.")
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
        raise RecipeError(f"{name}: {explained(error, Recipe, TAGS)}.".replace("?.", "?")) from error


def _set(values: dict[str, Any], setting: str) -> None:
    path, equals, text = setting.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(f"--set {setting}: expected section.key=value, e.g. --set sparsity.density=0.2.")
    try:
        value = yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise RecipeError(
            f"--set {setting}: expected a YAML value after '=', it does not parse: {one_line(error)}."
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
