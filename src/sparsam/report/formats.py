"""The picture of number formats: each product of each layer over the steps of a training."""

from __future__ import annotations

import plotly.graph_objects as go

from sparsam.report.load import RunData

__all__ = ["PRODUCTS", "formats_over_steps", "height"]

PRODUCTS = ("forward", "input_gradient", "weight_gradient")
# From wide to narrow; what is narrower is darker.
_COLOURS = {
    "fp32": "#c4c4cc",
    "tf32": "#a9b8c9",
    "bf16": "#5fb3a8",
    "fp16": "#3e8fd6",
    "int8": "#e5833a",
    "fp8": "#d6409f",
    "fp8_rows": "#a53a80",
    "mx_fp8": "#7c66dc",
}


def formats_over_steps(run: RunData) -> go.Figure | None:
    """A row for each product, coloured by its format between one switch and the next; None where no policy decided.

    Layers stand in their own order from the top, each with its forward, input gradient and weight gradient.
    """
    last_step = max((record["step"] for record in run.sparse.train), default=0)
    if not last_step or not run.by_product:
        return None
    rows = [row for row in run.formats if row["weight_gradient"]]
    switches = [r for r in run.sparse.switches if r["step"] <= last_step]
    borders = sorted({0, last_step, *(r["step"] for r in switches)})
    names, spans = [], []
    for row in rows:
        for product in PRODUCTS:
            mine = [r for r in switches if (r["layer"], r["product"]) == (row["name"], product)]
            now = mine[0]["before"] if mine else row[product]
            after = {r["step"]: r["after"] for r in mine}
            line = []
            for border in borders[:-1]:
                now = after.get(border, now)
                line.append(now)
            names.append(f"{row['name']} {product.replace('_', ' ')}")
            spans.append(line)
    shown = [name for name in _COLOURS if any(name in line for line in spans)]
    numbers = {name: number for number, name in enumerate(shown)}
    figure = go.Figure(
        go.Heatmap(
            z=[[numbers[name] for name in line] for line in spans],
            x=borders,
            y=names,
            text=spans,
            colorscale=_steps([_COLOURS[name] for name in shown]),
            zmin=-0.5,
            zmax=len(shown) - 0.5,
            colorbar={"tickvals": list(numbers.values()), "ticktext": shown, "title": "format"},
            hovertemplate="%{y}<br>from step %{x}: %{text}<extra></extra>",
        )
    )
    figure.update_layout(
        xaxis={"title": "step"},
        yaxis={"autorange": "reversed", "automargin": True},
        height=height(run),
        margin={"l": 10, "r": 10, "t": 10, "b": 40},
    )
    return figure


def height(run: RunData) -> int:
    """Pixels that the picture takes: a line for each product, as far as there is room."""
    products = len(PRODUCTS) * sum(bool(row["weight_gradient"]) for row in run.formats)
    return min(1200, 160 + 14 * products)


def _steps(colours: list[str]) -> list[tuple[float, str]]:
    """A colour scale without transitions."""
    count = len(colours)
    return [(end / count, colour) for place, colour in enumerate(colours) for end in (place, place + 1)]
