"""`sparsam inspect`: what would be made sparse in a model, what not, and why. Nothing is changed or trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from sparsam import measure
from sparsam.cli.screen import console, layer_table
from sparsam.recipe import default_recipe, read_recipe

__all__ = ["inspect"]


def inspect(
    model: Annotated[
        Path, typer.Argument(help="A Hugging Face model folder, a recipe, or a run folder.", show_default=False)
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change the recipe, e.g. sparsity.density=0.2.", show_default=False
        ),
    ] = None,
) -> None:
    """Shows what would be made sparse in a model, what not and why, and how fast each layer would be."""
    screen = console()
    settings = list(set_ or [])
    if (model / "config.json").is_file():
        recipe = read_recipe(default_recipe(), [f"model={json.dumps(str(model))}", *settings])
    else:
        recipe = read_recipe(model / "recipe.yaml" if (model / "recipe.yaml").is_file() else model, settings)
    if recipe.sparsity is None:
        raise ValueError(f"{model}: expected a recipe with a sparsity section, its model is dense. Set one with --set.")
    with screen.status("timing the layers, once for each shape"):
        table = recipe.sparsity.inspect(recipe.build_model(), measure.DeviceProfile(), recipe)
    screen.print(layer_table(table))
    screen.print(
        f"\n{100 * (1 - table.density):.3g} % of the sparse layers' weights would be gone, "
        f"{100 * (1 - table.density_all):.3g} % of all parameters."
    )
