"""The plots of a training, as plotly figures: shared by the static report and whatever shows a run while it goes on.

Colours and fonts of axes are left to the page, which knows whether it is light or dark; traces carry their own, chosen
to be read on both, and differ in dash as well as in colour.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import plotly.graph_objects as go

from sparsam.measure.figure import Figure
from sparsam.report.claims import smoothed_losses, time_to_twin
from sparsam.report.formats import formats_over_steps
from sparsam.report.load import RunData, Side

__all__ = [
    "DENSE",
    "SPARSE",
    "all_figures",
    "loss_by_step",
    "loss_by_time",
    "part_colour",
    "rewires",
    "speed",
    "step_parts",
    "topology",
]

SPARSE, DENSE = "#12a594", "#8d8d99"
_EVER = "#e5833a"
# Parts of a step keep their colour whatever the order of their sizes.
_PART_COLOURS = {
    "block-sparse products": "#12a594",
    "dense products": "#8d8d99",
    "attention": "#7c66dc",
    "activation": "#e5833a",
    "norms": "#d6409f",
    "optimiser": "#3e8fd6",
    "loss": "#c9a227",
    "embedding": "#6ea04b",
    "copies and casts": "#b9653b",
    "element-wise and other": "#5b8a9a",
    "scores for rewiring": "#46a758",
    "compiled code": "#60646c",
    "Python between operators": "#c4c4cc",
}
_MOST_POINTS = 800
_WINDOW = 15


def all_figures(run: RunData) -> dict[str, go.Figure]:
    """Every plot that this run has data for, name -> figure, in the order of the page."""
    makers: dict[str, Callable[[RunData], go.Figure | None]] = {
        "loss_by_time": loss_by_time,
        "loss_by_step": loss_by_step,
        "speed": speed,
        "step_parts": step_parts,
        "rewires": rewires,
        "topology": topology,
        "formats": formats_over_steps,
    }
    made = {name: make(run) for name, make in makers.items()}
    return {name: figure for name, figure in made.items() if figure is not None}


def loss_by_time(run: RunData) -> go.Figure | None:
    """Validation loss of both over their own training time, with the twin's final loss as a line to cross."""
    sides = [(name, colour, dash, side) for name, colour, dash, side in _sides(run) if _has_time(side)]
    if not sides:
        return None
    longest = max(float(r["seconds"]) for *_, side in sides for r in side.evaluations)
    scale, unit = (60.0, "minutes") if longest >= 120 else (1.0, "seconds")
    figure = go.Figure()
    for name, colour, dash, side in sides:
        x = [r["seconds"] / scale for r in side.evaluations]
        y = [r["loss"] for r in side.evaluations]
        figure.add_trace(_line(x, y, name, colour, dash, mode="lines+markers"))
    reached = time_to_twin(run) if any(layer.storage == "compact" for layer in run.layers) else None
    if reached is not None and run.dense is not None:
        target, share = smoothed_losses(run.dense)[-1][1], reached[0].value / reached[1].value
        figure.add_hline(y=target, line={"color": DENSE, "width": 1, "dash": "dot"})
        figure.add_vline(x=reached[0].value / scale, line={"color": SPARSE, "width": 1, "dash": "dot"})
        figure.add_annotation(
            x=reached[0].value / scale,
            y=0.93,
            yref="paper",
            text=f"twin's final loss<br>in {share:.2f} of its time",
            showarrow=False,
            xanchor="left",
            align="left",
            xshift=6,
        )
    _layout(figure, f"training time, {unit}", f"validation loss, {_loss_unit(run)}")
    figure.update_yaxes(range=_late_losses([side for *_, side in sides]))
    return figure


def loss_by_step(run: RunData) -> go.Figure | None:
    """Training loss (smoothed) and validation loss of both over steps."""
    figure = go.Figure()
    for name, colour, dash, side in _sides(run):
        if run.twin == "sampled" and side is run.dense:
            continue  # the loss of a few steps taken apart is no curve
        steps, losses = _smoothed(side.train, "loss")
        figure.add_trace(_line(steps, losses, f"{name}, training", colour, dash, width=1, opacity=0.55))
        if side.evaluations:
            x, y = [r["step"] for r in side.evaluations], [r["loss"] for r in side.evaluations]
            figure.add_trace(_line(x, y, f"{name}, validation", colour, dash, mode="lines+markers"))
    return _layout(figure, "step", f"loss, {_loss_unit(run)}") if figure.data else None


def speed(run: RunData) -> go.Figure | None:
    """Tokens per second of both over steps, medians of neighbouring steps."""
    figure = go.Figure()
    for name, colour, dash, side in _sides(run):
        steps, speeds = _smoothed(side.train, "tokens_per_second", middle=statistics.median)
        if steps:
            sampled = run.twin == "sampled" and side is run.dense
            mode = "markers" if sampled else "lines"
            figure.add_trace(_line(steps, speeds, f"{name}, sampled" if sampled else name, colour, dash, mode=mode))
    if not figure.data:
        return None
    _layout(figure, "step", "tokens/s")
    figure.update_yaxes(rangemode="tozero")
    return figure


def step_parts(run: RunData) -> go.Figure | None:
    """Where the time of one step goes, part by part, one bar for each training."""
    parts = {name: side.breakdown for name, _, _, side in _sides(run) if side.breakdown}
    if not parts:
        return None
    order = sorted(
        {part for breakdown in parts.values() for part in breakdown},
        key=lambda part: -sum(breakdown[part].value for breakdown in parts.values() if part in breakdown),
    )
    figure = go.Figure([_bar(part, parts, part_colour(part)) for part in order])
    _layout(figure, "ms of one step, under the profiler", "")
    # The table below it, with the same colours, is its legend.
    figure.update_layout(barmode="stack", hovermode="closest", showlegend=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def part_colour(part: str) -> str:
    """The colour that a part of a step has in every plot and table."""
    return _PART_COLOURS.get(part, "#a08c7d")


def rewires(run: RunData) -> go.Figure | None:
    """Units that each rewire moved; as a share of the active ones where their number is known."""
    key = "grown" if any("grown" in r for r in run.sparse.rewires) else "moved"
    events = [r for r in run.sparse.rewires if isinstance(r.get(key), (int, float))]
    if not events:
        return None
    share = all(r.get("active") for r in events)
    values = [100 * r[key] / r["active"] if share else r[key] for r in events]
    bar = go.Bar(
        x=[r["step"] for r in events],
        y=values,
        marker={"color": SPARSE, "line": {"width": 0}},
        name="moved",
        hovertemplate="step %{x}: %{y:.4g}" + (" %" if share else " units") + "<extra></extra>",
    )
    figure = _layout(go.Figure(bar), "step", "moved, % of active" if share else "units moved")
    figure.update_layout(showlegend=False)
    return figure


def topology(run: RunData) -> go.Figure | None:
    """Share of units that are active, and that were active at some time, over steps."""
    records = [r for r in run.sparse.train if isinstance(r.get("ever_active"), (int, float)) and "sparsity" in r]
    if not records:
        return None
    stride = -(-len(records) // _MOST_POINTS)
    shown = [*records[:-1:stride], records[-1]]
    steps = [r["step"] for r in shown]
    figure = go.Figure()
    figure.add_trace(_line(steps, [100 * (1 - r["sparsity"]) for r in shown], "active", SPARSE, "solid"))
    figure.add_trace(_line(steps, [100 * r["ever_active"] for r in shown], "active at some time", _EVER, "dash"))
    if run.sparse.compact_from is not None:
        figure.add_vline(x=run.sparse.compact_from, line={"color": DENSE, "width": 1, "dash": "dot"})
        note = {"text": "blocks become compact", "showarrow": False, "xanchor": "left", "xshift": 6}
        figure.add_annotation(x=run.sparse.compact_from, y=0.93, yref="paper", **note)
    _layout(figure, "step", "units, % of all")
    figure.update_yaxes(rangemode="tozero")
    return figure


def _sides(run: RunData) -> list[tuple[str, str, str, Side]]:
    sides = [("sparse" if any(layer.sparse for layer in run.layers) else "this run", SPARSE, "solid", run.sparse)]
    if run.dense is not None:
        sides.append(("dense twin", DENSE, "dash", run.dense))
    return sides


def _late_losses(sides: list[Side]) -> list[float]:
    """Range of the axis that leaves out the fall of the first tenth, which would flatten all that follows."""
    losses = [[r["loss"] for r in side.evaluations] for side in sides]
    low = min(min(values) for values in losses)
    high = max(values[min(len(values) - 1, 1 + len(values) // 10)] for values in losses)
    margin = 0.06 * max(high - low, 1e-3)
    return [low - margin, high + margin]


def _has_time(side: Side) -> bool:
    # A sampled twin is never evaluated, so it has no curve; one point is none either.
    return len(side.evaluations) > 1 and all("seconds" in r for r in side.evaluations)


def _loss_unit(run: RunData) -> str:
    loss = run.sparse.figures.get("validation_loss")
    return loss.unit if loss is not None else "nats/token"


def _line(
    x: list[float],
    y: list[float],
    name: str,
    colour: str,
    dash: str,
    mode: str = "lines",
    width: float = 2.5,
    opacity: float = 1.0,
) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=y,
        name=name,
        mode=mode,
        opacity=opacity,
        line={"color": colour, "width": width, "dash": dash},
        marker={"color": colour, "size": 6},
        hovertemplate="%{y:.4g}",
    )


def _bar(part: str, parts: Mapping[str, Mapping[str, Figure]], colour: str) -> go.Bar:
    totals = {name: sum(figure.value for figure in breakdown.values()) for name, breakdown in parts.items()}
    values = {name: breakdown[part].value if part in breakdown else 0.0 for name, breakdown in parts.items()}
    return go.Bar(
        y=list(parts),
        x=list(values.values()),
        customdata=[100 * value / totals[name] for name, value in values.items()],
        name=part,
        orientation="h",
        marker={"color": colour, "line": {"width": 0}},
        hovertemplate=f"{part}: %{{x:.3g}} ms, %{{customdata:.3g}} %<extra>%{{y}}</extra>",
    )


def _smoothed(
    records: list[dict[str, Any]], key: str, middle: Callable[[list[float]], float] = statistics.fmean
) -> tuple[list[float], list[float]]:
    """Steps and centred means (or medians) of a column, thinned to what a screen can show."""
    points = [(r["step"], float(r[key])) for r in records if isinstance(r.get(key), (int, float))]
    half = min(_WINDOW, max(1, len(points) // 10)) // 2
    stride = -(-len(points) // _MOST_POINTS) if points else 1
    steps, values = [], []
    for place in range(0, len(points), stride):
        window = [value for _, value in points[max(0, place - half) : place + half + 1]]
        steps.append(float(points[place][0]))
        values.append(middle(window))
    return steps, values


def _layout(figure: go.Figure, x: str, y: str) -> go.Figure:
    figure.update_layout(
        template="none",
        margin={"l": 60, "r": 16, "t": 8, "b": 44},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="x unified",
        dragmode=False,  # a finger that scrolls the page must not zoom the plot
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        autosize=True,
    )
    figure.update_xaxes(title_text=x, zeroline=False, showgrid=False, ticks="outside", automargin=True)
    figure.update_yaxes(title_text=y, zeroline=False, automargin=True)
    return figure
