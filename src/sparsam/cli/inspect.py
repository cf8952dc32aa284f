"""`sparsam inspect`: what is or would be made sparse in a model, what not, and why; a picture of its topologies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from sparsam import checkpoint, measure
from sparsam.cli.model import recipe_of
from sparsam.cli.screen import console, layer_table
from sparsam.recipe import Recipe
from sparsam.recipe.storage import current, restored
from sparsam.report.topology import Pictures, check_picture, write_picture
from sparsam.sparse.table import SparsityTable
from sparsam.sparse.weights import sparse_weights

__all__ = ["inspect"]


def inspect(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A Hugging Face model folder, gpt:LAYERSxWIDTH, a recipe, or a run folder. None: the default recipe.",
            show_default=False,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change the recipe, e.g. sparsity.density=0.2.", show_default=False
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write all topologies, larger, as .svg or .html.", show_default=False),
    ] = None,
) -> None:
    """Shows what is or would be made sparse in a model, what not and why, how fast each layer would be, and where the
    units are: as the newest checkpoint of a run has them, or as a training would begin."""
    if picture is not None:
        check_picture(picture)
    screen = console()
    recipe = recipe_of(model, list(set_ or []))
    if recipe.sparsity is None:
        raise ValueError(f"{model}: expected a recipe with a sparsity section, its model is dense. Set one with --set.")
    state = None if model is None or set_ else _newest_state(model)
    with screen.status("timing the layers, once for each shape"):
        network, table = _built(recipe, state)
    screen.print(layer_table(table))
    screen.print(
        f"\nSparsity: {100 * (1 - table.density):.3g} % of the sparse layers' weights, "
        f"{100 * (1 - table.density_all):.3g} % of all parameters."
    )
    if state is None and recipe.sparsity.method.changes_density:
        method = recipe.sparsity.method.text(recipe.training.steps, recipe.sparsity.density)
        screen.print(f"That is at the start; {method}.")
    topologies = {name: weight.topology for name, weight in sparse_weights(network).items()}
    if topologies:
        screen.print(Pictures(topologies))
    if picture is not None:
        if not topologies:
            raise ValueError(f"{picture}: expected a sparse layer to draw, found none. The table says why.")
        when = "first topology" if state is None else f"topology after step {state['run']['step']}"
        write_picture(picture, topologies, f"{'default recipe' if model is None else model.resolve().name}: {when}")
        screen.print(f"Picture: {picture}", soft_wrap=True)


def _newest_state(run: Path) -> dict[str, Any] | None:
    """Model and timings of the newest checkpoint; reads only, for a training may be going on."""
    folders = sorted((run / "checkpoints").glob("step-*"))
    return checkpoint.read(folders[-1], groups=("model", "run")) if folders else None


def _built(recipe: Recipe, state: dict[str, Any] | None) -> tuple[nn.Module, SparsityTable]:
    assert recipe.sparsity is not None
    network = recipe.build_model()
    if state is None:
        profile = measure.DeviceProfile()
        return network, recipe.sparsity.apply(network, profile, recipe)
    profile = measure.DeviceProfile.from_json(state["run"]["profile"])
    begun = recipe.sparsity.apply(network, profile, recipe)
    table = restored(begun, network, state["run"].get("compact"), state["model"], profile, recipe)
    assert table is not None
    return network, current(table, network)
