"""How the command line looks: its console, its tables, and the bars of a training."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import NoReturn

from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sparsam.report.tables import LAYER_HEAD, grouped_layer_rows
from sparsam.sparse.table import SparsityTable
from sparsam.train import Progress

__all__ = ["Bars", "Stopped", "console", "fail", "facts", "layer_table", "plain_table"]

_RECENT = 20  # steps over which speed is shown
_LINES = 10  # progress lines of a training whose output is not a terminal


class Stopped(Exception):
    """The user stopped it; the message says how to go on."""


def console(quiet: bool = False) -> Console:
    """Standard output, made anew each time so that redirection in between is seen; a quiet one prints nothing."""
    return Console(highlight=False, soft_wrap=False, quiet=quiet)


def fail(message: str, status: int = 1) -> NoReturn:
    """One line on stderr, and out."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[red]error[/] {escape(message)}")
    sys.exit(status)


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and what there is to say of each, without any lines."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, escape(text))
    return table


def plain_table(head: Iterable[str], rows: Iterable[Iterable[str]], right: Iterable[str] = ()) -> Table:
    """A table with a rule under its head; columns named in `right` hold numbers."""
    head, numbers = list(head), set(right)
    last = head[-1]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="dim", show_edge=False)
    for name in head:
        # Only the last column, which holds prose, may break.
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold", no_wrap=name != last)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


def layer_table(sparsity: SparsityTable) -> Table:
    """What was done with each layer and why; layers that differ only in their number share a line."""
    return plain_table(LAYER_HEAD, grouped_layer_rows(sparsity.rows), right=LAYER_HEAD[3:-1])


class Bars:
    """The progress of a training and of its twin: bars on a terminal, now and then a line elsewhere.

    Args:
        screen: where to.
        steps: of the whole training.
        notes: name of the training ("sparse", "dense twin") -> what to say at its side.
    """

    def __init__(self, screen: Console, steps: int, notes: dict[str, str]) -> None:
        self._screen, self._steps = screen, steps
        self._tracks = {name: _Track(note) for name, note in notes.items()}
        self._live = Live(console=screen, auto_refresh=False, transient=False) if screen.is_terminal else None
        self._drawn = 0.0

    def show(self, name: str, progress: Progress) -> None:
        """Takes one step in."""
        track = self._tracks[name]
        track.take(progress)
        if self._live is not None:
            if time.monotonic() - self._drawn > 0.1 or progress.step == self._steps:
                self._live.update(self._table(), refresh=True)
                self._drawn = time.monotonic()
        elif progress.step * _LINES // self._steps > track.told:
            track.told = progress.step * _LINES // self._steps
            self._screen.print(f"{name}  {progress.step}/{self._steps}  " + "  ".join(track.cells(self._steps)))

    def note(self, text: str) -> None:
        """A line above the bars."""
        self._screen.print(f"[yellow]note[/] {escape(text)}")

    def __enter__(self) -> Bars:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()

    def _table(self) -> Table:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, track in self._tracks.items():
            bar = ProgressBar(total=self._steps, completed=track.step, width=26)
            cells = [Text(cell) for cell in track.cells(self._steps)]
            table.add_row(Text(name, style="bold"), bar, Text(f"{track.step}/{self._steps}", style="dim"), *cells)
        return table


class _Track:
    """One training's numbers for the screen."""

    def __init__(self, note: str) -> None:
        self.note, self.step, self.loss, self.told = note, 0, float("nan"), 0
        self.speeds: deque[float] = deque(maxlen=_RECENT)
        self._times: deque[tuple[int, float]] = deque(maxlen=_RECENT)

    def take(self, progress: Progress) -> None:
        self.step = progress.step
        # Smoothed a little: the loss of one batch jumps too much to be read.
        self.loss = progress.loss if self.loss != self.loss else 0.9 * self.loss + 0.1 * progress.loss
        self.speeds.append(progress.tokens_per_second)
        self._times.append((progress.step, progress.step_seconds))

    def cells(self, steps: int) -> list[str]:
        if not self.speeds:
            return ["", "", self.note, "waits"]
        left = (steps - self.step) * statistics.median(seconds for _, seconds in self._times)
        minutes, seconds = divmod(round(left), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
        return [
            f"loss {self.loss:.3f}",
            f"{statistics.median(self.speeds):,.0f} tokens/s",
            self.note,
            "done" if self.step >= steps else f"{clock} left",
        ]
