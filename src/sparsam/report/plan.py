"""The page of a plan: its tables, and parallel efficiency against workers. One HTML file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from importlib import resources

import plotly.graph_objects as go

from sparsam.report.figures import DENSE, SPARSE

__all__ = ["efficiency_over_workers", "render_plan"]

Rows = Sequence[Sequence[str]]


def efficiency_over_workers(curves: Mapping[str, Sequence[tuple[int, float]]], ranks: int) -> go.Figure:
    """Parallel efficiency against workers, one line for each setting.

    Args:
        curves: setting -> (workers, share of what as many workers that never wait would do).
        ranks: of the cluster, marked.
    """
    figure = go.Figure()
    for name, points in curves.items():
        figure.add_trace(
            go.Scatter(
                x=[workers for workers, _ in points],
                y=[100 * share for _, share in points],
                name=name,
                mode="lines+markers",
                line={
                    "color": DENSE if name.startswith("dense") else SPARSE,
                    "dash": "solid" if "compressed" in name else "dash",
                },
                hovertemplate="%{y:.3g} % on %{x} workers",
            )
        )
    figure.add_vline(x=ranks, line={"color": DENSE, "width": 1, "dash": "dot"})
    figure.update_layout(
        template="none",
        margin={"l": 60, "r": 16, "t": 8, "b": 44},
        height=420,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
    )
    figure.update_xaxes(title_text="workers", type="log", dtick=0.30103, tickformat="d", showgrid=False)
    figure.update_yaxes(title_text="parallel efficiency, % (modelled)", rangemode="tozero")
    return figure


def render_plan(
    title: str, notes: Sequence[str], tables: Sequence[tuple[str, Sequence[str], Rows]], figure: go.Figure
) -> str:
    """The whole page.

    Args:
        title: what was planned.
        notes: what a reader must know.
        tables: caption, head, rows.
        figure: the plot, after the first table.
    """
    style = (resources.files("sparsam.report") / "page.css").read_text(encoding="utf-8")
    first, *others = [_table(*table) for table in tables]
    plot = figure.to_html(full_html=False, include_plotlyjs=True, config={"displayModeBar": False})
    body = [
        f'<p class="quote">{html.escape(title)}</p>',
        *(f"<p>{html.escape(note)}</p>" for note in notes),
        first,
        f"<h2>Parallel efficiency against workers</h2>{plot}",
        *others,
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head>'
        f'<body><main class="wrap hero">{"".join(body)}</main></body></html>\n'
    )


def _table(caption: str, head: Sequence[str], rows: Rows) -> str:
    def row(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f"<h2>{html.escape(caption)}</h2><table><thead>{row('th', head)}</thead><tbody>{body}</tbody></table>"
