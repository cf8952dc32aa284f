"""A figure is a number with its unit and how it came to be: measured, modelled, estimated or simulated.

Every number that a report, a benchmark or the command line shows is one of these; this file is not for computing them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

__all__ = ["Figure", "Kind", "estimated", "measured", "modelled", "simulated"]

Kind = Literal["measured", "modelled", "estimated", "simulated"]
_KINDS = get_args(Kind)

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
# Units that read better with a decimal prefix; all others are printed as they are.
_PREFIXED = frozenset({"FLOP", "FLOP/s", "B/s", "operations/s"})


@dataclass(frozen=True)
class Figure:
    """One number with unit and origin.

    Args:
        value: the number; never NaN (a figure that does not exist is left out).
        unit: plain text: "ms", "B", "tokens/s", "FLOP", "nats/byte", "x" for a ratio, "share" for 0..1, "" for a count.
        kind: measured (a clock or a counter), modelled (computed from shapes), estimated (an extrapolation of
            something measured), simulated (the thing measured was itself imitated).

    Raises:
        ValueError: the value is not a finite number, the kind is none of the four.
    """

    value: float
    unit: str
    kind: Kind

    def __post_init__(self) -> None:
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)) or not math.isfinite(self.value):
            raise ValueError(f"figure: expected a finite number, got {self.value!r}. Leave out what was not measured.")
        if self.kind not in _KINDS:
            raise ValueError(
                f"figure: expected one of {', '.join(_KINDS)}, got {self.kind!r}. Say how the number came to be."
            )

    @property
    def text(self) -> str:
        """The number as people read it, e.g. ``"12.5 MiB"``, ``"1.2 TFLOP"``, ``"2.10x"``; without the kind."""
        value, unit = self.value, self.unit
        if unit == "B":
            number, unit = _scaled(value, 1024.0, _BINARY)
        elif unit in _PREFIXED:
            number, prefix = _scaled(value, 1000.0, _DECIMAL)
            unit = prefix + unit
        elif unit.startswith(("nats", "bits")):  # losses differ in the third decimal
            number = f"{value:.3f}"
        elif unit == "share":
            return f"{100 * value:.3g} %"
        elif unit == "x":
            return f"{value:.2f}x"
        else:
            number = _digits(value)
        return f"{number} {unit}".rstrip()

    def __str__(self) -> str:
        return f"{self.text} ({self.kind})"

    def to_json(self) -> dict[str, Any]:
        """Plain data: ``{"value": ..., "unit": ..., "kind": ...}``."""
        return {"value": self.value, "unit": self.unit, "kind": self.kind}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Figure:
        """Back from `to_json`.

        Raises:
            ValueError: a key is missing or its content is no figure.
        """
        try:
            return cls(data["value"], str(data["unit"]), data["kind"])
        except (KeyError, TypeError):
            raise ValueError(
                f"figure: expected value, unit and kind, got {data!r}. Write it with Figure.to_json()."
            ) from None


def measured(value: float, unit: str) -> Figure:
    """A figure read off a clock or a counter."""
    return Figure(value, unit, "measured")


def modelled(value: float, unit: str) -> Figure:
    """A figure computed from shapes or formulas."""
    return Figure(value, unit, "modelled")


def estimated(value: float, unit: str) -> Figure:
    """A figure extrapolated from something measured."""
    return Figure(value, unit, "estimated")


def simulated(value: float, unit: str) -> Figure:
    """A figure measured on an imitation of the real thing (a shaped network, emulated formats)."""
    return Figure(value, unit, "simulated")


def _scaled(value: float, base: float, prefixes: tuple[str, ...]) -> tuple[str, str]:
    step = 0
    size = abs(value)
    while size >= base * 0.9995 and step < len(prefixes) - 1:
        size /= base
        step += 1
    return _digits(value / base**step), prefixes[step]


def _digits(value: float) -> str:
    """Three significant digits, whole numbers whole, thousands set apart."""
    if value == 0:
        return "0"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-3:
        return f"{value:.2e}"
    places = max(0, 2 - math.floor(math.log10(size)))
    return f"{value:.{places}f}"
