"""The doctor's rows: complete, each number with its kind, on tiny shapes."""

from __future__ import annotations

from sparsam.kernels.formats import FP8
from sparsam.measure import doctor
from sparsam.measure.figure import measured
from sparsam.measure.product_profile import ProductShape, ProductTime


def test_rows():
    told: list[str] = []
    rows = doctor.measure(progress=told.append, quick=True)
    sections = list(dict.fromkeys(row.section for row in rows))
    assert sections == [
        "Machine",
        "Dense products",
        "Formats, one product with casts",
        "Block-sparse 32x32, forward and backward, bf16",
        "Block-sparse 16x16, forward and backward, bf16",
        "Memory",
    ]
    assert told == ["dense products", "formats", "blocks of 32x32", "blocks of 16x16", "memory"]
    names = {row.name for row in rows}
    assert {
        "processor",
        "cores allowed",
        "threads",
        "kernel paths",
        "bf16",
        "fp32",
        "fp16",
        "int8",
        "fp8",
        "copy",
        "90 % sparse",
    } <= names
    assert all(row.text for row in rows)


def test_formats_are_judged_by_their_time_against_bf16(monkeypatch):
    ms = {"fp32": 8.0, "bf16": 4.0, "fp16": 5.0, "int8": 2.0, "fp8": 40.0, "fp8, torch _scaled_mm": 4000.0}

    def timed(shape, paths, seconds):
        if "tried" in paths:
            if paths["tried"].format != FP8:
                raise RuntimeError("unknown")
            return {}
        return {name: ProductTime(ms[name], "estimated" if "torch" in name else "measured") for name in paths}

    monkeypatch.setattr(doctor, "time_paths", timed)
    rows = doctor._format_rows(ProductShape("forward", 8, 16, 32, 1), quick=True)
    assert {row.name: row.text for row in rows} == {
        "fp32": "8 ms (measured)  0.5x the speed of bf16",
        "bf16": "4 ms (measured)  forward of 8 x 16 -> 32",
        "fp16": "5 ms (measured)  0.8x the speed of bf16, simulated, slower than bf16: never chosen",
        "int8": "2 ms (measured)  2x the speed of bf16, faster than bf16",
        "fp8": "40 ms (measured)  0.1x the speed of bf16, simulated, slower than bf16: never chosen",
        "fp8, torch _scaled_mm": "4,000 ms (estimated)  0.001x the speed of bf16, slower than bf16: never chosen",
        "fp16, torch linear": "torch does not know it on this machine",
        "int8, torch onednn.qlinear": "torch does not know it on this machine",
    }


def test_a_machine_where_bf16_is_slower_than_fp32_is_named_so(monkeypatch):
    ms = {"fp32": 2.0, "bf16": 4.0, "fp16": 3.0, "int8": 1.0, "fp8": 9.0}
    monkeypatch.setattr(doctor, "_known", lambda path: False)
    monkeypatch.setattr(
        doctor, "time_paths", lambda shape, paths, seconds: {name: ProductTime(ms[name], "measured") for name in paths}
    )
    rows = doctor._format_rows(ProductShape("forward", 8, 16, 32, 1), quick=True)
    assert [row.note for row in rows[:5]] == [
        "2x the speed of bf16",
        "forward of 8 x 16 -> 32, slower than fp32",
        "1.33x the speed of bf16, simulated, faster than bf16, slower than fp32",
        "4x the speed of bf16, faster than bf16",
        "0.444x the speed of bf16, simulated, slower than bf16: never chosen",
    ]


def test_text_of_a_row():
    assert doctor.Row("s", "n", measured(2.5, "x"), "faster").text == "2.50x (measured)  faster"
    assert doctor.Row("s", "n", None, "a line").text == "a line"
