"""What MODEL on a command line means: a recipe, or what gives one."""

from __future__ import annotations

import json
import re
from pathlib import Path

from sparsam.recipe import Recipe, default_recipe, read_recipe

__all__ = ["recipe_of"]


def recipe_of(model: Path | None, settings: list[str]) -> Recipe:
    """The recipe that goes with a MODEL.

    Args:
        model: a Hugging Face model folder or `gpt:LAYERSxWIDTH` (the default recipe with that model), a run folder (its
            own recipe), a recipe; None for the default recipe.
        settings: changes on top, `section.key=value`.

    Raises:
        ValueError: it is none of these; one line.
    """
    if model is None:
        return read_recipe(default_recipe(), settings)
    if str(model).startswith("gpt:"):
        return read_recipe(default_recipe(), [f"model={json.dumps(_gpt(str(model)))}", *settings])
    if (model / "config.json").is_file():
        return read_recipe(default_recipe(), [f"model={json.dumps(str(model))}", *settings])
    return read_recipe(model / "recipe.yaml" if (model / "recipe.yaml").is_file() else model, settings)


def _gpt(text: str) -> dict[str, int]:
    sizes = re.fullmatch(r"gpt:(\d+)x(\d+)", text)
    if sizes is None:
        raise ValueError(f"{text}: expected gpt:LAYERSxWIDTH, e.g. gpt:6x512. Other GPTs go into a recipe.")
    layers, width = (int(size) for size in sizes.groups())
    # heads of 64 features where they divide the width, as is usual
    return {"layers": layers, "width": width, "heads": width // 64 if width and width % 64 == 0 else 1}
