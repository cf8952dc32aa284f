"""Figures: text that people read, and refusals."""

from __future__ import annotations

import math

import pytest

from sparsam.measure.figure import Figure, estimated, measured, modelled, simulated


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (measured(12.5 * 2**20, "B"), "12.5 MiB (measured)"),
        (measured(1023, "B"), "1,023 B (measured)"),
        (modelled(1.2e12, "FLOP"), "1.20 TFLOP (modelled)"),
        (measured(2.0949, "x"), "2.09x (measured)"),
        (estimated(9123.4, "tokens/s"), "9,123 tokens/s (estimated)"),
        (measured(0.9, "share"), "90 % (measured)"),
        (measured(0, "ms"), "0 ms (measured)"),
        (measured(0.0123, "ms"), "0.0123 ms (measured)"),
        (measured(1.5e-7, "s"), "1.50e-07 s (measured)"),
        (simulated(600, ""), "600 (simulated)"),
    ],
)
def test_text(figure, text):
    assert str(figure) == text


def test_json_goes_there_and_back():
    figure = modelled(3.5, "nats/byte")
    assert Figure.from_json(figure.to_json()) == figure


@pytest.mark.parametrize("value", [math.nan, math.inf, "3", True, None])
def test_no_figure_without_a_number(value):
    with pytest.raises(ValueError, match="figure: expected a finite number"):
        Figure(value, "ms", "measured")


def test_unknown_kind():
    with pytest.raises(ValueError, match=r"figure: expected one of measured, .*simulated, got 'guessed'"):
        Figure(1.0, "ms", "guessed")  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [{"value": 1}, 3, {"value": 1.0, "unit": "ms"}])
def test_damaged_json(data):
    with pytest.raises(ValueError, match="figure: expected value, unit and kind"):
        Figure.from_json(data)
