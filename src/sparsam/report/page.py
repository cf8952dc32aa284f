"""Writes a report as one HTML file that needs nothing else: style, plots and plotly itself are inside.

Not for deciding anything: what is claimed comes from claims.py, what is drawn from figures.py.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from plotly.offline import get_plotlyjs

from sparsam.report.claims import Comparison, sparsity
from sparsam.report.figures import part_colour
from sparsam.report.formats import PRODUCTS, height
from sparsam.report.load import RunData
from sparsam.report.tables import COMPARISON_HEAD, LAYER_HEAD, comparison_rows, layer_rows, part_rows

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["render"]

# Figures that get a tile, in this order, and how a gain in them is said.
_TILES = {
    "tokens_per_second": ("Training speed", "as fast", "as fast"),
    "validation_loss": ("Validation loss", "", ""),
    "time_to_twin": ("Time to the twin's final loss", "sooner", "later"),
    "training_bytes": ("Parameters + gradients + optimiser", "smaller", "larger"),
    "training_flops": ("Operations of the training", "fewer", "more"),
    "flops_per_step": ("Operations per step", "fewer", "more"),
    "peak_rss_bytes": ("Peak memory", "smaller", "larger"),
}
_PLOTS = {
    "loss_by_time": "Validation loss over time",
    "loss_by_step": "Loss over steps",
    "speed": "Tokens per second",
    "rewires": "Units moved by each rewire",
    "topology": "Units active now and at some time",
}
# A grid of blocks, a few of them there: the mark of the house.
_BLOCKS = ((0, 0), (2, 0), (1, 1), (3, 1), (0, 2), (3, 2), (1, 3), (2, 3))


def render(
    run: RunData,
    sentence: str,
    comparisons: list[Comparison],
    notes: list[str],
    figures: dict[str, go.Figure],
    written: str,
) -> str:
    """The whole page.

    Args:
        run: the run folder's content.
        sentence, comparisons, notes: what is said.
        figures: what is drawn, by name.
        written: date and time, as text.

    Returns:
        HTML, opens offline.
    """
    parts = {
        "title": f"{html.escape(run.folder.resolve().name)} · sparsam report",
        "style": _resource("page.css"),
        "logo": "".join(
            f'<rect x="{6 * x + 0.5}" y="{6 * y + 0.5}" width="5" height="5" rx="1.2"/>' for x, y in _BLOCKS
        ),
        "name": html.escape(run.folder.resolve().name),
        "sentence": _emphasised(sentence),
        "chips": "".join(f'<span class="chip">{html.escape(text)}</span>' for text in _chips(run)),
        "tiles": "".join(_tile(row, run) for row in _tiled(comparisons)),
        "notes": _notes(notes),
        "plots": _plots(list(figures)),
        "tables": _tables(run, comparisons),
        "footer": html.escape(
            f"Written by sparsam {run.environment.get('sparsam', '')} on {written}. Every figure is marked: "
            "measured by a clock or a counter, modelled from shapes, or estimated from something measured."
        ),
        "plotly": get_plotlyjs().replace("</script", "<\\/script"),
        "data": _json({name: json.loads(figure.to_json()) for name, figure in figures.items()}),
        "script": _resource("page.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _resource("page.html"))


def _chips(run: RunData) -> list[str]:
    chips = []
    share = sparsity(run)
    if share is not None:
        chips.append(f"{100 * share:.3g} % sparse")
    section = run.recipe.get("sparsity")
    method = section.get("method") if isinstance(section, dict) else None
    name = method.get("type") if isinstance(method, dict) else method
    if name:
        chips.append(f"method {name}")
    chips.append(f"{run.sparse.steps:,} steps")
    if "parameters" in run.sparse.figures:
        chips.append(f"{run.sparse.figures['parameters'].value:,.0f} parameters kept")
    chips.append({"none": "no dense twin", "sampled": "dense twin sampled", "full": "dense twin in full"}[run.twin])
    isa = run.environment.get("isa")
    if isa:
        chips.append(f"kernels: {isa}")
    return chips


def _tiled(comparisons: list[Comparison]) -> list[Comparison]:
    rows = {row.name: row for row in comparisons}
    if "training_flops" in rows:
        rows.pop("flops_per_step", None)  # one tile for operations
    return [rows[name] for name in _TILES if name in rows]


def _tile(row: Comparison, run: RunData) -> str:
    label, better, worse = _TILES[row.name]
    figure = row.gain or row.sparse
    if figure is None:
        return ""
    if row.gain is not None:
        ahead = row.gain.value >= 1
        times = row.gain.value if ahead or better == worse else 1 / row.gain.value
        big = f"{times:.2f}x<small>{better if ahead else worse}</small>"
        css = "tile gain" if ahead else "tile"
    else:
        number, _, unit = figure.text.partition(" ")
        big, css = f"{html.escape(number)}<small>{html.escape(unit).replace('/', '/<wbr>')}</small>", "tile"
    alone = "no dense twin" if run.dense is None else "not compared"
    below = []
    if row.gain is not None and row.sparse is not None:
        below.append(row.sparse.text)
    if row.dense is not None:
        below.append(f"{'against' if below else 'dense twin'} {row.dense.text}")
    return (
        f'<div class="{css}"><div class="label">{html.escape(label)}</div><div class="big">{big}</div>'
        f'<div class="sub">{html.escape(" ".join(below)) or alone}</div>{_badge(figure.kind)}</div>'
    )


def _badge(kind: str) -> str:
    return f'<span class="kind {html.escape(kind)}">{html.escape(kind)}</span>'


def _notes(notes: list[str]) -> str:
    if not notes:
        return ""
    return f'<section class="notes">{"".join(f"<p>{html.escape(line)}</p>" for line in notes)}</section>'


def _plots(names: Sequence[str]) -> str:
    shown = [name for name in _PLOTS if name in names]
    cards = []
    for place, name in enumerate(shown):
        # The last of an odd number gets the whole row.
        alone = place == len(shown) - 1 and len(shown) % 2 == 1
        cards.append(
            f'<div class="card{" wide" if alone else ""}"><h3>{_PLOTS[name]}</h3>{_plot(name, _PLOTS[name])}</div>'
        )
    return f'<section class="block grid">{"".join(cards)}</section>' if cards else ""


def _plot(name: str, title: str, css: str = "plot") -> str:
    return f'<div class="{css}" id="plot-{name}" role="img" aria-label="{html.escape(title)}"></div>'


def _tables(run: RunData, comparisons: list[Comparison]) -> str:
    blocks = [_comparison_block(comparisons)]
    if run.sparse.breakdown:
        blocks.append(_parts_block(run))
    if run.layers:
        blocks.append(_layers_block(run))
    if run.by_product:
        blocks.append(_formats_block(run))
    blocks.append(_details(run))
    return "\n".join(blocks)


def _comparison_block(comparisons: list[Comparison]) -> str:
    rows = []
    for label, ours, theirs, gain, kinds in comparison_rows(comparisons):
        css = "key inner" if label.startswith("of which") else "key"
        numbers = (_cell(ours, "num"), _cell(theirs, "num"), _cell(gain, "num gain"))
        rows.append([_cell(label, css), *numbers, f"<td>{_badges(kinds)}</td>"])
    lead = "A gain of 2x is half the time, half the bytes, or twice the speed."
    return _block("All figures", lead, COMPARISON_HEAD, rows, css="compare")


def _parts_block(run: RunData) -> str:
    parts = part_rows(run)
    rows = []
    for name, *values in parts:
        swatch = f'<span class="swatch" style="background:{part_colour(name)}"></span>'
        rows.append([f'<td class="key">{swatch}{html.escape(name)}</td>', *(_cell(text, "num") for text in values)])
    lead = "Measured under the profiler, which slows a step by some per cent: read the shares."
    head = ("part of a step", "this run", "dense twin")[: len(parts[0])]
    title = "Where the time of a step goes"
    return _block(title, lead, head, rows, _plot("step_parts", title, "plot bars"))


def _formats_block(run: RunData) -> str:
    rows = [
        [
            _cell(row["name"], "key"),
            *(_cell(row[product], "") for product in PRODUCTS),
            f"<td>{_badge(row['arithmetic'])}</td>",
            _cell(row["reason"], "why"),
        ]
        for row in run.formats
    ]
    lead = "The formats at the end, and above them how they came about. A simulated one saves no time."
    head = ("layer", *(product.replace("_", " ") for product in PRODUCTS), "arithmetic", "why")
    picture = _plot("formats", "Number formats").replace(" role=", f' style="height:{height(run)}px" role=')
    return _block("Number formats", lead, head, rows, picture)


def _layers_block(run: RunData) -> str:
    rows = []
    for layer, texts in zip(run.layers, layer_rows(run.layers), strict=True):
        name, shape, storage, share, *numbers, ratio, why = texts
        bar = f'<span class="bar" aria-hidden="true"><i style="width:{100 * (1 - layer.density):.0f}%"></i></span>'
        rows.append(
            [
                _cell(name, "key"),
                _cell(shape, "num"),
                _cell(storage),
                f'<td class="num">{bar if layer.sparse else ""}{html.escape(share)}</td>',
                *(_cell(text, "num") for text in numbers),
                _cell(ratio, "num gain" if layer.storage == "compact" else "num"),
                _cell(why, "why"),
            ]
        )
    lead = (
        "Before training, each product was timed alone on this machine, forward and backward, block-sparse and dense."
    )
    return _block("Layers", lead, LAYER_HEAD, rows)


def _block(title: str, lead: str, head: Sequence[str], rows: list[list[str]], above: str = "", css: str = "") -> str:
    numeric = [' class="num"' if 'class="num' in cell else "" for cell in rows[0]] if rows else [""] * len(head)
    heads = "".join(f"<th{css}>{html.escape(text)}</th>" for text, css in zip(head, numeric, strict=True))
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (
        f'<section class="block"><h2>{html.escape(title)}</h2><p class="lead">{html.escape(lead)}</p>'
        f'<div class="card table {css}">{above}<div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></div></section>"
    )


def _details(run: RunData) -> str:
    phases = [
        [_cell(name, "key"), _cell(figure.text, "num"), f"<td>{_badge(figure.kind)}</td>"]
        for name, figure in run.sparse.phases.items()
    ]
    blocks = []
    if phases:
        body = "".join(f"<tr>{''.join(row)}</tr>" for row in phases)
        blocks.append(f"<details><summary>Phases of a step</summary><table><tbody>{body}</tbody></table></details>")
    if run.environment:
        lines = "".join(
            f"<tr>{_cell(str(name), 'key')}{_cell(_plain(value))}</tr>"
            for name, value in run.environment.items()
            if value is not None
        )
        blocks.append(
            f"<details><summary>Machine and software</summary><table><tbody>{lines}</tbody></table></details>"
        )
    if run.recipe_text:
        blocks.append(f"<details><summary>Recipe</summary><pre>{html.escape(run.recipe_text)}</pre></details>")
    return f'<section class="block">{"".join(blocks)}</section>' if blocks else ""


def _cell(text: str, css: str = "") -> str:
    return f'<td class="{css}">{html.escape(text)}</td>' if css else f"<td>{html.escape(text)}</td>"


def _badges(kinds: str) -> str:
    return " ".join(_badge(kind) for kind in kinds.split(", ") if kind)


def _emphasised(sentence: str) -> str:
    """The sentence with its ratios and shares set off."""
    return re.sub(r"(\d[\d.,]*(?:x\b| %| of the twin&#x27;s time))", r"<b>\1</b>", html.escape(sentence))


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _json(value: Any) -> str:
    # "</script>" inside a string would end the element that holds the data.
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _resource(name: str) -> str:
    return resources.files("sparsam.report").joinpath(name).read_text(encoding="utf-8")
