"""`sparsam train`: reads a recipe, trains it and its dense twin in turns, and reports.

On several ranks every one of them comes through here, started by torchrun or by `--ranks`; rank 0 speaks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape

from sparsam import __version__, measure
from sparsam.cli.screen import Bars, Stopped, console, facts
from sparsam.kernels.ops import backend
from sparsam.launch import launch
from sparsam.measure.doctor import REFERENCE
from sparsam.ranks import ALONE, Ranks, joined, restarts
from sparsam.recipe import Recipe, default_recipe, parse_recipe, read_recipe
from sparsam.report import write as write_report
from sparsam.run import Run, RunError
from sparsam.tasks.language import Task
from sparsam.train import Interrupted, Training
from sparsam.train import train as run_training
from sparsam.twin import TwinProcess

__all__ = ["train"]

_SPARSE, _DENSE, _TWIN = "sparse", "dense", "dense twin"
# Two cores with AMX reach 1000e9 and more in bf16; with AVX-512 alone 170e9, and 310e9 in fp32: there the usual demo
# would take a quarter of an hour.
_SLOW_FLOPS_PER_SECOND = 450e9
_TIMEOUT_SECONDS = 60.0  # for ranks whose recipe cannot be read to say so together


def train(
    recipe: Annotated[
        Path | None, typer.Argument(help="YAML file. None: a GPT on Python's standard library.", show_default=False)
    ] = None,
    data: Annotated[Path | None, typer.Option(help="A text file, or a folder of them.", show_default=False)] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run. [default: runs/DATE-TIME]", show_default=False)
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.", show_default=False)] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change the recipe, e.g. sparsity.density=0.2.", show_default=False
        ),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run folder.", show_default=False)] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Processes on this machine that share each batch, as torchrun's.", show_default=False),
    ] = None,
    again: Annotated[
        int, typer.Option("--restarts", min=0, help="With --ranks: start again after a failure, so often.")
    ] = 0,
) -> None:
    """Trains a model block-sparse, and its dense twin on the same batches; reports what was saved."""
    started = "WORLD_SIZE" in os.environ
    if started and (ranks or again):
        raise ValueError("--ranks: expected alone, got torchrun's ranks too. Leave --ranks and --restarts to torchrun.")
    if again and (ranks or 1) == 1:
        raise ValueError("--restarts: expected with --ranks N of at least 2. Add --ranks, or go on with --resume.")
    if started and recipe is None and resume is None and os.environ["WORLD_SIZE"] != "1":
        raise ValueError("RECIPE: expected one on several ranks, got none. Give a recipe, or use --ranks for the demo.")
    if resume is not None:
        given = {"RECIPE": recipe, "--data": data, "--out": out, "--steps": steps, "--set": set_}
        if refused := [name for name, value in given.items() if value]:
            raise ValueError(f"--resume keeps the recipe of its run: expected it alone, got {', '.join(refused)} too.")
        folder: Path = resume
        _over_ranks(ranks, again, lambda: _recipe_of(folder), lambda chosen, joined: Run.open(folder, joined))
        return
    settings = list(set_ or [])
    if data is not None:
        settings.append(f"data.path={json.dumps(str(data))}")
    if steps is not None:
        settings.append(f"training.steps={steps}")
    if recipe is None:
        recipe, own = _demo()
        settings = [*own, *settings]
    path: Path = recipe
    _over_ranks(ranks, again, lambda: read_recipe(path, settings).resolved(), partial(_new_run, out))


def _recipe_of(folder: Path) -> Recipe:
    return parse_recipe(Run(folder).recipe, name=str(folder / "recipe.yaml"))


def _new_run(out: Path | None, recipe: Recipe, ranks: Ranks) -> Run:
    """A folder for the run; the one from before, where torchrun starts again what failed."""
    if out is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        raise ValueError("--out: expected with torchrun's --max-restarts, so that a restart finds the run. Name one.")
    folder = Path(ranks.of_first(str(out or _new_folder())))
    begun = (folder / "recipe.yaml").is_file() and Run(folder).recipe == recipe.yaml()
    if ranks.of_first(bool(restarts()) and begun):
        return Run.open(folder, ranks)
    return Run.create(folder, recipe.yaml(), ranks)


def _over_ranks(
    count: int | None, again: int, read: Callable[[], Recipe], folder: Callable[[Recipe, Ranks], Run]
) -> None:
    """Trains in this process, which may be one of torchrun's, or starts so many and waits for them.

    Args:
        count, again: of --ranks and --restarts.
        read: reads the recipe.
        folder: makes or opens the run folder.
    """
    chosen: Recipe | ValueError | RunError
    try:
        chosen = read()
        task = chosen.over(count or 1).task()  # before there is a folder: what is refused leaves nothing behind
    except (ValueError, RunError) as error:
        chosen = error
    if isinstance(chosen, Recipe) and (count or 1) > 1:
        with folder(chosen, ALONE) as run:
            pass
        _launch(run, count or 1, again)
        return
    with joined(chosen.training.timeout_seconds if isinstance(chosen, Recipe) else _TIMEOUT_SECONDS) as ranks:
        with ranks.together():
            if not isinstance(chosen, Recipe):
                raise chosen
            chosen.over(ranks.size)
        with folder(chosen, ranks) as run:
            _train(chosen, run, task)


def _launch(run: Run, ranks: int, again: int) -> None:
    """Starts the ranks, all of which take up the run: the first time from its beginning."""
    status = launch(["train", "--resume", str(run.folder)], ranks, again, f"{run.resume_command} --ranks {ranks}")
    if status == 1 and not run.holds_training:  # refused by the model or the layers, before the first step
        shutil.rmtree(run.folder, ignore_errors=True)
    if status:
        raise SystemExit(status)


@measure.flush_subnormals()
def _demo() -> tuple[Path, list[str]]:
    """The recipe of the demo that this machine gets through in minutes, and the format that it multiplies fastest."""
    speeds = {
        "bf16": measure.dense_flops_per_second(torch.bfloat16),
        "fp32": measure.dense_flops_per_second(torch.float32),
    }
    format = max(speeds, key=speeds.__getitem__)
    small = speeds[format] < _SLOW_FLOPS_PER_SECOND
    if small:
        console().print(
            f"This machine multiplies {format} fastest, at {speeds[format] / 1e9:.0f} GFLOP/s: the demo trains in it, "
            "with a model of width 256 instead of 512, for 180 steps.\n",
            soft_wrap=True,
        )
    return default_recipe(small), [] if format == "bf16" else ["precision=fp32"]


@measure.flush_subnormals()
def _train(recipe: Recipe, run: Run, task: Task | None = None) -> None:
    ranks = run.ranks
    screen = console(quiet=not ranks.first)
    screen.print(f"[bold]sparsam[/] {__version__}\n")
    notes: list[str] = []
    try:
        training = Training(recipe, run, notes.append, task)
    except ValueError:  # refused by the model or the layers, before the first step
        if not run.holds_training and ranks.size == 1:  # several may be started again, in this folder
            shutil.rmtree(run.folder, ignore_errors=True)
        raise
    if restarts():
        notes.insert(0, f"started again after a failure ({restarts()} times so far), from step {training.step}")
    screen.print(facts(_about(training)))
    screen.print()
    name = _SPARSE if recipe.sparsity is not None else _DENSE
    kinds = {name: _how_sparse(training) or "dense"}
    if recipe.twin != "none":
        kinds[_TWIN] = "dense" if recipe.twin == "full" else "sampled"
    with Bars(screen, recipe.training.steps, kinds) as bars, _interruptible() as stop:
        for note in notes:
            bars.note(note)
        try:
            with ExitStack() as stack:
                twin = None
                if recipe.twin != "none":
                    twin = stack.enter_context(TwinProcess(run.folder, partial(bars.show, _TWIN), bars.note))
                    stop.forward = twin.interrupt
                run_training(training, partial(bars.show, name), stop, twin)
            interrupted = False
        except Interrupted:
            interrupted = True
        except KeyboardInterrupt:
            raise Stopped(f"stopped at once. Go on from the last checkpoint with: {run.resume_command}") from None
    screen.print()
    if interrupted:
        screen.print(f"Stopped after step {training.step} of {recipe.training.steps}; all of it is saved. Go on with:")
        screen.print(f"\n  {escape(run.resume_command)}\n", soft_wrap=True)
        raise SystemExit(130)
    if ranks.first:
        screen.print(write_report(run.folder))


def _about(training: Training) -> Iterator[tuple[str, str]]:
    """What is about to be trained, in a few lines."""
    recipe, machine = training.recipe, measure.describe()
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    yield "text", str(training.corpus)
    yield "model", f"{training.task.model_name} · {parameters / 1e6:.3g} M parameters"
    if training.table is not None and recipe.sparsity is not None:
        sparse = [row for row in training.table.rows if row.storage != "dense"]
        method = recipe.sparsity.method.text(recipe.training.steps, recipe.sparsity.density)
        matrices = f"{len(sparse)} of {len(training.table.rows)} matrices"
        # a method that changes density says by itself how much
        share = "" if recipe.sparsity.method.changes_density else f"{100 * (1 - training.table.density):.3g} % of "
        yield "sparse", f"{share}{matrices} · {recipe.sparsity.pattern.text} · {method}"
    yield (
        "machine",
        f"{machine['cpu']} · {machine['threads']} threads · {machine['isa']} kernels · {recipe.precision}",
    )
    if training.ranks.size > 1:
        batch, machines = recipe.training.batch, training.ranks.size // training.ranks.local
        where = "" if machines == 1 else f" on {machines} machines"
        yield "ranks", f"{training.ranks.size}{where} · {batch // training.ranks.size} of {batch} sequences each"
    yield "run", f"{training.run.folder}" + (f" · from step {training.step}" if training.step else "")
    if machine["warning"]:
        yield "warning", str(machine["warning"])
    if backend() == "reference":
        yield "kernels", REFERENCE


def _how_sparse(training: Training) -> str:
    """For the side of the bar: how sparse the model is, or becomes; nothing when it is dense."""
    section, table = training.recipe.sparsity, training.table
    if section is None or table is None or all(row.storage == "dense" for row in table.rows):
        return ""
    if section.method.changes_density:
        levels = section.method.start(section.density), section.method.end(section.density)
        return " to ".join(f"{100 * (1 - level):.3g} %" for level in levels) + " sparse"
    return f"{100 * (1 - table.density):.3g} % sparse"


class _Stop:
    """Whether Ctrl-C was pressed. Pressed again, it stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self.forward: Callable[[], None] = lambda: None

    def __call__(self) -> bool:
        return self.asked

    def on_signal(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.forward()


@contextmanager
def _interruptible() -> Iterator[_Stop]:
    """SIGINT and SIGTERM let the step in hand end, and the state be saved."""
    stop = _Stop()
    before = {number: signal.signal(number, stop.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _new_folder() -> Path:
    base = Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")
    folder, number = base, 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder
