"""The table that says in which format each product runs, what was asked for, and why it is not that."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["FormatRow", "FormatTable"]


@dataclass(frozen=True)
class FormatRow:
    """One layer.

    Attributes:
        name: of the layer, or of a kind of operation.
        forward, input_gradient, weight_gradient: the formats its products run in; "" where there is none.
        arithmetic: "real", or "simulated" when a product's numbers are rounded as in the format and multiplied in
            another.
        reason: what was asked for where that is something else, and why.
    """

    name: str
    forward: str
    input_gradient: str = ""
    weight_gradient: str = ""
    arithmetic: str = "real"
    reason: str = ""


@dataclass(frozen=True)
class FormatTable:
    """All linear layers of a model, and what the rest is computed in."""

    rows: tuple[FormatRow, ...]

    @property
    def simulated(self) -> bool:
        """Whether any product is simulated: then no time of the run says anything of the format."""
        return any(row.arithmetic == "simulated" for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain values: {"rows": [...], "simulated": bool}."""
        return {"rows": [asdict(row) for row in self.rows], "simulated": self.simulated}

    def __str__(self) -> str:
        cells = [
            ("layer", "forward", "input gradient", "weight gradient", "arithmetic", "why"),
            *(
                (row.name, row.forward, row.input_gradient, row.weight_gradient, row.arithmetic, row.reason)
                for row in self.rows
            ),
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
        )
