"""The table that sparsify and inspect return: every weight matrix, what was done with it, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["LayerRow", "SparsityTable"]


@dataclass(frozen=True)
class LayerRow:
    """One weight matrix.

    Attributes:
        name: of the layer.
        kind: class of the module.
        shape: of the weight.
        storage: "compact", "masked" or "dense".
        density: active share of its units; 1.0 when dense.
        active_units: how many units are active.
        units: how many there are; 0 when the layer is not sparse.
        reason: why it is stored so.
        compact_ms: measured forward + backward of the block-sparse product, or None when it was not timed.
        dense_ms: measured forward + backward of the dense product, or None.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    storage: str
    density: float
    active_units: int
    units: int
    reason: str
    compact_ms: float | None = None
    dense_ms: float | None = None

    @property
    def weights(self) -> int:
        product = 1
        for size in self.shape:
            product *= size
        return product


@dataclass(frozen=True)
class SparsityTable:
    """All weight matrices of a model.

    Attributes:
        rows: one per weight matrix, each tensor once.
        other_parameters: biases, norms and other vectors, always dense.
    """

    rows: tuple[LayerRow, ...]
    other_parameters: int = 0

    @property
    def density(self) -> float:
        """Active share of the weights of the layers that are sparse; 1.0 when none is."""
        sparse = [row for row in self.rows if row.storage != "dense"]
        total = sum(row.weights for row in sparse)
        return sum(row.density * row.weights for row in sparse) / total if total else 1.0

    @property
    def density_all(self) -> float:
        """Active share of all parameters, dense layers and vectors included."""
        total = sum(row.weights for row in self.rows) + self.other_parameters
        active = sum(row.density * row.weights for row in self.rows) + self.other_parameters
        return active / total if total else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain values: {"rows": [...], "density": ..., "density_all": ..., "other_parameters": ...}."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "density": self.density,
            "density_all": self.density_all,
            "other_parameters": self.other_parameters,
        }

    def __str__(self) -> str:
        head = ("layer", "weight", "storage", "sparsity", "sparse ms", "dense ms", "why")
        body = [
            (
                row.name,
                " x ".join(map(str, row.shape)),
                row.storage,
                f"{100 * (1 - row.density):.1f} %" if row.units else "",
                "" if row.compact_ms is None else f"{row.compact_ms:.3f}",
                "" if row.dense_ms is None else f"{row.dense_ms:.3f}",
                row.reason,
            )
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (head, *body)
        ]
        lines.append(
            f"sparsity {100 * (1 - self.density):.2f} % of the sparse layers' weights, "
            f"{100 * (1 - self.density_all):.2f} % of all parameters"
        )
        return "\n".join(lines)
