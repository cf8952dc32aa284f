"""`sparsam report`: reads a run folder, writes its report anew, and prints it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsam.cli.screen import console
from sparsam.report import write

__all__ = ["report"]


def report(
    run: Annotated[Path, typer.Argument(help="The folder that `sparsam train` wrote.", show_default=False)],
) -> None:
    """Shows what a run reached and saved; writes report.html and report.json into its folder."""
    console().print(write(run))
