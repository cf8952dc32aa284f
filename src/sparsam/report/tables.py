"""The tables of a report as rows of text: comparisons, layers, parts of a step. Looks are up to page and terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from sparsam.measure.figure import Figure
from sparsam.report.claims import Comparison
from sparsam.report.load import Layer, RunData
from sparsam.sparse.table import LayerRow

__all__ = ["COMPARISON_HEAD", "LAYER_HEAD", "comparison_rows", "grouped_layer_rows", "layer_rows", "part_rows"]

COMPARISON_HEAD = ("", "this run", "dense twin", "gain", "how known")
LAYER_HEAD = ("layer", "weight", "storage", "sparsity", "sparse ms", "dense ms", "ratio", "why")


def comparison_rows(comparisons: list[Comparison]) -> list[tuple[str, ...]]:
    """One line per figure: label, both values, gain or a dash, and how the values are known."""
    return [
        (
            row.label,
            _text(row.sparse),
            _text(row.dense),
            row.gain.text if row.gain is not None else "–",
            _kinds(row),
        )
        for row in comparisons
    ]


def layer_rows(layers: Iterable[Layer | LayerRow]) -> list[tuple[str, ...]]:
    """One line per weight matrix. Times are of its product alone; a dash where it was not timed."""
    return [
        (
            layer.name,
            " x ".join(str(size) for size in layer.shape),
            layer.storage,
            f"{100 * (1 - layer.density):.1f} %" if layer.storage != "dense" else "0 %",
            _ms(layer.compact_ms),
            _ms(layer.dense_ms),
            _layer_ratio(layer),
            layer.reason,
        )
        for layer in layers
    ]


def grouped_layer_rows(layers: Iterable[Layer | LayerRow]) -> list[tuple[str, ...]]:
    """`layer_rows` with layers that differ only in the numbers of their names in one line: ``blocks.*.mlp.up (6)``."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in layer_rows(layers):
        groups.setdefault((re.sub(r"\d+", "*", name), *rest), []).append(name)
    return [
        (names[0] if len(names) == 1 else f"{pattern} ({len(names)})", *rest)
        for (pattern, *rest), names in groups.items()
    ]


def part_rows(run: RunData) -> list[tuple[str, ...]]:
    """One line per part of a step: ms and share in this run, the same in the twin when it has them."""
    sides = [run.sparse.breakdown] + ([run.dense.breakdown] if run.dense is not None else [])
    if not run.sparse.breakdown:
        return []
    names = list(dict.fromkeys(name for side in sides for name in side))
    return [(name, *(_share(side, name) for side in sides)) for name in names]


def _share(parts: Mapping[str, Figure], name: str) -> str:
    if name not in parts:
        return "–"
    total = sum(figure.value for figure in parts.values())
    return f"{parts[name].text}, {100 * parts[name].value / total:.0f} %"


def _layer_ratio(layer: Layer | LayerRow) -> str:
    # Masked layers have no product of their own to time; their zeros are multiplied.
    if layer.storage == "masked" or layer.compact_ms is None or layer.dense_ms is None or layer.compact_ms <= 0:
        return "–"
    return f"{layer.dense_ms / layer.compact_ms:.2f}x"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _text(figure: Figure | None) -> str:
    return "–" if figure is None else figure.text


def _kinds(row: Comparison) -> str:
    kinds = dict.fromkeys(figure.kind for figure in (row.sparse, row.dense) if figure is not None)
    return ", ".join(kinds)
