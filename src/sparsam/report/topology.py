"""Pictures of topologies: small ones for a terminal, larger ones as SVG or HTML. A shade is the density of its cell."""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsam.report.load import ReportError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

__all__ = ["Pictures", "cells", "check_picture", "write_picture"]

_SHADES = " ░▒▓█"
# of a terminal: no unit, and all of them
_DARK, _BRIGHT = (34, 36, 40), (52, 226, 204)
# of a file: on white
_PAPER, _INK = (236, 238, 240), (10, 92, 84)
_TERMINAL = (30, 24)  # largest picture: columns and half rows of characters
_LARGEST = 512  # cells along a side of a picture in a file
_SIDE = 260  # its pixels
_LABEL = 44
_FILES = (".svg", ".html")
_LEGEND = (
    "Rows × columns of units, outputs downwards, and the share that is active. A shade is that share in its cell, "
    "up to the one that is named."
)


def cells(topology: Tensor, rows: int, cols: int) -> Tensor:
    """Density of each cell when a topology is seen through a coarser grid.

    Args:
        topology: bool (R, C).
        rows, cols: the largest size; a smaller topology keeps its own.

    Returns:
        float32 in 0..1, at most (rows, cols), both sides made smaller alike.
    """
    down, across = topology.shape
    scale = min(1.0, rows / down, cols / across)
    size = max(1, round(down * scale)), max(1, round(across * scale))
    return torch.nn.functional.adaptive_avg_pool2d(topology.float()[None, None], size)[0, 0]


@dataclass(frozen=True)
class Pictures:
    """The topologies of all layers for a terminal: ``rich.print(Pictures(topologies))``.

    Attributes:
        topologies: layer -> bool (R, C), True = active unit.
    """

    topologies: Mapping[str, Tensor]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.columns import Columns
        from rich.text import Text

        small = {name: cells(_upright(one), _TERMINAL[1], _TERMINAL[0]) for name, one in self.topologies.items()}
        coloured = console.color_system is not None and not console.no_color
        pictures = []
        for name, shades in small.items():
            body = _coloured(_stretched(shades)) if coloured else Text("\n".join(_plain(_stretched(shades))))
            label = _label(self.topologies[name], shades)
            pictures.append(Text.assemble((f"{name}\n", "bold"), (f"{label}\n", "dim"), body))
        yield Columns(pictures, padding=(1, 3))
        yield Text(_LEGEND, style="dim")


def write_picture(path: Path, topologies: Mapping[str, Tensor], title: str) -> None:
    """Writes the topologies of all layers into one file that needs nothing else.

    Args:
        path: ends in .svg or .html.
        topologies: layer -> bool (R, C).
        title: a line above them.

    Raises:
        ReportError: another ending, or the file cannot be written; one line.
    """
    check_picture(path)
    large = {name: cells(_upright(one), _LARGEST, _LARGEST) for name, one in topologies.items()}
    labels = {name: _label(one, large[name]) for name, one in topologies.items()}
    text = _svg(large, labels, title)
    if path.suffix == ".html":
        text = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
            f'<body style="margin:0;background:#fff">{text}</body></html>\n'
        )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise ReportError(f"{path}: expected to write the picture, got: {problem.strerror}. Check the path.") from None


def check_picture(path: Path) -> None:
    """Refuses a file of another kind, before anything is computed."""
    if path.suffix not in _FILES:
        raise ReportError(f"{path}: expected a picture file that ends in {' or '.join(_FILES)}. Change its name.")


def _upright(topology: Tensor) -> Tensor:
    """A column of whole outputs is drawn as a strip, from left to right."""
    return topology.T.expand(2, -1) if topology.shape[1] == 1 else topology


def _label(topology: Tensor, shades: Tensor) -> str:
    down, across = topology.shape
    most = float(shades.max())
    scale = f", at most {100 * most:.2g} %" if most < 1 else ""
    return f"{down} × {across}, {100 * float(topology.float().mean()):.3g} %{scale}"


def _stretched(shades: Tensor) -> Tensor:
    """Shades up to 1: the label says what that is."""
    return shades / shades.max().clamp(min=1e-9)


def _plain(shades: Tensor) -> Iterator[str]:
    """Two half rows to a line of characters."""
    for top, bottom in _pairs(shades):
        yield "".join(
            _SHADES[max(round((len(_SHADES) - 1) * (a + b) / 2), int(a + b > 0))]
            for a, b in zip(top, bottom, strict=True)
        ).rstrip()


def _coloured(shades: Tensor) -> Text:
    from rich.text import Text

    text = Text()
    for top, bottom in _pairs(shades):
        for above, below in zip(top, bottom, strict=True):
            text.append("▀", f"{_hex(above, _DARK, _BRIGHT)} on {_hex(below, _DARK, _BRIGHT)}")
        text.append("\n")
    text.right_crop(1)
    return text


def _pairs(shades: Tensor) -> Iterator[tuple[list[float], list[float]]]:
    rows = shades.tolist()
    if len(rows) % 2:
        rows.append(rows[-1] if len(rows) == 1 else [0.0] * len(rows[0]))
    return zip(rows[::2], rows[1::2], strict=True)


def _hex(shade: float, low: Sequence[int], high: Sequence[int]) -> str:
    return "#" + "".join(f"{round(a + (b - a) * shade):02x}" for a, b in zip(low, high, strict=True))


def _svg(large: Mapping[str, Tensor], labels: Mapping[str, str], title: str) -> str:
    columns = min(4, max(1, len(large)))
    cell, margin = _SIDE + 28, 28
    lines = -(-len(large) // columns)
    width, height = columns * cell + margin, lines * (cell + _LABEL) + 2 * margin + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="system-ui, sans-serif" font-size="12" fill="#22262a">',
        f'<title>{html.escape(title)}</title><rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{margin}" y="{margin}" font-size="16" font-weight="600">{html.escape(title)}</text>',
        f'<text x="{margin}" y="{margin + 20}" fill="#666c72">{_LEGEND}</text>',
    ]
    for place, (name, shades) in enumerate(large.items()):
        line, column = divmod(place, columns)
        x, y = margin + column * cell, margin + 40 + line * (cell + _LABEL)
        scale = _SIDE / max(shades.shape)
        size = f'width="{max(2.0, shades.shape[1] * scale):.4g}" height="{max(2.0, shades.shape[0] * scale):.4g}"'
        image = base64.b64encode(_png(_stretched(shades))).decode()
        parts += [
            f'<text x="{x}" y="{y + 14}" font-weight="600">{html.escape(name)}</text>',
            f'<text x="{x}" y="{y + 30}" fill="#666c72">{labels[name]}</text>',
            f'<image x="{x}" y="{y + 38}" {size} preserveAspectRatio="none" style="image-rendering:pixelated"'
            f' href="data:image/png;base64,{image}"><title>{html.escape(name)}</title></image>',
        ]
    return "\n".join([*parts, "</svg>\n"])


def _png(shades: Tensor) -> bytes:
    """A PNG of 8-bit colours, one pixel a cell."""
    low, high = torch.tensor(_PAPER), torch.tensor(_INK)
    pixels = (low + (high - low) * shades[:, :, None]).round().to(torch.uint8)
    rows, cols = shades.shape
    # each line of pixels is preceded by its filter, none
    data = torch.cat([torch.zeros(rows, 1, dtype=torch.uint8), pixels.reshape(rows, -1)], 1).numpy().tobytes()
    header = struct.pack(">IIBBBBB", cols, rows, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(data, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
