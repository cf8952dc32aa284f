"""Writes the report of a run: report.html for people, report.json for programs, text for the terminal."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsam.report.claims import Comparison, compare, notes
from sparsam.report.load import ReportError, RunData, load
from sparsam.report.sentence import sentence
from sparsam.report.tables import COMPARISON_HEAD, LAYER_HEAD, comparison_rows, grouped_layer_rows, part_rows

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["Report", "read", "write"]

_VERSION = 1
# Columns from which a terminal has room for the reason in each line of the layer table.
_WIDE = 120


@dataclass(frozen=True)
class Report:
    """What a run has to say.

    Attributes:
        sentence: the one to quote.
        comparisons: every figure beside its twin's, with the gains that may be claimed.
        notes: what a reader must know beside them, one line each.
        html, json: the files that were written, or None.
    """

    data: RunData
    sentence: str
    comparisons: list[Comparison]
    notes: list[str]
    html: Path | None = field(default=None)
    json: Path | None = field(default=None)

    def text(self) -> str:
        """The report as plain text: figures, parts of a step, layers, notes, and the sentence last."""
        blocks = [_plain_table(COMPARISON_HEAD, comparison_rows(self.comparisons))]
        parts = part_rows(self.data)
        if parts:
            blocks.append(_plain_table(("part of a step", "this run", "dense twin")[: len(parts[0])], parts))
        if self.data.layers:
            blocks.append(_plain_table(LAYER_HEAD, grouped_layer_rows(self.data.layers)))
        blocks.append("\n".join(self.notes))
        blocks.append(self.sentence)
        blocks += [f"Report: {path}" for path in (self.html,) if path is not None]
        return "\n\n".join(block for block in blocks if block)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The same for a terminal with colours: ``rich.print(report)``."""
        from rich.padding import Padding
        from rich.panel import Panel
        from rich.text import Text

        items: list[Any] = [_rich_table(COMPARISON_HEAD, comparison_rows(self.comparisons), title="Figures", gain=3)]
        parts = part_rows(self.data)
        if parts:
            head = ("part of a step", "this run", "dense twin")[: len(parts[0])]
            items.append(_rich_table(head, parts, title="Where the time of a step goes"))
        if self.data.layers:
            items += self._rich_layers(options.max_width)
        items += [Padding(Text(line, style="dim"), (0, 1)) for line in self.notes]
        items.append(Panel(Text(self.sentence, style="bold"), border_style="green"))
        if self.html is not None:
            items.append(Padding(Text(f"Report: {self.html}"), (0, 1)))
        yield from items

    def _rich_layers(self, width: int) -> list[Any]:
        from rich.padding import Padding
        from rich.text import Text

        rows = grouped_layer_rows(self.data.layers)
        if width >= _WIDE:
            return [_rich_table(LAYER_HEAD, rows, title="Layers")]
        # The reasons would squeeze the numbers: they follow the table, each once.
        reasons: dict[str, list[str]] = {}
        for name, *_, reason in rows:
            reasons.setdefault(reason, []).append(name)
        table = _rich_table(LAYER_HEAD[:-1], [row[:-1] for row in rows], title="Layers")
        lines = [
            Padding(Text(f"{', '.join(names)}: {reason}", style="dim"), (0, 1)) for reason, names in reasons.items()
        ]
        return [table, *lines, ""]

    def to_json(self) -> dict[str, Any]:
        """Plain data: everything that the page shows except its plots, whose data is in metrics.jsonl."""
        run = self.data
        sides = {"sparse": run.sparse} | ({} if run.dense is None else {"dense": run.dense})
        return {
            "version": _VERSION,
            "sentence": self.sentence,
            "twin": run.twin,
            "finished": run.sparse.finished,
            "steps": {name: side.steps for name, side in sides.items()},
            "comparisons": [row.to_json() for row in self.comparisons],
            "notes": self.notes,
            "figures": {name: {key: f.to_json() for key, f in side.figures.items()} for name, side in sides.items()},
            "step_parts": {
                name: {key: f.to_json() for key, f in side.breakdown.items()} for name, side in sides.items()
            },
            "phases": {name: {key: f.to_json() for key, f in side.phases.items()} for name, side in sides.items()},
            "layers": [
                {
                    "name": layer.name,
                    "kind": layer.kind,
                    "shape": list(layer.shape),
                    "storage": layer.storage,
                    "sparsity": 1 - layer.density,
                    "reason": layer.reason,
                    "compact_ms": layer.compact_ms,
                    "dense_ms": layer.dense_ms,
                }
                for layer in run.layers
            ],
            "formats": run.formats,
            "sparsity": {
                "sparse_layers": 1 - run.table["density"] if "density" in run.table else None,
                "all_parameters": 1 - run.table["density_all"] if "density_all" in run.table else None,
            },
            "environment": run.environment,
            "recipe": run.recipe,
        }


def read(folder: str | Path) -> Report:
    """The report of a run folder, without writing anything.

    Raises:
        ReportError: see `write`.
    """
    run = load(Path(folder))
    comparisons = compare(run)
    return Report(run, sentence(run, comparisons), comparisons, notes(run))


def write(folder: str | Path) -> Report:
    """Reads a run folder and writes report.html and report.json into it.

    Works on a run that is not finished too; what it has not measured yet is left out and said.

    Args:
        folder: what `sparsam train` wrote.

    Returns:
        the report, to print.

    Raises:
        ReportError: no run there, nothing trained yet, a damaged file, or the folder cannot be written; one line.
    """
    from sparsam.report.figures import all_figures
    from sparsam.report.page import render

    folder = Path(folder)
    report = read(folder)
    page = render(
        report.data,
        report.sentence,
        report.comparisons,
        report.notes,
        all_figures(report.data),
        time.strftime("%Y-%m-%d %H:%M"),
    )
    html, data = folder / "report.html", folder / "report.json"
    _write(html, page)
    _write(data, json.dumps(report.to_json(), indent=1))
    return Report(report.data, report.sentence, report.comparisons, report.notes, html, data)


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.partial")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as problem:
        draft.unlink(missing_ok=True)
        raise ReportError(
            f"{path}: expected to write the report, got: {problem.strerror}. Free the way and report again."
        ) from None


def _plain_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *rows)
    ]
    return "\n".join(lines)


def _rich_table(head: Sequence[str], rows: Sequence[Sequence[str]], title: str, gain: int | None = None) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, text in enumerate(head):
        numeric = all(row[place][:1] in "0123456789–" for row in rows)
        table.add_column(
            text, justify="right" if numeric and place else "left", style="green" if place == gain else None
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
