"""The table: densities over sparse layers and over all parameters, as text and as plain values."""

from __future__ import annotations

import json

from sparsam import LayerRow, SparsityTable

TABLE = SparsityTable(
    (
        LayerRow("embed", "Embedding", (10, 10), "dense", 1.0, 0, 0, "embedding"),
        LayerRow("fc1", "Linear", (20, 10), "compact", 0.25, 1, 4, "2.0x faster than dense", 0.5, 1.0),
        LayerRow("fc2", "Linear", (10, 60), "masked", 0.75, 450, 600, "asked for"),
    ),
    other_parameters=100,
)


def test_densities_by_hand():
    assert TABLE.density == (0.25 * 200 + 0.75 * 600) / 800
    assert TABLE.density_all == (100 + 50 + 450 + 100) / 1000


def test_an_empty_table_is_dense():
    assert SparsityTable(()).density == SparsityTable(()).density_all == 1.0


def test_text_names_layer_choice_reason_and_both_timings():
    lines = str(TABLE).splitlines()
    assert lines[0].split() == ["layer", "weight", "storage", "sparsity", "sparse", "ms", "dense", "ms", "why"]
    assert lines[2].split() == [
        "fc1",
        "20",
        "x",
        "10",
        "compact",
        "75.0",
        "%",
        "0.500",
        "1.000",
        *TABLE.rows[1].reason.split(),
    ]
    assert lines[-1] == "sparsity 37.50 % of the sparse layers' weights, 30.00 % of all parameters"


def test_json_is_plain():
    table = json.loads(json.dumps(TABLE.to_json()))
    assert table["rows"][1]["compact_ms"] == 0.5
    assert (table["density"], table["density_all"], table["other_parameters"]) == (0.625, 0.7, 100)
