"""`sparsam export`: the model of a run, as files for whoever uses it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from sparsam.cli.screen import console, facts
from sparsam.compress.quantise import quantise
from sparsam.deploy.storage import save
from sparsam.recipe import read_recipe
from sparsam.run import Run, RunError
from sparsam.stored_model import trained_model

__all__ = ["export"]

_TARGETS = ("sparsam",)
_FORMATS = ("fp32", "bf16", "int8", "int4")


def export(
    run: Annotated[Path, typer.Argument(help="The folder that `sparsam train` wrote.", show_default=False)],
    to: Annotated[str, typer.Option("--to", help="What to write: sparsam (safetensors and JSON).")] = "sparsam",
    format: Annotated[
        str,
        typer.Option(help="Of the weights: fp32, bf16; int8 or int4 for linear layers, the rest as it was trained."),
    ] = "fp32",
    group: Annotated[int, typer.Option(help="Weights that share a scale, for int4.")] = 16,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where to. None: RUN/export/TO-FORMAT.", show_default=False),
    ] = None,
) -> None:
    """Writes the model of a run's newest checkpoint, without its optimiser, as files that any program can read."""
    if to not in _TARGETS:
        raise ValueError(f"--to: expected {' or '.join(_TARGETS)}, got {to!r}. Other targets are not written yet.")
    if format not in _FORMATS:
        raise ValueError(f"--format: expected one of {', '.join(_FORMATS)}, got {format!r}.")
    folder = run / "export" / f"{to}-{format}" if out is None else out
    screen = console()
    _ = Run(run).recipe  # says that it is no run folder
    recipe = read_recipe(run / "recipe.yaml")
    found = trained_model(run, recipe)
    if found is None:
        raise RunError(f"{run}: expected a run with a checkpoint, found none. Train it first.")
    model, step = found
    done: dict[str, str] = {}
    match format:
        case "bf16":
            model.bfloat16()
        case "fp32":
            model.float()
        case _:
            done = quantise(model, format, group=group)  # type: ignore[arg-type]
    size = save(model, folder, texts={"recipe.yaml": recipe.yaml()})
    parameters = sum(one.numel() for one in recipe.build_model().parameters())
    what = [f"{count} {kind}" for kind, count in Counter(done.values()).items()]
    screen.print(
        facts(
            [
                ("model", f"{run}, step {step}"),
                ("linear layers", ", ".join(what) if what else f"in {format}"),
                ("size", f"{size / 1e6:,.2f} MB; dense in fp32 {4 * parameters / 1e6:,.2f} MB"),
            ]
        )
    )
    screen.print(f"Export: {folder}", soft_wrap=True)
