"""The doctor's rows: complete, each number with its kind, on tiny shapes."""

from __future__ import annotations

from sparsam.measure import doctor
from sparsam.measure.figure import measured


def test_rows():
    told: list[str] = []
    rows = doctor.measure(progress=told.append, quick=True)
    sections = list(dict.fromkeys(row.section for row in rows))
    assert sections == [
        "Machine",
        "Dense products",
        "Block-sparse 32x32, forward and backward, bf16",
        "Block-sparse 16x16, forward and backward, bf16",
        "Memory",
    ]
    assert told == ["dense products", "blocks of 32x32", "blocks of 16x16", "memory"]
    names = {row.name for row in rows}
    assert {"processor", "cores allowed", "threads", "kernel paths", "bf16", "fp32", "copy", "90 % sparse"} <= names
    assert all(row.text for row in rows)


def test_text_of_a_row():
    assert doctor.Row("s", "n", measured(2.5, "x"), "faster").text == "2.50x (measured)  faster"
    assert doctor.Row("s", "n", None, "a line").text == "a line"
